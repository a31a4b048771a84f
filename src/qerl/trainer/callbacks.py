"""Callbacks of a run: metrics.jsonl, a progress bar, early stopping, and an orderly stop on Ctrl-C or
SIGTERM."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from qerl.errors import QeRLError
from qerl.run_folder import METRICS_FILE, append_metrics, read_metrics, write_metrics

logger = logging.getLogger(__name__)

STOPPING = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL = 1.0
"""Seconds within which a second signal counts as the first one, forwarded by a launcher."""

# (label, metric, format) of the progress line.
_SHOWN = (
    ("reward", "reward", "{:.2f}"),
    ("accuracy", "rewards/accuracy/mean", "{:.2f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("sigma", "noise/sigma", "{:.0e}"),
)
# The same for `algorithm: sft`, which samples nothing in training.
_SHOWN_OF_SFT = (
    ("loss", "loss", "{:.3f}"),
    ("held-out loss", "eval_loss", "{:.3f}"),
    ("accuracy", "eval_rewards/accuracy/mean", "{:.2f}"),
)


def check_callbacks(callbacks: Any) -> None:
    """Raise unless this is None or a list of callbacks.

    Raises:
        QeRLError: It is not a list of callbacks or callback classes.
    """
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise QeRLError(f"callbacks is a {type(callbacks).__name__}; pass a list of TrainerCallback objects.")
    for each in callbacks or ():
        kind = each if isinstance(each, type) else type(each)
        if not issubclass(kind, TrainerCallback):
            raise QeRLError(f"callbacks has the type {kind.__name__}; each must be a TrainerCallback.")


class MetricsFile(TrainerCallback):
    """Writer of metrics.jsonl: one JSON object per log call; a resumed run drops rows after its checkpoint.

    Args:
        folder: The run folder.

    Attributes:
        facts: Values that hold for the whole run; written with `max_steps` as a line of their own whenever
            training begins.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        kept = read_metrics(self.folder) if (self.folder / METRICS_FILE).exists() else []
        rows = [row for row in kept if row["step"] <= state.global_step]
        if self.facts:
            rows.append({"step": state.global_step, "max_steps": state.max_steps, **self.facts})
        with self._written():
            write_metrics(self.folder, rows)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            with self._written():
                append_metrics(self.folder, {"step": state.global_step, **logs})

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QeRLError(
                f"{self.folder / METRICS_FILE} cannot be written ({error.strerror or error}); make room and "
                "go on with --resume_from_checkpoint true."
            ) from error


class ProgressBar(TrainerCallback):
    """Progress bar with step, key metrics and time left; without a terminal, a line per log.

    The metrics are those of `_SHOWN` (reward, accuracy, entropy, sigma), with `algorithm: sft` those of
    `_SHOWN_OF_SFT`.
    """

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
            "first step" if args.algorithm == "sft" else "first rollout",
            total=state.max_steps,
            completed=state.global_step,
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
            f"{label} {form.format(logs[key])}"
            for label, key, form in (_SHOWN_OF_SFT if args.algorithm == "sft" else _SHOWN)
            if logs.get(key) is not None
        ]
        if not shown:
            return
        if self.progress:
            self.progress.update(self.task, description="  ".join(shown))
        else:
            self.console.print(
                f"step {state.global_step}/{state.max_steps}  " + "  ".join(shown), highlight=False
            )

    def close(self) -> None:
        """Stop the progress bar and restore the terminal."""
        if self.progress:
            self.progress.stop()


class EarlyStop(EarlyStoppingCallback):
    """Early stopping when evaluations no longer improve; a resumed run continues its checkpoint's count.

    transformers restores the count only together with the state of all callbacks, which would also replace
    callbacks whose settings this run has changed.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the count of evaluations without improvement from a checkpoint.

        transformers' warning is left out; it would also reach a run that keeps its last policy on purpose.
        """
        saved = state.stateful_callbacks.get(type(self).__name__)
        attributes = saved.get("attributes", {}) if isinstance(saved, dict) else {}
        self.early_stopping_patience_counter = int(attributes.get("early_stopping_patience_counter", 0))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        name = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
        if name not in kwargs["metrics"]:
            return  # another one of several evaluation sets
        super().on_evaluate(args, state, control, **kwargs)
        ends = self.early_stopping_patience_counter >= self.early_stopping_patience
        if ends and state.is_world_process_zero:
            logger.warning(
                "Training ends after step %d: %s was not better in %d evaluations in a row.",
                state.global_step,
                name,
                self.early_stopping_patience_counter,
            )


class InterruptGuard(TrainerCallback):
    """Stop on Ctrl-C or SIGTERM: after the current step, with a checkpoint; at once on a second signal.

    A context manager: signals are caught inside it. Under torchrun each process gets the terminal's signal
    and, a moment later, the launcher's; both count as one. A signal that reaches any process stops all
    processes after the same step. Processes check for it after each step, evaluation and checkpoint.

    Attributes:
        interrupted: Whether any process has received a signal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.interrupted = False
        self._first: float | None = None
        self._step_done = self._trained = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():  # other threads cannot
            self._former = {number: signal.signal(number, self._on_signal) for number in STOPPING}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self.interrupted = now, True
            doing = (
                "Saving the model" if self._trained else "Stopping after this step and saving a checkpoint"
            )
            with contextlib.suppress(RuntimeError):  # the signal may interrupt a write
                # Plain text: for markup rich imports modules, and the signal may interrupt such an import.
                self.console.out(f"{doing}; Ctrl-C again stops at once.", highlight=False)
        elif now - self._first > ONE_SIGNAL:
            raise KeyboardInterrupt

    def _stops(self, args: TrainingArguments) -> bool:
        """Return True, on every process, if any process was interrupted."""
        if args.world_size > 1:
            flag = torch.tensor(float(self.interrupted), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.interrupted = bool(flag)
        return self.interrupted

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_done = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_done = True
        if self._stops(args):
            control.should_save = control.should_training_stop = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._step_done and self._stops(args):  # not in an evaluation before the first step
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._stops(args):
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trained = True
