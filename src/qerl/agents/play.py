"""Rollouts of external agents: the loop that completes their requests, until all agents have ended.

`Endpoints` holds the objects that outlive a rollout, the server and the process of agents; a `_Play` is one
rollout. Its thread drives the engine: it starts the agents, takes their requests from the desk
(`qerl.agents.desk`) between two rounds of the engine, and answers them while the next round is on the device.
"""

import asyncio
import contextlib
import gc
import queue
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.agents.chat import Templates
from qerl.agents.desk import BURST_S, MODEL, EndpointDesk, Episode, OpenSequence, Request, trajectory_ended
from qerl.agents.outside import Endpoint
from qerl.agents.process import AgentProcess, EndpointOf, run
from qerl.agents.trajectory import Trajectory
from qerl.calls.beside import GRACE_S, Beside
from qerl.endpoint.bodies import ApiError, Asked
from qerl.endpoint.history import Branch, Place, Turn
from qerl.endpoint.http import Routes
from qerl.endpoint.listening import Listening
from qerl.endpoint.reply import Outcome
from qerl.endpoint.stops import TurnLimits
from qerl.errors import QeRLError
from qerl.rollout.engine import Completion, Ended, NormOffsets, RolloutEngine, SamplingParams, Session
from qerl.rollout.stops import StopStrings
from qerl.seeding import derive_seed

_YOUNG = 50_000
"""Number of new objects that starts a collection of Python's youngest generation, in a rollout."""


class Endpoints:
    """The endpoint of a policy, kept over rollouts.

    Args:
        tokenizer: The policy's tokenizer, with a chat template.
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
        weakref.finalize(self, self._process.close)  # a trainer has no close
        self._listening: Listening | None = None

    def close(self) -> None:
        """Stop the server and the process of agents."""
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
        """Run the agent of each environment until it returns, fails or times out; return the trajectories.

        Args:
            engine: Samples from the policy.
            params, norm_offsets: Arguments of the session.
            environments: One per trajectory, already reset.
            seeds: One per environment.
            fixed: Whether to refuse requests whose temperature or filters differ from the session's.
        """
        first = environments[0]
        if self._listening is None:
            routes = Routes(self._desk, rewarded=True).routes()
            self._listening = Listening(routes, first.host, first.port)
            weakref.finalize(self, self._listening.close)
        episodes = [
            Episode(environment, seed, f"sk-qerl-{secrets.token_urlsafe(24)}")
            for environment, seed in zip(environments, seeds, strict=True)
        ]
        # A new name of the policy: forks and late trajectories reuse only prefixes computed in this rollout.
        entered = engine.session(params, norm_offsets, growing=True, policy=object())
        with _collecting_seldom(), entered as session:
            loop = _Play(
                session, episodes, params, self._desk, self._templates, self._tokenizer, self._beside,
                self._process, fixed,
            )  # fmt: skip
            try:
                loop.run(self._listening.url, _vocabulary_of(engine, self._tokenizer))
            finally:
                loop.abandon()
                self._desk.open([])
        return [self._trajectory(episode) for episode in episodes]

    def _trajectory(self, episode: Episode) -> Trajectory:
        """Convert an episode to its first branch, with the others as forks."""
        branches = [_as_trajectory(branch) for branch in episode.history.branches()]
        if not branches:  # nothing was drawn; a masked token stands in
            pad = self._tokenizer.pad_token_id
            branches = [Trajectory([pad])]
            branches[0].hear([pad], [{"role": "assistant", "content": ""}])
            branches[0].end = "stop"
        first, *forks = branches
        first.forks = forks
        return first


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage less often while clients and the server share the interpreter with the engine's thread.

    The short-lived objects of a request survive collections after every 700 new objects, and are promoted to
    older generations, until a full collection walks over all objects of the process: half a second in which
    no other thread runs. With a larger threshold they are freed before they are promoted.
    """
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0 means that collection is turned off
        gc.set_threshold(max(thresholds[0], _YOUNG), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _vocabulary_of(engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of token ids that the model can embed."""
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


def _too_long(have: int, room: int) -> ApiError:
    return ApiError(
        f"The conversation is too long: it adds {have} tokens, but {max(room, 0)} are left of "
        "max_completion_length or of the model's positions; shorten it.",
        param="messages",
        code="context_length_exceeded",
    )


@dataclass(frozen=True)
class _Start:
    """A request that needs new sequences.

    Attributes:
        episode, request: The request and its episode.
        params: Sampling parameters of the request.
        room: Maximum number of tokens per sequence.
    """

    episode: Episode
    request: Request
    params: SamplingParams
    room: int


class _Play:
    """One run of `Endpoints.play`."""

    def __init__(
        self,
        session: Session,
        episodes: Sequence[Episode],
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
        self._drawing: dict[int, tuple[Episode, Request, int, OpenSequence]] = {}
        self._refused: list[tuple[Episode, Request]] = []  # for lack of memory, to try again
        self._texts: dict[tuple[str, ...], StopStrings] = {}
        self._untold: list[Callable[[], None]] = []  # calls that update replies
        self._vocabulary = 0

    def run(self, url: str, vocabulary: int) -> None:
        """Start the agents, and decode until all have ended."""
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
        """Deliver the results that have accumulated to their replies."""
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()

    def _beginning(self) -> bool:
        """Return True if an agent is about to start, or has just started and not sent a request yet."""
        running = [each for each in self._open if each.running is not None and not each.running.done()]
        begun = [each for each in running if each.until < float("inf")]
        if len(begun) < min(len(running), self._episodes[0].environment.at_once):
            return True
        moment = time.monotonic() - BURST_S
        return any(not each.replies and each.until - each.environment.timeout > moment for each in begun)

    def abandon(self) -> None:
        """Cancel the agents that still run, and close their episodes."""
        for episode in self._open:
            if episode.running is not None:
                episode.running.cancel()
            self._desk.close(episode)

    async def _agent(self, episode: Episode, url: str, at_once: asyncio.Semaphore) -> None:
        """Run one agent, and store its reward or failure."""
        environment = episode.environment
        given = EndpointOf(url, episode.key, MODEL)
        asked = environment.agent, given, dict(environment.row), environment.timeout
        async with at_once:
            episode.until = time.monotonic() + environment.timeout
            ran = await (self._process.run(*asked) if environment.process else run(self._beside, *asked))
        if not episode.is_open:  # its environment may belong to another trajectory by now
            return
        if ran.reward is not None:
            environment.reward = ran.reward
        elif ran.failure and not (ran.late and environment.reward is not None):  # a reward was sent
            environment.error = f"The agent failed: {ran.failure}"

    def _look(self) -> None:
        """End the trajectories whose agent has returned with a reward, failed, or timed out."""
        now = time.monotonic()
        self._beside.watch(self._episodes[0].environment.timeout + GRACE_S)
        for episode in [*self._open]:
            environment, running = episode.environment, episode.running
            assert running is not None, "its agent was started"
            if not environment.has_ended and running.cancelled():
                environment.error = "The agent was abandoned because it blocked the shared event loop."
            late = now > episode.until + GRACE_S
            if environment.process and not running.done():
                late = False  # `AgentProcess` kills a process that hangs; the next rollout gets another
            if late and not environment.has_ended:
                environment.error = f"The trajectory has no reward after {environment.timeout:g} s."
            if environment.has_ended and (running.done() or late):
                self._end(episode)

    def _end(self, episode: Episode) -> None:
        """End a trajectory: refuse its requests, and finish its sequences that are not being drawn."""
        self._open.remove(episode)
        self._desk.close(episode)
        drawing = {index for index, (of, *_) in self._drawing.items() if of is episode}
        for index in [*episode.sequences]:
            if index not in drawing:
                self._finish(episode, index)

    def _finish(self, episode: Episode, index: int) -> None:
        del episode.sequences[index]
        self._session.finish(index)

    # Requests

    def _take(self) -> None:
        """Start the requests that have arrived; those with the same prompt share its prefill."""
        waiting, self._refused = self._refused, []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._desk.asked.get_nowait())
        by_prompt: dict[tuple[int, ...], list[_Start]] = {}
        for episode, request in waiting:
            try:
                if not episode.is_open:
                    raise trajectory_ended()
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

    def _begin(self, episode: Episode, request: Request) -> "_Start | None":
        """Resume the sequence that a request continues, or return the sequences to start for it.

        Raises:
            ApiError: A token id is too large, no room is left, or the sampling parameters are refused.
        """
        asked = request.asked
        params, place = self._params_of(asked), request.place
        if max(place.given, default=0) >= self._vocabulary:
            raise ApiError(
                f"The prompt has the token id {max(place.given)}, but the model embeds only "
                f"{self._vocabulary} tokens.",
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
        """Start sequences, those of a prompt next to each other, with the same number for every prompt.

        Requests that do not fit into memory wait until others have ended, or are refused if none is running.
        """
        began: list[tuple[_Start, int, TurnLimits, SamplingParams, int]] = []
        for each in starts:
            asked, params = each.request.asked, each.params
            mark: tuple[int | str, ...] = (asked.fingerprint,)
            if asked.seed is not None:  # draws the same, whatever ends the turn
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
            sequence = OpenSequence(index, limits, turn, each.params, each.request.asked.seed)
            turn.handle = each.episode.sequences[index] = sequence
            self._drawing[index] = each.episode, each.request, at, sequence

    def _goes_on(
        self, episode: Episode, sequence: OpenSequence, place: Place, asked: Asked, params: SamplingParams
    ) -> bool:
        """Return True if a request can resume the sequence that drew the turn before it."""
        return (
            sequence.index in episode.sequences
            and sequence.index not in self._drawing
            and sequence.last is place.parent
            and sequence.params == params
            and asked.seed in (None, sequence.seed)
        )

    def _params_of(self, asked: Asked) -> SamplingParams:
        """Return the sampling parameters of a request, without the stops of its turns.

        Raises:
            ApiError: In training, they differ from the run's, with which the update computes.
        """
        given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            own = getattr(self._params, name)
            if self._fixed and value != own:
                raise ApiError(
                    f"{name} is {value}, but this run trains on samples with {name} {own}; leave it out, or "
                    f"set {name}: {value} in the run's settings.",
                    param=name,
                )
        return replace(self._params, **given)

    def _limit(self, limits: TurnLimits, request: Request, episode: Episode, choice: int) -> None:
        """Set the limits of a sequence's turn from its request."""
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
        """Record a turn of the policy; it is answered once the engine's next round has been launched."""
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

    def _answer(self, episode: Episode, request: Request, choice: int, turn: Turn, drawn: Completion) -> None:
        """Add a turn to the history, and answer its request once all its continuations have ended."""
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
