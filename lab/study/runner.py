"""Compute the unfinished runs of a study, one batch after the other, until all are finished.

`lab.study.plan` says which batches there are. Several processes may work in one folder; each takes the next
batch that no other process has claimed.

The training itself is passed in (`Make`): this module knows no model, so that its tests train nothing. The
current batch is saved after its step on Ctrl-C or SIGTERM, and every five minutes.
"""

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from statistics import fmean
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab.study.arms import Run
from lab.study.followed import Followed
from lab.study.plan import Batch, make_plan
from lab.study.results import DIVERGED, RunResult, by_key
from lab.study.store import Checkpoint, Store
from qerl.errors import QeRLError, first_line
from qerl.trainer.callbacks import InterruptGuard

SAVE_EVERY = 300.0
"""Seconds between two checkpoints of a batch."""

LOOK_EVERY = 2.0
"""Seconds between two checks for batches of other processes that the remaining runs wait for."""


class BatchTrainer(Protocol):
    """Trains the runs of one batch side by side; each list has one item per run, in the order of the runs."""

    def step(self) -> list[dict[str, float]]:
        """Do one optimizer step of every run and return the logged values."""

    def evaluate(self, samples: int) -> list[dict[str, float]]:
        """Score every run's clean policy on the held-out problems, with ``samples`` sampled answers of each
        too."""

    def state(self) -> dict[str, Any]:
        """The state on which the next step depends, as containers of tensors and numbers."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a state."""


class Make(Protocol):
    """Makes trainers of batches."""

    facts: Mapping[str, Any]
    """Facts that are recorded with each run: versions, device, `fingerprint` of the model."""

    def __call__(self, runs: Sequence[Run], followed: Sequence[Followed | None]) -> BatchTrainer:
        """Make a trainer of some runs of one arm.

        Args:
            runs: The runs.
            followed: For each run the rollouts that its temperature follows; None for none.
        """


class Runner:
    """Computes the unfinished runs of a study.

    Args:
        store: The study's folder.
        make: Makes the trainers of batches.
        console: Where progress is shown.
    """

    def __init__(self, store: Store, make: Make, console: Console) -> None:
        self.store = store
        self.study = store.study
        self.make = make
        self.console = console
        self.guard = InterruptGuard(console)
        self._failed: dict[str, Exception] = {}
        self._second_turn: set[str] = set()
        self._said: int | None = None
        self._start, self._open_at_start = time.monotonic(), 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )

    def run(self) -> bool:
        """Compute until nothing is left for this process; returns False if Ctrl-C or SIGTERM came first.

        A batch that fails is skipped, so that the others are computed nevertheless, and its error is raised
        at the end. A batch that ran out of memory, which another process may have taken, is retried once.

        Raises:
            QeRLError: The folder cannot be written or holds runs of another model; memory ran out in a batch,
                or its arm cannot be computed.
        """
        if warning := self.store.continue_with(self.make.facts["fingerprint"]):
            self._say(warning)
        with self.guard, self._bar:
            runs = sum(map(self.study.count, self.study.arms.values()))
            self._task = self._bar.add_task("", total=runs * self.study.steps)
            self._open_at_start = make_plan(self.store).open
            while not self.guard.interrupted and self._round(runs):
                pass
        if self._failed:
            raise next(iter(self._failed.values()))
        return not self.guard.interrupted or not make_plan(self.store).open

    def _round(self, runs: int) -> bool:
        """Compute one batch or wait for other processes; returns False if neither is left to do."""
        plan = make_plan(self.store)
        self._say_time_left(plan.open)
        self._bar.update(self._task, completed=(runs - plan.open) * self.study.steps)
        others = False
        for batch in sorted(plan.batches, key=lambda batch: batch.name in self._second_turn):
            if batch.name in self._failed:
                continue
            if self._take(batch):
                return True
            others = True
        if others and plan.waiting:
            time.sleep(LOOK_EVERY)
            return True
        if others:
            self.console.print(f"Other processes compute the {plan.open} runs that are left.")
        return False

    def _say_time_left(self, open_: int) -> None:
        """Without a progress bar, print the runs left and their time at the pace of all processes so far."""
        if self._bar.disable and 0 < open_ < self._open_at_start and open_ != self._said:
            self._said = open_
            pace = (time.monotonic() - self._start) / (self._open_at_start - open_)
            self.console.print(f"{open_} runs are left, about {pace * open_ / 60:.0f} min.")

    def _take(self, batch: Batch) -> bool:
        """Compute a batch unless another process does; returns True if this process claimed it."""
        with self.store.claimed(batch.name) as mine:
            if not mine:
                return False
            done = {result.run.name for result in self.store.results().runs}
            missing = [i for i, run in enumerate(batch.runs) if run.name not in done]
            if missing:
                try:
                    self._compute(batch.of(missing))
                except Exception as error:
                    self._put_aside(batch, error)
            return True

    def _put_aside(self, batch: Batch, error: Exception) -> None:
        """Note a failed batch: if memory ran out it is retried once after the others, else it has failed."""
        again = isinstance(error.__cause__, torch.OutOfMemoryError) and batch.name not in self._second_turn
        if again:
            self._second_turn.add(batch.name)
        else:
            self._failed[batch.name] = error
        _let_go(error)
        self._say(
            f"{batch.title} failed: {first_line(error)}" + (" It is tried again after the others." * again)
        )

    def _compute(self, batch: Batch) -> None:
        if again := self.store.read(batch.runs):
            self._say(f"{batch.title}: {len(again)} runs are computed again, as {self._why(again)}.")
        try:
            work = _Work(self.store, batch, self.make(batch.runs, batch.followed), self._say)
            while not work.done and not self.guard.interrupted:
                work.step()
                self._bar.update(
                    self._task, advance=len(batch.runs), description=f"{batch.title}  {work.shown()}"
                )
        except torch.OutOfMemoryError as error:
            raise QeRLError(
                f"GPU memory ran out in {batch.title}; lower runs_per_batch, tokens_per_forward or "
                f"rows_at_once ({first_line(error)})."
            ) from error
        if work.done:
            work.finish(self.make.facts)
            self._say(f"{batch.title}: {work.summary()}")
        else:
            work.save()

    def _why(self, again: Sequence[RunResult]) -> str:
        """Why runs that exist do not count as finished."""
        arm = again[0].run.arm
        if arm.name in self.store.again:
            return f"they are of commit {', '.join(sorted({one.commit for one in again}))}"
        return f"the entropy curves of {arm.match_entropy}, which they followed, have changed"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _let_go(error: BaseException | None) -> None:
    """Free the objects in an error's frames, above all a batch's memory; its traceback stays readable."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Work:
    """A batch in progress, resumed from its checkpoint if there is one."""

    def __init__(self, store: Store, batch: Batch, trainer: BatchTrainer, say: Callable[[str], None]) -> None:
        self.store, self.batch, self.trainer = store, batch, trainer
        self.study = store.study
        self.names = [run.name for run in batch.runs]
        self.followed = [None if one is None else asdict(one) for one in batch.followed]
        self.records: list[list[dict[str, float]]] = []
        self.evaluations: list[list[dict[str, float]]] = []
        kept = store.checkpoint(batch.name)
        if kept and (other := self._other(kept)):
            say(f"{batch.title} starts again from step 0: its checkpoint is of {other}.")
            kept = None
        if kept:
            trainer.load_state(kept.state)
            self.records, self.evaluations = kept.records, kept.evaluations
        self.start = self.saved = time.monotonic()
        self.start -= kept.seconds if kept else 0.0
        self._evaluate()

    def _other(self, kept: Checkpoint) -> str | None:
        """How a checkpoint differs from this batch; None if it does not."""
        if kept.names != self.names:
            return "other runs"
        if kept.commit != self.store.commit:
            return f"commit {kept.commit}, not {self.store.commit}"
        return None if kept.followed == self.followed else "runs that followed other curves of entropy"

    @property
    def done(self) -> bool:
        return len(self.records) == self.study.steps

    def step(self) -> None:
        self.records.append(self.trainer.step())
        self._evaluate()
        if not self.done and time.monotonic() - self.saved > SAVE_EVERY:
            self.save()

    def _evaluate(self) -> None:
        """Evaluate if an evaluation is due at this step and has not been done."""
        at, step = self.study.eval_at, len(self.records)
        if step in at and len(self.evaluations) == at.index(step):
            self.evaluations.append(self.trainer.evaluate(self.study.final_completions if self.done else 0))

    def save(self) -> None:
        state, seconds = self.trainer.state(), time.monotonic() - self.start
        done = self.names, self.records, self.evaluations
        kept = Checkpoint(*done, state, seconds, self.followed, self.store.commit)
        self.store.save_checkpoint(self.batch.name, kept)
        self.saved = time.monotonic()

    def finish(self, facts: Mapping[str, Any]) -> None:
        seconds, runs = time.monotonic() - self.start, len(self.names)
        when = {"date": date.today().isoformat(), "seconds": round(seconds / runs, 3)}
        facts = {**facts, "commit": self.store.commit, **when}
        self.results = [self._result(i, facts) for i in range(runs)]
        for result in self.results:
            self.store.write(result)
        self.store.drop_checkpoint(self.batch.name)
        self.seconds = seconds

    def _result(self, i: int, facts: dict[str, Any]) -> RunResult:
        records = [step[i] for step in self.records]
        diverged = next((n for n, record in enumerate(records, start=1) if record[DIVERGED]), None)
        evaluations = by_key(evaluation[i] for evaluation in self.evaluations)
        return RunResult(
            self.batch.runs[i],
            by_key(records),
            self.study.eval_at,
            evaluations,
            diverged,
            facts,
            self.batch.followed[i],
        )

    def shown(self) -> str:
        """The current step and accuracy, for the progress bar."""
        accuracy = fmean(one["accuracy"] for one in self.evaluations[-1])
        return f"step {len(self.records)}/{self.study.steps}  accuracy {accuracy:.3f}"

    def summary(self) -> str:
        """One line about the finished batch."""
        accuracy = fmean(result.accuracy[-1] for result in self.results)
        area = fmean(result.area for result in self.results)
        diverged = sum(result.diverged_at is not None for result in self.results)
        return (
            f"{len(self.names)} runs in {self.seconds:.0f} s, mean accuracy {accuracy:.3f} at the end and "
            f"{area:.3f} over the curve" + (f"; {diverged} diverged" if diverged else "")
        )
