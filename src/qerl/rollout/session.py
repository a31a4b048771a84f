"""State of a session: the tokens of each sequence, how many more it may have, and its stage.

A completion is sampled in turns. In a turn the policy draws tokens until it stops; then the caller may append
tokens, and the next turn begins. Drawn and appended tokens form one list with one limit. A whole completion
is a session of one turn.

Both engines track sequences with this module. Each engine decides which sequences share a batch, and where
their keys and values are stored between turns.
"""

import time
import weakref
from abc import abstractmethod
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import numpy as np

from qerl.errors import QeRLError
from qerl.rollout.engine import (
    Begun,
    Completion,
    Ended,
    RolloutResult,
    SamplingParams,
    Session,
    WhenEnded,
    check_one_each,
    check_prompts,
)
from qerl.rollout.stops import Cut, FinishReason, Stop, first_cut

S = TypeVar("S", bound="TrackedSession")

Stage = Literal["drawing", "between turns", "finished"]
"""Stage of a sequence: the policy draws, the caller may append tokens, or the sequence is finished."""


@dataclass(eq=False)
class Prompt:
    """The prompt of one or more sequences.

    Attributes:
        number: Index in the call or session, from 0.
        token_ids: All its tokens.
        aligned_to: In the paged engine, sequences read the largest multiple of this many tokens from the
            prompt's shared blocks; the rest is copied into each sequence's own blocks.
        blocks: In the paged engine, KV cache blocks by pool, shared by its sequences; empty while none of
            them holds any.
        found: In the paged engine, number of leading tokens already cached when its blocks were allocated.
        page_names: In the paged engine, names of its first pages, by which they are looked up.
    """

    number: int
    token_ids: list[int]
    aligned_to: int = 1
    blocks: dict[int, list[int]] = field(default_factory=dict)
    found: int = 0
    page_names: list[bytes] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the blocks: all but the last, which each sequence decodes itself."""
        return len(self.token_ids) - 1

    @property
    def shared_tokens(self) -> int:
        """Number of cached tokens that sequences read from the shared blocks."""
        return self.cached_tokens - self.tail

    @property
    def tail(self) -> int:
        """Number of last cached tokens, which are copied into each sequence's own blocks."""
        return self.cached_tokens % self.aligned_to


@dataclass(eq=False)
class Sequence:
    """A completion in progress.

    Attributes:
        index: Index in the call or session, from 0.
        prompt: The prompt that it continues.
        sample: Index among the prompt's sequences, from 0.
        params: Sampling parameters, including the stop tokens.
        max_tokens: Maximum number of tokens, drawn or appended, from its parameters and the model's
            positions; at most 0 for a sequence without room.
        key: Seed, prompt and sample by which its uniform numbers are keyed.
        stops: Conditions that the host checks in addition to the stop tokens, which the engine checks itself.
        token_ids, logprobs, entropies: All tokens so far; the latter two are 0.0 for appended tokens.
        turn_start: Number of tokens at the start of the current turn.
        finish_reason: Why its last turn ended.
        stage: See `Stage`.
        generated: In the paged engine, the number of tokens so far as the host knows it. That engine reads
            `token_ids` and the rest when the sequence leaves its row (with stops, tokens after each round).
        cached: Number of tokens in its own blocks, the prompt's tail included, whose keys and values were
            there when it left its row.
        blocks: Blocks of its own tokens by pool, which it may keep between turns.
        row: Row of the batch while it runs.
        choices: Experts of each computed token, as in `Completion.choices`.
    """

    index: int
    prompt: Prompt
    sample: int
    params: SamplingParams
    max_tokens: int
    key: tuple[int, int, int] = (0, 0, 0)
    stops: tuple[Stop, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    turn_start: int = 0
    finish_reason: FinishReason = "length"
    stage: Stage = "drawing"
    generated: int = 0
    cached: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    row: int | None = None
    choices: np.ndarray | None = None

    @property
    def room(self) -> int:
        """Number of tokens that it may still have; 0 after logits that were not finite."""
        return 0 if self.finish_reason == "error" else max(0, self.max_tokens - len(self.token_ids))

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.token_ids[-1] if self.token_ids else self.prompt.token_ids[-1]

    @property
    def own_tokens(self) -> int:
        """Number of tokens in its own blocks before its next step: the prompt's tail and last token, and its
        own tokens, without the very last of these."""
        return self.prompt.tail + self.generated

    def own_tokens_after(self, steps: int) -> int:
        """Return how many tokens its own blocks must hold for ``steps`` more steps and the token after."""
        return self.prompt.tail + min(self.generated + steps + 1, self.max_tokens)

    @property
    def length(self) -> int:
        """Number of tokens so far. While the sequence is drawing, only `generated` is current in the paged
        engine, and only `token_ids` in the portable engine."""
        return max(self.generated, len(self.token_ids))

    def begin(self, begun: Begun) -> None:
        """Restore the state from an earlier session; a sequence that has ended gets no room."""
        self.token_ids, self.logprobs = list(begun.token_ids), list(begun.logprobs)
        self.entropies, self.generated = list(begun.entropies), len(begun.token_ids)
        if begun.finish_reason is not None:
            self.finish_reason, self.choices = begun.finish_reason, begun.choices
            self.max_tokens = len(begun.token_ids)

    def cut(self, checked: int) -> Cut | None:
        """Return where its stops end its turn, if they do; the first ``checked`` tokens are known not to."""
        if not self.stops:
            return None
        return first_cut(self.stops, self.prompt.token_ids, self.token_ids, self.turn_start, checked)

    def write(self, token_ids: list[int]) -> None:
        """Append the caller's tokens, and begin the next turn."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.entropies += [0.0] * len(token_ids)
        self.turn_start, self.stage = len(self.token_ids), "drawing"


def new_sequences(
    prompts: list[list[int]],
    params: list[SamplingParams],
    positions: int | None = None,
    first: int = 0,
    first_prompt: int = 0,
    aligned_to: int = 1,
) -> list[Sequence]:
    """Create equally many sequences per prompt, numbered consecutively.

    Args:
        prompts: Token ids of each prompt.
        params: Of each sequence: prompts in order, samples of a prompt next to each other.
        positions: The model's maximum number of positions; None if it has no limit.
        first, first_prompt: Numbers of the first sequence and of the first prompt.
        aligned_to: As in `Prompt`.
    """
    samples = len(params) // len(prompts)
    made: list[Sequence] = []
    for number, token_ids in enumerate(prompts, first_prompt):
        prompt = Prompt(number, token_ids, aligned_to=aligned_to)
        for sample in range(samples):
            own = params[len(made)]
            most = own.max_tokens
            limit = most if positions is None else min(most, positions - len(token_ids))
            made.append(Sequence(first + len(made), prompt, sample, own, limit, stops=own.stops))
    return made


class TrackedSession(Session):
    """A session that tracks its sequences; a subclass draws the tokens.

    Args:
        params: Sampling parameters of sequences without their own.
        positions: The model's maximum number of positions; None if it has no limit.
        pad_token_id: The only token of a turn whose first logits were not finite.
    """

    _aligned_to = 1

    def __init__(self, params: SamplingParams, positions: int | None, pad_token_id: int) -> None:
        self._params, self._positions, self._pad_token_id = params, positions, pad_token_id
        self._sequences: dict[int, Sequence] = {}  # those that were not finished, by number
        self._started = self._started_prompts = 0
        self._full: list[Sequence] = []  # without room from their start, and not returned yet
        self._drawing = self.prefilled_tokens = 0

    @abstractmethod
    def _add(self, sequences: list[Sequence]) -> None:
        """Queue new sequences that have room; earlier sequences go on if this raises."""

    @abstractmethod
    def _resume(self, sequence: Sequence) -> None:
        """Queue a sequence whose next turn has begun."""

    @abstractmethod
    def _drop(self, sequence: Sequence) -> None:
        """Free everything that is held for a finished sequence."""

    def _read(self) -> None:
        """Copy the tokens drawn so far to the host; no sequence is decoded afterwards."""

    @abstractmethod
    def _decode(self, meanwhile: Callable[[], None] | None) -> list[Sequence]:
        """Decode a round; return the sequences whose turn has ended, with tokens and reason up to date."""

    def start(
        self,
        prompts: abc.Sequence[abc.Sequence[int]],
        samples_per_prompt: int,
        params: abc.Sequence[SamplingParams] | None = None,
        seeds: abc.Sequence[int] | None = None,
        begun: abc.Sequence[Begun] | None = None,
    ) -> list[int]:
        """See `Session.start`."""
        check_prompts(prompts, samples_per_prompt)
        count = len(prompts) * samples_per_prompt
        for what, given in (("sampling parameters", params), ("seeds", seeds), ("beginnings", begun)):
            if given is not None:
                check_one_each(what, given, count)
        own = [self._params] * count if params is None else list(params)
        added = new_sequences(
            [list(prompt) for prompt in prompts],
            own,
            self._positions,
            self._started,
            self._started_prompts,
            self._aligned_to,
        )
        for place, sequence in enumerate(added):
            shared = sequence.params.seed, sequence.prompt.number, sequence.sample
            sequence.key = shared if seeds is None else (seeds[place], 0, 0)
            if begun is not None:
                sequence.begin(begun[place])
        self._add(added)
        self._sequences |= {sequence.index: sequence for sequence in added}
        self._started += len(added)
        self._started_prompts += len(prompts)
        self._full += [sequence for sequence in added if not sequence.room]
        self._drawing += len(added)
        return [sequence.index for sequence in added]

    def go_on(self, index: int, token_ids: abc.Sequence[int]) -> None:
        """See `Session.go_on`."""
        sequence = self._between_turns(index)
        if len(token_ids) >= sequence.room:
            raise QeRLError(
                f"Sequence {index} has room for {sequence.room} tokens, and {len(token_ids)} appended "
                "tokens leave no room to draw one; append fewer or finish the sequence."
            )
        sequence.write(list(token_ids))
        self._drawing += 1
        self._resume(sequence)

    def room(self, index: int) -> int:
        """See `Session.room`."""
        return self._unfinished(index).room

    def finish(self, index: int) -> None:
        """See `Session.finish`."""
        sequence = self._between_turns(index)
        sequence.stage = "finished"
        del self._sequences[index]  # a server's session may have no end
        self._drop(sequence)

    def length(self, index: int) -> int:
        """See `Session.length`."""
        return self._unfinished(index).length

    def set_aside(self) -> None:
        """End the session and copy its drawn tokens to the host, before another session uses the engine."""
        if not self.over:
            self._read()
            self.over = True

    def leave(self) -> dict[int, Begun]:
        """See `Session.leave`."""
        self.set_aside()
        ended = {sequence.index: sequence.finish_reason for sequence in self._full}
        return {
            index: Begun(s.token_ids, s.logprobs, s.entropies, ended.get(index), s.choices)
            for index, s in self._sequences.items()
            if s.stage == "drawing"
        }

    def next(self, one_round: bool = False, meanwhile: Callable[[], None] | None = None) -> list[Ended]:
        """See `Session.next`."""
        ended, self._full = self._full, []
        while not ended:
            ended = self._decode(meanwhile)
            if one_round or not self.busy:
                break
        return [self._end(sequence) for sequence in ended]

    @property
    def busy(self) -> bool:
        """See `Session.busy`."""
        return self._drawing > 0

    def _end(self, sequence: Sequence) -> Ended:
        sequence.stage = "between turns"
        self._drawing -= 1
        turn, reason = slice(sequence.turn_start, None), sequence.finish_reason
        drawn = sequence.token_ids[turn], sequence.logprobs[turn], sequence.entropies[turn]
        if reason == "error" and not drawn[0]:
            drawn = [self._pad_token_id], [0.0], [0.0]
        return Ended(sequence.index, Completion(*drawn, reason, sequence.choices))

    def _between_turns(self, index: int) -> Sequence:
        sequence = self._unfinished(index)
        if sequence.stage != "between turns":
            raise QeRLError(
                f"The turn of sequence {index} has not ended; go_on and finish need a turn that has ended."
            )
        return sequence

    def _unfinished(self, index: int) -> Sequence:
        if index not in self._sequences:
            state = "was finished" if 0 <= index < self._started else "was not started"
            raise QeRLError(f"Sequence {index} {state}, so the session does not hold it; start another.")
        return self._sequences[index]


class LastSession(Generic[S]):
    """A weak reference to the last session of an engine, which may be entered again.

    A caller that wants to enter the session again keeps it alive; otherwise its device memory is freed when
    its context ends.
    """

    def __init__(self) -> None:
        self._session: Callable[[], S | None] = lambda: None

    @property
    def session(self) -> S | None:
        """The last session, or None if it was garbage-collected."""
        return self._session()

    def set_aside(self) -> None:
        """End the last session if it still exists."""
        if (session := self.session) is not None:
            session.set_aside()

    @contextmanager
    def opened(self, session: S) -> Iterator[S]:
        """Make this the last session while the context is open; an error ends the session.

        It was created after `set_aside`, or is entered again.
        """
        self._session = weakref.ref(session)
        try:
            yield session
        except BaseException:
            session.over = True
            raise

    def again(self, going_on: Session) -> S:
        """Return the last session if it is ``going_on`` and can be entered again.

        Raises:
            QeRLError: ``going_on`` is over, or of another engine.
        """
        if (session := self.session) is None or session is not going_on or session.over:
            raise QeRLError(
                "This session is over, because it was left, the engine was reset, or another session was "
                "opened; start its sequences in a new session from what its method leave returns."
            )
        return session


def whole_completions(
    opened: AbstractContextManager[TrackedSession],
    prompts: abc.Sequence[abc.Sequence[int]],
    samples_per_prompt: int,
    params: abc.Sequence[SamplingParams] | None = None,
    seeds: abc.Sequence[int] | None = None,
    ended: WhenEnded | None = None,
) -> RolloutResult:
    """Sample whole completions, each a sequence of one turn, for `RolloutEngine.generate`.

    Args:
        opened: A session without sequences.
        prompts, samples_per_prompt: As in `RolloutEngine.generate`.
        params, seeds: As in `Session.start`.
        ended: As in `RolloutEngine.generate`.
    """
    begin = time.perf_counter()
    found: dict[int, Completion] = {}
    with opened as session:
        indices = session.start(prompts, samples_per_prompt, params, seeds)
        while session.busy:
            for turn in session.next_finished():
                found[turn.index] = turn.completion
                if ended is not None:
                    ended(turn.index, turn.completion)
    completions = [found[index] for index in indices]
    return RolloutResult(
        completions=completions,
        prompt_tokens=session.prefilled_tokens,
        generated_tokens=sum(len(completion.token_ids) for completion in completions),
        seconds=time.perf_counter() - begin,
    )
