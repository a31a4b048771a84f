"""Stops that end the turn of a request, and stream its tokens as they are drawn.

The stops of a sequence are fixed when the engine starts it, but each request that continues it may have other
limits and stop texts. So a sequence of the endpoint has one pair of stops, which read the limits of the
current turn's request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qerl.rollout.stops import Stop


@dataclass(eq=False)
class TurnLimits:
    """The limits that the request of a sequence's current turn sets.

    Attributes:
        max_tokens: Maximum number of tokens of the turn; None for no limit of its own.
        texts: The stop for the request's stop texts; None without any.
        tell: Receives the tokens that are final, in the order in which they are drawn; None if the answer is
            not streamed.
        wanted: Returns False once the turn is no longer wanted.
    """

    max_tokens: int | None = None
    texts: Stop | None = None
    tell: Callable[[list[int]], None] | None = None
    wanted: Callable[[], bool] = field(default=lambda: True)

    def stops(self) -> tuple[Stop, Stop]:
        """Return the stops of the sequence, to pass to the engine at its start."""
        return _Length(self), _Text(self)


class _Length(Stop):
    """A stop that ends a turn at the maximum number of tokens of its request."""

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
    """A stop that ends a turn at a stop text of its request, or once it is unwanted; streams its tokens."""

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
        """See `Stop.end`. Tokens after ``checked`` may still be cut off and are not streamed yet."""
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
