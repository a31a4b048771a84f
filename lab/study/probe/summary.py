"""From the cells of a probe to what they say: estimates with 95 % intervals, paired with the clean cell.

An interval is the percentile interval of a bootstrap over problems: problems are drawn with replacement, the
same ones for a cell and for the clean cell that it is compared with, so that what is common to both cancels.
Each problem has a draw of the noise of its own (`lab.study.probe.perturb`), so the interval covers the draws
too. It does not cover other policies or other models.

The primary number is the gain in the logarithm of P(at least one of 8 samples is right), averaged over
problems before the logarithm, divided by the measured KL: what a nat of distance from the clean policy buys a
group of 8.

Shapes: P problems, N resamples.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qerl.eval.interval import pass_at

Array = npt.NDArray[np.float64]
Results = dict[str, Any]

RESAMPLES = 2000
KS = (1, 4, 8, 16, 64)
"""Samples k of pass@k; those above the number of samples are left out."""

GROUP = 8
"""k of the primary number."""

HARD = 0.1
"""A problem is hard if at most this share of an independent set of clean samples is right."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; NaN where it is not defined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What one cell says.

    Attributes:
        cell: Its name.
        policy, task, what: As in the cell; `policy` is None for a format.
        target: Wanted KL, None where none was.
        strength: Of the perturbation; of a format the temperature.
        numbers: Estimates by name, see `read_rows`.
    """

    cell: str
    policy: str | None
    task: str
    what: str
    target: float | None
    strength: float
    numbers: dict[str, Estimate]


def read_rows(results: Results) -> list[Row]:
    """What the cells of a probe say, in their order, clean references left out.

    Of a probe that is not finished, differences are left out where the other cell is missing.

    Returns:
        Each row has `pass@k`, `pass@1/PART` for the parts of a task, `solved` (share of problems with a right
        sample), `answers` (distinct ones a problem), `kl` and `entropy` a token, `ess` (share of the
        samples), `ess_token` (share of the tokens). Rows of perturbations have, paired with clean, `success`
        (difference of pass@1), `success/PART`, `gain` (of log pass@8), `per_nat` (the same divided by KL),
        `solved_more` and `answers_more` (of `solved` and `answers`), `hard` (difference of pass@1 on hard
        problems), and from worked solutions `shift`, `spread` and `lift`. Rows of formats have, paired with
        the first format, `success`, `gain`, `solved_more`, `answers_more` and `entropy_more`; at temperature
        1 also `prefix_entropy`, `prefix_more` and `prefix_kl` along given prefixes and `error`, that of the
        weights.
    """
    cells = results["cells"]
    rows = []
    for name, cell in cells.items():
        if name.endswith("-reference"):
            continue
        clean = cells.get(_clean_of(results, cell))
        boot = _Boot(cell, results["probe"]["samples"], results["strata"][cell["task"]])
        numbers = boot.own() | boot.solutions() | boot.prefixes(clean)
        if clean is not None and clean is not cell:
            numbers |= boot.paired(clean)
            reference = cells.get(f"{cell['policy']}-{cell['task']}-clean-reference")
            if reference is not None:
                numbers |= boot.hard(clean, reference)
        strength = cell.get("strength", cell.get("temperature"))
        rows.append(
            Row(name, cell["policy"], cell["task"], cell["what"], cell.get("target"), strength, numbers)
        )
    return rows


def gain_over(results: Results, cell: str, other: str) -> Estimate:
    """How much more log pass@8 one cell has than another one of the same task, paired by problem."""
    one, two = results["cells"][cell], results["cells"][other]
    boot = _Boot(one, results["probe"]["samples"], results["strata"][one["task"]])
    return boot.paired(two)["gain"]


def _clean_of(results: Results, cell: dict[str, Any]) -> str:
    """Name of the cell that one is compared with."""
    if cell["policy"] is not None:
        return f"{cell['policy']}-{cell['task']}-clean"
    return f"format-{cell['task']}-{next(iter(results['probe']['formats']))}-0-plain"


class _Boot:
    """Estimates of one cell."""

    def __init__(self, cell: dict[str, Any], samples: int, strata: Sequence[str]) -> None:
        self._cell, self._samples = cell, samples
        names = dict.fromkeys(strata)
        self._parts = {name: np.array([float(own == name) for own in strata]) for name in names}
        self._one = np.ones(len(cell["numbers"]["right"]))
        self._times = _times(len(self._one))

    def own(self) -> dict[str, Estimate]:
        """Estimates that need no other cell."""
        numbers, one = _arrays(self._cell["numbers"]), self._one
        ks = [k for k in KS if k <= self._samples]
        out = {f"pass@{k}": self._of(_ratio, _pass(self._cell, k, self._samples), one) for k in ks}
        for name, part in self._parts.items():
            out[f"pass@1/{name}"] = self._of(_ratio, _pass(self._cell, 1, self._samples) * part, part)
        out["solved"] = self._of(_ratio, (numbers["right"] > 0).astype(np.float64), one)
        out["answers"] = self._of(_ratio, numbers["answers"], one)
        out["ess"] = self._of(_ratio, numbers["ess"], one)
        for name in ("kl", "entropy"):
            out[name] = self._of(_ratio, numbers[name], numbers["tokens"])
        out["ess_token"] = self._of(
            lambda r, squared, tokens: r**2 / (tokens * squared),
            numbers["ratio"], numbers["ratio_squared"], numbers["tokens"],
        )  # fmt: skip
        return out

    def paired(self, clean: dict[str, Any]) -> dict[str, Estimate]:
        """Differences from the clean cell."""
        here, there = ([_pass(cell, k, self._samples) for k in (1, GROUP)] for cell in (self._cell, clean))
        own, other = _arrays(self._cell["numbers"]), _arrays(clean["numbers"])
        out = {
            "success": self._of(_ratio, here[0] - there[0], self._one),
            "gain": self._of(_gain, here[1], there[1]),
            "solved_more": self._of(
                _ratio, (own["right"] > 0).astype(np.float64) - (other["right"] > 0), self._one
            ),
            "answers_more": self._of(_ratio, own["answers"] - other["answers"], self._one),
            "entropy_more": self._of(
                lambda a, n, b, m: a / n - b / m,
                own["entropy"], own["tokens"], other["entropy"], other["tokens"],
            ),
        }  # fmt: skip
        for name, part in self._parts.items():
            out[f"success/{name}"] = self._of(_ratio, (here[0] - there[0]) * part, part)
        if self._cell["policy"] is not None:
            out["per_nat"] = self._of(
                lambda a, b, kl, tokens: _gain(a, b) / (kl / tokens),
                here[1],
                there[1],
                own["kl"],
                own["tokens"],
            )
        return out

    def hard(self, clean: dict[str, Any], reference: dict[str, Any]) -> dict[str, Estimate]:
        """Success on problems that were hard beforehand, and how much more than the clean policy's it is."""
        hard = (_pass(reference, 1, self._samples) <= HARD).astype(np.float64)
        here, there = (_pass(cell, 1, self._samples) * hard for cell in (self._cell, clean))
        return {"hard": self._of(_ratio, here - there, hard), "hard_clean": self._of(_ratio, there, hard)}

    def solutions(self) -> dict[str, Estimate]:
        """Means over decisive tokens of worked solutions."""
        read = self._cell.get("solutions")
        if not read or not read["problem"]:
            return {}
        problems = len(self._one)
        count: Array = np.bincount(read["problem"], minlength=problems).astype(np.float64)
        sums: dict[str, Array] = {
            name: np.bincount(read["problem"], weights=read[name], minlength=problems).astype(np.float64)
            for name in ("shift", "spread", "lift")
        }
        return {name: self._of(_ratio, values, count) for name, values in sums.items()}

    def prefixes(self, first: dict[str, Any] | None) -> dict[str, Estimate]:
        """Entropies along the prefixes that the first format wrote, compared with its own."""
        if "prefixes" not in self._cell:
            return {}
        here, error = _arrays(self._cell["prefixes"]), self._cell["error"]
        out = {
            "prefix_entropy": self._of(_ratio, here["entropy"], here["tokens"]),
            "prefix_kl": self._of(_ratio, here["kl"], here["tokens"]),
            "error": Estimate(error, error, error),
        }
        if first is not None:
            more = here["entropy"] - _arrays(first["prefixes"])["entropy"]
            out["prefix_more"] = self._of(_ratio, more, here["tokens"])
        return out

    def _of(self, statistic: Callable[..., Any], *by_problem: Array) -> Estimate:
        """An estimate of a function of sums over problems, from the addends [P] of each sum."""
        with np.errstate(all="ignore"):
            value = float(statistic(*(addends.sum() for addends in by_problem)))
            resampled = statistic(*(self._times @ addends for addends in by_problem))
        resampled = resampled[np.isfinite(resampled)]
        if not math.isfinite(value) or not len(resampled):
            return Estimate(math.nan, math.nan, math.nan)
        low, high = np.percentile(resampled, [2.5, 97.5])
        return Estimate(value, float(low), float(high))


@functools.cache
def _times(problems: int) -> Array:
    """How often each resample has each problem, [N, P], the same for all cells."""
    drawn = np.random.default_rng(0).integers(0, problems, (RESAMPLES, problems))
    return np.stack([np.bincount(one, minlength=problems) for one in drawn]).astype(np.float64)


def _arrays(numbers: dict[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(values, dtype=np.float64) for name, values in numbers.items()}


def _pass(cell: dict[str, Any], k: int, samples: int) -> Array:
    """pass@k [P] of each problem."""
    table = np.array([pass_at(samples, right, k) for right in range(samples + 1)])
    return table[np.asarray(cell["numbers"]["right"])]


def _ratio(sums: Any, counts: Any) -> Any:
    return sums / counts


def _gain(here: Any, there: Any) -> Any:
    return np.log(here / there)


def by(rows: Sequence[Row], policy: str | None, task: str) -> list[Row]:
    """The rows of one policy and task."""
    return [row for row in rows if row.policy == policy and row.task == task]
