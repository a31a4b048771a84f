"""GRPO on sums with a packed base: share of right answers by seed, beside runs with a learning rate of 0.

    python -m lab sums                               # prints the folder of the policy
    python -m lab sums --seeds 0 1 2 --out FILE      # trains, and writes the results
    python -m lab sums --policy mixture --seeds 0 1 2 --out FILE

On a GPU a mixture learns with and without replay of its sampler's routing; the CPU's engine does not record
expert choices. A run is a whole one of `lab/sums/recipe.yaml`: rollout engine, rewards, packed row,
optimizer. Its result is not sampled but computed: the mean probability of a right answer over held-out sums.
"""

import argparse
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.result import write_result
from lab import scratch
from lab.sums import policy
from lab.sums.task import Sums
from qerl.settings.recipe import load_config
from qerl.trainer.run import build

SUMS = "sums"
RECIPE = Path(__file__).parent / "recipe.yaml"
HELD_OUT = 2000
"""Sums that are scored before and after a run."""


_ARMS: dict[policy.Kind, tuple[dict[str, Any], ...]] = {
    "hybrid": ({}, {"learning_rate": 0.0}),
    "mixture": ({}, {"replay_routing": False}, {"learning_rate": 0.0}),
}
"""Changes to the recipe of each run of a seed."""


def sums_folder(kind: policy.Kind = "hybrid") -> Path:
    """Return the folder of a bfloat16 policy, its config and its tokenizer; the first call trains the policy.

    Raises:
        QeRLError: Its training ended with too few right samples.
    """
    name = SUMS if kind == "hybrid" else f"{SUMS}-{kind}"
    return scratch.policy_folder(
        name, (scratch, policy), partial(policy.train_policy, kind), policy.make_tokenizer
    )


def learn(kind: policy.Kind, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Run the recipe and return the figures of the run.

    Args:
        kind: Kind of the policy.
        seed: Seed of the run: its prompts, samples and adapter.
        changes: Settings that differ from the recipe's.

    Returns:
        Among others: share of right samples per step, probability of a right answer on held-out sums before
        and after, `sampling/kl` of the first step, in which sampler and trainer have the same policy, and its
        mean over all steps; for a mixture also the share of the sampler's experts that the trainer's router
        would not have chosen.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = {"model": str(sums_folder(kind)), "output_dir": folder, "seed": seed, "eval_strategy": "no"}
        config = load_config([RECIPE], given | changes)
        trainer, _ = build(config, Console(quiet=True))
        problems = torch.tensor(
            [list(map(int, row["prompt"][-1]["content"].split("+"))) for row in _held_out()]
        )
        started, before = time.perf_counter(), _right(trainer.model, problems)
        trainer.train()
        steps = [row for row in trainer.state.log_history if "loss" in row]
        routing = [step["routing/differ"] for step in steps if "routing/differ" in step]
        of_mixture = {
            "replay_routing": config.replay_routing,
            "routing_differ": sum(routing) / len(routing) if routing else None,
        }
        return {
            "policy": kind, "seed": seed, "learning_rate": config.learning_rate, "weights": config.weights,
            "device": trainer.model.device.type, "engine": type(trainer.engine).__name__, "steps": len(steps),
            "seconds": time.perf_counter() - started,
            "before": before, "after": _right(trainer.model, problems),
            "reward_by_step": [step["rewards/accuracy/mean"] for step in steps],
            "first_sampling_kl": steps[0]["sampling/kl"],
            "sampling_kl": sum(step["sampling/kl"] for step in steps) / len(steps),
            **(of_mixture if kind == "mixture" else {}),
        }  # fmt: skip


def _held_out() -> list[dict[str, Any]]:
    return Sums(test_size=HELD_OUT).draw("test", HELD_OUT)


def _right(model: torch.nn.Module, sums_B2: torch.Tensor) -> float:
    return float(policy.right_probability(model, sums_B2).mean())


def main(arguments: list[str]) -> None:
    """Run `python -m lab sums` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab sums", description=__doc__.split("\n")[0])
    parser.add_argument("--policy", choices=_ARMS, default="hybrid")
    parser.add_argument("--seeds", type=int, nargs="+", help="train with these seeds")
    parser.add_argument("--steps", type=int, help="of each run; those of the recipe")
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args(arguments)
    if not args.seeds:
        print(sums_folder(args.policy))
        return
    changes = {"max_steps": args.steps} if args.steps else {}
    rows = []
    arms = [arm for arm in _ARMS[args.policy] if torch.cuda.is_available() or "replay_routing" not in arm]
    for seed, arm in itertools.product(args.seeds, arms):
        row = learn(args.policy, seed, changes | arm)
        rows.append(row)
        print(
            f"seed {seed}, learning rate {row['learning_rate']:g}: right {row['before']:.3f} before, "
            f"{row['after']:.3f} after {row['steps']} steps; sampling/kl {row['first_sampling_kl']:.1e} at "
            f"first, {row['sampling_kl']:.1e} in the mean",
            flush=True,
        )
        if args.out:
            write_result(args.out, " ".join(["sums", *arguments]), rows, program="lab")
