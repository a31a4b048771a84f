"""What a run shows and keeps while it trains: metrics.jsonl, a progress bar, and an orderly stop on
Ctrl-C."""

import json
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qerl.report.runs import METRICS_FILE, read_metrics

# (label, metric, format) of the progress line.
_SHOWN = (
    ("reward", "reward", "{:.2f}"),
    ("accuracy", "rewards/accuracy/mean", "{:.2f}"),
    ("entropy", "rollout/entropy", "{:.2f}"),
    ("sigma", "noise/sigma", "{:.0e}"),
)


class MetricsFile(TrainerCallback):
    """One JSON object per log call in metrics.jsonl; a resumed run goes on where its checkpoint stood."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        kept = read_metrics(self.path.parent) if self.path.exists() else []
        lines = [json.dumps(row) + "\n" for row in kept if row["step"] <= state.global_step]
        self.path.write_text("".join(lines), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class ProgressBar(TrainerCallback):
    """Step, reward, accuracy, entropy, sigma and time left; one plain line per log where there is no
    terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task(
            "first rollout", total=state.max_steps, completed=state.global_step
        )
        self.progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.progress:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        shown = [
            f"{label} {form.format(logs[key])}" for label, key, form in _SHOWN if logs.get(key) is not None
        ]
        if not shown:
            return
        if self.progress:
            self.progress.update(self.task, description="  ".join(shown))
        else:
            self.console.print(
                f"step {state.global_step}/{state.max_steps}  " + "  ".join(shown), highlight=False
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.progress:
            self.progress.stop()


class InterruptGuard(TrainerCallback):
    """Ctrl-C ends the run after the present step, with a checkpoint; a second one ends it at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.interrupted = False
        self._former: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._former = signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.console.print("Stopping after this step and saving a checkpoint; Ctrl-C again stops at once.")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.interrupted:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
