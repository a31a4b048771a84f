"""A thinking budget: a thinking block that is still open when the budget is spent is closed for the policy.

A reasoning model writes its thoughts between two tokens of its own, ``<think>`` and ``</think>``. If this
block is still open when the budget is spent, the turn is interrupted, the closing text is appended, and the
policy continues within its limits. The closing text is masked, like all text that the policy did not write:
the loss trains the truncated thoughts and the answer after them.

Runs and evaluations may combine the budget with stop strings; `stops_of` makes the stops of both.
"""

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.rollout.stops import Stop, StopStrings

OPENS, CLOSES = "<think>", "</think>"
"""The thinking tokens of Qwen3, DeepSeek-R1, SmolLM3 and models derived from them."""

CLOSING = "\n</think>\n\n"
"""The default closing text: that of Qwen3's template."""

_BLANK = 4
"""Maximum number of white space tokens between the token that opens a block and the turn."""


class ThinkingBudget(Stop):
    """A stop that interrupts a turn whose thinking block is still open after a number of drawn tokens.

    Args:
        tokenizer: Has one token that opens a thinking block and one that closes it.
        tokens: Number of drawn tokens per turn after which an open thinking block is closed.
        closing: The closing text.

    Attributes:
        closing_ids: Tokens of the closing text.

    Raises:
        QeRLError: The tokenizer has no such tokens, or ``closing`` does not close a thinking block.
    """

    reason = "pause"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: int, closing: str = CLOSING) -> None:
        found = [tokenizer.encode(text, add_special_tokens=False) for text in (OPENS, CLOSES)]
        if any(len(ids) != 1 for ids in found):
            name = tokenizer.name_or_path or "the tokenizer"
            raise QeRLError(
                f"thinking_budget needs {OPENS} and {CLOSES} as single tokens, which {name} does not have; "
                "remove it, or use a model that thinks."
            )
        (self._opens,), (self._closes,) = found
        self._tokenizer, self._tokens = tokenizer, tokens
        self.closing_ids: list[int] = tokenizer.encode(closing, add_special_tokens=False)
        if self._closes not in self.closing_ids or self._opens in self.closing_ids:
            raise QeRLError(
                f"thinking_end is {closing!r}, which does not end the thinking; include {CLOSES} in it."
            )

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        place = start + self._tokens
        if not checked < place <= len(token_ids):
            return None
        drawn = token_ids[start:place]
        for token in reversed(drawn):
            if token in (self._opens, self._closes):
                return place if token == self._opens else None
        before = [*prompt_ids, *token_ids[:start]]
        return place if self._is_open(before[-_BLANK - 1 :]) else None

    def closed_by_policy(self, before: Sequence[int], turn: Sequence[int], written: Sequence[int]) -> bool:
        """Return True if the policy itself closed a thinking block in a turn.

        Args:
            before: All tokens before the turn.
            turn: Tokens of the turn.
            written: For each token of the turn 1 if the policy drew it, 0 if others wrote it.
        """
        is_open = self._is_open(before[-_BLANK - 1 :])
        for token, own in zip(turn, written, strict=True):
            if token == self._closes and is_open and own:
                return True
            is_open = token == self._opens or (is_open and token != self._closes)
        return False

    def _is_open(self, token_ids: Sequence[int]) -> bool:
        """Return True if the tokens before a turn open a thinking block, with only white space after it."""
        if self._opens not in token_ids:
            return False
        behind = token_ids[len(token_ids) - list(reversed(token_ids)).index(self._opens) :]
        return not self._tokenizer.decode(behind).strip()


def thinking_of(stops: Sequence[Stop]) -> ThinkingBudget | None:
    """Return the thinking budget among these stops, or None."""
    return next((stop for stop in stops if isinstance(stop, ThinkingBudget)), None)


class StopSettings(Protocol):
    """Settings of the stops of a turn, named as in recipes."""

    @property
    def stop_strings(self) -> Sequence[str] | None: ...

    @property
    def thinking_budget(self) -> int | None: ...

    @property
    def thinking_end(self) -> str | None: ...  # None only without a budget


def stops_of(asked: StopSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[Stop, ...]:
    """Return the stops that end or interrupt turns besides stop tokens.

    Raises:
        QeRLError: There is a thinking budget, and the model has no thinking tokens or the closing text does
            not close a thinking block.
    """
    stops: list[Stop] = []
    if asked.stop_strings:
        stops.append(StopStrings(tokenizer, asked.stop_strings))
    if asked.thinking_budget is not None:
        assert asked.thinking_end is not None
        stops.append(ThinkingBudget(tokenizer, asked.thinking_budget, asked.thinking_end))
    return tuple(stops)
