"""Which problems are held out of data that comes without a test split.

Problems are ordered by a hash of their text, and the first in that order are held out. No random numbers are
drawn, so neither the order of the rows nor the seed of a run can move a problem into the other set, and two
copies of one problem are always in the same set.
"""

from qerl.seeding import derive_seed


def holdout_rank(problem: str) -> float:
    """The place of a problem in the held-out order: uniform in [0, 1), and the same on every machine."""
    return derive_seed("held out", problem) / 2**63
