"""Batched decoding of clients' sampling requests.

A client sends the 64 samples of its batch as 64 requests. Requests of one policy are decoded together in a
session of the engine, each with its own temperature, filters and end tokens; equal prompts among them are
found and prefilled once. Between rounds of the engine new requests join the session, whether or not a running
one has ended. A request of another policy waits for a session of its own; meanwhile at most `MAX_JOINERS`
requests may join the running session, so that no client keeps the others waiting. Each sample has its own
seed, so it draws the same tokens whatever else is in the batch.

The engine refuses a request for which it has no memory. While other requests run, the refusal is not final,
because they may hold that memory: the request goes back to its place in the queue. Whenever samples have
ended, the oldest refused request is tried again, and each session begins with the oldest pending request,
alone if need be. So every request is begun in the end, or refused with nothing running beside it, which is
its answer.

Noise applies to a whole session, so greedy samples, which have none, use another session than the noisy ones
of their policy. Log-probabilities of prompts are those of the policy without noise, from a separate pass
before the session, which may use the KV cache's memory; a late request for them waits for the next session,
because a session may be noisy.

When other work has waited too long for the model, the session is paused between two rounds: its KV cache is
released, the work runs, and the session resumes with the same policy and the same noise. Keys and values of
its sequences are then computed again, and no token is drawn twice. The policy is a snapshot, which does not
change although its model may be trained meanwhile. If the session cannot resume for lack of memory, all its
requests go back to their places in the queue with the tokens they have, and each is begun again or refused
like any other. Overdue work also runs between two sessions, since many sessions of one round would otherwise
keep it waiting as long as one of many rounds.

A request whose client is gone is not begun, and its running samples end when the engine next checks their
stops.

A server with teachers has one engine per model. Only one of them holds a KV cache at a time, and releases it
before a session of another. If the engine keeps prefixes, keys and values of finished samples stay, so that a
request with the whole conversation until now computes only what is new, even if no sample was running in
between; updates release the memory (`Sampling.release`).
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from qerl.endpoint.stops import TurnLimits
from qerl.errors import QeRLError
from qerl.rollout.engine import Begun, Completion, NormOffsets, RolloutEngine, SamplingParams, Session
from qerl.rollout.stops import Stop, StopStrings
from qerl.seeding import derive_seed
from qerl_serve.adapters import Snapshot
from qerl_serve.types import (
    Arrivals,
    Overdue,
    SampledSequence,
    SampleRequest,
    SampleResult,
    nothing_overdue,
)

Policy = Snapshot | None
"""A snapshot, or None for the base without an adapter."""

MAX_JOINERS = 64
"""Maximum requests that join a session while others wait for the next: one batch of a client."""

Answer = tuple[int, SampleResult | Exception]


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
        positions: Maximum tokens of a prompt and its completion together.
        vocabulary: Token ids are below this.
        end_token_ids: Default end tokens of a completion.
    """

    positions: int
    vocabulary: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Scores:
    """The scores of a prompt, as in `SampleResult`."""

    logprobs: Sequence[float] | None = None
    topk: Sequence[Sequence[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Host:
    """A model to sample from.

    Attributes:
        engine: Its rollout engine.
        limits: Of a request.
        lend: Returns a context manager that gives the model this policy.
        noise: Returns the norm offsets for samples of a snapshot; None samples without noise.
        score: Returns the scores of the requests' prompts, in order, under the policy that the model has.
        stop_strings: Makes a stop for these strings.
        keeps_prefixes: Whether samples reuse keys and values of their prefix from earlier samples of their
            policy.
    """

    engine: RolloutEngine
    limits: Limits
    lend: Callable[[Policy], AbstractContextManager[object]]
    noise: Callable[[Snapshot], NormOffsets] | None
    score: Callable[[Sequence[SampleRequest]], Sequence[Scores]]
    stop_strings: Callable[[tuple[str, ...]], StopStrings]
    keeps_prefixes: bool


Find = Callable[[str], tuple[Host, Policy]]


@dataclass
class _Asked:
    """A request in progress.

    Attributes:
        number: Number in order of arrival.
        request: As the client sent it.
        host: The model.
        policy: The policy to sample from.
        noisy: True if its samples have noise.
        params: Parameters of its samples, without their seeds.
        scores: Scores of its prompt, once computed; None before or if not requested.
        samples: Finished completions, by number of the sample.
        begun: Unfinished samples of a session that could not resume, by number.
        refused: True if it is not tried again until samples of other requests end.
    """

    number: int
    request: SampleRequest
    host: Host
    policy: Policy
    noisy: bool
    params: SamplingParams
    scores: Scores | None = None
    samples: dict[int, Completion] = field(default_factory=dict)
    begun: dict[int, Begun] = field(default_factory=dict)
    refused: bool = False
    _listens: dict[int, tuple[Stop, ...]] = field(default_factory=dict)  # each knows what it has streamed

    def shares_with(self, other: "_Asked") -> bool:
        """Return True if both can be in one session."""
        same = self.host is other.host and self.policy is other.policy
        return same and self.noisy == other.noisy

    @property
    def name(self) -> Hashable | None:
        """The engine's name of the policy, with the noise of its samples; None if no prefixes are kept."""
        if not self.host.keeps_prefixes:
            return None
        return None if self.policy is None else self.policy.number, self.noisy

    @property
    def to_score(self) -> bool:
        wanted = self.request.prompt_logprobs or self.request.topk_prompt_logprobs > 0
        return wanted and self.scores is None

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the samples that have not ended."""
        return [index for index in range(self.request.num_samples) if index not in self.samples]

    def params_of(self, index: int) -> SamplingParams:
        """Return the parameters of a sample, with stops that stream its tokens if the client wants that."""
        told = self.request.told
        if told is None:
            return self.params
        if index not in self._listens:
            self._listens[index] = TurnLimits(tell=partial(told, index)).stops()
        return replace(self.params, stops=(*self.params.stops, *self._listens[index]))

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
    """Ends samples whose client is gone."""

    reads_tokens = False

    def __init__(self, request: SampleRequest) -> None:
        self._request = request

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        return None if self._request.wanted() else checked + 1


def given_up() -> QeRLError:
    """Return the error for a request whose client is gone."""
    return QeRLError("The client of these samples is gone, so they were not finished.")


class Sampling:
    """Answers sampling requests.

    Args:
        find: Returns model and policy of a key; raises `QeRLError` for an unknown one.

    Attributes:
        prefilled_tokens: Tokens that were prefilled: prompts, shared ones once and without kept prefixes, and
            sequences computed again after pauses.
    """

    def __init__(self, find: Find) -> None:
        self._find, self._memory = find, _Memory()
        self.prefilled_tokens = 0

    def release(self) -> None:
        """Release the KV cache."""
        self._memory.release()

    def answer(
        self, requests: Sequence[SampleRequest], arrived: Arrivals, overdue: Overdue = nothing_overdue
    ) -> Iterator[Answer]:
        """See `Backend.sample`."""
        queue = _Queue(self._find, self._memory, arrived, overdue)
        yield from queue.take(requests)
        try:
            while queue.waiting:
                yield from queue.serve()
                if queue.waiting and (work := overdue()) is not None:
                    self.release()
                    work()
        finally:
            self.prefilled_tokens += queue.prefilled_tokens
            self._memory.rest()


class _Memory:
    """The engine that may hold a KV cache; only one does at a time."""

    def __init__(self) -> None:
        self._host: Host | None = None

    def take(self, host: Host) -> None:
        """Let the engine of a model hold the KV cache; another engine releases its own."""
        if host is not self._host:
            self.release()
            self._host = host

    def release(self) -> None:
        """Release the KV cache."""
        if self._host is not None:
            self._host.engine.release()

    def rest(self) -> None:
        """Release the KV cache unless later samples may use its prefixes."""
        if self._host is not None and not self._host.keeps_prefixes:
            self.release()


def _refused(
    asked: Sequence[_Asked], do: Callable[[Sequence[_Asked]], None]
) -> Iterator[tuple[_Asked, QeRLError]]:
    """Call `do` with all requests together; if that is refused, with each alone.

    Yields:
        Refused requests, each with the error.
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


class _Queue:
    """FIFO of validated sampling requests, and the session for the oldest and those that can share it.

    Attributes:
        waiting: Pending requests, oldest first.
        prefilled_tokens: As in `Sampling`.
    """

    def __init__(self, find: Find, memory: _Memory, arrived: Arrivals, overdue: Overdue) -> None:
        self._find, self._memory, self._arrived, self._overdue = find, memory, arrived, overdue
        self._numbered = self.prefilled_tokens = 0
        self.waiting: list[_Asked] = []
        self._open: dict[int, _Asked] = {}  # requests of the session, not answered yet
        self._begun: dict[int, tuple[_Asked, int]] = {}  # request and sample of each sequence
        self._joined = 0  # requests that have joined the session while others waited

    def take(self, requests: Sequence[SampleRequest]) -> Iterator[Answer]:
        """Validate and enqueue requests; yields refusals."""
        for request in requests:
            number, self._numbered = self._numbered, self._numbered + 1
            try:
                self.waiting.append(self._admit(number, request))
            except QeRLError as error:
                yield number, error

    def serve(self) -> Iterator[Answer]:
        """Run one session: answer the oldest request, those that share its session, and later ones that
        join."""
        first = self.waiting[0]
        host = first.host
        self._memory.take(host)
        for each in self.waiting:
            each.refused = False
        self._begun, self._joined = {}, 0
        self._open = {each.number: each for each in self._leave(first.shares_with)}
        noise = host.noise
        try:
            with host.lend(first.policy):
                yield from self._score(host)
                offsets = noise(first.policy) if noise and first.policy and first.noisy else {}
                opened = partial(host.engine.session, first.params, offsets, growing=True, policy=first.name)
                with opened() as session:
                    yield from self._start(session, list(self._open.values()))
                    work = yield from self._rounds(session, first)
            while work is not None:
                self._memory.release()
                work()
                if not any(each.request.wanted() for each in self._open.values()):
                    yield from ((number, given_up()) for number in self._open)
                    return
                with ExitStack() as stack:
                    stack.enter_context(host.lend(first.policy))
                    try:
                        stack.enter_context(opened(going_on=session))
                    except QeRLError:  # too little memory for all of them
                        self._wait_again(session)
                        return
                    work = yield from self._rounds(session, first)
        except Exception as error:  # of the engine or of the policy, so of this session alone
            yield from ((number, error) for number in self._open)
            self._memory.release()

    def _rounds(self, session: Session, first: _Asked) -> Generator[Answer, None, Callable[[], None] | None]:
        """Decode until all samples have ended, or other work is overdue; return that work.

        Args:
            session: The engine's session.
            first: A request of the session.
        """
        while session.busy:
            yield from self._next(session)
            yield from self.take(self._arrived())
            if self._joined < MAX_JOINERS:
                before = len(self._open)
                joining = self._leave(
                    lambda each: first.shares_with(each) and not each.to_score and not each.refused
                )
                yield from self._start(session, joining)
                self._joined += len(self._open) - before if self.waiting else 0
            if session.busy and (work := self._overdue()) is not None:
                return work
        return None

    def _admit(self, number: int, request: SampleRequest) -> _Asked:
        host, policy = self._find(request.sampler)
        limits, prompt = host.limits, request.prompt
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
        ends = limits.end_token_ids if request.stop_token_ids is None else request.stop_token_ids
        check_tokens("A stop token", ends or (0,), limits.vocabulary)
        strings = request.stop_strings
        texts = (host.stop_strings(strings),) if strings else ()
        params = SamplingParams(
            max_tokens=min(room, request.max_tokens or room),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            stop_token_ids=tuple(sorted(set(ends))),
            stops=(*texts, _Unwanted(request)),
        )
        noisy = host.noise is not None and policy is not None and params.temperature > 0
        return _Asked(number, request, host, policy, noisy, params)

    def _leave(self, wanted: Callable[[_Asked], bool]) -> list[_Asked]:
        """Remove the wanted requests from `waiting` and return them."""
        found = [each for each in self.waiting if wanted(each)]
        self.waiting = [each for each in self.waiting if not wanted(each)]
        return found

    def _enqueue(self, asked: Iterable[_Asked]) -> None:
        """Put requests back into `waiting`, in order of arrival."""
        self.waiting = sorted([*asked, *self.waiting], key=lambda each: each.number)

    def _wait_again(self, session: Session) -> None:
        """Enqueue the requests of a session that cannot resume, with the tokens they have."""
        for number, begun in session.leave().items():
            each, index = self._begun[number]
            each.begun[index] = begun
        self._enqueue(self._open.values())
        self._open = {}

    def _refuse(self, each: _Asked, error: QeRLError) -> Iterator[Answer]:
        """Answer a request of the session with an error."""
        del self._open[each.number]
        yield each.number, error

    def _score(self, host: Host) -> Iterator[Answer]:
        """Score the prompts for which it was requested, each alone if together they are refused; yields
        refusals."""
        asked = [each for each in self._open.values() if each.to_score and each.request.wanted()]
        if asked:  # running out of memory in this pass would lower its tokens per forward permanently
            self._memory.release()
        for each, error in _refused(asked, partial(self._score_together, host)):
            yield from self._refuse(each, error)

    def _score_together(self, host: Host, asked: Sequence[_Asked]) -> None:
        found = host.score([each.request for each in asked])
        for each, scores in zip(asked, found, strict=True):
            each.scores = scores

    def _start(self, session: Session, asked: Sequence[_Asked]) -> Iterator[Answer]:
        """Begin the samples of requests; those of equal prompts share one prefill.

        Yields:
            Refusals; a request that is refused while others run is enqueued again instead.
        """
        self._open |= {each.number: each for each in asked}
        by_prompt: dict[tuple[int, ...], list[_Asked]] = {}
        for each in asked:
            if each.request.wanted():
                by_prompt.setdefault(each.request.prompt, []).append(each)
            else:
                yield from self._refuse(each, given_up())
        by_count: dict[int, list[_Asked]] = {}
        for same in by_prompt.values():
            by_count.setdefault(sum(len(each.unfinished) for each in same), []).extend(same)
        for together in by_count.values():
            for each, error in _refused(together, partial(self._begin, session)):
                if session.busy:
                    each.refused = True
                    self._enqueue([self._open.pop(each.number)])
                else:
                    yield from self._refuse(each, error)

    def _begin(self, session: Session, asked: Sequence[_Asked]) -> None:
        """Begin requests that are ordered by prompt, with equally many samples for every prompt."""
        begun = [(each, index) for each in asked for index in each.unfinished]
        prompts = list(dict.fromkeys(each.request.prompt for each in asked))
        indices = session.start(
            prompts,
            len(begun) // len(prompts),
            [each.params_of(index) for each, index in begun],
            seeds=[derive_seed("request", each.request.seed, index) for each, index in begun],
            begun=[each.begun.get(index, Begun([], [], [])) for each, index in begun],
        )
        self._begun.update(zip(indices, begun, strict=True))

    def _next(self, session: Session) -> Iterator[Answer]:
        """Decode one round; yields the answers of requests whose samples have all ended."""
        before = session.prefilled_tokens
        turns = session.next(one_round=True)
        self.prefilled_tokens += session.prefilled_tokens - before
        oldest = next((each for each in self.waiting if each.refused), None)
        if turns and oldest:
            oldest.refused = False
        for ended in turns:
            session.finish(ended.index)
            each, index = self._begun.pop(ended.index)
            each.samples[index] = ended.completion
            if len(each.samples) == each.request.num_samples:
                del self._open[each.number]
                yield each.number, each.result()


def check_tokens(what: str, token_ids: Sequence[int], vocabulary: int) -> None:
    """Raise if the model does not have these tokens; ``what`` begins the error.

    Raises:
        QeRLError: There are no tokens, or one is out of range.
    """
    if not len(token_ids):
        raise QeRLError(f"{what} is empty; it needs at least one token.")
    if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
        raise QeRLError(
            f"{what} has the id {wrong}, and this model has {vocabulary} tokens; use its own tokenizer."
        )
