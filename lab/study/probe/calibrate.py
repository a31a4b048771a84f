"""Strengths at which a measured quantity has wanted values.

The quantity rises with the strength, about as a power of it (KL as its square), and is measured with the same
random numbers each time, so it is a smooth curve but for steps where one of few texts changes. The first
round measures a grid; every later round measures, for each target, the point at which the straight line in
logarithms between the two neighbours of the target meets it. One pass of the model measures all points of a
round, so four targets cost what one does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qerl.errors import QeRLError


@dataclass(frozen=True)
class Calibration:
    """Strengths and what was measured there.

    Attributes:
        strengths: One for each target.
        measured: The quantity at these.
        curve: All points that were measured, as (strength, value), by strength.
    """

    strengths: list[float]
    measured: list[float]
    curve: list[tuple[float, float]]


def find_strengths(
    measure: Callable[[Sequence[float]], Sequence[float]],
    targets: Sequence[float],
    low: float,
    high: float,
    tolerance: float = 0.03,
    grid: int = 8,
    rounds: int = 6,
) -> Calibration:
    """The strength of each target.

    Args:
        measure: The quantity at each of some strengths, above 0 except where rounding makes it less.
        targets: Wanted values, above 0.
        low, high: Range that is searched, above 0.
        tolerance: How far, relative to the target, a measured value may be off.
        grid: Points of the first round.
        rounds: At most, the first included; the nearest point is taken where the tolerance is not met by
        then.

    Raises:
        QeRLError: A target is not reached within the range.
    """
    ratio = (high / low) ** (1 / (grid - 1))
    points = [low * ratio**i for i in range(grid)]
    table: dict[float, float] = {}
    for _ in range(rounds):
        table |= dict(zip(points, measure(points), strict=True))
        points = [_between(table, target) for target in targets if _off(table, target) > tolerance]
        points = [point for point in dict.fromkeys(points) if point not in table]
        if not points:
            break
    nearest = [min(table, key=lambda point: abs(table[point] - target)) for target in targets]
    return Calibration(nearest, [table[point] for point in nearest], sorted(table.items()))


def _off(table: dict[float, float], target: float) -> float:
    return min(abs(value - target) for value in table.values()) / target


def _between(table: dict[float, float], target: float) -> float:
    """Where the straight line in logarithms between the neighbours of the target meets it."""
    points = sorted(point for point in table if math.isfinite(table[point]))
    for left, right in pairwise(points):
        if table[left] <= target <= table[right]:
            y0, y1 = (math.log(max(table[point], target * 1e-6)) for point in (left, right))
            share = (math.log(target) - y0) / (y1 - y0) if y1 > y0 else 0.5
            share = min(max(share, 0.02), 0.98)  # an end was measured already
            return left ** (1 - share) * right**share
    raise QeRLError(
        f"No strength between {points[0]:g} and {points[-1]:g} gives {target:g}: measured are "
        f"{table[points[0]]:.3g} to {table[points[-1]]:.3g}; choose another target."
    )
