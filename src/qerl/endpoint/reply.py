"""A pending answer, shared by the engine's thread and the threads that send it.

The engine's thread adds tokens and the outcome; a callback only wakes the sender, which then reads both. A
repeated request gets the reply of the first one, from its beginning, so a reply may have several readers.
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
        message: See `Turn.message`.
        token_ids: All drawn tokens, including a stop token and stop texts.
        logprobs: Natural log-probability of each token, at the temperature at which it was drawn.
        finish_reason: The reason in OpenAI's terms.
    """

    message: Message
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Outcome:
    """The whole answer.

    Attributes:
        prompt_ids: All tokens before the continuations.
        choices: The continuations.
    """

    prompt_ids: list[int]
    choices: list[Choice]


@dataclass(eq=False)
class Reply:
    """The state of an answer; made and updated by a `Desk`.

    Attributes:
        name: The name in the answer's id.
        choices: Number of continuations.
        drawn: Token ids of each continuation so far that can no longer be cut off.
        outcome: The answer or an error; None until either is known.
        wanted: False once no client waits for the answer.
        created: Time of the request, in seconds since 1970; repeated requests share it.
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
        """Append tokens to a continuation."""
        self.drawn[choice] += token_ids
        self._wake()

    def settle(self, outcome: Outcome | ApiError) -> None:
        """Set the outcome once; later calls have no effect."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = outcome
        self._wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call a function now, and on each update in the thread that makes it; it must not block."""
        with self._lock:
            self._wakers.append(wake)
        wake()

    def leave(self, wake: Callable[[], None]) -> bool:
        """Stop calling a function of `listen`; return True if no other function is left."""
        with self._lock:
            self._wakers.remove(wake)
            return not self._wakers

    def _wake(self) -> None:
        with self._lock:
            wakers = [*self._wakers]
        for wake in wakers:
            wake()
