"""Sampling requests, as clients send them, as work that fills a batch.

A client sends the 64 samples of its batch as 64 requests. Those of one policy and the same temperature,
filters and end tokens are decoded together in a session of the engine; equal prompts among them are found and
prefilled once. Between rounds of the engine the desk is asked: what has arrived and fits joins those that are
being decoded, whether or not one of them has ended. What belongs to another session waits for it, and while
it waits `MOST_JOINERS` may join, so that no client keeps the others waiting. Each sample has a seed of its
own, so it draws the same tokens whoever shares the batch.

The engine refuses a request for which it has no memory. Beside others that decides nothing, because they, or
what was made for them, may hold what it needs: it goes back to its place at the desk. Whenever samples have
ended the oldest of those is tried again, and each session begins with the oldest request that waits, alone if
need be. So every request is begun in the end, or refused with nothing beside it, which is its answer.

Log-probabilities of prompts are those of the policy without noise, from a pass of their own in front of the
session; a late request that wants them waits for the next session, because a session may be noisy.

A request that nobody waits for any more, because its client is gone, is not begun, and what is being decoded
for it ends with the engine's next look at its stops.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from qerl.errors import QeRLError
from qerl.rollout.engine import Completion, NormOffsets, RolloutEngine, SamplingParams, Session
from qerl.rollout.stops import Stop, StopStrings
from qerl.seeding import derive_seed
from qerl_serve.adapters import Snapshot
from qerl_serve.types import Arrivals, SampledSequence, SampleRequest, SampleResult

Policy = Snapshot | None
"""A snapshot, or the base without any adapter."""

MOST_JOINERS = 64
"""Requests that join a session while others wait for the next: a batch, as clients send it."""

Answer = tuple[int, SampleResult | Exception]


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    Attributes:
        positions: Tokens of a prompt and its completion together.
        vocabulary: Token ids are below this.
        end_token_ids: Where a completion ends if the request does not say.
    """

    positions: int
    vocabulary: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Scores:
    """What a scoring pass found of a prompt, as in `SampleResult`."""

    logprobs: Sequence[float] | None = None
    topk: Sequence[Sequence[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Host:
    """What sampling asks of the model behind it.

    Attributes:
        engine: Samples.
        policy: The policy of a key; raises `QeRLError` for one that there is not.
        lend: Inside the block the model is this policy.
        noise: Noise of a policy's samples.
        score: What is asked of the prompts of some requests, in their order; the model is the policy.
        stop_strings: Makes what ends a completion at the first of some strings.
    """

    engine: RolloutEngine
    policy: Callable[[str], Policy]
    lend: Callable[[Policy], AbstractContextManager[object]]
    noise: Callable[[Policy], NormOffsets]
    score: Callable[[Sequence[SampleRequest]], Sequence[Scores]]
    stop_strings: Callable[[tuple[str, ...]], StopStrings]


@dataclass(frozen=True)
class _Group:
    """What requests have in common that share a session."""

    policy: Policy
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]

    def params(self, positions: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=positions,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass
class _Asked:
    """A request on its way: number, group, room for tokens, stops, what was found of its prompt if that was
    asked for, and the samples that are finished."""

    number: int
    request: SampleRequest
    group: _Group
    room: int
    stops: tuple[Stop, ...]
    scores: Scores | None = None
    samples: dict[int, Completion] = field(default_factory=dict)

    @property
    def to_score(self) -> bool:
        wanted = self.request.prompt_logprobs or self.request.topk_prompt_logprobs > 0
        return wanted and self.scores is None

    def result(self) -> SampleResult | QeRLError:
        if not self.request.wanted():
            return given_up()
        drawn = [self.samples[index] for index in range(self.request.num_samples)]
        if any(completion.finish_reason == "error" for completion in drawn):
            return QeRLError(
                "The policy gave logits that are not finite, so nothing could be drawn; the adapter has "
                "diverged, or the weights are damaged."
            )
        sequences = [
            SampledSequence(c.token_ids, c.logprobs, "stop" if c.finish_reason == "stop" else "length")
            for c in drawn
        ]
        scores = self.scores or Scores()
        return SampleResult(sequences, scores.logprobs, scores.topk)


class _Unwanted(Stop):
    """Ends samples for which nobody waits any more."""

    reads_tokens = False

    def __init__(self, request: SampleRequest) -> None:
        self._request = request

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        return None if self._request.wanted() else checked + 1


def given_up() -> QeRLError:
    """The answer to a request that nobody waits for."""
    return QeRLError("Nobody waits for these samples any more, so they were not finished.")


class Sampling:
    """Answers sampling requests.

    Args:
        host: The model.
        limits: Of a request.
    """

    def __init__(self, host: Host, limits: Limits) -> None:
        self._host, self._limits = host, limits

    def answer(self, requests: Sequence[SampleRequest], arrived: Arrivals) -> Iterator[Answer]:
        """See `Backend.sample`."""
        desk = _Desk(self._host, self._limits, arrived)
        yield from desk.take(requests)
        try:
            while desk.waiting:
                yield from self._serve(desk, desk.waiting[0].group)
        finally:
            self._host.engine.release()

    def _serve(self, desk: "_Desk", group: _Group) -> Iterator[Answer]:
        """Answer those that wait in a group, and those that join them."""
        running = _Running(desk, group)
        try:
            with self._host.lend(group.policy):
                yield from self._score(running)
                noise = self._host.noise(group.policy) if group.temperature > 0 else {}
                params = group.params(self._limits.positions)
                with self._host.engine.session(params, noise, growing=True) as session:
                    yield from running.start(session, running.unanswered)
                    joined = 0  # while others waited
                    while session.busy:
                        yield from running.next(session)
                        yield from desk.ask()
                        if joined < MOST_JOINERS:
                            before = len(running.unanswered)
                            yield from running.start(session, desk.leave(running.may_join))
                            joined += len(running.unanswered) - before if desk.waiting else 0
        except Exception as error:  # of the engine or of the policy, so of this group alone
            yield from ((each.number, error) for each in running.unanswered)

    def _score(self, running: "_Running") -> Iterator[Answer]:
        """Score prompts, each alone if together they cannot be; yields refusals."""
        asked = [each for each in running.unanswered if each.to_score and each.request.wanted()]
        for each, error in _refused(asked, self._score_together):
            yield from running.refuse(each, error)

    def _score_together(self, asked: Sequence[_Asked]) -> None:
        found = self._host.score([each.request for each in asked])
        for each, scores in zip(asked, found, strict=True):
            each.scores = scores


def _refused(
    asked: Sequence[_Asked], do: Callable[[Sequence[_Asked]], None]
) -> Iterator[tuple[_Asked, QeRLError]]:
    """Do something with some requests together; if that is refused, with each alone.

    Yields:
        Those with which it is refused, and why.
    """
    if not asked:
        return
    try:
        do(asked)
    except QeRLError as error:
        if len(asked) == 1:
            yield asked[0], error
        else:
            for each in asked:
                yield from _refused([each], do)


class _Desk:
    """Numbers requests, refuses those that cannot be served, and keeps the others in order of arrival."""

    def __init__(self, host: Host, limits: Limits, arrived: Arrivals) -> None:
        self._host, self._limits, self._arrived = host, limits, arrived
        self._numbered = 0
        self.waiting: deque[_Asked] = deque()

    def ask(self) -> Iterator[Answer]:
        """Take in what has arrived; yields refusals."""
        return self.take(self._arrived())

    def take(self, requests: Sequence[SampleRequest]) -> Iterator[Answer]:
        """Take in requests; yields refusals."""
        for request in requests:
            number, self._numbered = self._numbered, self._numbered + 1
            try:
                self.waiting.append(self._admit(number, request))
            except QeRLError as error:
                yield number, error

    def leave(self, wanted: Callable[[_Asked], bool]) -> list[_Asked]:
        """Take those that are wanted out of those that wait."""
        found = [each for each in self.waiting if wanted(each)]
        if found:
            self.waiting = deque(each for each in self.waiting if not wanted(each))
        return found

    def put_back(self, each: _Asked) -> None:
        """Let a request wait again, in its place by arrival."""
        self.waiting = deque(sorted((each, *self.waiting), key=lambda other: other.number))

    def _admit(self, number: int, request: SampleRequest) -> _Asked:
        limits, prompt = self._limits, request.prompt
        check_tokens("The prompt", prompt, limits.vocabulary)
        room = limits.positions - len(prompt)
        if room < 1:
            raise QeRLError(
                f"The prompt has {len(prompt)} tokens, and this model has {limits.positions} positions for "
                "prompt and completion together; shorten it."
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise QeRLError(f"max_tokens is {request.max_tokens}; a completion has at least one token.")
        if request.num_samples < 1:
            raise QeRLError(f"num_samples is {request.num_samples}; ask for at least one.")
        stops = limits.end_token_ids if request.stop_token_ids is None else request.stop_token_ids
        group = _Group(
            self._host.policy(request.sampler),
            request.temperature,
            request.top_p,
            min(request.top_k, limits.vocabulary),
            tuple(sorted(set(stops))),
        )
        check_tokens("A stop token", group.stop_token_ids or (0,), limits.vocabulary)
        group.params(limits.positions)  # which checks temperature and filters
        strings = request.stop_strings
        texts = (self._host.stop_strings(strings),) if strings else ()
        ends = (*texts, _Unwanted(request))
        return _Asked(number, request, group, min(room, request.max_tokens or room), ends)


class _Running:
    """Which sequence of a session is which sample of which request; it begins with all of a group that wait.

    Args:
        desk: Where they wait, and where those go back to that do not fit beside others.
        group: The group.
    """

    def __init__(self, desk: _Desk, group: _Group) -> None:
        self._desk, self._group = desk, group
        self._open = {each.number: each for each in desk.leave(lambda each: each.group == group)}
        self._samples: dict[int, tuple[_Asked, int]] = {}
        self._put_back: set[int] = set()  # numbers of those that are not tried again before samples end

    @property
    def unanswered(self) -> list[_Asked]:
        """The requests without an answer."""
        return list(self._open.values())

    def may_join(self, each: _Asked) -> bool:
        """Whether a request that waits is to be started now."""
        return each.group == self._group and not each.to_score and each.number not in self._put_back

    def refuse(self, each: _Asked, error: QeRLError) -> Iterator[Answer]:
        """Answer a request with an error."""
        del self._open[each.number]
        yield each.number, error

    def start(self, session: Session, asked: Sequence[_Asked]) -> Iterator[Answer]:
        """Begin the samples of some requests, those of equal prompts behind one prefill.

        Yields:
            Refusals; those that are refused beside others go back to the desk instead.
        """
        self._open |= {each.number: each for each in asked}
        by_prompt: dict[tuple[int, ...], list[_Asked]] = {}
        for each in asked:
            if each.request.wanted():
                by_prompt.setdefault(each.request.prompt, []).append(each)
            else:
                yield from self.refuse(each, given_up())
        by_count: dict[int, list[_Asked]] = {}
        for same in by_prompt.values():
            by_count.setdefault(sum(each.request.num_samples for each in same), []).extend(same)
        for together in by_count.values():
            for each, error in _refused(together, partial(self._begin, session)):
                if session.busy:
                    del self._open[each.number]
                    self._put_back.add(each.number)
                    self._desk.put_back(each)
                else:
                    yield from self.refuse(each, error)

    def _begin(self, session: Session, asked: Sequence[_Asked]) -> None:
        """Begin requests, those of a prompt next to each other and every prompt with as many samples."""
        begun = [(each, index) for each in asked for index in range(each.request.num_samples)]
        prompts = list(dict.fromkeys(each.request.prompt for each in asked))
        indices = session.start(
            prompts,
            len(begun) // len(prompts),
            max_tokens=[each.room for each, _ in begun],
            seeds=[derive_seed("request", each.request.seed, index) for each, index in begun],
            stops=[each.stops for each, _ in begun],
        )
        self._samples.update(zip(indices, begun, strict=True))

    def next(self, session: Session) -> Iterator[Answer]:
        """Decode a round; yields the answers of requests all of whose samples have ended."""
        turns = session.next(one_round=True)
        if turns and self._put_back:
            self._put_back.remove(min(self._put_back))
        for ended in turns:
            session.finish(ended.index)
            each, index = self._samples.pop(ended.index)
            each.samples[index] = ended.completion
            if len(each.samples) == each.request.num_samples:
                del self._open[each.number]
                yield each.number, each.result()


def check_tokens(what: str, token_ids: Sequence[int], vocabulary: int) -> None:
    """Refuse tokens that the model does not have.

    Args:
        what: Begins the sentence.
        token_ids: At least one.
        vocabulary: Number of tokens.

    Raises:
        QeRLError: There is none, or one is out of range.
    """
    if not len(token_ids):
        raise QeRLError(f"{what} is empty; it needs at least one token.")
    if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
        raise QeRLError(
            f"{what} has the id {wrong}, and this model has {vocabulary} tokens; use its own tokenizer."
        )
