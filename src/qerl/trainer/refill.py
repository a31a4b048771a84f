"""Refill of rows across steps: rows that become free at a rollout's tail sample groups of coming steps.

A rollout waits for the longest of its samples, and its last rows decode alone. Here the engine's session
outlives the step. Groups of coming steps start where rows are free, samples that have not ended by the time
of the update go on after it, and sampling and update take turns on the GPU: they do not run at the same time.

**Which group trains when** is settled before anything is sampled. W groups train in a step, and group n
trains in step n // W, however long it takes. In step s only groups below (s + 1 + max_staleness) W may start
(`StalenessWindow`). So groups are used in order of start, which does not prefer short answers, no token is
older than `max_staleness` optimizer steps when it trains, and what a step trains on does not depend on
timing. At most as many samples run at a time as a step trains on, for which memory is planned.

**What a stale sample is.** Its tokens were drawn under several versions of the adapter, one per optimizer
step that the sample spans. Keys and values computed before an update are kept (PipelineRL, arXiv 2509.19128;
compare AReaL, arXiv 2505.24298, which computes them again), so a token may attend to keys and values of older
adapters than the one that draws it. Its log-probability and entropy are those of the distribution that it was
drawn from, recorded at drawing; the loss takes its ratio, or its correction, to these. `Sample.ages` has the
age of each token: optimizer steps between its draw and its update.

**Resuming.** A checkpoint holds unfinished samples as tokens with their log-probabilities, without keys and
values. A run that saves also drops its KV cache, with all that the engine has captured, and computes it again
from the tokens with the current adapter, as the resumed run does: so both go on bit for bit. Keys and values
are computed again, too, after an evaluation or any other use of the engine between two steps, and where the
update ran out of memory. A resume with a lower `max_staleness` draws anew the samples that are too old for
it. Ctrl-C saves where the run would not have: a resume from there is right, and differs from an uninterrupted
run by as much as recomputed keys and values differ.

Reward functions are called when a group trains, with all groups of the step, as without refill.

Given up: several processes, several turns, groups that are replaced for want of a signal, and noise, which is
drawn per step and not per sample. `qerl.settings.groups` refuses them.

Legend: W groups of a step.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.errors import QeRLError
from qerl.rollout.engine import Begun
from qerl.trainer.dynamic_sampling import prompt_of
from qerl.trainer.sampler import Drawn, Row, Sampler, Sequences, begun_of, joined
from qerl.trainer.step_log import StepLog
from qerl.update.packed_row import choices_of_plain, plain_choices

UNDER_WAY_FILE = "under_way.json"
"""File in a checkpoint with the groups that have started and not trained yet."""


class StalenessWindow:
    """The groups that may start, in order of their numbers. Plain arithmetic: it samples nothing.

    Args:
        wanted: W.
        max_staleness: Optimizer steps that a group may start early.

    Attributes:
        started: All groups below this number have started.
    """

    def __init__(self, wanted: int, max_staleness: int) -> None:
        self._wanted, self._max_staleness = wanted, max_staleness
        self.started = 0

    def needed(self, step: int) -> range:
        """The groups that train in a step."""
        return range(step * self._wanted, (step + 1) * self._wanted)

    def allowed(self, step: int, steps: int) -> int:
        """Return the number below which groups may start in this step of a run of `steps` steps."""
        return min(step + 1 + self._max_staleness, steps) * self._wanted

    def start(self, step: int, steps: int, room: int) -> range:
        """Return the numbers of the groups to start now.

        Args:
            step: Optimizer step, from 0.
            steps: Optimizer steps of the run.
            room: Groups that may run in addition to those that are running.
        """
        begin = self.started
        self.started = max(begin, min(begin + room, self.allowed(step, steps)))
        return range(begin, self.started)


class Refill:
    """Draws the groups of a step, and starts groups of coming steps in rows that are free.

    Args:
        sampler: Draws samples.
        rows_of: Returns the rows of an optimizer step, each repeated per sample, copies side by side.
        size: Samples of a group.
        max_staleness: Optimizer steps that a group may start early.
        log: Receives the seconds spent.

    Attributes:
        under_way: Number of samples that had not ended when the last step's draw returned.
    """

    def __init__(
        self,
        sampler: Sampler,
        rows_of: Callable[[int], list[Row]],
        size: int,
        max_staleness: int,
        log: StepLog,
    ) -> None:
        self._sampler, self._rows_of, self._size, self._log = sampler, rows_of, size, log
        self._max_staleness = max_staleness
        self.begin_training()

    def begin_training(self) -> None:
        """Begin a training, without unfinished samples."""
        self.under_way = 0
        self._window: StalenessWindow | None = None  # W is known with the first rows
        self._call: Sequences | None = None
        self._opened: dict[int, Drawn] = {}  # rows of steps whose groups may start
        self._ended: dict[int, Drawn] = {}  # finished groups that wait for their step
        self._begun: dict[int, list[Begun]] = {}  # groups that an earlier call has begun
        self._prompts: dict[int, list[int]] = {}  # of the groups in _begun
        self._drawn_in: dict[int, list[list[int]]] = {}  # by group and sample, the step of each token
        self._tokens = 0  # drawn in this step

    def end_training(self) -> None:
        """Discard unfinished samples and free the engine's memory."""
        if self._call is not None:
            self.begin_training()
            self._sampler.release()

    def draw(self, rows: list[Row], step: int, steps: int) -> Drawn:
        """Return the samples that train in a step, with the ages of their tokens.

        Args:
            rows: Rows of the step, each repeated per sample, copies side by side.
            step: Optimizer step, from 0.
            steps: Optimizer steps of the run.

        Raises:
            QeRLError: The rows are not those of `rows_of`, or a checkpoint's samples are of other groups or
                prompts.
        """
        begin, size, wanted = time.perf_counter(), self._size, len(rows) // self._size
        if self._window is None:
            self._window = StalenessWindow(wanted, self._max_staleness)
            self._window.started = step * wanted + self._resumed(self._window, step, steps)
        if self._call is not None and self._call.session.over:
            self.suspend()  # an evaluation, or a callback, has sampled since
        window, self._tokens = self._window, 0
        self._open(rows, step, -(-max(window.allowed(step, steps), window.started) // wanted))
        longest = max(len(ids) for drawn in self._opened.values() for ids in drawn.ids)
        call, self._call = self._call, None  # a call that fails is over
        with self._sampler.refilled(call, self._drawn_of, size, longest) as call:
            if self._begun:
                self._begin_again(call)
            while not all(group in self._ended for group in window.needed(step)):
                # Whole groups: one sample more would need a decode step of twice as many rows.
                if numbers := window.start(step, steps, wanted - -(-call.samples // size)):
                    call.start(numbers)
                for group, drawn in call.next(one_round=True):
                    self._ended[group] = drawn
                    self._stamp(group, [len(sample.tokens) for sample in drawn.samples], step)
            for group, lengths in call.lengths().items():
                self._stamp(group, lengths, step)
        self._call, self.under_way = call, call.samples
        seconds = time.perf_counter() - begin
        self._log.add_seconds("rollout", seconds)
        found = joined([self._taken(group, step) for group in window.needed(step)], self._tokens, seconds)
        del self._opened[step]
        return found

    def make_room(self) -> bool:
        """Free the KV cache of unfinished samples, whose tokens stay; return True if there were any."""
        busy = self._call is not None and self._call.busy
        if busy:
            self.suspend()
            self._sampler.release()
        return busy

    def suspend(self) -> None:
        """Reduce samples that have not trained to their tokens: the engine has dropped their keys and values,
        or will."""
        if self._call is None:
            return
        whole = {
            group: [begun_of(completion) for completion in drawn.result.completions]
            for group, drawn in self._ended.items()
            if drawn.result is not None
        }
        self._begun = self._call.left() | whole
        self._prompts = {group: self._prompt(group) for group in self._begun}
        self._call, self._ended = None, {}

    def save(self, folder: Path) -> None:
        """Write samples that have not trained into a checkpoint, and go on as a run that is resumed from it
        does."""
        if self._window is not None and not self._opened:
            return  # after the last step
        self.suspend()
        self._sampler.reset()
        groups = [
            {
                "group": group,
                "prompt": self._prompts[group],
                "samples": [_plain(*each) for each in zip(samples, self._drawn_in[group], strict=True)],
            }
            for group, samples in sorted(self._begun.items())
        ]
        if groups:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / UNDER_WAY_FILE).write_text(json.dumps(groups), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, if there is anything."""
        self.begin_training()
        file = folder / UNDER_WAY_FILE
        for group in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ():
            number, samples = group["group"], group["samples"]
            self._prompts[number] = group["prompt"]
            self._drawn_in[number] = [each.pop("drawn_in") for each in samples]
            self._begun[number] = [_of_plain(each) for each in samples]

    def _resumed(self, window: StalenessWindow, step: int, steps: int) -> int:
        """Drop a checkpoint's samples that these settings do not allow; return the number of groups that are
        left.

        Groups that could not have started yet are dropped, and so are samples with a token that would be too
        old when it trains. Both are drawn anew.

        Raises:
            QeRLError: The groups are not this step's first ones and those after them.
        """
        first, found = window.needed(step).start, sorted(self._begun)
        if found != [*range(first, first + len(found))]:
            raise QeRLError(
                f"The checkpoint has unfinished samples of the groups {found}, but step {step + 1} begins "
                f"with group {first}; resume from an intact checkpoint, or set max_staleness: 0, which "
                "discards them."
            )
        for group in found:
            if group >= window.allowed(step, steps):
                del self._begun[group], self._prompts[group], self._drawn_in[group]
                continue
            oldest = group // len(window.needed(0)) - self._max_staleness
            for place, drawn_in in enumerate(self._drawn_in[group]):
                if drawn_in and drawn_in[0] < oldest:
                    self._begun[group][place], self._drawn_in[group][place] = Begun([], [], []), []
        return len(self._begun)

    def _begin_again(self, call: Sequences) -> None:
        """Start groups with the tokens that an earlier call has drawn for them."""
        begun, self._begun = self._begun, {}
        numbers = range(min(begun), max(begun) + 1)
        if any(self._prompt(number) != self._prompts.get(number) for number in numbers):
            raise QeRLError(
                "The checkpoint has unfinished samples of other prompts than these settings and data give; "
                "set those back, or set max_staleness: 0, which discards the samples."
            )
        call.start(numbers, [each for number in numbers for each in begun[number]])

    # Rows

    def _prompt(self, group: int) -> list[int]:
        """The tokens of a group's prompt."""
        return self._drawn_of(range(group, group + 1)).ids[0]

    def _open(self, rows: list[Row], step: int, end: int) -> None:
        """Open the rows of steps `step` to `end` - 1, the last of which groups may start.

        Raises:
            QeRLError: The rows are not those of `rows_of`.
        """
        if [*map(prompt_of, rows)] != [*map(prompt_of, self._rows_of(step))]:
            raise QeRLError(
                f"Step {step + 1} has other prompts than the order of the data gave for it in advance: a "
                "callback has ended an epoch early or skipped steps, get_train_dataloader is overridden, or "
                "a transform of the data set gives other prompts each time. Remove the cause, or set "
                "max_staleness: 0."
            )
        for number in range(step, end):
            if number not in self._opened:
                self._opened[number] = self._sampler.open(self._rows_of(number), self._size)

    def _drawn_of(self, numbers: range) -> Drawn:
        """Return the opened rows of groups."""
        parts = []
        for group in numbers:
            assert self._window is not None, "it says which start"
            step = group // len(self._window.needed(0))
            place = group - self._window.needed(step).start
            parts.append(self._opened[step].part(place * self._size, self._size))
        return joined(parts, 0, 0.0)

    # Ages

    def _stamp(self, group: int, lengths: list[int], step: int) -> None:
        """Note the present lengths of a group's samples: tokens that are new were drawn in this step."""
        for drawn_in, length in zip(
            self._drawn_in.setdefault(group, [[] for _ in lengths]), lengths, strict=True
        ):
            self._tokens += length - len(drawn_in)
            drawn_in += [step] * (length - len(drawn_in))

    def _taken(self, group: int, step: int) -> Drawn:
        """Return a group that trains now, with the ages of its tokens."""
        drawn = self._ended.pop(group)
        for sample, drawn_in in zip(drawn.samples, self._drawn_in.pop(group), strict=True):
            sample.ages = [step - then for then in drawn_in]
        return drawn


def _plain(begun: Begun, drawn_in: list[int]) -> dict[str, Any]:
    """Return a sample as JSON types; `_of_plain` reads it, without the steps of its tokens."""
    return vars(begun) | {"drawn_in": drawn_in, "choices": plain_choices(begun.choices)}


def _of_plain(plain: dict[str, Any]) -> Begun:
    return Begun(**plain | {"choices": choices_of_plain(plain["choices"])})
