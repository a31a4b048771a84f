"""Times of a model's four-bit products by this package and by other installed ones, side by side.

This package's kernel and quack share one copy of an NVFP4 weight; humming has a copy of its own,
bitsandbytes multiplies with NF4, cuBLAS with BF16. The rollout's tile for quack is made for many tokens;
``--tune quack`` finds the best tile for few.

    python -m bench kernels --shape 7b 32b --tokens 1 8 16 32 64 --tune quack

Each time is the median of CUDA-graph replays over copies of the weight that together exceed the L2 cache.
The error is relative to float64, in the Frobenius norm.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.products import RIVALS, Rival, dequantised
from bench.random_weights import random_tiles
from bench.result import write_result
from qerl.families.sizes import Sizes
from qerl.kernels.cards import Card, card_of
from qerl.kernels.needs import has_module
from qerl.kernels.weights.nvfp4 import Tile, quack_gemm, quack_tile, tiling_for
from qerl.kernels.weights.packed_gemm import (
    MAX_TOKENS,
    OUTPUT_SCALE,
    Tiling,
    packed_gemm,
    partial_sums,
    slices,
    sums_dtype,
    to_operand,
)
from qerl.kernels.weights.tiles import TILE, Tiles
from qerl.weight_formats import FORMATS

_CACHE_BYTES = 150e6  # three times an H100's L2


def graph_time(calls: Sequence[Callable[[], Any]]) -> float:
    """Return microseconds per call: the median over replays of one CUDA graph of all calls."""
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


def packed_tilings(tokens: int, card: Card) -> list[Tiling]:
    """Return the tilings to try on a card.

    Each has at least two stages, of 9 to 74 KB of weight, and as many tiles before a wait as the teams'
    registers allow. Above 128 tokens a block has 128 rows. Without wgmma a thread needs about 60 registers
    besides its accumulators, and a quarter of the multiprocessor has 512 per lane of its warps.
    """
    found: dict[tuple[int, ...], Tiling] = {}
    if tokens > 128:
        wide = itertools.product(((1, 1), (2, 1), (2, 2), (3, 3)), (150_000, 190_000, 226_000), (1, 2))
        for (tiles, together), shared, cluster in wide:
            tiling = Tiling(2, 2, tiles, together, shared, cluster=cluster, registers=240)
            if tiling.stages(tokens) >= 2:
                found.setdefault((tiles, together, tiling.stages(tokens), cluster), tiling)
        return list(found.values())
    hopper = card.math == "wgmma"
    memory = (140_000, 176_000, 215_000) if hopper else (card.shared_bytes - 1024,)
    fragments = (1,) if hopper or tokens <= 16 else (1, 2)
    spans = (2, 4, 8) if hopper else (1, 2, 4, 8)
    clusters = (1, 2) if hopper and tokens > 32 else (1,)
    most = tiling_for(tokens, card, (1 << 16, 1 << 16))  # for a large weight
    sizes = itertools.product((2, 3, 4), (1, 2, 3, 4), spans, memory, fragments, clusters)
    for teams, row_groups, rounds, shared, rows, cluster in sizes:
        warps = teams * 4 // rows + (1 if card.loader == "bulk" else 4)
        spilled = rows * tokens // 2 + 60 > min(255, 512 // -(-warps // 4))
        if teams % row_groups or (tokens > 64 and teams > 3 if hopper else spilled):
            continue
        together = min(rounds, 4 if teams < 4 or tokens <= 16 else 2)
        registers = most.registers if teams == most.teams else 0
        span = teams // row_groups * rounds
        tiling = Tiling(teams, row_groups, span, together, shared, rows, cluster, registers)
        stages = tiling.stages(tokens)
        if (not hopper or tiling.tiles * row_groups >= 4) and tiling.tiles * row_groups <= 32 and stages >= 2:
            found.setdefault((teams, row_groups, rounds, stages, rows, cluster), tiling)
    return list(found.values())


def quack_tiles(tokens: int, rows: int) -> list[Tile]:
    """Return the tiles (tile_m, tile_n, split_k) to try."""
    widths = {max(16, min(256, 1 << (tokens - 1).bit_length()))} | ({128} if tokens == 256 else set())
    tiles = itertools.product((64, 128), sorted(widths), (1, 2, 3, 4, 6))
    return [tile for tile in tiles if tile[2] == 1 or rows // tile[0] * tile[2] <= 700]


def time_packed(x_TK: torch.Tensor, weights: list[Tiles], tiling: Tiling) -> float:
    """Return microseconds of this package's product with one tiling."""
    tokens = len(x_TK)
    most, _ = partial_sums(tiling, weights[0].shape, x_TK.device, slices(tokens))
    out = torch.empty(most, tokens, weights[0].shape[0], dtype=sums_dtype(tokens), device="cuda")
    x = to_operand(x_TK)
    return graph_time([lambda w=w: packed_gemm(x, w, out, tiling) for w in weights])  # type: ignore[misc]


def time_quack(x_TK: torch.Tensor, weights: list[Tiles], tile: Tile) -> float:
    """Return microseconds of quack's product with one tile."""
    out = torch.empty(x_TK.shape[0], weights[0].shape[0], dtype=torch.bfloat16, device="cuda")
    return graph_time([lambda w=w: quack_gemm(x_TK, w, out, tile) for w in weights])  # type: ignore[misc]


def time_others(x_TK: torch.Tensor, others: list[Rival]) -> float:
    """Return microseconds of another package's product."""
    return graph_time([lambda o=o: o.multiply(x_TK) for o in others])  # type: ignore[misc]


def time_cublas(x_TK: torch.Tensor, rows: int) -> float:
    """Return microseconds of cuBLAS on a BF16 weight."""
    width = x_TK.shape[1]
    weights = [
        torch.randn(rows, width, device="cuda").bfloat16()
        for _ in range(max(2, int(_CACHE_BYTES / (rows * width * 2)) + 1))
    ]
    out = torch.empty(x_TK.shape[0], rows, dtype=torch.bfloat16, device="cuda")
    return graph_time([lambda w=w: torch.mm(x_TK, w.T, out=out) for w in weights])  # type: ignore[misc]


def packed_error(x_TK: torch.Tensor, weight: Tiles, tiling: Tiling) -> float:
    """Return the relative error of this package's kernel; unused partial sums start as NaN."""
    tokens = len(x_TK)
    most, counts = partial_sums(tiling, weight.shape, x_TK.device, slices(tokens))
    shape = most, tokens, weight.shape[0]
    out = torch.full(shape, float("nan"), dtype=sums_dtype(tokens), device="cuda")
    packed_gemm(to_operand(x_TK), weight, out, tiling)
    used = torch.arange(most, device="cuda")[:, None] < counts.repeat_interleave(TILE)[None]
    found = torch.where(used[:, None], out.double(), 0.0).sum(0) / OUTPUT_SCALE
    return _relative(found, x_TK.double() @ dequantised(weight).T)


def quack_error(x_TK: torch.Tensor, weight: Tiles, tile: Tile) -> float:
    """Return the relative error of quack."""
    out = torch.empty(x_TK.shape[0], weight.shape[0], dtype=torch.bfloat16, device="cuda")
    quack_gemm(x_TK, weight, out, tile)
    return _relative(out, x_TK.double() @ dequantised(weight).T)


def others_error(x_TK: torch.Tensor, other: Rival) -> float:
    """Return the relative error of another package's product."""
    return _relative(other.multiply(x_TK), x_TK.double() @ other.dense_NK().T)


def _relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def measure(
    name: str, product: tuple[str, int, int], tokens: int, engines: Sequence[str], tune: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the result rows of one product, fastest first within an engine.

    Engines that are not in ``tune`` are timed only with the rollout's tiling.
    """
    label, rows, width = product
    size = FORMATS["nvfp4"].matrix_bytes(rows * width)
    weights = [random_tiles(rows, width) for _ in range(max(2, int(_CACHE_BYTES / size) + 1))]
    x_TK = torch.randn(tokens, width, device="cuda").bfloat16()
    common = {"shape": name, "matrix": label, "rows": rows, "width": width, "tokens": tokens}
    found: list[dict[str, Any]] = []

    def add(engine: str, moved: float, timed: list[tuple[float, Any]], error: float | None) -> None:
        for micros, choice in sorted(timed, key=lambda pair: pair[0]):
            found.append(
                {**common, "engine": engine, "us": round(micros, 2), "gb_s": round(moved / micros / 1e3),
                 "choice": choice, "error": error}
            )  # fmt: skip

    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    if "qerl" in engines and tokens <= MAX_TOKENS[card.math]:
        chosen = tiling_for(tokens, card, (rows, width))
        tried = packed_tilings(tokens, card) if "qerl" in tune else []
        tilings = list(dict.fromkeys([chosen, *tried]))
        timed = [(time_packed(x_TK, weights, tiling), list(vars(tiling).values())) for tiling in tilings]
        add("qerl", size, timed, packed_error(x_TK, weights[0], chosen))
    if "quack" in engines and has_module("quack"):
        chosen_tile = quack_tile(tokens, width)
        tiles = quack_tiles(tokens, rows) if "quack" in tune else [chosen_tile]
        timed_tiles = [(time_quack(x_TK, weights, tile), list(tile)) for tile in tiles]
        add("quack", size, timed_tiles, quack_error(x_TK, weights[0], chosen_tile))
    for engine, build in RIVALS.items():
        if engine in engines and has_module(engine):
            others = [build(weight) for weight in weights]
            add(engine, size, [(time_others(x_TK, others), None)], others_error(x_TK, others[0]))
    del weights
    if "cublas" in engines:
        add("cublas", rows * width * 2.0, [(time_cublas(x_TK, rows), None)], None)
    return found


def main(arguments: list[str]) -> None:
    """Run `python -m bench kernels` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["7b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--engine", nargs="+", default=["qerl", "quack", *RIVALS, "cublas"], help="engines to time"
    )
    parser.add_argument(
        "--tune",
        nargs="+",
        default=[],
        choices=["qerl", "quack"],
        help="engines for which many tilings are tried",
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    result: list[dict[str, Any]] = []
    for name in args.shape:
        sizes = Sizes.by_name(name)
        for product in dict.fromkeys(each for run in sizes.runs for each in run.spec.products):
            label, rows, width = product.name, product.outputs, product.inputs
            for tokens in args.tokens:
                found = measure(name, (label, rows, width), tokens, args.engine, args.tune)
                result += found
                for engine in dict.fromkeys(row["engine"] for row in found):
                    best = [row for row in found if row["engine"] == engine][:4]
                    error = best[0]["error"]
                    print(
                        f"{name} {label} {rows}x{width} {tokens} tokens, {engine}: {best[0]['us']:.1f} us, "
                        f"{best[0]['gb_s']} GB/s"
                        + (f", error {error:.1e}" if error is not None else "")
                        + "".join(f" | {row['us']:.1f} {row['choice']}" for row in best if row["choice"]),
                        flush=True,
                    )
    if args.out:
        write_result(args.out, " ".join(["kernels", *arguments]), result)
