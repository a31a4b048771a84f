"""The NVFP4 products of a model's shapes: this package's kernel, quack and cuBLAS on BF16, side by side.

    python -m qerl.bench.kernels --shape 7b 32b --tokens 1 8 16 32 64

Each time is the median of CUDA-graph replays that walk over copies of the weight larger together than the L2
cache.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from qerl.bench.rollout import head
from qerl.bench.shapes import shape
from qerl.kernels import gemm
from qerl.kernels.blob import Blob, Tiling, from_blob, small_gemm

_CACHE_BYTES = 150e6  # three times an H100's L2


def random_blob(rows: int, width: int) -> Blob:
    """Random codes and scales between 1 and 1.875."""
    codes = torch.randint(0, 256, (rows // 64, width // 64, 128, 16), dtype=torch.uint8, device="cuda")
    scales = torch.randint(56, 64, (rows // 64, width // 64, 32, 4, 2), dtype=torch.uint8, device="cuda")
    return Blob(codes, scales, (rows, width))


def dequantised(blob: Blob) -> torch.Tensor:
    """fp64 [N, K] of a blob, global scale 1."""
    codes, scales = from_blob(blob)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=codes.device)
    table = torch.cat([table, -table])
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    return values * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)


def graph_time(calls: list[Any]) -> float:
    """Microseconds a call: median over replays of a graph with all calls in it."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def candidates(tokens: int, rows: int, width: int) -> list[Tiling]:
    """Tilings worth trying."""
    found = []
    k_tiles = width // 64
    for (block_rows, warps_n, warps_k), depth, blocks in itertools.product(
        [(1, 8, 1), (1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 4, 1), (1, 2, 4)], [4], [2, 3]
    ):
        if block_rows == 2 and tokens <= 8:
            continue
        across = -(-rows // (16 * block_rows * warps_n))
        threads = 32 * warps_n * warps_k
        if threads * blocks > 1024:
            continue
        seen = set()
        for waves in (1, 2, 4, 8):
            per_wave = 132 * blocks * (2 if threads <= 128 else 1)
            splits = max(1, round(per_wave * waves / across))
            if splits in seen or k_tiles / splits < 2 * warps_k or splits > 16:
                continue
            seen.add(splits)
            cut = Tiling(block_rows, warps_n, warps_k, depth, splits, blocks)
            if cut.shared_bytes(tokens, width) * blocks < 200_000:
                found.append(cut)
    return found


def _tune_quack(name: str, label: str, x: torch.Tensor, blobs: list[Blob]) -> None:
    tokens, rows = x.shape[0], blobs[0].shape[0]
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device="cuda")
    timed = []
    tiles: list[Any] = [None]
    for tile_n in (16, 32, 64, 128, 256):
        if tokens <= tile_n < 2 * tokens or (tile_n == 128 and tokens == 256):
            tiles += [(tile_m, tile_n, split) for tile_m in (64, 128) for split in (1, 2, 3, 4, 6)]
    for tile in tiles:
        if tile and tile[2] > 1 and rows // tile[0] * tile[2] > 700:
            continue
        try:
            timed.append((graph_time([lambda b=b, t=tile: gemm._quack(x, b, out, t) for b in blobs]), tile))
        except Exception as error:
            print(tile, repr(error)[:100])
    default = timed[0][0]
    timed.sort(key=lambda pair: pair[0])
    truth = x.double() @ dequantised(blobs[0]).T
    gemm._quack(x, blobs[0], out, timed[0][1])
    wrong = float((out.double() - truth).norm() / truth.norm())
    print(
        f"{name} {label} M={tokens}: quack {default:.1f} error {wrong:.1e} best "
        + " ".join(f"{t:.1f}:{c}" for t, c in timed[:5]),
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m qerl.bench.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["7b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tune", action="store_true", help="try many tilings and print the best")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    result: list[dict[str, Any]] = []
    for name in args.shape:
        s = shape(name)
        q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
        for label, rows, width in (
            ("qkv", q + 2 * kv, s.hidden), ("o", s.hidden, q),
            ("gate_up", 2 * s.intermediate, s.hidden), ("down", s.hidden, s.intermediate),
        ):  # fmt: skip
            size = rows * width * 0.5625
            copies = max(2, int(_CACHE_BYTES / size) + 1)
            blobs = [random_blob(rows, width) for _ in range(copies)]
            for tokens in args.tokens:
                x = torch.randn(tokens, width, device="cuda").bfloat16()
                if tokens > 16:
                    _tune_quack(name, label, x, blobs)
                    continue
                cuts = candidates(tokens, rows, width) if args.tune else [gemm.tiling(tokens, rows, width)]
                timed = []
                for cut in cuts:
                    out = torch.empty(cut.splits, tokens, rows, device="cuda")
                    calls = [lambda x=x, b=b, o=out, c=cut: small_gemm(x, b, o, c) for b in blobs]
                    timed.append((graph_time(calls), cut))
                timed.sort(key=lambda pair: pair[0])
                truth = x.double() @ dequantised(blobs[0]).T
                best, cut = timed[0]
                out = torch.full((cut.splits, tokens, rows), float("nan"), device="cuda")
                small_gemm(x, blobs[0], out, cut)
                wrong = float((out.double().sum(0) * 256 - truth).norm() / truth.norm())
                row = {
                    "shape": name, "matrix": label, "tokens": tokens, "us": best, "gb_s": size / best / 1e3,
                    "tiling": vars(cut), "error": wrong,
                    "others": [(t, list(vars(c).values())) for t, c in timed[:6]],
                }  # fmt: skip
                if gemm.has_quack():
                    outs = torch.empty(tokens, rows, dtype=torch.bfloat16, device="cuda")
                    row["quack_us"] = graph_time(
                        [lambda x=x, b=b, o=outs: gemm._quack(x, b, o) for b in blobs]
                    )
                result.append(row)
                print(
                    f"{name} {label} M={tokens}: {best:.1f} us {row['gb_s']:.0f} GB/s error {wrong:.1e} "
                    f"{list(vars(cut).values())} default? quack {row.get('quack_us', 0):.1f} | "
                    + " ".join(f"{t:.1f}:{list(vars(c).values())}" for t, c in timed[1:4])
                )
            del blobs
    if args.out:
        args.out.write_text(json.dumps({**head(["python -m qerl.bench.kernels"]), "rows": result}, indent=1))


if __name__ == "__main__":
    main()
