"""Seconds and memory of a step of reinforcement learning through `qerl serve`, on random weights.

    python -m bench serve --prompts 16 --tokens 1024 --tokens_per_forward 16896 --every_n_layers 29

The loop is that of the Tinker cookbook with the package tinker, which must be installed: take a snapshot,
request each sample separately, send all of them back with `importance_sampling`, and step the optimizer. The
client is a subprocess that reaches the server through HTTP, so times include the wire and the client. No
sample ends before its last token and advantages are random, so a step has the tokens of one of
`python -m bench step` with the same options, for comparison. The two are comparable only if both are given
`--tokens_per_forward` and `--every_n_layers`: for a server with several adapters the plan finds other values
than for a run. A row also has the values of the last update, because running out of memory changes them.

Per number of adapters, steps of the first adapter are timed, after one that captures and compiles. Then the
peak memory is read while every adapter holds gradients and moments and the first is updated with a whole
batch, and is shown beside the plan's. With `--steps 1` the first step is the counted one, so that its memory
is valid and its time is not.
"""

import argparse
import math
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.result import Row, write_result
from bench.serve_loop import client
from bench.served import KEY, Served, serving
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.gpu_memory import total_bytes
from qerl.measure.gauge import gauge
from qerl.plan.phases import MemoryPlan, make_plan
from qerl.plan.propose import fastest
from qerl.plan.work import Work
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.weight_formats import FORMATS

_PLANNED_GB = 80
"""Memory of the GPU that is planned for if the machine has none, in GiB."""


def planned(sizes: Sizes, args: argparse.Namespace, adapters: int) -> MemoryPlan:
    """Return the plan of a step with ``adapters`` adapters; settings without an option are the fastest.

    Raises:
        QeRLError: The step does not fit.
    """
    samples = args.prompts * args.samples
    work = Work(
        weights=args.weights, rank=args.rank, targets=sizes.targets, prompt_tokens=args.prompt,
        completion_tokens=args.tokens, group=args.samples, sequences=min(samples, MAX_ROWS),
        microbatch=samples, tokens_per_forward=args.tokens_per_forward, adapters=adapters,
        serves=True, may_offload=False,
    )  # fmt: skip
    on_gpu = torch.cuda.is_available()
    capacity = total_bytes(torch.device("cuda")) if on_gpu else _PLANNED_GB * 2**30
    limits = [args.tokens_per_forward] if args.tokens_per_forward else None
    every = [args.every_n_layers] if args.every_n_layers else None
    found = fastest(replace(sizes, tied=False), work, capacity, limits, every)
    if found is None:
        raise QeRLError(f"A step with {adapters} adapters does not fit; `qerl plan --adapters` says why.")
    return make_plan(replace(sizes, tied=False), found, capacity)


def measure(args: argparse.Namespace, sizes: Sizes, served: Served) -> Iterator[Row]:
    """Yield the rows of the client, which runs as a subprocess against a server in this process.

    Raises:
        QeRLError: The client failed.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with serving(served) as server:
        process = spawn.Process(target=client, args=(server.url, args, sizes.vocabulary, there), daemon=True)
        process.start()
        there.close()
        try:
            while True:
                said = here.recv()
                if said is None:
                    here.send(server.peak.take())
                else:
                    yield {**said, **server.held()}
        except EOFError:
            process.join()
            if process.exitcode != 0:
                raise QeRLError("The client of the benchmark failed; see above.") from None
        finally:
            process.kill()


def rows(args: argparse.Namespace, sizes: Sizes) -> Iterator[Row]:
    """Yield a row per number of adapters."""
    # One server is measured, so the plan for the largest number of adapters applies to all rows.
    work = planned(sizes, args, max(args.adapters)).work
    args.tokens_per_forward, args.every_n_layers = work.tokens_per_forward, work.every_n_layers
    positions = args.prompt + args.tokens + 64
    served = Served(
        sizes, args.weights, args.rank, max(args.adapters), positions, work.tokens_per_forward,
        work.every_n_layers,
    )  # fmt: skip
    shared = {
        "engine": "qerl serve", "shape": args.shape, "weights": args.weights, "lora_rank": args.rank,
        "prompts": args.prompts, "samples": args.samples, "prompt_tokens": args.prompt,
        "completion_tokens": args.tokens, "tokens_per_forward": work.tokens_per_forward,
        "every_n_layers": work.every_n_layers,
    }  # fmt: skip
    with gauge() as state:
        for found in measure(args, sizes, served):
            plan = planned(sizes, args, found["adapters"])
            yield {
                **shared, **found, "planned_gb": plan.peak / 1e9, "planned_rollout_gb": plan.rollout / 1e9,
                "planned_update_gb": plan.update / 1e9, "gpu_state": state.take(),
            }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters")
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=[1], help="number of models that clients train"
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--tokens_per_forward", type=int, help="of the update; default: what the plan finds")
    parser.add_argument(
        "--every_n_layers", type=int, help="recompute every n-th layer; default: from the plan"
    )
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has, for a trial")
    parser.add_argument("--steps", type=int, default=3, help="counted steps; the median is reported")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Run `python -m bench serve` with these arguments."""
    args = _parser().parse_args(arguments)
    if find_spec("tinker") is None:
        raise QeRLError("`python -m bench serve` needs the package tinker; install it with pip.")
    os.environ |= {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}  # for the client's process
    sizes = Sizes.by_name(args.shape)
    sizes = sizes.with_layers(args.layers or sizes.layers)
    found: list[Row] = []
    for row in rows(args, sizes):
        found.append(row)
        print(
            f"{row['shape']} {row['weights']} r{row['lora_rank']}, {row['prompts']} x {row['samples']} x "
            f"{row['completion_tokens']}, {row['adapters']} adapters: sample {row['sample_s']:.2f} s, update "
            f"{row['update_s']:.2f} s, step {row['total_s']:.2f} s, {row['tokens_per_s']:.0f} tokens/s; GB: "
            f"in use {row['peak_gb']:.1f}, allocated {row.get('allocated_gb', math.nan):.1f}, planned "
            f"{row['planned_gb']:.1f}; update: {row['held_tokens_per_forward']} tokens at a time, "
            f"recomputing every n-th layer, n = {row['held_every_n_layers']}",
            flush=True,
        )
        if args.out:
            write_result(args.out, " ".join(["serve", *arguments]), found)
