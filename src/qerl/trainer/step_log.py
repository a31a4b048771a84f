"""A trainer's log between two log lines: metrics, seconds by part, peak memory, the table of completions.

Metrics are lists of values by name; a log line has their means, NaN left out. Samples of training and those
of each evaluation are kept in tables of their own: an evaluation within a rollout's steps would otherwise
replace the samples of that rollout.

Parquet wants one type for each value of a table. The arguments of tool calls have none: they differ by tool,
a model writes any value, and a call without arguments is a structure without a field, which Parquet refuses.
So arguments are written as JSON text, the form in which OpenAI's interface has them.
"""

import contextlib
import json
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import torch
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from qerl.errors import QeRLError, first_line
from qerl.run_folder import COMPLETIONS_FOLDER, table_path

HIDDEN = "reward_hidden"
"""Name of the seconds of rewards that ran during a rollout, whose own seconds contain them already."""

_PARTS = ("rollout", "reward", "logprob")
_RU_MAXRSS = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of `ru_maxrss`: 1 on macOS, 1024 on Linux."""


def used_bytes(device: torch.device) -> int:
    """Return the bytes in use on a GPU, by any process; on the CPU this process's peak.

    On a GPU the figure is the device's, CUDA's context included: keys and values of the paged engine do not
    pass through torch's allocator, so its own statistics would leave out the larger half of a rollout.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RU_MAXRSS


@dataclass
class Record:
    """A sample as a row of the table of completions; `extra` has the columns that reward functions add."""

    prompt: Any
    completion: Any
    rewards: dict[str, float]
    advantage: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class StepLog:
    """Metrics, times, memory and samples of a trainer.

    Args:
        device: Device whose memory is read.
        longest: Number of newest samples that a table keeps.

    Attributes:
        metrics: Values since the last log line by name, of ``train`` and of ``eval``.
        records: Samples of the newest rollouts, of all processes.
        evaluation: Prefix of the evaluation under way, ``eval`` or ``eval_NAME``; empty in training.
    """

    def __init__(self, device: torch.device, longest: int) -> None:
        self._device, self._longest = device, longest
        self.metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        self.records: list[Record] = []
        self.evaluation = ""
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._peak = 0
        self._total, self._last_microbatch, self._running = 0.0, 0.0, False

    # Metrics

    def add(self, mode: str, values: Mapping[str, float]) -> None:
        """Add a value of each of these metrics."""
        for name, value in values.items():
            self.metrics[mode][name].append(value)

    def means(self, mode: str) -> dict[str, float | None]:
        """Return the mean of each metric since the last call; None where none of its values is a number."""
        found = {name: mean(values) for name, values in self.metrics[mode].items()}
        self.metrics[mode].clear()
        return found

    @contextlib.contextmanager
    def apart(self, evaluation: str) -> Iterator[None]:
        """Keep samples of an evaluation in a table of their own, and drop its seconds, which belong to no
        step.

        Args:
            evaluation: Prefix of the evaluation in this block.
        """
        former = self.records, self.evaluation
        clock = self._seconds, self._total, self._last_microbatch, self._running
        self.records, self.evaluation = [], evaluation
        self._seconds, self._running = defaultdict(float), False
        try:
            yield
        finally:
            self.records, self.evaluation = former
            self._seconds, self._total, self._last_microbatch, self._running = clock

    # Times: seconds of an optimizer step, of trainings and of evaluations

    def add_seconds(self, part: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to a part of the step, or to `HIDDEN`."""
        self._seconds[part] += seconds

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as a part of the step: rollout, reward or logprob."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Count the seconds of the block, a whole microbatch; after the step's last one, also those until the
        step ends."""
        start, self._running = time.perf_counter(), True
        try:
            yield
        finally:
            self._last_microbatch = time.perf_counter()
            self._total += self._last_microbatch - start

    def end_step(self) -> dict[str, float]:
        """Return the seconds of the step that ends here, and its peak of memory in 10^9 bytes; empty outside
        of a step.

        The update is the time of the whole step without the other parts; it includes the optimizer.
        """
        if not self._running:
            return {}
        total = self._total + time.perf_counter() - self._last_microbatch
        parts = {name: self._seconds.pop(name, 0.0) for name in _PARTS}
        parts["update"] = total - sum(parts.values())
        if HIDDEN in self._seconds:
            parts[HIDDEN] = self._seconds.pop(HIDDEN)
        self._total, self._running = 0.0, False
        self.read_memory()  # torch keeps what it has freed, so a reading at the end shows the update's peak
        peak, self._peak = self._peak, 0
        times = {f"time/{name}": seconds for name, seconds in parts.items()}
        return {"step_time": total} | times | {"memory/peak_gb": peak / 1e9}

    def read_memory(self) -> None:
        """Take a reading of the memory in use."""
        self._peak = max(self._peak, used_bytes(self._device))

    def begin(self, split: str) -> None:
        """Begin a training (``train``) or an evaluation (``eval``, ``eval_NAME``), and clear what an
        interrupted one left."""
        self._began[split] = time.monotonic()
        if split != "train":
            self.metrics["eval"].clear()
            return
        self.metrics["train"].clear()
        self.records, self._peak = [], 0
        self._seconds.clear()
        self._total, self._last_microbatch, self._running = 0.0, 0.0, False

    def put_runtimes(self, metrics: dict[str, float]) -> None:
        """Replace transformers' runtimes in these metrics, if there are any, and the rates that follow from
        them.

        transformers measures by the time of day: if the clock is set back meanwhile, its runtime is negative.
        """
        for split, began in self._began.items():
            if (theirs := metrics.get(f"{split}_runtime")) is None:
                continue
            seconds = time.monotonic() - began
            metrics[f"{split}_runtime"] = round(seconds, 4)
            for name in (f"{split}_samples_per_second", f"{split}_steps_per_second"):
                if name in metrics:
                    metrics[name] = round(metrics[name] * theirs / seconds, 3)

    # The table of completions

    def keep(self, records: Sequence[Record]) -> None:
        """Add the samples of a rollout to the table."""
        self.records = [*self.records, *records][-self._longest :]

    def table(self, step: int) -> pd.DataFrame:
        """Return the samples of the newest rollouts, one row each."""
        names = dict.fromkeys(name for record in self.records for name in record.rewards)
        extras = dict.fromkeys(name for record in self.records for name in record.extra)
        columns: dict[str, list[Any]] = {
            "step": [step] * len(self.records),
            "prompt": [_with_text_arguments(record.prompt) for record in self.records],
            "completion": [_with_text_arguments(record.completion) for record in self.records],
        }
        columns |= {name: [record.rewards.get(name) for record in self.records] for name in names}
        columns |= {name: [record.extra.get(name) for record in self.records] for name in extras}
        return pd.DataFrame(columns | {"advantage": [record.advantage for record in self.records]})

    def write_table(self, run: Path, step: int) -> pd.DataFrame:
        """Write the table of a step into the run folder, and return it.

        Raises:
            QeRLError: The table cannot be written.
        """
        table = self.table(step)
        try:
            path = table_path(run, step, self.evaluation)
            path.parent.mkdir(parents=True, exist_ok=True)
            table.to_parquet(path)
        except (OSError, pyarrow.ArrowException) as error:
            remedy = "make room" if isinstance(error, OSError) else "give each column values of one type"
            raise QeRLError(
                f"The completions of step {step} cannot be written to {run / COMPLETIONS_FOLDER} "
                f"({first_line(error)}); {remedy}, or set log_completions: false."
            ) from error
        return table


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of all values but NaN; None if there is none."""
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else None


def print_table(table: pd.DataFrame, step: int, most: int | None, evaluation: str = "") -> None:
    """Show completions in the terminal: ``most`` of them, drawn anew each time, or all for None.

    Args:
        table: The samples, one row each.
        step: The step of training at which they were logged.
        most: Number of rows to show.
        evaluation: Prefix of the evaluation that they are of (`StepLog.evaluation`); empty for training.
    """
    title = f"Step {step}"
    if evaluation:
        named = evaluation.removeprefix("eval").removeprefix("_")
        title = f"Evaluation{' of ' + named if named else ''}, step {step}"
    rows = table if most is None or most >= len(table) else table.sample(most)
    shown = RichTable(title=Text(title), expand=True, show_lines=True)
    columns = [name for name in rows.columns if name != "step"]
    for name in columns:  # as Text: brackets in a completion are no markup
        shown.add_column(Text(name), overflow="fold")
    for row in rows[columns].itertuples(index=False):
        cells = (f"{value:.2f}" if isinstance(value, float) else _text(value) for value in row)
        shown.add_row(*map(Text, cells))
    Console().print(shown)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in value)
    return str(value)


def _with_text_arguments(conversation: Any) -> Any:
    """Return the conversation with the arguments of tool calls as JSON text; a text is returned as it is."""
    if not isinstance(conversation, list):
        return conversation
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and message.get("tool_calls")
        else message
        for message in conversation
    ]


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    arguments = call.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False, default=str)}
