"""What ends the turn of one request, and tells its client of tokens as they are drawn.

A sequence of the engine has its stops from its start, and requests that continue it ask for other limits and
texts each time. So a sequence of the endpoint has one pair of stops, which look at what the request of the
present turn asks for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qerl.rollout.stops import Stop


@dataclass(eq=False)
class TurnLimits:
    """What the request of a sequence's present turn asks for.

    Attributes:
        max_tokens: Tokens of the turn at most; None for no limit of its own.
        texts: Looks for the request's stop texts; None without any.
        tell: Is given tokens that stay, in the order in which they are drawn; None where nobody listens.
        wanted: False once nobody wants the turn.
    """

    max_tokens: int | None = None
    texts: Stop | None = None
    tell: Callable[[list[int]], None] | None = None
    wanted: Callable[[], bool] = field(default=lambda: True)

    def stops(self) -> tuple[Stop, Stop]:
        """The stops of the sequence, to be handed to the engine when it starts."""
        return _Length(self), _Text(self)


class _Length(Stop):
    """Ends a turn that has as many tokens as its request allows."""

    reason = "length"

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        """See `Stop.reads_tokens`; it changes from turn to turn."""
        return self._limits.max_tokens is not None

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        if self._limits.max_tokens is None:
            return None
        place = start + self._limits.max_tokens
        return place if checked < place <= len(token_ids) else None


class _Text(Stop):
    """Ends a turn with one of its request's texts, or because nobody wants it; tells of tokens."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._turn, self._told = -1, 0

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]
        """See `Stop.reads_tokens`; it changes from turn to turn."""
        return self._limits.texts is not None or self._limits.tell is not None

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`. Tokens behind ``checked`` may still be cut off, so they are told the next time."""
        limits = self._limits
        if not limits.wanted():
            return checked + 1
        if limits.tell is not None:
            if start != self._turn:
                self._turn, self._told = start, start
            if checked > self._told:
                limits.tell(list(token_ids[self._told : checked]))
                self._told = checked
        if limits.texts is None:
            return None
        return limits.texts.end(prompt_ids, token_ids, start, checked)
