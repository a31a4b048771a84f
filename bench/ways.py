"""Decode steps of few rows in several ways, in turn in one process.

    python -m bench ways --shape 7b --batch 1 8 --ways old new --rounds 4

A way is what replaces constants and tilings of the kernels before a step is captured. The ways take turns,
every other round in reverse order. A row has the median step of all rounds, how far the rounds are apart, and
the ratio to the first way within each round, whose median and extremes are what a decision is made of.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.result import write_result
from bench.rollout import read_bandwidth
from qerl.kernels.decode import attend, launch
from qerl.kernels.limits import PAGE
from qerl.kernels.weights import nvfp4
from qerl.kernels.weights.packed_gemm import Tiling
from qerl.measure.decode import decode_speed
from qerl.measure.gauge import gauge
from qerl.measure.model_config import shape_of
from qerl.measure.random_model import random_decoder
from qerl.rollout.paged import decode

_OLD = Tiling(2, 2, 8, 4)
_EIGHT = Tiling(2, 2, 8, 8)
# Of each way: tokens up to which a program combines one token's splits, tokens up to which tiles have 8, the
# tiling of products of 8 and of 16 tokens, and splits of attention (0: as the rule says).
WAYS: dict[str, tuple[int, int, Tiling, int]] = {
    "old": (0, 0, _OLD, 0),
    "combine": (16, 0, _OLD, 0),
    "tiles": (0, 8, _OLD, 0),
    "sets": (0, 0, replace(_OLD, sets=2), 0),
    "adder": (0, 0, replace(_OLD, adder=True), 0),
    "together": (0, 0, _EIGHT, 0),
    "new": (16, 8, replace(_EIGHT, sets=2, adder=True), 0),
    "new-combine": (0, 8, replace(_EIGHT, sets=2, adder=True), 0),
    "new-tiles": (16, 0, replace(_EIGHT, sets=2, adder=True), 0),
    "new-sets": (16, 8, replace(_EIGHT, adder=True), 0),
    "new-adder": (16, 8, replace(_EIGHT, sets=2), 0),
    "new-together": (16, 8, replace(_OLD, sets=2, adder=True), 0),
    "new-7": (16, 8, Tiling(2, 2, 7, 7, sets=2, adder=True), 0),
    "new-4-teams": (16, 8, Tiling(4, 2, 8, 4, sets=2, adder=True), 0),
    "new-wide": (16, 8, Tiling(4, 4, 4, 4, sets=2, adder=True), 0),
    "new-1-split": (16, 8, replace(_EIGHT, sets=2, adder=True), 1),
    "new-2-splits": (16, 8, replace(_EIGHT, sets=2, adder=True), 2),
    "new-4-splits": (16, 8, replace(_EIGHT, sets=2, adder=True), 4),
    "new-8-splits": (16, 8, replace(_EIGHT, sets=2, adder=True), 8),
}


@contextmanager
def taken(way: str) -> Iterator[None]:
    """Steps that are captured meanwhile go this way."""
    combined, tiles, tiling, splits = WAYS[way]
    tilings = nvfp4._WGMMA_TILINGS | {8: tiling, 16: replace(tiling, together=4)}
    with ExitStack() as stack:
        stack.enter_context(patch.object(attend, "FEW_TOKENS", combined))
        stack.enter_context(patch.object(launch, "FEW_TOKENS", tiles))
        stack.enter_context(patch.object(nvfp4, "_WGMMA_TILINGS", tilings))
        if splits:
            stack.enter_context(patch.object(decode, "attention_splits", lambda *_: splits))
        yield


def main(arguments: list[str]) -> None:
    """Runs `python -m bench ways` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench ways", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=["old", "new"])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--decode", type=int, default=128, help="tokens")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    shape, positions = shape_of(args.shape, args.layers or 0), args.prompt + args.decode + PAGE
    limit = read_bandwidth()
    decoder = random_decoder(shape, "nvfp4", args.rank, positions)
    rows: list[dict[str, Any]] = []
    with gauge() as state:
        for batch in args.batch:
            found: dict[str, list[float]] = {way: [] for way in args.ways}
            states: dict[str, list[Any]] = {way: [] for way in args.ways}
            for i in range(args.rounds):
                for way in args.ways[:: -1 if i % 2 else 1]:
                    state.take()
                    with taken(way):
                        seen = decode_speed(decoder, batch, args.prompt, args.decode, args.group, 2)
                    found[way].append(seen["step_ms"])
                    states[way].append(state.take())
            for way in args.ways:
                times = found[way]
                ratios = [first / own for first, own in zip(found[args.ways[0]], times, strict=True)]
                middle = statistics.median(times)
                rows.append(
                    {"way": way, "batch": batch, "step_ms": middle, "decode_tok_s": batch / middle * 1e3,
                     "spread": (max(times) - min(times)) / middle, "rounds_ms": times,
                     "faster": statistics.median(ratios), "faster_least": min(ratios),
                     "faster_most": max(ratios), "gpu_states": [each for each in states[way] if each]}
                )  # fmt: skip
                print(
                    f"{args.shape} batch {batch} {way}: {middle:.4f} ms, {batch / middle * 1e3:.0f} tok/s, "
                    f"{statistics.median(ratios) - 1:+.1%} "
                    f"({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}), spread {rows[-1]['spread']:.1%}",
                    flush=True,
                )
            if args.out:
                write_result(
                    args.out, " ".join(["ways", *arguments]), rows, read_gb_s=limit, shape=args.shape,
                    prompt_tokens=args.prompt, decode_tokens=args.decode, group=args.group,
                    lora_rank=args.rank,
                )  # fmt: skip
