"""A stop of tokens, where sequences of one session have different ones."""

from collections.abc import Iterable, Sequence

from qerl.rollout.stops import Stop


class StopTokens(Stop):
    """Any of these tokens ends a turn, which includes it."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = frozenset(ids)

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        places = range(checked, len(token_ids))
        return next((place + 1 for place in places if token_ids[place] in self._ids), None)
