"""A rollout that agents of their own lead over the endpoint, beside the same one by the built-in loop.

    python -m bench agents docs/examples/verifiers-calculator.yaml --beside demo-tools \\
        --out bench/results/agents-verifiers-CARD.json

Both recipes are played by turns on the same held-out problems and the untrained model, with the samples of a
group and the lengths of their recipes, after one rollout of each that imports and connects. The processor's
time, of all threads of this process, is given as well: that of a machine that does other things, without the
programs that an agent starts. What is drawn differs, as seeds of agents follow from what they ask, so tokens
are given too, and ratios of the times for each of them.
"""

import argparse
import shlex
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.result import Row, write_result
from qerl.demo import packed, prepared
from qerl.errors import QeRLError
from qerl.eval.policy import Policy, load
from qerl.eval.run import Job
from qerl.eval.sampling import conversations_of, in_conversations
from qerl.rollout.engine import SamplingParams
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import changed, load_config

ALIKE = (
    "model", "weights", "rounding", "task", "task_options", "num_generations", "max_completion_length",
    "temperature",
)  # fmt: skip
"""Settings in which two recipes have to agree, so that their rollouts are the same work."""


class Way:
    """The conversations of a recipe.

    Args:
        config: Its settings.
        job: Its problems and environment.
        policy: Plays them.
    """

    def __init__(self, config: QeRLConfig, job: Job, policy: Policy) -> None:
        self._policy, self._rows, self._samples = policy, list(job.problems), config.num_generations
        params = SamplingParams(max_tokens=config.max_completion_length, temperature=config.temperature)
        self._params = policy.stopping(params, job.asked)
        kwargs = job.loading.chat_template_kwargs
        self._conversations = conversations_of(policy.tokenizer, kwargs, **job.turns)

    def play(self, repeat: int) -> dict[str, Any]:
        """One rollout: its wall and processor seconds, tokens drawn, and conversations that failed."""
        seeds = [repeat * 10_000 + place for place in range(len(self._rows) * self._samples)]
        start, busy = time.perf_counter(), time.process_time()
        said = in_conversations(
            self._conversations, self._policy.engine, self._rows, self._samples, self._params, seeds
        )
        found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        others = self._conversations.environments or []
        failed = sum(getattr(each, "error", None) is not None for each in others)
        return found | {"drawn_tokens": sum(each.tokens for each in said), "failed": failed}

    def close(self) -> None:
        """End what it has opened."""
        self._conversations.__exit__()


def rows(args: argparse.Namespace, console: Console) -> Iterator[Row]:
    """A row for the built-in loop and one for the agents, with their ratio to it."""
    names = (args.beside, args.recipe)
    configs = [load_config([name], {"eval_samples": args.prompts}) for name in names]
    for name in ALIKE:
        one, other = (getattr(config, name) for config in configs)
        if one != other:
            raise QeRLError(
                f"{name} is {other!r} in {args.recipe} and {one!r} in {args.beside}; give both the same."
            )
    configs = [changed(config, {"model": packed(config, console)}) for config in configs]
    jobs = [prepared(config, None, console) for config in configs]
    policy = load(jobs[0].loading, console)
    ways = [Way(config, job, policy) for config, job in zip(configs, jobs, strict=True)]
    taken = [[way.play(repeat) for way in ways] for repeat in range(args.repeats + 1)][1:]
    loop: dict[str, float] = {}
    for name, config, runs in zip(names, configs, zip(*taken, strict=True), strict=True):
        seconds, cpu = (statistics.median(run[key] for run in runs) for key in ("seconds", "cpu_seconds"))
        of_token = {
            key: statistics.median(run[key] / run["drawn_tokens"] for run in runs)
            for key in ("seconds", "cpu_seconds")
        }
        loop = loop or of_token
        yield {
            "recipe": name, "environment": config.environment, "prompts": args.prompts,
            "samples": config.num_generations, "max_completion_length": config.max_completion_length,
            "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
            "ratio": round(of_token["seconds"] / loop["seconds"], 3),
            "cpu_ratio": round(of_token["cpu_seconds"] / loop["cpu_seconds"], 3),
            "drawn_tokens": [run["drawn_tokens"] for run in runs],
            "failed": sum(run["failed"] for run in runs),
            "runs": [{key: round(run[key], 2) for key in ("seconds", "cpu_seconds")} for run in runs],
        }  # fmt: skip
    for way in ways:
        way.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench agents", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", help="name or file of a recipe whose environment is an endpoint")
    parser.add_argument(
        "--beside", required=True, help="recipe of the built-in loop with the same model and task"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="timed rollouts, of which the median is taken")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Runs `python -m bench agents` with these arguments."""
    args = _parser().parse_args(arguments)
    found: list[Row] = []
    for row in rows(args, Console()):
        found.append(row)
        print(
            f"{row['recipe']}: {row['seconds']} s a rollout ({row['cpu_seconds']} of the CPU), "
            f"{row['ratio']} of the loop's for each token ({row['cpu_ratio']}), {row['drawn_tokens']} drawn, "
            f"{row['failed']} failed",
            flush=True,
        )
    if args.out:
        write_result(args.out, shlex.join(["agents", *arguments]), found, note=args.note)
