"""Seconds of a step of a study, by how many runs share it, on a small real model and generated arithmetic.

    python -m lab speed --runs 1 8 32 --out bench/results/study-h200.json

Each row trains a batch (`lab.study.batched`) with noise in its rollouts. The first steps capture graphs and
warm up, and are not counted. What counts is a seed-step: the time of a step divided by the number of runs.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.result import write_result
from lab.study.arms import Arm, Run
from lab.study.batched.trainer import BatchedTrainer, Settings
from lab.study.named import find_model
from qerl.errors import QeRLError
from qerl.models.load import load_model, load_tokenizer
from qerl.tasks.arithmetic import Arithmetic
from qerl.weight_formats import FORMATS

_WARM_UP = 3
"""Steps that are not counted: one without noise, one with it, and one more."""


def measure(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, runs: int
) -> dict[str, Any]:
    """Train a batch, and say what its steps took."""
    arm = Arm("none") if args.no_noise else Arm("aqn", noise=True, noise_stages=2)
    counted = args.steps
    settings = Settings(
        steps=2 * (counted + _WARM_UP), prompts_per_step=args.prompts, samples_per_prompt=args.samples,
        max_completion_length=args.tokens, tokens_per_forward=args.tokens_per_forward,
    )  # fmt: skip
    task = Arithmetic(args.level, 2)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    batch = BatchedTrainer(base, tokenizer, task, [Run(arm, seed, 2e-4) for seed in range(runs)], settings)
    made = time.perf_counter() - start
    batch.done = 0 if args.no_noise else settings.steps // 2 - 1  # the stage without noise ends here
    rows: list[dict[str, float]] = []
    for _ in range(_WARM_UP + counted):
        start = time.perf_counter()
        records = batch.step()
        torch.cuda.synchronize()
        parts = {f"{name}_s": seconds for name, seconds in batch.seconds.items()}
        rows.append({"step_s": time.perf_counter() - start} | parts)
    peak = torch.cuda.max_memory_allocated() / 1e9
    start = time.perf_counter()
    scores = batch.evaluate(task.test())
    first = time.perf_counter() - start
    start = time.perf_counter()
    batch.evaluate(task.test())
    again = time.perf_counter() - start
    medians = {name: statistics.median(row[name] for row in rows[_WARM_UP:]) for name in rows[0]}
    return {
        "runs": runs, "seed_step_s": medians["step_s"] / runs, **medians, "made_s": made,
        "evaluation_s": again, "first_evaluation_s": first, "update_gb": peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reward": statistics.fmean(record["reward"] for record in records),
        "kl": statistics.fmean(record["sampling/kl"] for record in records),
        "accuracy": statistics.fmean(score["accuracy"] for score in scores),
        "steps": [row["step_s"] for row in rows],
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab speed", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--level", default="wp12", help="of the task arithmetic, with two worked examples")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8, 32], help="runs of a batch")
    parser.add_argument("--prompts", type=int, default=8, help="of a run in each step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of a completion at most")
    parser.add_argument("--tokens_per_forward", type=int, default=32768, help="of the update")
    parser.add_argument("--steps", type=int, default=8, help="steps counted, of which the median is shown")
    parser.add_argument("--no_noise", action="store_true", help="rollouts without noise")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Runs `python -m lab speed` with these arguments.

    Raises:
        QeRLError: There is no GPU.
    """
    args = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        raise QeRLError(
            "`python -m lab speed` measures a CUDA GPU and this machine shows none; see `qerl doctor`."
        )
    found = find_model(args.model)
    base = load_model(found, args.weights, torch.bfloat16, "cuda")
    tokenizer = load_tokenizer(found)
    shared = {
        "model": args.model, "weights": args.weights, "task": args.level, "prompts": args.prompts,
        "samples": args.samples, "completion_tokens": args.tokens,
        "tokens_per_forward": args.tokens_per_forward, "noise": not args.no_noise,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for runs in args.runs:
        rows.append(measure(base, tokenizer, args, runs))
        row = rows[-1]
        print(
            f"{runs} runs: {row['seed_step_s']:.4f} s a seed-step; step {row['step_s']:.3f} s (rollout "
            f"{row['rollout_s']:.3f}, reward {row['reward_s']:.3f}, update {row['update_s']:.3f}), "
            f"evaluation {row['evaluation_s']:.2f} s, made in {row['made_s']:.1f} s, peak "
            f"{row['peak_gb']:.1f} GB; reward {row['reward']:.3f}, KL {row['kl']:.1e}",
            flush=True,
        )
        if args.out:
            write_result(args.out, " ".join(["speed", *arguments]), rows, "lab", **shared)
