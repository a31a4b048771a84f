"""Where a rollout's agents ask: their trajectories, and the requests that were not taken yet.

The server's thread calls the desk (`qerl.endpoint.http.Desk`) and leaves requests there; the thread that
draws (`qerl.agents.play`) takes them between two rounds of the engine. A request becomes tokens here, in the
server's thread, which mostly is while the engine's round is on the device.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from qerl.agents.chat import Templates, decoded
from qerl.agents.outside import Endpoint
from qerl.endpoint.bodies import ApiError, Asked
from qerl.endpoint.history import History, Place, Turn
from qerl.endpoint.http import check_model
from qerl.endpoint.reply import Choice, Reply
from qerl.endpoint.stops import TurnLimits
from qerl.rollout.engine import SamplingParams

MODEL = "policy"
"""The name by which agents ask for the policy."""

_LOOK_S = 0.2
"""Seconds between two looks at the agents' time while nothing is asked."""

_GAP_S, BURST_S = 0.005, 0.5
"""Where nothing is drawn, requests that follow each other within the first are begun together, so that the
samples of a group share their prompt; so are those of agents that have just begun, and whose clients make
their connections. The second bounds both waits."""


@dataclass(eq=False)
class OpenSequence:
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
class Request:
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
class Episode:
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
    sequences: dict[int, OpenSequence] = field(default_factory=dict)
    running: "Future[None] | None" = None
    until: float = float("inf")
    is_open: bool = True


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
        self._episodes: dict[str, Episode] = {}
        self._prompts: dict[str, list[int]] = {}  # of this rollout, as a template may write the date
        self._changed = threading.Event()
        self.asked: queue.SimpleQueue[tuple[Episode, Request]] = queue.SimpleQueue()

    def open(self, episodes: Sequence[Episode]) -> None:
        """Take requests of some trajectories, and of those that were open before no longer."""
        with self._lock:
            self._episodes, self._prompts = {episode.key: episode for episode in episodes}, {}

    def close(self, episode: Episode) -> None:
        """Take no more requests of a trajectory; those that wait for an answer hear of it."""
        with self._lock:
            episode.is_open = False
            replies = [*episode.replies.values()]
        for reply in replies:
            reply.settle(trajectory_ended())

    def wait_for_burst(self, more: Callable[[], bool]) -> None:
        """Wait until something was asked, or an agent has ended, and no more follows close behind; for want
        of either a moment.

        Args:
            more: Says whether more is to be expected, though it does not follow as close.
        """
        if self._changed.wait(_LOOK_S):
            until = time.monotonic() + BURST_S
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
                raise trajectory_ended()
            name = f"{key[-12:]}{len(episode.replies)}"
            reply = episode.replies[asked.fingerprint] = Reply(name, asked.n)
            self.asked.put((episode, Request(asked, reply, place)))
        self._changed.set()
        return reply

    def reward(self, key: str, reward: float) -> None:
        """See `Desk.reward`."""
        episode = self._episode(key)
        if not episode.is_open:
            raise trajectory_ended()
        episode.environment.reward = reward
        self._changed.set()

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Desk.decode`."""
        return decoded(self._tokenizer, token_ids)

    def left(self, reply: Reply) -> None:
        """See `Desk.left`; the client may ask again."""

    def _episode(self, key: str) -> Episode:
        with self._lock:
            episode = self._episodes.get(key)
        if episode is None:
            raise ApiError(
                "The key belongs to no trajectory of this rollout; an agent takes the one that it was given.",
                401,
                code="invalid_api_key",
            )
        return episode


def trajectory_ended() -> ApiError:
    return ApiError(
        "The trajectory of this key has ended: its agent has returned, its reward was sent, or its time was "
        "up; nothing more is drawn for it.",
        code="trajectory_ended",
    )
