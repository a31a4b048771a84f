"""Captured decode steps, by the number of rows and the settings of sampling.

A step takes as long as its rows say, used or not, so there are steps of many sizes, each captured when it is
first needed. Every round takes the smallest that holds what runs. To move to another costs some copies on the
GPU, a hundredth of a round; a smaller step saves a tenth to a third of it, from the first sequence that ends
with nobody waiting to the last long ones that are alone.
"""

from dataclasses import replace

from qerl.rollout.drafts import FEW_ROWS
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import rows_of_step
from qerl.rollout.paged.machine import Machine
from qerl.rollout.paged.scheduler import Scheduler
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.sequence import Sequence

KEPT_SETTINGS = 3
"""Temperatures, filters and stops whose steps are kept: training's, evaluation's and one more."""


class DecodeGraphs:
    """Steps of one model over one cache.

    Args:
        decoder: The weights.
        cache: Keys and values.
        machine: Where steps are captured.
        small_rows: Tokens up to which no smaller step is taken, see `Pace`.
        drafted: Tokens of a draft at most in steps of few rows (`qerl.rollout.drafts`); 0 for none.

    Attributes:
        steps: Steps by rows and settings, the one used last at the end.
        drafted: As given.
        small_rows: Rows up to which no smaller step is taken: as given without drafts. With them a row has
            several tokens, and steps of more than `FEW_ROWS` rows, without drafts, give way to those with.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, machine: Machine, small_rows: int, drafted: int = 0
    ) -> None:
        self._decoder, self._cache, self._machine, self.drafted = decoder, cache, machine, drafted
        self.small_rows = max(1, min(small_rows // (drafted + 1), FEW_ROWS)) if drafted else small_rows
        self._max_new = self._table_width = 0
        self.forget()

    def forget(self) -> None:
        """Drop all steps, with their buffers and graph memory."""
        self.steps: dict[tuple[int, SamplingParams], DecodeStep] = {}
        self._graphs = self._machine.graphs()

    def serves(self, max_new: int, table_width: int) -> bool:
        """True if steps take sequences of so many new tokens and tables of so many blocks."""
        return max_new <= self._max_new and table_width <= self._table_width

    def make_room(self, max_new: int, table_width: int) -> None:
        """Forget the present steps, and make those to come large enough for such sequences and tables."""
        self._max_new = max(self._max_new, max_new)
        self._table_width = max(self._table_width, table_width)

    def fit(
        self, step: DecodeStep | None, scheduler: Scheduler, entering: list[Sequence], params: SamplingParams
    ) -> DecodeStep:
        """Switch to the smallest step that holds what runs.

        Args:
            step: The step in use; None at the start of a call.
            scheduler: What runs; its sequences are moved into the first rows if the step changes.
            entering: Those of them that are in no row on the GPU yet.
            params: Sampling parameters of the call.
        """
        running = scheduler.running
        present = None if step is None else step.rows.count
        rows = rows_of_step(len(running), present, self.small_rows)
        if step is not None and rows == present:
            return step
        chosen = self.step(rows, params)
        new = set(entering)
        staying = [row for row, sequence in running.items() if sequence not in new]
        moved = scheduler.compact(chosen.rows.count)
        chosen.rows.clear()
        if step is not None:
            chosen.rows.move(step.rows, {row: moved[row] for row in staying})
        return chosen

    def step(self, rows: int, params: SamplingParams) -> DecodeStep:
        """The step of so many rows, one of `qerl.rollout.paged.limits.ROW_COUNTS`, with these settings."""
        settings = replace(params, seed=0, max_tokens=1, stops=())
        key = rows, settings
        if key in self.steps:
            self.steps[key] = self.steps.pop(key)
        else:
            self._evict(settings)
            drafted = self.drafted if rows <= FEW_ROWS else 0
            # One step is in use at a time, and begins with nothing in its rows.
            present = next((step.rows for (count, _), step in self.steps.items() if count == rows), None)
            self.steps[key] = DecodeStep(
                self._decoder,
                self._cache,
                rows,
                self._max_new,
                self._table_width,
                params,
                self._graphs,
                drafted,
                present,
            )
        return self.steps[key]

    def _evict(self, settings: SamplingParams) -> None:
        """Make room for a step with these settings: those of the settings used longest ago go."""
        kept = list(dict.fromkeys(known for _, known in reversed(self.steps)))
        for old in kept[KEPT_SETTINGS - (settings not in kept) :]:
            for key in [key for key in self.steps if key[1] == old]:
                del self.steps[key]
