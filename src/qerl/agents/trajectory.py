"""A trajectory: one completion in which the policy and others took turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qerl.rollout.engine import Completion, FinishReason

Message = dict[str, Any]
"""A message as chat templates take it: a role, a content, perhaps calls of tools."""

EndReason = Literal["stop", "length", "turns", "tool", "error"]
"""Why a trajectory ended: ``stop`` (the policy called nothing more, or its environment was through),
``length`` (no room for a further token of the policy), ``turns`` (as many as it may have), ``tool`` (a call
failed, and that ends it), ``error`` (logits that were not finite)."""

ThoughtsClosed = Literal["model", "budget"]
"""Who closed the thoughts of a trajectory: the budget if it closed any of them, else the model itself."""


@dataclass
class Trajectory:
    """The policy's turns and the others' answers, in order.

    Attributes:
        prompt_ids: Tokens before it.
        token_ids: Tokens of the whole completion.
        written: For each of them 1 if the policy drew it, 0 if others wrote it.
        logprobs: Natural log-probability of each token under the policy that drew it, 0.0 at those of others.
        entropies: Entropy in nats of the distribution that it was drawn from, 0.0 at those of others.
        messages: The same as messages.
        turn_start: Tokens before the policy's present or last turn.
        turns: Number of the policy's turns.
        first: Tokens of its first turn.
        calls, failures: Calls of tools or of the environment, and how many of them failed.
        end: Why it ended; None while it goes on.
        thoughts: Who closed its thoughts, where there is a budget of thinking; else None.
        choices: Experts of its tokens up to the policy's last turn, as of `Completion.choices`.
        forks: Where an agent has written its history anew, the other conversations of the same trajectory;
            what they have in common with it or with each other is the policy's in the first alone.
    """

    prompt_ids: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turn_start: int = 0
    turns: int = 0
    first: int = 0
    calls: int = 0
    failures: int = 0
    end: EndReason | None = None
    thoughts: ThoughtsClosed | None = None
    choices: np.ndarray | None = field(default=None, compare=False)
    forks: list["Trajectory"] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason:
        """The reason of its end, as an engine gives it for a completion."""
        return self.end if self.end in ("length", "error") else "stop"

    @property
    def turn(self) -> list[int]:
        """Tokens of the policy's turn, with others' tokens within it."""
        return self.token_ids[self.turn_start :]

    def write(self, turn: Completion) -> None:
        """Append a turn of the policy, or a part of it."""
        self.token_ids += turn.token_ids
        self.written += [1] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.entropies += turn.entropies
        self.choices = turn.choices

    def end_turn(self, message: Message) -> None:
        """Count the policy's turn, which is whole, and keep it as a message."""
        self.turns += 1
        self.messages.append(message)
        if self.turns == 1:
            self.first = len(self.token_ids)

    def hear(self, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Append the others' answer, as tokens and as messages; the policy's next turn begins."""
        self.insert(token_ids)
        self.messages += messages
        self.turn_start = len(self.token_ids)

    def insert(self, token_ids: Sequence[int]) -> None:
        """Append text of others within a turn of the policy."""
        self.token_ids += token_ids
        for column in (self.written, self.logprobs, self.entropies):
            column += [0] * len(token_ids)
