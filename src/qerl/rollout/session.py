"""Books of a session: what each sequence has, what it may still have, and whose turn it is.

A completion is made in turns. In a turn the policy draws tokens until it stops; then others may write some,
and the next turn begins. What both have written is one list of tokens with one limit. A whole completion is
a session of one turn.

Both engines keep these books in the same way. Which sequences share a batch, and where their keys and values
lie between turns, is each engine's own.
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
"""Whose turn it is: the policy's, that of others, nobody's any more."""


@dataclass(eq=False)
class Prompt:
    """What sequences begin with.

    Attributes:
        number: Position in the call or session, from 0.
        token_ids: All its tokens.
        aligned_to: In the paged engine, a multiple of so many tokens is read in the prompt's blocks; what is
            beyond it each sequence has in its own.
        blocks: In the paged engine, blocks of its keys and values by pool, shared by its sequences; empty
            while none of them holds any.
        found: In the paged engine, its first tokens that were in its blocks when these were given out.
        page_names: In the paged engine, names of its first pages, by which they are found.
    """

    number: int
    token_ids: list[int]
    aligned_to: int = 1
    blocks: dict[int, list[int]] = field(default_factory=dict)
    found: int = 0
    page_names: list[bytes] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the blocks: all but the last, which each sequence decodes itself."""
        return len(self.token_ids) - 1

    @property
    def shared_tokens(self) -> int:
        """Those of them that its sequences read there."""
        return self.cached_tokens - self.tail

    @property
    def tail(self) -> int:
        """How many of them, the last ones, are copied into each sequence's own blocks."""
        return self.cached_tokens % self.aligned_to


@dataclass(eq=False)
class Sequence:
    """One completion in the making.

    Attributes:
        index: Position in the call or session, from 0.
        prompt: The prompt that it continues.
        sample: Number among the prompt's sequences, from 0.
        params: How its tokens are drawn, and which end its turns.
        max_tokens: Tokens that it may have, drawn or written, as its parameters and the model's positions
            say; at most 0 for one without room.
        key: Seed, prompt and sample by which its uniform numbers are keyed.
        stops: What the host looks for beside the stop tokens that the drawing engine looks for itself.
        token_ids, logprobs, entropies: What it has, the latter two 0.0 where others wrote.
        turn_start: Tokens that it had when its turn began.
        finish_reason: Why its last turn ended.
        stage: Whose turn it is.
        generated: In the paged engine, which reads `token_ids` and the rest when the sequence leaves its row
            (of one that has stops, the tokens after each round), tokens that it has, as the host knows it.
        cached: Of its own tokens, which begin with the prompt's last (before which the prompt's tail stands),
            those whose keys and values its blocks held when it left its row.
        blocks: Blocks of its own tokens by pool, which it may keep while others write.
        row: Row of the batch while it runs.
        choices: Experts of each token that was computed, as of `Completion.choices`.
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
        """Tokens that it may still have; 0 after logits that were not finite."""
        return 0 if self.finish_reason == "error" else max(0, self.max_tokens - len(self.token_ids))

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.token_ids[-1] if self.token_ids else self.prompt.token_ids[-1]

    @property
    def own_tokens(self) -> int:
        """Tokens in its own blocks before its next step: the prompt's tail and last token, and its own tokens
        but the very last."""
        return self.prompt.tail + self.generated

    def own_tokens_after(self, steps: int) -> int:
        """Tokens that its own blocks must hold after so many more steps, and for the token after them."""
        return self.prompt.tail + min(self.generated + steps + 1, self.max_tokens)

    @property
    def length(self) -> int:
        """Tokens that it has: of one that is drawing the paged engine knows the number alone, the portable
        engine the tokens alone."""
        return max(self.generated, len(self.token_ids))

    def begin(self, begun: Begun) -> None:
        """Have what was drawn before; one that has ended has no room."""
        self.token_ids, self.logprobs = list(begun.token_ids), list(begun.logprobs)
        self.entropies, self.generated = list(begun.entropies), len(begun.token_ids)
        if begun.finish_reason is not None:
            self.finish_reason, self.choices = begun.finish_reason, begun.choices
            self.max_tokens = len(begun.token_ids)

    def cut(self, checked: int) -> Cut | None:
        """Where its stops end its turn, if they do; so many of its tokens are known not to."""
        if not self.stops:
            return None
        return first_cut(self.stops, self.prompt.token_ids, self.token_ids, self.turn_start, checked)

    def write(self, token_ids: list[int]) -> None:
        """Append what others wrote, and begin the next turn."""
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
    """Sequences of as many samples of each prompt, numbered on.

    Args:
        prompts: Token ids of each.
        params: Of each sequence, prompts in order, the samples of a prompt next to each other.
        positions: Positions that the model has, None where it sets no limit.
        first, first_prompt: Numbers of the first sequence and of the first prompt.
        aligned_to: As of `Prompt`.
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
    """A session that knows what its sequences have, and asks a subclass to draw.

    Args:
        params: Sampling parameters of sequences without their own.
        positions: Positions that the model has; None where it sets no limit.
        pad_token_id: Stands in for a turn whose first logits were not finite.
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
        """Queue those of new sequences that have room; what is there goes on if it raises."""

    @abstractmethod
    def _resume(self, sequence: Sequence) -> None:
        """Queue a sequence to which others have written."""

    @abstractmethod
    def _drop(self, sequence: Sequence) -> None:
        """Give up what is held of a sequence that will not go on."""

    def _read(self) -> None:
        """Have what was drawn of all sequences on the host; none of them is decoded any more."""

    @abstractmethod
    def _decode(self, meanwhile: Callable[[], None] | None) -> list[Sequence]:
        """Decode a round; gives the sequences that have ended their turn, tokens and reason up to date."""

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
                f"Sequence {index} has room for {sequence.room} tokens, and {len(token_ids)} written ones "
                "leave none to draw: shorten them or finish the sequence."
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
        """Be over, and have on the host what was drawn, before others take what the engine holds."""
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
                f"Sequence {index} has not ended its turn; only one whose turn has ended can go on or finish."
            )
        return sequence

    def _unfinished(self, index: int) -> Sequence:
        if index not in self._sequences:
            state = "was finished" if 0 <= index < self._started else "was not started"
            raise QeRLError(f"Sequence {index} {state}, so nothing is known of it; start another.")
        return self._sequences[index]


class LastSession(Generic[S]):
    """The session of an engine that may be entered again. It is not kept: whoever goes on with it keeps it,
    and else what it holds of the device goes with its context."""

    def __init__(self) -> None:
        self._session: Callable[[], S | None] = lambda: None

    @property
    def session(self) -> S | None:
        """It, if somebody has it still."""
        return self._session()

    def set_aside(self) -> None:
        """Let it be over, if somebody has it still."""
        if (session := self.session) is not None:
            session.set_aside()

    @contextmanager
    def opened(self, session: S) -> Iterator[S]:
        """A block of a session that was made after `set_aside`, or is entered again; an error ends it."""
        self._session = weakref.ref(session)
        try:
            yield session
        except BaseException:
            session.over = True
            raise

    def again(self, going_on: Session) -> S:
        """The session, if it is the one that shall go on.

        Raises:
            QeRLError: It is over, or of another engine.
        """
        if (session := self.session) is None or session is not going_on or session.over:
            raise QeRLError(
                "This session is over, because it was left, or the engine was reset or has opened another "
                "session since; call its method leave, and start with what that gives in a new session."
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
    """What `RolloutEngine.generate` returns: sequences of one turn.

    Args:
        opened: A session in which nothing was started.
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
