"""Results of a probe, from its file in bench/results: estimates with 95 % intervals per cell.

A probe is a study without training: fixed policies sample the same problems with the same uniform numbers,
clean and perturbed, and untrained ones also in other formats. The file has counts and sums of each problem by
*cell* (a policy, a task, and a perturbation at a target KL; or a format, a draw of its error and a
temperature). It was measured at the commit that it names.

An interval is the percentile interval of a bootstrap over problems: problems are drawn with replacement, the
same ones for a cell and for the cell that it is compared with, so that their common part cancels. Each
problem has its own draw of the noise, so the interval covers the draws too. It does not cover other policies
or other models.

Shapes: P problems, N resamples.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.result import RESULTS
from qerl.eval.interval import pass_at

TRAINED = ("probe-trained", "probe-seeds")
"""Probes of policies after some steps of clean runs."""

RESAMPLES = 2000

GROUP = 8
"""Samples of a group, at least one of which must be right."""

Array = npt.NDArray[np.float64]
Cell = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """The estimates of one cell.

    Attributes:
        cell: Name of the cell.
        policy: Policy of the cell; None for a format.
        task: Name of the task.
        what: Name of the perturbation or format, or `clean`.
        target: Target KL in nats per token; None if there is none.
        strength: Strength of the perturbation; for a format the temperature.
        numbers: Estimates by name, see `alone` and `beside`.
    """

    cell: str
    policy: str | None
    task: str
    what: str
    target: float | None
    strength: float
    numbers: dict[str, Estimate]


@cache
def probe(name: str) -> dict[str, Any]:
    """Return the results of a probe by the name of their file."""
    found: dict[str, Any] = json.loads(gzip.decompress((RESULTS / f"{name}.json.gz").read_bytes()))
    return found


@cache
def read(name: str) -> list[Row]:
    """Return a row per cell of a probe, compared with its policy's clean cell or with the first format."""
    return rows_of(probe(name))


def rows_of(results: dict[str, Any]) -> list[Row]:
    """Return the rows of a file's content; second sets of clean samples, `-reference`, are left out."""
    cells, samples = results["cells"], results["probe"]["samples"]
    rows = []
    for name, cell in cells.items():
        if name.endswith("-reference"):
            continue
        clean = f"{cell['policy']}-{cell['task']}-clean"
        if cell["policy"] is None:
            clean = f"format-{cell['task']}-{next(iter(results['probe']['formats']))}-0-plain"
        numbers = alone(cell, samples)
        if clean != name:
            numbers |= beside(cell, cells[clean], samples)
        elif "prefixes" in cell:
            numbers["prefix_more"] = Estimate(0.0, 0.0, 0.0)
        strength = cell.get("strength", cell.get("temperature"))
        shared = name, cell["policy"], cell["task"], cell["what"], cell.get("target"), strength
        rows.append(Row(*shared, numbers))
    return rows


def over(name: str, cell: str, other: str) -> dict[str, Estimate]:
    """Return the differences of one cell of a probe from another of the same task, paired by problem."""
    results = probe(name)
    return beside(results["cells"][cell], results["cells"][other], results["probe"]["samples"])


def alone(cell: Cell, samples: int) -> dict[str, Estimate]:
    """Return the estimates that need no other cell.

    Args:
        cell: The cell.
        samples: Samples per problem.

    Returns:
        `pass@1`, `solved` (share of problems with a right sample), `answers` (distinct ones per problem),
        `ess` (effective share of the samples), `kl` and `entropy` per token; for formats at temperature 1
        `error` of the weights and `prefix_kl` along given prefixes; for perturbations, over the decisive
        tokens of worked solutions, `shift` of the log-odds and `lift` of the logarithm of the mean
        probability.
    """
    numbers = _arrays(cell["numbers"])
    one = np.ones_like(numbers["right"])
    found = {
        "pass@1": estimate(_ratio, _pass(cell, 1, samples), one),
        "solved": estimate(_ratio, _solved(cell), one),
        "answers": estimate(_ratio, numbers["answers"], one),
        "ess": estimate(_ratio, numbers["ess"], one),
        "kl": estimate(_ratio, numbers["kl"], numbers["tokens"]),
        "entropy": estimate(_ratio, numbers["entropy"], numbers["tokens"]),
    }
    if "prefixes" in cell:
        given, error = _arrays(cell["prefixes"]), cell["error"]
        found["error"] = Estimate(error, error, error)
        found["prefix_kl"] = estimate(_ratio, given["kl"], given["tokens"])
    if tokens := cell.get("solutions"):
        count = np.bincount(tokens["problem"], minlength=len(one)).astype(np.float64)
        for key in ("shift", "lift"):
            sums = np.bincount(tokens["problem"], weights=tokens[key], minlength=len(one))
            found[key] = estimate(_ratio, sums.astype(np.float64), count)
    return found


def beside(cell: Cell, other: Cell, samples: int) -> dict[str, Estimate]:
    """Return the differences from another cell, paired by problem.

    Returns:
        `success` (of `pass@1`), `gain` (of the logarithm of P(one of 8 is right), averaged over problems
        before the logarithm), `solved_more`, `answers_more`, `entropy_more`; for a perturbation `per_nat`,
        the gain divided by its KL; for formats at temperature 1 `prefix_more`, the difference of the entropy
        along given prefixes.
    """
    own, its = _arrays(cell["numbers"]), _arrays(other["numbers"])
    one = np.ones_like(own["right"])
    groups = [_pass(each, GROUP, samples) for each in (cell, other)]
    found = {
        "success": estimate(_ratio, _pass(cell, 1, samples) - _pass(other, 1, samples), one),
        "gain": estimate(_gain, *groups),
        "solved_more": estimate(_ratio, _solved(cell) - _solved(other), one),
        "answers_more": estimate(_ratio, own["answers"] - its["answers"], one),
        "entropy_more": estimate(
            lambda a, n, b, m: a / n - b / m, own["entropy"], own["tokens"], its["entropy"], its["tokens"]
        ),
    }
    if cell["policy"] is not None:
        found["per_nat"] = estimate(
            lambda a, b, kl, n: _gain(a, b) / (kl / n), *groups, own["kl"], own["tokens"]
        )
    if "prefixes" in cell and "prefixes" in other:
        given = _arrays(cell["prefixes"])
        more = given["entropy"] - _arrays(other["prefixes"])["entropy"]
        found["prefix_more"] = estimate(_ratio, more, given["tokens"])
    return found


def estimate(statistic: Callable[..., Any], *by_problem: Array) -> Estimate:
    """Return the estimate of a function of sums over problems, from the addends [P] of each sum."""
    value = statistic(*(addends.sum() for addends in by_problem))
    times = _times(len(by_problem[0]))
    low, high = np.percentile(statistic(*(times @ addends for addends in by_problem)), [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


@cache
def _times(problems: int) -> Array:
    """Return how often each resample contains each problem, [N, P], the same for all cells."""
    drawn = np.random.default_rng(0).integers(0, problems, (RESAMPLES, problems))
    return np.stack([np.bincount(one, minlength=problems) for one in drawn]).astype(np.float64)


def _arrays(numbers: dict[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(values, dtype=np.float64) for name, values in numbers.items()}


def _pass(cell: Cell, k: int, samples: int) -> Array:
    """Return pass@k of each problem, [P]."""
    table = np.array([pass_at(samples, right, k) for right in range(samples + 1)])
    return table[np.asarray(cell["numbers"]["right"])]


def _solved(cell: Cell) -> Array:
    """Return 1 for each problem with a right sample, else 0, [P]."""
    return (np.asarray(cell["numbers"]["right"]) > 0).astype(np.float64)


def _ratio(sums: Any, counts: Any) -> Any:
    return sums / counts


def _gain(here: Any, there: Any) -> Any:
    return np.log(here / there)
