"""Agents of their own: programs that speak OpenAI's chat API to the policy, and give back a reward.

    def agent(endpoint, row):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        said = client.chat.completions.create(model=endpoint.model, messages=row["prompt"])
        return float(row["answer"] in said.choices[0].message.content)

Each trajectory of a rollout is one run of the agent, with a key of its own. The agents run in threads, on the
event loop of `qerl.calls.beside` if they are coroutine functions, or somewhere else altogether, and ask as
they like; this thread draws. What they ask is taken in between two rounds of the engine, so that nobody waits
for anybody: a request that continues a conversation goes on with its sequence, whose keys and values are kept
(`Session.go_on`), and any other starts one (`qerl.endpoint.history` says which does), which computes what no
other has computed where the engine keeps prefixes.

An answer wakes the server and then its client, which take Python's lock from the thread that launches the
engine's work, some milliseconds for each of them. So answers go out once the next round was given to the
device: requests are then read and written while it computes, and not while it waits for the host. A turn
becomes text when its answer goes out, and a request becomes tokens in the server's thread, which mostly is at
that time too. Agents may run in a process of their own (`qerl.agents.process`), which leaves the server.

**What costs what.** An agent that raises, or whose time is up, costs its own row, as a tool that fails does.
A client that is gone costs nothing: what it asked for is drawn, and is there if it asks again. A request that
is sent again, word by word and in the same trajectory, gets the first one's answer, so it is not drawn or
counted twice; who wants another continuation asks for `n`, or with another `seed`. What was still being drawn
when a trajectory ended is left out.

**Sampling.** In training the temperature and the filters are the run's, because the update computes the
policy's log-probabilities with them; a request that asks for others is refused. An evaluation has no update,
and there a request that asks has what it asks for.

Seeds are keyed by the trajectory and by what a request says, so the order in which requests come in does not
matter. Which rows decode together follows from when agents answer; so a run that is repeated may differ in
the last bit of a log-probability, and at times by a token.
"""

import asyncio
import contextlib
import gc
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.agents.chat import Templates, decoded
from qerl.agents.process import Agent, AgentProcess, EndpointOf, named, run
from qerl.agents.trajectory import Trajectory
from qerl.calls.beside import GRACE_S, Beside
from qerl.endpoint.bodies import ApiError, Asked
from qerl.endpoint.history import Branch, History, Place, Turn
from qerl.endpoint.http import Routes, check_model
from qerl.endpoint.listening import Listening
from qerl.endpoint.reply import Choice, Outcome, Reply
from qerl.endpoint.stops import TurnLimits
from qerl.errors import QeRLError
from qerl.rollout.engine import Completion, Ended, NormOffsets, RolloutEngine, SamplingParams, Session
from qerl.rollout.stops import StopStrings
from qerl.seeding import derive_seed

MODEL = "policy"
"""The name by which agents ask for the policy."""

_LOOK_S = 0.2
"""Seconds between two looks at the agents' time while nothing is asked."""

_YOUNG = 50_000
"""New objects after which Python's collector looks at them, in a rollout."""

_GAP_S, _BURST_S = 0.005, 0.5
"""Where nothing is drawn, requests that follow each other within the first are begun together, so that the
samples of a group share their prompt; so are those of agents that have just begun, and whose clients make
their connections. The second bounds both waits."""


class Endpoint:
    """The environment of an agent of its own: one run of it, and its reward.

    Args:
        agent: What runs.
        timeout: Seconds that a trajectory may take.
        at_once: Agents that run at the same time; the others wait for their turn.
        host, port: Where the endpoint listens; port 0 takes a free one.
        process: Whether it runs in a process of agents beside this one (`qerl.agents.process`).

    Attributes:
        row: Columns of the row.
        reward: What the agent gave; None while there is none.
        error: Why there is none.
    """

    def __init__(
        self,
        agent: Agent,
        timeout: float = 600.0,
        at_once: int = 256,
        host: str = "127.0.0.1",
        port: int = 0,
        process: bool = False,
    ) -> None:
        if not callable(agent):
            raise QeRLError(f"The agent of an endpoint is a {type(agent).__name__}; pass a function.")
        if not 0 < timeout < float("inf"):
            raise QeRLError(f"timeout of the endpoint is {timeout}; give seconds above 0.")
        if at_once < 1:
            raise QeRLError(f"at_once of the endpoint is {at_once}; at least one agent must run at a time.")
        if process:
            named(agent)
        self.agent, self.timeout, self.at_once, self.host, self.port = agent, timeout, at_once, host, port
        self.process = process
        self.row: dict[str, Any] = {}
        self.reward: float | None = None
        self.error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is a reward, or a reason why there is none."""
        return self.reward is not None or self.error is not None

    def reset(self, **row: Any) -> None:
        """Take the row; the agent begins with the rollout."""
        self.row, self.reward, self.error = row, None, None

    def get_reward(self) -> float | None:
        """The reward of the trajectory.

        Raises:
            QeRLError: The agent failed.
        """
        if self.error is not None:
            raise QeRLError(self.error)
        return self.reward


@dataclass(eq=False)
class _Sequence:
    """A sequence of the engine.

    Attributes:
        index: Its number in the session.
        limits: What its present turn may have.
        last: Its present or last turn.
        params: Of its sampling, without the stops of its turns.
        seed: That its request gave; None where it gave none.
    """

    index: int
    limits: TurnLimits
    last: Turn
    params: SamplingParams
    seed: int | None


@dataclass(eq=False)
class _Request:
    """A request that is drawn.

    Attributes:
        asked, reply: It, and its answer in the making.
        place: Where it goes on.
        prompt_ids: Tokens before its turns.
        choices: Those that have ended, by number.
    """

    asked: Asked
    reply: Reply
    place: Place
    prompt_ids: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)


@dataclass(eq=False)
class _Episode:
    """A trajectory under way.

    Attributes:
        environment: Its.
        seed: By which its sequences are keyed.
        key: Its clients' key.
        history: What was said in it.
        replies: To its requests, by what they ask for.
        sequences: Of the engine that are not finished.
        running: The agent, once it runs.
        until: When its time is up, once it runs.
        is_open: Whether requests are taken.
    """

    environment: Endpoint
    seed: int
    key: str
    history: History = field(default_factory=History)
    replies: dict[str, Reply] = field(default_factory=dict)
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    running: "Future[None] | None" = None
    until: float = float("inf")
    is_open: bool = True


@dataclass(frozen=True)
class _Start:
    """A request for which sequences are to be started.

    Attributes:
        episode, request: It.
        params: Of its sampling.
        room: Tokens that each sequence may have.
    """

    episode: _Episode
    request: _Request
    params: SamplingParams
    room: int


class EndpointDesk:
    """Takes the requests of a rollout's agents (`qerl.endpoint.http.Desk`); thread-safe.

    Args:
        tokenizer: Of the policy.
        templates: Of the policy.

    Attributes:
        asked: Requests that were not taken yet, and whose they are.
        rendering: Held by whoever reads or writes a history, or renders.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templates: Templates) -> None:
        self._tokenizer, self._templates = tokenizer, templates
        self._lock, self.rendering = threading.Lock(), threading.Lock()
        self._episodes: dict[str, _Episode] = {}
        self._prompts: dict[str, list[int]] = {}  # of this rollout, as a template may write the date
        self._changed = threading.Event()
        self.asked: queue.SimpleQueue[tuple[_Episode, _Request]] = queue.SimpleQueue()

    def open(self, episodes: Sequence[_Episode]) -> None:
        """Take requests of some trajectories, and of those that were open before no longer."""
        with self._lock:
            self._episodes, self._prompts = {episode.key: episode for episode in episodes}, {}

    def close(self, episode: _Episode) -> None:
        """Take no more requests of a trajectory; those that wait for an answer hear of it."""
        with self._lock:
            episode.is_open = False
            replies = [*episode.replies.values()]
        for reply in replies:
            reply.settle(_over())

    def wait_for_burst(self, more: Callable[[], bool]) -> None:
        """Wait until something was asked, or an agent has ended, and no more follows close behind; for want
        of either a moment.

        Args:
            more: Says whether more is to be expected, though it does not follow as close.
        """
        if self._changed.wait(_LOOK_S):
            until = time.monotonic() + _BURST_S
            while time.monotonic() < until:
                self._changed.clear()
                if not (self._changed.wait(_GAP_S) or more()):
                    break
        self._changed.clear()

    def wake(self) -> None:
        """End a wait."""
        self._changed.set()

    async def models(self, key: str) -> Sequence[str]:
        """See `Desk.models`."""
        self._episode(key)
        return [MODEL]

    async def ask(self, key: str, asked: Asked) -> Reply:
        """See `Desk.ask`; what was asked before has the first reply."""
        episode = self._episode(key)
        check_model(asked.model, [MODEL])
        reply = episode.replies.get(asked.fingerprint)
        if episode.is_open and reply is not None and not isinstance(reply.outcome, ApiError):
            return reply
        # Samples of a group begin alike; what follows is a trajectory's own, and is not remembered.
        prompts = None if episode.replies else self._prompts
        with self.rendering:
            place = self._templates.place(asked, episode.history, prompts)
        with self._lock:
            if not episode.is_open:
                raise _over()
            name = f"{key[-12:]}{len(episode.replies)}"
            reply = episode.replies[asked.fingerprint] = Reply(name, asked.n)
            self.asked.put((episode, _Request(asked, reply, place)))
        self._changed.set()
        return reply

    def reward(self, key: str, reward: float) -> None:
        """See `Desk.reward`."""
        episode = self._episode(key)
        if not episode.is_open:
            raise _over()
        episode.environment.reward = reward
        self._changed.set()

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Desk.decode`."""
        return decoded(self._tokenizer, token_ids)

    def left(self, reply: Reply) -> None:
        """See `Desk.left`; the client may ask again."""

    def _episode(self, key: str) -> _Episode:
        with self._lock:
            episode = self._episodes.get(key)
        if episode is None:
            raise ApiError(
                "The key belongs to no trajectory of this rollout; an agent takes the one that it was given.",
                401,
                code="invalid_api_key",
            )
        return episode


def _over() -> ApiError:
    return ApiError(
        "The trajectory of this key has ended: its agent has returned, its reward was sent, or its time was "
        "up; nothing more is drawn for it.",
        code="trajectory_ended",
    )


def _too_long(have: int, room: int) -> ApiError:
    return ApiError(
        f"The conversation leaves no room: {have} tokens were to be added and {max(room, 0)} are left of "
        "max_completion_length or of the model's positions; shorten it.",
        param="messages",
        code="context_length_exceeded",
    )


class Endpoints:
    """The endpoint of a policy, for one rollout after the other.

    Args:
        tokenizer: Of the policy, with a chat template.
        template_kwargs: The template's own arguments.
        beside: Runs agents.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None,
        beside: Beside,
    ) -> None:
        self._tokenizer, self._beside = tokenizer, beside
        self._templates = Templates(tokenizer, template_kwargs)
        self._desk, self._process = EndpointDesk(tokenizer, self._templates), AgentProcess()
        weakref.finalize(self, self._process.close)  # a trainer has no end of its own
        self._listening: Listening | None = None

    def close(self) -> None:
        """End the server, and the process of agents."""
        self._process.close()
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def play(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        norm_offsets: NormOffsets | None,
        environments: Sequence[Endpoint],
        seeds: Sequence[int],
        fixed: bool,
    ) -> list[Trajectory]:
        """A trajectory of each environment, whose agent has then returned, failed, or lost its time.

        Args:
            engine: Samples from the policy.
            params, norm_offsets: Of the session.
            environments: Each was reset.
            seeds: One for each.
            fixed: Whether requests must not ask for another temperature or other filters than the session's.
        """
        first = environments[0]
        if self._listening is None:
            routes = Routes(self._desk, rewarded=True).routes()
            self._listening = Listening(routes, first.host, first.port)
            weakref.finalize(self, self._listening.close)
        episodes = [
            _Episode(environment, seed, f"sk-qerl-{secrets.token_urlsafe(24)}")
            for environment, seed in zip(environments, seeds, strict=True)
        ]
        # Nothing else has this name, so forks and late trajectories find what was computed in this rollout.
        entered = engine.session(params, norm_offsets, growing=True, policy=object())
        with _collecting_seldom(), entered as session:
            loop = _Play(
                session, episodes, params, self._desk, self._templates, self._tokenizer, self._beside,
                self._process, fixed,
            )  # fmt: skip
            try:
                loop.run(self._listening.url, engine_vocabulary(engine, self._tokenizer))
            finally:
                loop.abandon()
                self._desk.open([])
        return [self._trajectory(episode) for episode in episodes]

    def _trajectory(self, episode: _Episode) -> Trajectory:
        """What an update takes of an episode: its first branch, with the others as forks."""
        branches = [_as_trajectory(branch) for branch in episode.history.branches()]
        if not branches:  # it has said nothing; a token that nobody counts stands in
            pad = self._tokenizer.pad_token_id
            branches = [Trajectory([pad])]
            branches[0].hear([pad], [{"role": "assistant", "content": ""}])
            branches[0].end = "stop"
        first, *forks = branches
        first.forks = forks
        return first


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    """A block in which clients and the server share Python with the thread that draws.

    What a request leaves for a moment outlives collections of every 700 objects, and is counted as if it
    stayed, until all objects of the process are walked over, half a second in which nobody else runs. With
    longer intervals it is gone before.
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:  # else somebody has turned collections off
        gc.set_threshold(max(thresholds[0], _YOUNG), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def engine_vocabulary(engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> int:
    """Token ids are below this."""
    if engine.model is None:
        return len(tokenizer)
    embedding: Any = engine.model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def _as_trajectory(branch: Branch) -> Trajectory:
    last = branch.last.drawn
    assert last is not None, "a branch ends with a turn that has ended"
    return Trajectory(
        branch.prompt_ids,
        branch.token_ids,
        branch.written,
        branch.logprobs,
        branch.entropies,
        branch.messages,
        turn_start=len(branch.token_ids) - len(last.token_ids),
        turns=len(branch.turns),
        first=len(branch.last.path[0].drawn.token_ids) if branch.last.path[0].drawn else 0,
        calls=sum(len(turn.message.get("tool_calls", ())) for turn in branch.turns),
        end=last.finish_reason if last.finish_reason in ("length", "error") else "stop",
        choices=last.choices,
    )


class _Play:
    """One run of `Endpoints.play`."""

    def __init__(
        self,
        session: Session,
        episodes: Sequence[_Episode],
        params: SamplingParams,
        desk: EndpointDesk,
        templates: Templates,
        tokenizer: PreTrainedTokenizerBase,
        beside: Beside,
        process: AgentProcess,
        fixed: bool,
    ) -> None:
        self._session, self._episodes, self._params, self._desk = session, episodes, params, desk
        self._templates, self._tokenizer, self._beside, self._fixed = templates, tokenizer, beside, fixed
        self._process = process
        self._open = [*episodes]
        self._drawing: dict[int, tuple[_Episode, _Request, int, _Sequence]] = {}
        self._refused: list[tuple[_Episode, _Request]] = []  # for want of memory, until others have ended
        self._texts: dict[tuple[str, ...], StopStrings] = {}
        self._untold: list[Callable[[], None]] = []  # what replies are to be told
        self._vocabulary = 0

    def run(self, url: str, vocabulary: int) -> None:
        """Let agents begin, and draw until all have ended."""
        self._vocabulary = vocabulary
        self._desk.open(self._episodes)
        at_once = asyncio.Semaphore(self._episodes[0].environment.at_once)
        for episode in self._episodes:
            episode.running = self._beside.start(self._agent(episode, url, at_once))
            episode.running.add_done_callback(lambda _: self._desk.wake())
        while self._open:
            if self._session.busy:
                for ended in self._session.next(one_round=True, meanwhile=self._tell):
                    self._ended(ended)
            else:
                self._tell()
                self._desk.wait_for_burst(self._beginning)
            self._take()
            self._look()

    def _tell(self) -> None:
        """Tell replies what has come of their requests."""
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()

    def _beginning(self) -> bool:
        """Whether an agent is about to begin, or has begun a moment ago and not asked yet."""
        running = [each for each in self._open if each.running is not None and not each.running.done()]
        begun = [each for each in running if each.until < float("inf")]
        if len(begun) < min(len(running), self._episodes[0].environment.at_once):
            return True
        moment = time.monotonic() - _BURST_S
        return any(not each.replies and each.until - each.environment.timeout > moment for each in begun)

    def abandon(self) -> None:
        """Give up what still goes on."""
        for episode in self._open:
            if episode.running is not None:
                episode.running.cancel()
            self._desk.close(episode)

    async def _agent(self, episode: _Episode, url: str, at_once: asyncio.Semaphore) -> None:
        """Run one agent and keep what it gave."""
        environment = episode.environment
        given = EndpointOf(url, episode.key, MODEL)
        asked = environment.agent, given, dict(environment.row), environment.timeout
        async with at_once:
            episode.until = time.monotonic() + environment.timeout
            ran = await (self._process.run(*asked) if environment.process else run(self._beside, *asked))
        if not episode.is_open:  # its environment may be another trajectory's by now
            return
        if ran.reward is not None:
            environment.reward = ran.reward
        elif ran.failure and not (ran.late and environment.reward is not None):  # which was sent
            environment.error = f"The agent failed: {ran.failure}"

    def _look(self) -> None:
        """End the trajectories whose agent has returned with a reward, failed, or lost its time."""
        now = time.monotonic()
        self._beside.watch(self._episodes[0].environment.timeout + GRACE_S)
        for episode in [*self._open]:
            environment, running = episode.environment, episode.running
            assert running is not None, "its agent was started"
            if not environment.has_ended and running.cancelled():
                environment.error = "The agent was left behind with an event loop that it held up."
            late = now > episode.until + GRACE_S
            if environment.process and not running.done():
                late = False  # what hangs is ended with its process, for the next rollout has another
            if late and not environment.has_ended:
                environment.error = f"The trajectory has no reward after {environment.timeout:g} s."
            if environment.has_ended and (running.done() or late):
                self._end(episode)

    def _end(self, episode: _Episode) -> None:
        """Take no more of a trajectory, and give up what the engine holds of it."""
        self._open.remove(episode)
        self._desk.close(episode)
        drawing = {index for index, (of, *_) in self._drawing.items() if of is episode}
        for index in [*episode.sequences]:
            if index not in drawing:
                self._finish(episode, index)

    def _finish(self, episode: _Episode, index: int) -> None:
        del episode.sequences[index]
        self._session.finish(index)

    # Requests

    def _take(self) -> None:
        """Begin what was asked since, those with one prompt behind one prefill."""
        waiting, self._refused = self._refused, []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._desk.asked.get_nowait())
        by_prompt: dict[tuple[int, ...], list[_Start]] = {}
        for episode, request in waiting:
            try:
                if not episode.is_open:
                    raise _over()
                start = self._begin(episode, request)
            except ApiError as error:
                request.reply.settle(error)
                continue
            if start is not None:
                by_prompt.setdefault(tuple(request.prompt_ids), []).append(start)
        by_count: dict[int, list[_Start]] = {}
        for starts in by_prompt.values():
            by_count.setdefault(sum(each.request.asked.n for each in starts), []).extend(starts)
        for starts in by_count.values():
            self._start(starts)

    def _begin(self, episode: _Episode, request: _Request) -> "_Start | None":
        """Go on with the sequence of a request, or say what is to be started for it.

        Raises:
            ApiError: It asks for what it cannot have.
        """
        asked = request.asked
        params, place = self._params_of(asked), request.place
        if max(place.given, default=0) >= self._vocabulary:
            raise ApiError(
                f"The prompt has a token id of {max(place.given)}, and the model embeds {self._vocabulary}.",
                param="prompt",
            )
        before = place.parent.token_ids if place.parent is not None else []
        request.prompt_ids = before + place.given
        sequence = place.parent.handle if place.parent is not None else None
        if asked.n == 1 and sequence is not None and self._goes_on(episode, sequence, place, asked, params):
            if len(place.given) >= self._session.room(sequence.index):
                raise _too_long(len(place.given), self._session.room(sequence.index))
            turn = episode.history.begin(place)
            turn.handle, sequence.last = sequence, turn
            self._limit(sequence.limits, request, episode, 0)
            self._session.go_on(sequence.index, place.given)
            self._drawing[sequence.index] = episode, request, 0, sequence
            return None
        used = len(request.prompt_ids) - len(place.parent.path[0].given) if place.parent is not None else 0
        if params.max_tokens - used < 1:
            raise _too_long(len(place.given), params.max_tokens - used + len(place.given))
        return _Start(episode, request, params, params.max_tokens - used)

    def _start(self, starts: Sequence["_Start"]) -> None:
        """Start sequences, those of a prompt next to each other and every prompt with as many.

        What the engine has no memory for waits until others have ended, or is refused if there are none.
        """
        began: list[tuple[_Start, int, TurnLimits, SamplingParams, int]] = []
        for each in starts:
            asked, params = each.request.asked, each.params
            mark: tuple[int | str, ...] = (asked.fingerprint,)
            if asked.seed is not None:  # which draws alike, whatever ends the turn
                mark = (asked.seed, each.request.place.before)
            for at in range(asked.n):
                limits = TurnLimits()
                self._limit(limits, each.request, each.episode, at)
                own = replace(params, max_tokens=each.room, stops=(*params.stops, *limits.stops()))
                began.append((each, at, limits, own, derive_seed("asked", each.episode.seed, *mark, at)))
        prompts = [*dict.fromkeys(tuple(each.request.prompt_ids) for each in starts)]
        try:
            indices = self._session.start(
                prompts,
                len(began) // len(prompts),
                [params for *_, params, _ in began],
                [seed for *_, seed in began],
            )
        except QeRLError as error:
            for each in starts:
                if len(starts) > 1:
                    self._start([each])
                elif self._session.busy:
                    self._refused.append((each.episode, each.request))
                else:
                    each.request.reply.settle(ApiError(str(error), code="context_length_exceeded"))
            return
        for index, (each, at, limits, _, _) in zip(indices, began, strict=True):
            turn = each.episode.history.begin(each.request.place)
            sequence = _Sequence(index, limits, turn, each.params, each.request.asked.seed)
            turn.handle = each.episode.sequences[index] = sequence
            self._drawing[index] = each.episode, each.request, at, sequence

    def _goes_on(
        self, episode: _Episode, sequence: _Sequence, place: Place, asked: Asked, params: SamplingParams
    ) -> bool:
        """Whether a request can go on with the sequence that drew the turn before it."""
        return (
            sequence.index in episode.sequences
            and sequence.index not in self._drawing
            and sequence.last is place.parent
            and sequence.params == params
            and asked.seed in (None, sequence.seed)
        )

    def _params_of(self, asked: Asked) -> SamplingParams:
        """The sampling of a request, without the stops of its turns.

        Raises:
            ApiError: It asks for another one than the run's, whose update would not know of it.
        """
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            own = getattr(self._params, name)
            if self._fixed and value != own:
                raise ApiError(
                    f"{name} is {value} and this run trains on samples of {name} {own}; leave it out, or set "
                    f"{name}: {value} in the run's settings.",
                    param=name,
                )
        return replace(self._params, **given)

    def _limit(self, limits: TurnLimits, request: _Request, episode: _Episode, choice: int) -> None:
        """Let the turn of a sequence end as its request says."""
        asked, reply = request.asked, request.reply
        if asked.stop and asked.stop not in self._texts:
            self._texts[asked.stop] = StopStrings(self._tokenizer, asked.stop)
        limits.max_tokens = asked.max_tokens
        limits.texts = self._texts[asked.stop] if asked.stop else None
        limits.tell = (
            (lambda ids: self._untold.append(lambda: reply.tell(choice, ids))) if asked.stream else None
        )
        limits.wanted = lambda: episode.is_open

    def _ended(self, ended: Ended) -> None:
        """Take in a turn of the policy; it is answered once the engine's next round is under way."""
        episode, request, choice, sequence = self._drawing.pop(ended.index)
        drawn, turn = ended.completion, sequence.last
        if not episode.is_open:
            self._finish(episode, ended.index)
        elif not drawn.token_ids:
            self._finish(episode, ended.index)
            refusal = _too_long(len(turn.given), 0)
            self._untold.append(lambda: request.reply.settle(refusal))
        else:
            self._untold.append(lambda: self._answer(episode, request, choice, turn, drawn))

    def _answer(
        self, episode: _Episode, request: _Request, choice: int, turn: Turn, drawn: Completion
    ) -> None:
        """Keep a turn, and answer its request if it was the last one of it."""
        if not episode.is_open:
            return
        ends = drawn.token_ids[-1] in self._params.stop_token_ids
        with self._desk.rendering:
            said = self._templates.choice(request.asked, request.prompt_ids, drawn, ends)
            episode.history.end(turn, drawn, said.message)
        if drawn.finish_reason == "error":
            request.reply.settle(ApiError("The policy gave logits that are not finite.", 500))
            return
        request.choices[choice] = said
        if len(request.choices) == request.asked.n:
            choices = [request.choices[at] for at in range(request.asked.n)]
            request.reply.settle(Outcome(request.prompt_ids, choices))
