"""A trajectory: one completion in which the policy and others took turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from qerl.rollout.engine import Completion, FinishReason

Message = dict[str, Any]
"""A message as chat templates take it: a role, a content, and possibly tool calls."""

EndReason = Literal["stop", "length", "turns", "tool", "error"]
"""Why a trajectory ended: ``stop`` (a turn without calls, or the environment ended the episode), ``length``
(no room for another token of the policy), ``turns`` (the turn limit), ``tool`` (a failed call, with
``tool_errors: end``), ``error`` (logits that were not finite)."""

ThoughtsClosed = Literal["model", "budget"]
"""The side that closed the thinking blocks: ``budget`` if it closed any of them, else ``model``."""


@dataclass
class Trajectory:
    """The policy's turns and the others' answers, in order.

    Attributes:
        prompt_ids: Tokens of the prompt.
        token_ids: Tokens of the whole completion.
        written: For each token 1 if the policy drew it, 0 if others wrote it.
        logprobs: Natural log-probability of each token under the policy that drew it; 0.0 for others' tokens.
        entropies: Entropy in nats of the distribution that each token was drawn from; 0.0 for others' tokens.
        messages: The turns and answers as messages.
        turn_start: Number of tokens before the policy's current or last turn.
        turns: Number of the policy's turns.
        first: Number of tokens of the first turn.
        calls, failures: Number of tool or environment calls, and of those that failed.
        end: Why the trajectory ended; None while it runs.
        thoughts: The side that closed its thinking blocks; None without a thinking budget or a closed block.
        choices: Experts of its tokens up to the policy's last turn; see `Completion.choices`.
        forks: Other conversations of the same trajectory, if an agent has rewritten its history. A turn that
            several conversations share counts as the policy's only in the first of them.
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
        """The end reason as the finish reason of a completion."""
        return self.end if self.end in ("length", "error") else "stop"

    @property
    def turn(self) -> list[int]:
        """Tokens of the policy's current or last turn, including others' tokens inserted into it."""
        return self.token_ids[self.turn_start :]

    def write(self, turn: Completion) -> None:
        """Append a turn of the policy, or a part of it."""
        self.token_ids += turn.token_ids
        self.written += [1] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        self.entropies += turn.entropies
        self.choices = turn.choices

    def end_turn(self, message: Message) -> None:
        """Count the policy's completed turn, and append its message."""
        self.turns += 1
        self.messages.append(message)
        if self.turns == 1:
            self.first = len(self.token_ids)

    def hear(self, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Append an answer of others, as tokens and messages; the policy's next turn begins after it."""
        self.insert(token_ids)
        self.messages += messages
        self.turn_start = len(self.token_ids)

    def insert(self, token_ids: Sequence[int]) -> None:
        """Append tokens of others without ending the policy's turn."""
        self.token_ids += token_ids
        for column in (self.written, self.logprobs, self.entropies):
            column += [0] * len(token_ids)
