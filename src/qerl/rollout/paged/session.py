"""Rounds of the paged engine: admit sequences, prefill, run a few decode steps, collect ended sequences.

Between turns a sequence's keys and values stay in its blocks, so tokens that others append are prefilled
behind them, and meanwhile its row serves another sequence. A session begins with the cache of the previous
one. A cache that turns out too small is replaced, together with all captured steps, and its content is
computed again; so a growing session reserves more at once than its sequences need (`BlockDemand.ahead`).
Blocks of known prefixes stay known across sessions, until the cache is replaced or given up
(`qerl.rollout.paged.blocks`).

A session that is entered again continues with the blocks, tables and rows that it had when it was left, on
weights that the engine has read again. If the memory was given up or the captured steps were dropped
meanwhile, its sequences are computed again, in the same cache, or in a smaller one if too little GPU memory
is free by then.
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
    """The parts of the engine that outlive a session.

    Attributes:
        cache: The KV cache.
        graphs: Captured decode steps.
        prefill: Prefill passes.
        budget: Returns the bytes that the cache may take once this many more bytes are freed.
        max_sequences: Maximum number of running sequences.
        pace: Lengths of rounds and passes.
    """

    cache: KVCache
    graphs: DecodeGraphs
    prefill: Prefill
    budget: Callable[[int], int]
    max_sequences: int
    pace: Pace


class PagedSession(TrackedSession):
    """A session of the paged engine, see `qerl.rollout.engine.Session`.

    Args:
        params: Sampling parameters of sequences without their own.
        positions: Number of positions of the model.
        pad_token_id: The only token of a turn whose first logits were not finite.
        parts: The engine's parts, with the weights of this session.
        growing: Whether to reserve memory for sequences that are started later.
        longest_prompt: As in `RolloutEngine.session`.
        policy: Name of the policy if prefixes are kept, else None.
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
        self._samples = 0  # minimum per prompt

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
        """Reserve a cache for these sequences, at least ``samples`` of which share each prompt."""
        sizes = {(len(each.prompt.token_ids), each.max_tokens) for each in sequences}
        longest, limit = (max(column) for column in zip(*sizes, strict=True))
        longest = max(longest, self._longest_prompt)
        needs = [self._demand(prompt, own, 1, (prompt - 1) % self._aligned_to).least for prompt, own in sizes]
        least = Units(max(of_pool) for of_pool in zip(*needs, strict=True))
        rows = min(self._parts.max_sequences, len(sequences))
        self._reserve(self._demand(longest, limit, samples, self._aligned_to - 1), least, rows)
        self._samples = samples

    def _resume(self, sequence: Sequence) -> None:
        self._scheduler.resume(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)

    def enter(self, renewed: bool, longest_prompt: int | None, policy: Hashable | None) -> None:
        """Continue the session after it was left.

        Args:
            renewed: Whether captured steps were dropped since, because weight buffers were replaced.
            longest_prompt: As in `RolloutEngine.session`.
            policy: Present name of the policy.
        """
        if policy != self._policy:  # its sequences have keys and values of both
            self._policy = self._scheduler.memory.policy = None
        self._longest_prompt = max(self._longest_prompt, longest_prompt or 0)
        given_up = self._parts.cache.given_up
        if renewed or given_up:
            self._suspend()
        if given_up and self._scheduler.present:
            self._hold(self._scheduler.present, self._samples)

    def _suspend(self) -> None:
        """Preempt all running sequences and release all blocks; their content will be computed again."""
        self._read()
        self._scheduler.suspend(self._memory())

    def _read(self) -> None:
        """See `TrackedSession._read`."""
        if self._step is not None:
            self._step.rows.end(self._scheduler.running)
        self._step = None

    def give_up_idle(self) -> None:
        """Evict all sequences that are not running, as if memory were short."""
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
        most = max(sequence.max_tokens - sequence.generated for sequence in scheduler.running.values())
        assert most > 0, "a running sequence has a token left"
        step.decode(min(parts.pace.round_steps, most))
        if meanwhile is not None:
            meanwhile()
        generated, rows, overrun = step.rows.read(scheduler.running)
        ended = [scheduler.running[row] for row in rows]
        self._keep_choices(ended, [generated[row] for row in rows])
        scheduler.advance(generated, rows, overrun)
        return ended

    def _keep_choices(self, sequences: list[Sequence], generated: list[int]) -> None:
        """Read the experts of all computed tokens of the sequences, before their blocks may be released."""
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
        """Prefill prompts, copy their blocks to the sequences that need copies, then prefill sequences."""
        prefill = self._parts.prefill
        if not planned.copies:
            prefill.run(planned.prompt_spans() + planned.own_spans())
            return
        prefill.run(planned.prompt_spans())
        self._parts.cache.copy(planned.copies)
        prefill.run(planned.own_spans())

    def _demand(self, prompt: int, own: int, samples: int, tail: int) -> BlockDemand:
        pools, pace = self._parts.cache.geometry.pools, self._parts.pace
        ahead = (1 + pace.spare_rounds) * pace.round_steps
        passes = pace.prefill_tokens[-1]
        return BlockDemand(prompt, own, samples, pools, passes, ahead, tail)

    def _memory(self) -> SequenceMemory:
        """Return the bookkeeping of the present cache, with all blocks free."""
        cache, passes = self._parts.cache, self._parts.pace.prefill_tokens
        pools, known = cache.geometry.pools, cache.known
        return memory_of(cache.blocks, pools, PAGE, passes[-1], known, self._policy)

    def _reserve(self, demand: BlockDemand, least: Units, rows: int) -> None:
        """Take back the present cache if it serves these sequences, else replace it and drop captured steps.

        Args:
            demand: Blocks that the sequences need.
            least: Blocks of the sequence that needs most.
            rows: How many of them can run at once.

        Raises:
            QeRLError: One of them does not fit. Earlier sequences go on unaffected, or, if the cache's
                memory has gone to others meanwhile, wait for a cache.
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
        self._suspend()  # before anything that may fail: no sequence may hold blocks of a closed cache
        parts.cache.reserve(taken.blocks(rows), least, parts.budget(0))
        parts.graphs.make_room(taken.completion_tokens, taken.table_width)
        self._scheduler.suspend(self._memory())

    def _taken_back(self) -> bool:
        """Take back the cache's memory; return False if too little GPU memory is free for it."""
        try:
            self._parts.cache.take_back()
        except QeRLError:
            return False
        return True
