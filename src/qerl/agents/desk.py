"""The desk of a rollout: its open trajectories, and the queue of requests from their agents.

The server's thread calls the desk (`qerl.endpoint.http.Desk`), which tokenizes and queues requests; the
engine's thread (`qerl.agents.play`) takes them between two rounds of the engine. Tokenizing thus happens in
the server's thread, mostly while a round runs on the device.
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
"""The model name under which agents request the policy."""

_LOOK_S = 0.2
"""Seconds between two checks of the agents' time limits while no request arrives."""

_GAP_S, BURST_S = 0.005, 0.5
"""Seconds. While the engine is idle, requests that follow each other within `_GAP_S` are started together, so
that the samples of a group share their prefill; so are those of agents that have just started and whose
clients are still connecting. `BURST_S` bounds both waits."""


@dataclass(eq=False)
class OpenSequence:
    """A sequence of the engine.

    Attributes:
        index: Its number in the session.
        limits: Limits of its current turn.
        last: Its current or last turn.
        params: Its sampling parameters, without the stops of its turns.
        seed: The seed in its request; None if the request has none.
    """

    index: int
    limits: TurnLimits
    last: Turn
    params: SamplingParams
    seed: int | None


@dataclass(eq=False)
class Request:
    """A queued or running request.

    Attributes:
        asked, reply: The request as parsed, and its pending answer.
        place: The place in the history at which the request continues.
        prompt_ids: All tokens before its continuations.
        choices: Continuations that have ended, by number.
    """

    asked: Asked
    reply: Reply
    place: Place
    prompt_ids: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)


@dataclass(eq=False)
class Episode:
    """A running trajectory.

    Attributes:
        environment: Its environment.
        seed: The seed from which those of its sequences are derived.
        key: The API key of its clients.
        history: Its conversations.
        replies: Replies to its requests, by `Asked.fingerprint`.
        sequences: Its unfinished sequences in the engine, by number.
        running: Future of the agent, once it is scheduled.
        until: Deadline of the agent on the monotonic clock, once it runs.
        is_open: Whether requests are accepted.
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
    """Queues the requests of a rollout's agents (`qerl.endpoint.http.Desk`); thread-safe.

    Args:
        tokenizer: The policy's tokenizer.
        templates: The policy's chat templates.

    Attributes:
        asked: Queue of requests, each with its episode.
        rendering: Lock to hold while rendering, and while reading or writing a history.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templates: Templates) -> None:
        self._tokenizer, self._templates = tokenizer, templates
        self._lock, self.rendering = threading.Lock(), threading.Lock()
        self._episodes: dict[str, Episode] = {}
        self._prompts: dict[str, list[int]] = {}  # per rollout, because a template may write the date
        self._changed = threading.Event()
        self.asked: queue.SimpleQueue[tuple[Episode, Request]] = queue.SimpleQueue()

    def open(self, episodes: Sequence[Episode]) -> None:
        """Accept requests of these trajectories, and no longer those of the previous ones."""
        with self._lock:
            self._episodes, self._prompts = {episode.key: episode for episode in episodes}, {}

    def close(self, episode: Episode) -> None:
        """Refuse further requests of a trajectory, and answer the pending ones with an error."""
        with self._lock:
            episode.is_open = False
            replies = [*episode.replies.values()]
        for reply in replies:
            reply.settle(trajectory_ended())

    def wait_for_burst(self, more: Callable[[], bool]) -> None:
        """Wait until a request has arrived or an agent has ended, and until nothing follows within `_GAP_S`.

        Returns after `_LOOK_S` if nothing happens.

        Args:
            more: Returns True while further requests are expected although none has followed.
        """
        if self._changed.wait(_LOOK_S):
            until = time.monotonic() + BURST_S
            while time.monotonic() < until:
                self._changed.clear()
                if not (self._changed.wait(_GAP_S) or more()):
                    break
        self._changed.clear()

    def wake(self) -> None:
        """Wake `wait_for_burst`."""
        self._changed.set()

    async def models(self, key: str) -> Sequence[str]:
        """See `Desk.models`."""
        self._episode(key)
        return [MODEL]

    async def ask(self, key: str, asked: Asked) -> Reply:
        """See `Desk.ask`; a repeated request gets the reply of the first one."""
        episode = self._episode(key)
        check_model(asked.model, [MODEL])
        reply = episode.replies.get(asked.fingerprint)
        if episode.is_open and reply is not None and not isinstance(reply.outcome, ApiError):
            return reply
        # The samples of a group share their first prompt; later prompts differ, and are not cached.
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
        """See `Desk.left`. Nothing is cancelled: the client may ask again."""

    def _episode(self, key: str) -> Episode:
        with self._lock:
            episode = self._episodes.get(key)
        if episode is None:
            raise ApiError(
                "The key belongs to no trajectory of this rollout; an agent must use the api_key of its "
                "endpoint.",
                401,
                code="invalid_api_key",
            )
        return episode


def trajectory_ended() -> ApiError:
    return ApiError(
        "The trajectory of this key has ended: its agent has returned, its reward was sent, or its time "
        "limit passed; it gets no more tokens.",
        code="trajectory_ended",
    )
