"""Rounds of the paged engine: who enters, what is prefilled, a few decode steps, who has ended.

Between turns a sequence's keys and values stay in its blocks, so what others write is prefilled behind them,
and while they write the rows are used by others. A session begins with the cache that the last one left; one
that turns out too small is replaced with all captured steps, and what lay in it is computed again. So a
session that grows takes more at once than its sequences need (`BlockDemand.ahead`). Pages that are known by
what they hold stay so until the cache is replaced or given up, whichever session they are from
(`qerl.rollout.paged.blocks`).

A session that is entered again goes on with the blocks, tables and rows that it had when it was left, on
weights that the engine has read anew. Where the memory was given up meanwhile its sequences wait and are
computed again, in the cache as it was, or in a smaller one if others hold too much by then.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from qerl.errors import QeRLError
from qerl.kernels.limits import PAGE, STOP_TOKENS
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.blocks import memory_of
from qerl.rollout.paged.decode import DecodeGraphs, DecodeStep
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import BlockDemand, Units, count_for
from qerl.rollout.paged.prefill import Prefill
from qerl.rollout.paged.scheduler import Pace, Round, Scheduler, SequenceMemory
from qerl.rollout.session import Sequence, TrackedSession
from qerl.rollout.stops import StopTokens


@dataclass(frozen=True)
class EngineParts:
    """What outlives a session.

    Attributes:
        cache: Keys and values.
        graphs: Captured decode steps.
        prefill: Passes over what is not decoded.
        budget: Bytes that keys and values may take once so many more bytes are free.
        max_sequences: Sequences that run side by side at most.
        pace: Lengths of rounds and passes.
    """

    cache: KVCache
    graphs: DecodeGraphs
    prefill: Prefill
    budget: Callable[[int], int]
    max_sequences: int
    pace: Pace


class PagedSession(TrackedSession):
    """See `qerl.rollout.engine.Session`.

    Args:
        params: Sampling parameters of sequences without their own.
        positions: Positions that the model has.
        pad_token_id: Stands in for a turn whose first logits were not finite.
        parts: Of the engine; their weights are those of this session.
        growing: Whether to take memory for sequences that are still to come.
        longest_prompt: As in `RolloutEngine.session`.
        policy: Its name where prefixes are kept, else None.
    """

    def __init__(
        self,
        params: SamplingParams,
        positions: int,
        pad_token_id: int,
        parts: EngineParts,
        growing: bool,
        longest_prompt: int | None = None,
        policy: Hashable | None = None,
    ) -> None:
        super().__init__(params, positions, pad_token_id)
        self._policy, self._aligned_to = policy, 1 if policy is None else PAGE
        self._parts, self._most_positions = parts, positions
        self._growing, self._longest_prompt = growing and longest_prompt is None, longest_prompt or 0
        self._scheduler = Scheduler(self._memory(), parts.max_sequences, parts.pace)
        self._step: DecodeStep | None = None
        self._samples = 0  # of each prompt, at least

    def _add(self, sequences: list[Sequence]) -> None:
        with_room, present = [each for each in sequences if each.room], self._scheduler.present
        if with_room:
            samples = len(sequences) // len({each.prompt for each in sequences})
            self._hold(present + with_room, min(self._samples, samples) if present else samples)
        self._scheduler.add(sequences)
        for sequence in sequences:
            if left := sequence.params.stop_token_ids[STOP_TOKENS:]:
                sequence.stops += (StopTokens(left),)

    def _hold(self, sequences: list[Sequence], samples: int) -> None:
        """Have a cache for some sequences, at least so many of which share a prompt; see `_reserve`."""
        sizes = {(len(each.prompt.token_ids), each.max_tokens) for each in sequences}
        longest, limit = (max(column) for column in zip(*sizes, strict=True))
        longest = max(longest, self._longest_prompt)
        needs = [self._demand(prompt, own, 1).least for prompt, own in sizes]
        least = Units(max(of_pool) for of_pool in zip(*needs, strict=True))
        rows = min(self._parts.max_sequences, len(sequences))
        self._reserve(self._demand(longest, limit, samples), least, rows)
        self._samples = samples

    def _resume(self, sequence: Sequence) -> None:
        self._scheduler.resume(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)

    def enter(self, renewed: bool, longest_prompt: int | None, policy: Hashable | None) -> None:
        """Go on after it was left.

        Args:
            renewed: Whether captured steps were dropped since, because the weights are elsewhere.
            longest_prompt: As in `RolloutEngine.session`.
            policy: Its present name.
        """
        if policy != self._policy:  # what its sequences have is of both
            self._policy = self._scheduler.memory.policy = None
        self._longest_prompt = max(self._longest_prompt, longest_prompt or 0)
        given_up = self._parts.cache.given_up
        if renewed or given_up:
            self._suspend()
        if given_up and self._scheduler.present:
            self._hold(self._scheduler.present, self._samples)

    def _suspend(self) -> None:
        """Let all sequences wait, of which what the cache held will be computed again."""
        self._read()
        self._scheduler.suspend(self._memory())

    def _read(self) -> None:
        """See `TrackedSession._read`."""
        if self._step is not None:
            self._step.rows.end(self._scheduler.running)
        self._step = None

    def give_up_idle(self) -> None:
        """Give up the blocks of sequences that wait for others, as when memory were short."""
        while self._scheduler.reclaim():
            pass

    def _decode(self, meanwhile: Callable[[], None] | None) -> list[Sequence]:
        """See `TrackedSession._decode`."""
        scheduler, parts = self._scheduler, self._parts
        if not scheduler.busy:
            return []
        planned = scheduler.next_round()
        self.prefilled_tokens += planned.prefilled_tokens
        if self._step is not None:
            self._step.rows.end(planned.preempted)
        step = self._step = parts.graphs.fit(self._step, scheduler, planned.admitted)
        step.rows.place(planned.admitted)
        step.attend(scheduler.running)
        self._prefill(planned)  # last, because uploads would wait for it
        most = max(sequence.max_tokens for sequence in scheduler.running.values())
        step.decode(min(parts.pace.round_steps, most))
        if meanwhile is not None:
            meanwhile()
        generated, rows, overrun = step.rows.read(scheduler.running)
        ended = [scheduler.running[row] for row in rows]
        self._keep_choices(ended, [generated[row] for row in rows])
        scheduler.advance(generated, rows, overrun)
        return ended

    def _keep_choices(self, sequences: list[Sequence], generated: list[int]) -> None:
        """Read the experts of all tokens that were computed of sequences, before their blocks may go."""
        cache = self._parts.cache
        pool = cache.geometry.pool_of_choices
        if pool is None or not sequences:
            return
        blocks, tokens = [], []
        for sequence, count in zip(sequences, generated, strict=True):
            blocks += [sequence.prompt.blocks.get(pool, []), sequence.blocks[pool]]
            tokens += [sequence.prompt.shared_tokens, sequence.prompt.tail + count]
        found = cache.choices(blocks, tokens)
        ends = np.cumsum(tokens)
        for i, sequence in enumerate(sequences):
            begin = ends[2 * i - 1] if i else 0
            sequence.choices = found[begin : ends[2 * i + 1]].copy()  # a view would keep all of them

    def _prefill(self, planned: Round) -> None:
        """Compute what enters; what sequences have copies of is copied before they go on from it."""
        prefill, cache = self._parts.prefill, self._parts.cache
        if not planned.copies:
            prefill.run(planned.prompt_spans() + planned.own_spans(), cache)
            return
        prefill.run(planned.prompt_spans(), cache)
        cache.copy(planned.copies)
        prefill.run(planned.own_spans(), cache)

    def _demand(self, prompt: int, own: int, samples: int) -> BlockDemand:
        pools, pace = self._parts.cache.geometry.pools, self._parts.pace
        ahead = (1 + pace.spare_rounds) * pace.round_steps
        passes = pace.prefill_tokens[-1]
        return BlockDemand(prompt, own, samples, pools, passes, ahead, self._aligned_to - 1)

    def _memory(self) -> SequenceMemory:
        """The blocks of the cache as it is, held by nobody."""
        cache, passes = self._parts.cache, self._parts.pace.prefill_tokens
        pools, known = cache.geometry.pools, cache.known
        return memory_of(cache.blocks, pools, PAGE, passes[-1], known, self._policy)

    def _reserve(self, demand: BlockDemand, least: Units, rows: int) -> None:
        """Have a cache for all sequences, taken back, made or enlarged; steps that knew another are dropped.

        Args:
            demand: Of those that are there.
            least: Blocks of the one that fills most.
            rows: How many of them can run side by side.

        Raises:
            QeRLError: One of them does not fit; what was there before goes on as if nobody had asked, or, if
                the memory went to others meanwhile, waits for a cache.
        """
        parts, taken = self._parts, demand
        steps_serve = parts.graphs.serves(demand.completion_tokens, demand.table_width)
        if steps_serve and parts.cache.serves(demand.blocks(rows), least) and self._taken_back():
            return
        if self._scheduler.present and not parts.cache.given_up:  # they need what is dropped below
            parts.cache.check_affordable(least, parts.budget(parts.cache.held_bytes))
        if self._growing:
            taken, rows = demand.ahead(self._most_positions), min(parts.max_sequences, count_for(rows))
        parts.graphs.forget()
        parts.prefill.forget()
        parts.cache.close()
        self._suspend()  # before what may fail: nobody holds what is closed
        parts.cache.reserve(taken.blocks(rows), least, parts.budget(0))
        parts.graphs.make_room(taken.completion_tokens, taken.table_width)
        self._scheduler.suspend(self._memory())

    def _taken_back(self) -> bool:
        """Have the memory of the cache as it was again; False if others have come to hold too much of it."""
        try:
            self._parts.cache.take_back()
        except QeRLError:
            return False
        return True
