"""Held-out problems for data that comes without a test split.

Problems are ordered by a hash of their text, and the held-out ones are the first in that order. No random
numbers are drawn, so neither the order of the rows nor the seed of a run can move a problem into the other
set, and two copies of one problem never end up on both sides.
"""

from qerl.seeding import derive_seed


def position(problem: str) -> float:
    """Place of a problem in the held-out order, uniform in [0, 1) and the same on every machine."""
    return derive_seed("held out", problem) / 2**63
