"""An answer in the making, between the thread that draws and those that send.

The drawing thread tells tokens and the outcome; whoever sends hears of both through a callback that only
wakes it. A request that is sent again gets the reply of the first, from its beginning, so several may read
one.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from qerl.endpoint.bodies import ApiError, Message

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Choice:
    """One continuation.

    Attributes:
        message: As of `Turn.message`.
        token_ids: As drawn, a stop token and stop texts included.
        logprobs: Natural log-probability of each, at the temperature that it was drawn at.
        finish_reason: As OpenAI names it.
    """

    message: Message
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Outcome:
    """The whole answer.

    Attributes:
        prompt_ids: Tokens that were read before a continuation begins.
        choices: The continuations.
    """

    prompt_ids: list[int]
    choices: list[Choice]


@dataclass(eq=False)
class Reply:
    """What is known of an answer; made by a `Desk`, which tells it.

    Attributes:
        name: A name of the answer.
        drawn: Token ids of each continuation so far that are known to stay.
        outcome: The answer, or why there is none; None while it is drawn.
        wanted: False once nobody waits for it any more.
        created: When it was asked for, in seconds since 1970; a request that is sent again has the same.
    """

    name: str
    choices: int = 1
    drawn: list[list[int]] = field(default_factory=list)
    outcome: Outcome | ApiError | None = None
    wanted: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wakers: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drawn = [[] for _ in range(self.choices)]

    def tell(self, choice: int, token_ids: list[int]) -> None:
        """Add tokens to a continuation."""
        self.drawn[choice] += token_ids
        self._wake()

    def settle(self, outcome: Outcome | ApiError) -> None:
        """Give the answer, once; later ones are left out."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = outcome
        self._wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call a function in whichever thread has told something, and at once; it must not wait."""
        with self._lock:
            self._wakers.append(wake)
        wake()

    def leave(self, wake: Callable[[], None]) -> bool:
        """Call a function of `listen` no more; whether nobody listens any longer."""
        with self._lock:
            self._wakers.remove(wake)
            return not self._wakers

    def _wake(self) -> None:
        with self._lock:
            wakers = [*self._wakers]
        for wake in wakers:
            wake()
