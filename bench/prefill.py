"""Time of prefill passes by size, each captured and launched kernel by kernel.

    python -m bench prefill --shape 7b --tokens 64 256 512 1024 2048 --out bench/results/prefill-7b-h200.json

A pass computes one prompt of as many tokens as the pass is built for. Two times are measured: until the host
has queued the pass, and until the GPU has computed it. A pass whose first time is not much shorter than its
second one waits for the host.
"""

import argparse
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.result import write_result
from bench.ways import setting
from qerl.kernels.limits import PAGE
from qerl.measure.decode import random_cache
from qerl.measure.gauge import gauge
from qerl.measure.model_config import shape_of
from qerl.measure.random_model import random_decoder
from qerl.rollout.paged.decode import DecodeGraphs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import PREFILL_TOKENS, KVGeometry, Units
from qerl.rollout.paged.machine import Cuda
from qerl.rollout.paged.prefill import Prefill
from qerl.rollout.paged.scheduler import Pace, Span
from qerl.rollout.paged.weights import Decoder
from qerl.weight_formats import FORMATS


def main(arguments: list[str]) -> None:
    """Run `python -m bench prefill` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m bench prefill", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for none")
    parser.add_argument("--tokens", type=int, nargs="+", default=[*PREFILL_TOKENS], help="tokens of a pass")
    parser.add_argument("--repeats", type=int, default=20, help="timed passes")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    longest = max(args.tokens)
    decoder = random_decoder(shape_of(args.shape, args.layers or 0), args.weights, args.rank, longest)
    pools = KVGeometry.of(decoder.sizes, 2).pools
    cache = random_cache(decoder, Units([-(-longest // PAGE)] * len(pools)), torch.bfloat16)
    common = {"engine": "qerl", "shape": args.shape, "weights": args.weights, "lora_rank": args.rank}
    rows: list[dict[str, Any]] = []
    with gauge() as state:
        for tokens in args.tokens:
            for captured in (False, True):
                row = {"tokens": tokens, **pass_times(decoder, cache, tokens, captured, args.repeats)}
                if row["captured"] != captured:  # passes of so many tokens are always launched
                    break
                rows.append(common | row | {"gpu_state": state.take()})
                print(
                    f"{tokens} tokens, {'captured' if captured else 'launched'}: queued in "
                    f"{row['queued_ms']:.2f} ms, computed in {row['ms']:.2f} ms, spread {row['spread']:.0%}, "
                    f"{row['pass_mb']:.0f} MB",
                    flush=True,
                )
                if args.out:
                    write_result(args.out, shlex.join(["prefill", *arguments]), rows)


def pass_times(decoder: Decoder, cache: KVCache, tokens: int, captured: bool, repeats: int) -> dict[str, Any]:
    """Time passes over a prompt of ``tokens`` tokens, captured if asked for and if they may be.

    Returns:
        captured, whether they were; queued_ms and ms, medians until the host goes on and until the GPU is
        done; spread, (largest - smallest) / median of the latter; pass_mb, the memory that the pass holds, in
        10^6 bytes.
    """
    blocks = list(range(-(-tokens // PAGE)))
    span = Span(
        [number % 1000 for number in range(tokens)], 0, dict.fromkeys(range(len(cache.blocks)), blocks)
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with setting(f"qerl.rollout.paged.prefill:CAPTURED_TOKENS={tokens if captured else 0}"):
        graphs = DecodeGraphs(decoder, cache, Cuda(), Pace().small_rows)
        graphs.make_room(1, len(blocks))
        prefill = Prefill(decoder, cache, graphs, (tokens,))
        for _ in range(3):
            prefill.run([span])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    queued, whole = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        prefill.run([span])
        queued.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - start))
    middle = statistics.median(whole)
    return {
        "captured": prefill.passes[tokens].captured,
        "queued_ms": statistics.median(queued),
        "ms": middle,
        "spread": (max(whole) - min(whole)) / middle,
        "pass_mb": held / 1e6,
    }
