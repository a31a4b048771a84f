"""A guessing game of several turns: find a whole number, told after each guess to go higher or lower.

The number is the row's ``answer``, which the prompt does not show; the task ``guess_number`` has such rows. A
policy that halves the range each time needs about log2(range) guesses, one that ignores the answers about
half of the range, so the game teaches the policy to use answers from earlier turns.
"""

import re
from typing import Any

from qerl.errors import QeRLError

_INTEGER = re.compile(r"-?\d+")


class GuessNumber:
    """The game of one row; its reward is 1 divided by the number of guesses, 0 if the number is not found.

    Args:
        guesses: Maximum number of guesses in an episode.
    """

    def __init__(self, guesses: int = 7) -> None:
        if guesses < 1:
            raise QeRLError(f"guesses is {guesses}; a game of guess_number needs at least one.")
        self._limit = guesses
        self._number = 0
        self._made = 0
        self._found = False

    def reset(self, answer: str, **row: Any) -> None:
        """Hide the row's number, which adds nothing to the prompt.

        Raises:
            QeRLError: The answer is no whole number.
        """
        if not _INTEGER.fullmatch(answer.strip()):
            raise QeRLError(
                f"guess_number hides the row's answer, which is {answer!r}; use the task guess_number, or "
                "rows whose answer is a whole number."
            )
        self._number = int(answer)
        self._made = 0
        self._found = False

    def respond(self, text: str) -> str | None:
        """Return whether the turn's last whole number is too low or too high; None ends the game, after a
        hit, after the last guess, or if the turn states no number."""
        stated = _INTEGER.findall(text)
        if not stated:
            return None
        self._made += 1
        guess = stated[-1][:20]  # a longer number is as wrong, and Python refuses to read very long ones
        self._found = int(guess) == self._number
        if self._found or self._made == self._limit:
            return None
        if int(guess) < self._number:
            return f"{guess} is too low; guess higher."
        return f"{guess} is too high; guess lower."

    def get_reward(self) -> float:
        """1 divided by the guesses made if the last one was right, else 0."""
        return 1.0 / self._made if self._found else 0.0
