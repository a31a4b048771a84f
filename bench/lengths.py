"""Lengths of a benchmark's completions, the same for every engine and in every call.

Completions of equal length hide the cost of a rollout's tail, in which the last long ones decode alone in
steps made for many rows. Here each sample gets its own token limit, so lengths do not depend on the sampled
tokens. A limit ends a completion as a stop token does.
"""

import json
import random
import statistics
from pathlib import Path

from qerl.errors import QeRLError

SIGMA = 0.7
"""Standard deviation of a lognormal length's logarithm; that of the lengths is then 0.8 times their mean."""

KINDS = "equal, uniform, lognormal:MEAN or file:LENGTHS.json"


def draw_lengths(spec: str, count: int, most: int, seed: int = 0) -> list[int]:
    """Return the lengths in tokens of ``count`` completions, equal for equal arguments.

    Args:
        spec: ``equal``: all have ``most``. ``uniform``: 1 to ``most``. ``lognormal:MEAN``: with that mean
            before clipping to 1 to ``most``. ``file:PATH``: the entries of a JSON list in order, repeated
            from the first if there are too few, clipped to ``most``.
        count: Number of completions.
        most: Maximum length.
        seed: Seed of the draws.

    Raises:
        QeRLError: ``spec`` is none of these, or the file holds no list of lengths.
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
    """Return random prompts of a call, of token ids below 1000.

    No two prompts, of this call or another, share a prefix, so that no engine can reuse keys and values.
    """
    draw = random.Random(call)
    return [[draw.randrange(1000) for _ in range(tokens)] for _ in range(count)]


def call_row(seconds: list[float], lengths: list[int]) -> dict[str, float]:
    """Return the fields of a row of whole calls: median seconds, tokens per second, tokens, longest length,
    and spread, (slowest - fastest) / median."""
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
