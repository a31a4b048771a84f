"""Lengths at which the completions of a benchmark end, the same for every engine and in every call.

Completions of equal length hide what a rollout's tail costs: the last long ones decode alone, in rows that
were meant for many. Here each sample gets a limit of its own, so nothing depends on what is sampled. A limit
ends a completion as a stop token does.
"""

import json
import random
import statistics
from pathlib import Path

from qerl.errors import QeRLError

SIGMA = 0.7
"""Standard deviation of a lognormal length's logarithm: 0.8 times the mean is the lengths' own."""

KINDS = "equal, uniform, lognormal:MEAN or file:LENGTHS.json"


def draw_lengths(spec: str, count: int, most: int, seed: int = 0) -> list[int]:
    """Tokens of so many completions, the same ones for the same arguments.

    Args:
        spec: ``equal``: all have ``most``. ``uniform``: 1 to ``most``. ``lognormal:MEAN``: of that mean
            before they are cut to 1 to ``most``. ``file:PATH``: those of a JSON list, from the first on and
            again from the first where there are too few, cut to ``most``.
        count: Completions.
        most: Tokens of the longest.
        seed: Of what is drawn.

    Raises:
        QeRLError: The lengths are none of these, or the file has none.
    """
    kind, _, value = spec.partition(":")
    draw = random.Random(seed)
    if spec == "equal":
        lengths = [most] * count
    elif spec == "uniform":
        lengths = [draw.randint(1, most) for _ in range(count)]
    elif kind == "lognormal" and _is_positive(value):
        # exp(mu + sigma^2 / 2) is the mean.
        lengths = [round(float(value) * draw.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)) for _ in range(count)]
    elif kind == "file" and value:
        every = _read(Path(value))
        lengths = [every[i % len(every)] for i in range(count)]
    else:
        raise QeRLError(f"--lengths is {spec!r}; give {KINDS}.")
    return [min(max(length, 1), most) for length in lengths]


def random_ids(call: int, count: int, tokens: int) -> list[list[int]]:
    """Prompts of a call, of token ids below 1000; no two of them, of this call or another, begin alike, so no
    engine can take one's keys and values for the other's."""
    draw = random.Random(call)
    return [[draw.randrange(1000) for _ in range(tokens)] for _ in range(count)]


def call_row(seconds: list[float], lengths: list[int]) -> dict[str, float]:
    """What is said of calls with completions of these lengths: seconds (the median), tokens, the longest,
    tokens a second, and spread, (slowest - fastest) / median."""
    middle = statistics.median(seconds)
    return {
        "call_s": middle,
        "call_tok_s": sum(lengths) / middle,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "spread": (max(seconds) - min(seconds)) / middle,
    }


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _read(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise QeRLError(f"--lengths: {path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, list) or not found or any(type(each) is not int or each < 1 for each in found):
        raise QeRLError(f"--lengths: {path} must be a JSON list of numbers of tokens, each 1 or more.")
    return found
