"""Decode speed of a model shape with random weights.

    python -m benchmarks rollout --shape 7b --weights nvfp4 --rank 32 --batch 1 8 64 128

Prompts are given as cached random keys and values; the timed part is decoding, from the first token on, with
the attention's work growing as it does in a rollout. A group shares its prompt. With `--peers`, vLLM does the
same work in the same run (`benchmarks.peers`).
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import vllm_decode
from benchmarks.peers.process import peer_rows
from benchmarks.peers.vllm_decode import PEERS
from benchmarks.random_model import random_decoder
from benchmarks.result import write_result
from qerl.families.sizes import Sizes
from qerl.kernels.limits import PAGE
from qerl.rollout.engine import KV_DTYPES, SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.forward import Cache
from qerl.rollout.paged.weights import Decoder
from qerl.weight_formats import FORMATS, WeightFormatName


def random_cache(decoder: Decoder, blocks: int, dtype: torch.dtype) -> Cache:
    """Normal random keys and values, made layer by layer."""
    cache = Cache.empty(decoder, blocks, decoder.embedding_VD.device, dtype)
    for half in (cache.k, cache.v):
        for layer in half:
            layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=layer.device))
    return cache


def fill_prompts(step: DecodeStep, prompt_tokens: int, group: int, decode_tokens: int) -> None:
    """Puts every row at the end of a prompt of ``prompt_tokens`` that is already cached, ``group`` rows a
    prompt."""
    rows = step.rows
    group = min(group, rows)
    prompt_blocks, own_blocks = -(-(prompt_tokens - 1) // PAGE), -(-(decode_tokens + 1) // PAGE)
    groups = -(-rows // group)
    tables = torch.zeros(2 * rows, step.tables.shape[1], dtype=torch.int32)
    block = iter(range(groups * prompt_blocks + rows * own_blocks))
    for g in range(groups):
        tables[g, :prompt_blocks] = torch.tensor([next(block) for _ in range(prompt_blocks)])
    for row in range(rows):
        tables[rows + row, :own_blocks] = torch.tensor([next(block) for _ in range(own_blocks)])
    tile = step.tile_tokens
    items = []
    for g in range(groups):
        for start in range(g * group, min(rows, (g + 1) * group), tile):
            items.append([start, min(tile, rows - start, (g + 1) * group - start), g, 0])
    items += [[0, 0, 0, 0]] * (rows - len(items))
    items += [[row, 1, rows + row, 1] for row in range(rows)]
    step.tables.copy_(tables)
    step.items.copy_(torch.tensor(items, dtype=torch.int32))
    step.order.copy_(torch.arange(2 * rows, dtype=torch.int32) % rows)
    state = step.state
    state.position_T.fill_(prompt_tokens - 1)
    state.slot_T.copy_(tables[rows:, 0] * PAGE)
    state.limit_2T[0].fill_(prompt_tokens - 1)
    state.limit_2T[1].fill_(1)
    state.generated_T.zero_()
    state.max_new_T.fill_(decode_tokens)
    state.done_T.zero_()
    state.token_T.copy_(torch.randint(0, 1000, (rows,)))
    state.uniform_TM.uniform_()


def measure(
    decoder: Decoder,
    rows: int,
    prompt_tokens: int,
    decode_tokens: int,
    group: int,
    lora: bool,
    repeats: int = 3,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Times ``decode_tokens`` decode steps of ``rows`` sequences.

    Returns:
        decode_tok_s, step_ms (medians over the repeats) and spread, (largest - smallest) / median.
    """
    width = -(-max(prompt_tokens, decode_tokens + 1) // PAGE)
    blocks = -(-rows // min(group, rows)) * -(-prompt_tokens // PAGE) + rows * -(-(decode_tokens + 1) // PAGE)
    cache = random_cache(decoder, blocks, kv_dtype)
    step = DecodeStep(decoder, cache, rows, decode_tokens, width, SamplingParams(decode_tokens), lora)
    times = []
    for _ in range(repeats):
        fill_prompts(step, prompt_tokens, group, decode_tokens)
        if step._graph is None:
            step._capture()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(decode_tokens):
            step.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert int(step.state.generated_T.min()) == decode_tokens
    assert torch.isfinite(step.state.out_stats_2TM).all()
    middle = statistics.median(times)
    return {
        "decode_tok_s": rows * decode_tokens / middle,
        "step_ms": middle / decode_tokens * 1e3,
        "spread": (max(times) - min(times)) / middle,
    }


def step_bytes(
    sizes: Sizes,
    weights: WeightFormatName,
    rank: int,
    rows: int,
    prompt: int,
    decoded: int,
    group: int,
    kv_bytes: int,
) -> float:
    """Bytes one decode step must read: weights, head, LoRA and, at half of the completion, keys and
    values."""
    per_weight = FORMATS[weights].on_engine.bytes_per_element
    layer = sum(n * k * per_weight + (n + k * parts) * rank * 2 for _, n, k, parts in sizes.products)
    groups = -(-rows // group)
    cache = (groups * prompt + rows * decoded / 2) * 2 * sizes.kv_heads * sizes.head_size
    cache *= kv_bytes
    return sizes.layers * (layer + cache) + sizes.vocabulary * sizes.hidden * 2


def profile(
    decoder: Decoder,
    rows: int,
    prompt_tokens: int,
    group: int,
    lora: bool,
    kv_dtype: torch.dtype,
    steps: int = 4,
) -> list[tuple[str, int, float]]:
    """(kernel, calls, microseconds) of one decode step, largest first.

    Taken outside the graph: inside, kernels overlap and each would be charged for waiting for the one before.
    """
    cache = random_cache(decoder, 2 * rows * 8 + 1, kv_dtype)
    step = DecodeStep(decoder, cache, rows, 64, 8, SamplingParams(64), lora)
    fill_prompts(step, prompt_tokens, group, 64)
    step._run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step._run()
        torch.cuda.synchronize()
    found = [(e.key, e.count // steps, e.self_device_time_total / steps) for e in trace.key_averages()]
    return sorted(found, key=lambda row: -row[2])


def read_bandwidth() -> float:
    """GB/s at which this GPU reads memory, the limit of a decode step: the best of a few sums over 8 GB."""
    data = torch.ones(1 << 31, dtype=torch.float32, device="cuda")
    speeds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        speeds.append(data.numel() * 4 / start.elapsed_time(end) / 1e6)
    return max(speeds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks rollout", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument(
        "--weights", nargs="*", default=["nvfp4"], choices=tuple(FORMATS), help="none: peers alone"
    )
    parser.add_argument("--peers", nargs="+", default=[], choices=PEERS, help="measure these as well")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--decode", type=int, default=256, help="tokens")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--kv_cache_dtype", default="auto", choices=KV_DTYPES, help="of our own rows")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try things out")
    parser.add_argument("--no_adapter", action="store_true", help="measure without the adapter as well")
    parser.add_argument("--profile", action="store_true", help="add the kernels of one step")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median is shown")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def _own_rows(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """What :func:`measure` gives for each format, batch and, if asked for, without the adapter."""
    kv_dtype = KV_DTYPES[args.kv_cache_dtype]
    for weights in args.weights:
        decoder = random_decoder(sizes, weights, args.rank, args.prompt + args.decode + PAGE)
        for batch in args.batch:
            for lora in [True, False] if args.no_adapter else [args.rank > 0]:
                fixed = (decoder, batch, args.prompt)
                seen = measure(*fixed, args.decode, args.group, lora, args.repeats, kv_dtype)
                rank = args.rank if lora else 0
                row = {
                    "engine": "qerl", "weights": weights, "lora_rank": rank, "batch": batch,
                    "kv_cache_dtype": args.kv_cache_dtype, **seen,
                }  # fmt: skip
                if args.profile:
                    row["kernels"] = [
                        {"us": round(micros, 1), "calls": calls, "name": name}
                        for name, calls, micros in profile(*fixed, args.group, lora, kv_dtype)[:10]
                    ]
                yield row
        del decoder


def _peer_rows(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The same of other engines, each in a process of its own."""
    spec = {
        "sizes": asdict(sizes), "rank": args.rank, "batches": args.batch, "prompt_tokens": args.prompt,
        "decode_tokens": args.decode, "group": args.group, "repeats": args.repeats,
    }  # fmt: skip
    for peer in args.peers:
        weights, quantization = PEERS[peer]
        settings = {
            "engine": peer, "weights": weights, "lora_rank": args.rank, "kv_cache_dtype": "auto",
        }  # fmt: skip
        wanted = {**spec, "weights": weights, "quantization": quantization}
        for row in peer_rows(peer, vllm_decode.__name__, wanted):
            yield {**settings, **row}


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['engine']} {row['shape']} {row['weights']} r{row['lora_rank']} batch {row['batch']}: "
        f"{row['decode_tok_s']:.0f} tok/s, {row['step_ms']:.3f} ms a step, {row['gb_s']:.0f} GB/s, "
        f"{row['limit_fraction']:.0%} of the limit, spread {row['spread']:.1%}",
        flush=True,
    )
    for kernel in row.get("kernels", []):
        print(f"    {kernel['us']:9.1f} us {kernel['calls']:5d} x {kernel['name'][:90]}")


def main(arguments: list[str]) -> None:
    """Runs `python -m benchmarks rollout` with these arguments."""
    args = _parser().parse_args(arguments)
    sizes = Sizes.by_name(args.shape)
    sizes = replace(sizes, layers=args.layers or sizes.layers)
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, reads {limit:.0f} GB/s")
    lengths = {"prompt_tokens": args.prompt, "decode_tokens": args.decode, "group": args.group}
    rows: list[dict[str, Any]] = []
    for row in itertools.chain(_own_rows(args, sizes), _peer_rows(args, sizes)):
        moved = step_bytes(
            sizes, row["weights"], row["lora_rank"], row["batch"], args.prompt, args.decode, args.group,
            KV_DTYPES[row["kv_cache_dtype"]].itemsize,
        )  # fmt: skip
        speed = moved / row["step_ms"] / 1e6
        row |= {"shape": args.shape, **lengths, "gb_s": speed, "limit_fraction": speed / limit}
        rows.append(row)
        _print(row)
        if args.out:
            write_result(args.out, " ".join(["rollout", *arguments]), rows, read_gb_s=limit)
