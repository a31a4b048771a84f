"""The demo: score a small real model, train it on this machine, score the adapter that was saved.

The scores come from the same harness as `qerl eval`, on held-out problems, decoded greedily. The trained
model is loaded afresh from the run folder, so the second score is that of the adapter on disk. With an
environment the first conversations are printed, before training and after it, because they show what the
model has learned and a number does not.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from qerl.agents.trajectory import Message
from qerl.eval.policy import load
from qerl.eval.record import EvalResult, Record
from qerl.eval.request import Request
from qerl.eval.run import Job, Problems, prepare, score
from qerl.fp4.quantize import quantize_checkpoint
from qerl.models.cache import cache_folder
from qerl.models.decide import Source
from qerl.models.hub import local_checkpoint
from qerl.report.curve import terminal_curve
from qerl.report.page import write_report
from qerl.run_folder import read_metrics
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import changed
from qerl.trainer.run import train
from qerl.weight_formats import DEFAULT_FORMAT, FORMATS

_SHOWN = 3
"""Number of conversations that are printed."""

_OF_SOURCE = ("weights", "rounding", "dtype", "chat_template_kwargs", "trust_remote_code")
_OF_REQUEST = (
    "task", "task_options", "environment", "environment_options", "max_tool_calling_iterations",
    "stop_strings", "thinking_budget", "thinking_end",
)  # fmt: skip
"""Fields that mean the same in a run's settings and in an evaluation."""


@dataclass(frozen=True)
class Demo:
    """Result of a demo.

    Attributes:
        before, after: Scores on the same held-out problems, of the untrained model and of the saved adapter.
        seconds: Seconds of the whole demo.
    """

    before: EvalResult
    after: EvalResult
    seconds: float


def run_demo(config: QeRLConfig, console: Console) -> Demo | None:
    """Train, and print the accuracy on `eval_samples` held-out problems before it and after it.

    Args:
        config: Settings of the run. Model, output folder and, on a GPU, microbatches are replaced.
        console: Shows progress and results.

    Returns:
        The result; None if training was interrupted.
    """
    start = time.perf_counter()
    config = changed(config, {
        "model": packed(config, console),
        "output_dir": str(_free(Path(str(config.output_dir)))),
        **(one_microbatch(config) if torch.cuda.is_available() else {}),
    })  # fmt: skip
    console.print(f"Scoring {config.eval_samples} held-out problems before training.")
    before = score_demo(config, None, console)
    run = train(config, console)
    if run.interrupted:
        return None
    console.print("Scoring the saved adapter on the same problems.")
    after = score_demo(config, run.folder, console)
    _show(run.folder, before, after, console)
    found = Demo(before, after, time.perf_counter() - start)
    console.print(f"time: {found.seconds / 60:.1f} minutes, seed {config.seed}")
    return found


def one_microbatch(config: QeRLConfig) -> dict[str, Any]:
    """Return fields that put all samples of a step into one loss, which is the same mathematically.

    The recipe has a group in each loss, which suits the dense attention of a CPU. A GPU attends within groups
    only, and with a model this small its time goes into launches, once for each loss. Where a rollout serves
    several steps, no field changes.
    """
    if config.steps_per_generation != config.gradient_accumulation_steps:
        return {}
    samples = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
    }


def packed(config: QeRLConfig, console: Console) -> str:
    """Return the name or folder of the model in the settings' format; a packed one is quantised once and
    kept."""
    assert config.model is not None
    weights = config.weights or DEFAULT_FORMAT
    if not FORMATS[weights].packed:
        return config.model
    name = f"{Path(config.model).name}-{weights}-{config.rounding}"
    target = cache_folder() / name
    if not target.exists():
        console.print(f"Quantising {config.model} to {target}, once.")
        quantize_checkpoint(local_checkpoint(config.model), target, weights, config.rounding)
    return str(target)


def _free(folder: Path) -> Path:
    """Return the folder, or the next numbered one if it exists: a second demo does not touch the first."""
    numbered = (folder.with_name(f"{folder.name}-{i}") for i in count(2))
    return folder if not folder.exists() else next(path for path in numbered if not path.exists())


def score_demo(config: QeRLConfig, adapter: Path | None, console: Console) -> EvalResult:
    """Return the score on `eval_samples` held-out problems; print the first conversations, if any.

    Args:
        config: Settings of the run.
        adapter: The trained adapter; None for the untrained model.
        console: Shows progress, conversations and the result.
    """
    job = prepared(config, adapter, console)
    record = Record(adapter / "eval" if adapter else None, job.settings)
    result = score(job, load(job.loading, console), record, console)
    if job.turns:
        for problem, row in list(zip(job.problems, record.rows, strict=True))[:_SHOWN]:
            question = problem["prompt"][-1]["content"]
            console.print(conversation(question, row["completion"]), markup=False, highlight=False)
    return result


def prepared(config: QeRLConfig, adapter: Path | None, console: Console) -> Job:
    """The job that scores a run's settings on `eval_samples` held-out problems; arguments as `score_demo`."""
    assert config.model is not None and config.task is not None
    own = {name: getattr(config, name) for name in _OF_SOURCE}
    asked = {name: getattr(config, name) for name in _OF_REQUEST}
    request = Request(max_tokens=config.max_completion_length, limit=config.eval_samples, **asked)
    return prepare(Source(config.model, adapter, **own), request, Problems(), console)


def conversation(question: str, messages: Sequence[Message]) -> str:
    """A conversation as lines, each with its speaker."""
    said = [("problem", question)]
    said += [("model" if m["role"] == "assistant" else "environment", m["content"]) for m in messages]
    return "\n".join(f"{who:>12}  {' / '.join(text.split(chr(10)))}" for who, text in said) + "\n"


def _show(folder: Path, before: EvalResult, after: EvalResult, console: Console) -> None:
    rewards = [row["reward"] for row in read_metrics(folder) if "reward" in row]
    console.print("\nreward by step")
    console.print(terminal_curve(rewards), highlight=False)
    table = Table(title=f"greedy accuracy on {before.problems} held-out problems")
    table.add_column("")
    table.add_column("accuracy", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, result in (("before", before), ("after", after)):
        low, high = result.interval
        table.add_row(name, f"{100 * result.accuracy:.1f} %", f"{100 * low:.1f} to {100 * high:.1f} %")
    console.print(table)
    console.print(f"gain: {100 * (after.accuracy - before.accuracy):+.1f} points")
    report = folder / "report.html"
    write_report([folder], report)
    console.print(f"adapter, metrics and {report.name} are in {folder}")
