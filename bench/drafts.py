"""What drafted tokens cost: milliseconds of a pass of few rows with and without drafts.

    python -m bench drafts --out bench/results/drafts-7b-h200.json

A step that drafts k tokens computes k + 1 positions of each row and looks for drafts first, whether it finds
any or not. Random weights at temperature 1 write nothing twice, so hardly a draft is found and none is worth
anything: what is measured is the price alone. What drafts win has to come from texts that repeat themselves,
and is counted on real completions (`bench.acceptance`); the two together say when drafts pay.

Whole calls are timed, after one that captures. Prompts are short, because prefill is in the time of a call.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.lengths import random_ids
from bench.result import Row, write_result
from qerl.families.sizes import Sizes
from qerl.measure.random_model import as_if_trained, random_policy
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.weight_formats import FORMATS

REPEATS = 3


def measure(engine: PagedEngine, rows: int, prompt: int, decode: int) -> Row:
    """Times calls of an engine in which so many rows decode to the same length.

    Returns:
        generated, drafted and accepted tokens of all timed calls; pass_ms, the median over calls of seconds
        by passes, in milliseconds; and spread, (slowest - fastest) / median.
    """
    found = [
        engine.generate(random_ids(call, rows, prompt), 1, SamplingParams(decode, seed=call))
        for call in range(REPEATS + 1)
    ][1:]
    passes = [(result.generated_tokens - result.accepted_tokens) / rows for result in found]
    times = [1e3 * result.seconds / count for result, count in zip(found, passes, strict=True)]
    middle = statistics.median(times)
    return {
        "generated": sum(result.generated_tokens for result in found),
        "drafted": sum(result.drafted_tokens for result in found),
        "accepted": sum(result.accepted_tokens for result in found),
        "pass_ms": middle,
        "spread": (max(times) - min(times)) / middle,
    }


def _rows(args: argparse.Namespace, sizes: Sizes) -> Iterator[Row]:
    for draft in args.draft:
        policy = as_if_trained(random_policy(sizes, args.weights, args.rank, args.prompt + args.decode + 64))
        engine = PagedEngine(policy, 0, max_sequences=max(args.batch), speculative_tokens=draft)
        for rows in args.batch:
            yield {
                "shape": args.shape, "weights": args.weights, "lora_rank": args.rank, "batch": rows,
                "draft": draft, "prompt_tokens": args.prompt, "decode_tokens": args.decode,
                **measure(engine, rows, args.prompt, args.decode),
            }  # fmt: skip
        engine.release()
        del policy, engine  # before the next model is made


def main(arguments: list[str]) -> None:
    """Runs `python -m bench drafts` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench drafts", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4], help="rows; from 5 on none draft")
    parser.add_argument("--draft", type=int, nargs="+", default=[0, 1, 3, 7], help="tokens of a draft")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--decode", type=int, default=256, help="tokens")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    rows: list[Row] = []
    for row in _rows(args, Sizes.by_name(args.shape)):
        rows.append(row)
        print(
            f"{row['shape']} {row['weights']}, {row['batch']} rows, drafts of {row['draft']}: "
            f"{row['pass_ms']:.3f} ms a pass, spread {row['spread']:.1%}, {row['accepted']} of "
            f"{row['drafted']} drafted tokens accepted",
            flush=True,
        )
        if args.out:
            write_result(args.out, " ".join(["drafts", *arguments]), rows)
