"""The raw files of studies and probes, and the values of a run that the pages report.

Legend: a value of a run is a number; seeds are keys. P problems, R resamples.
"""

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lab.audit import statistics as st

RESULTS = Path(__file__).parents[2] / "bench" / "results"

Run = dict[str, Any]
Value = Callable[[Run], float]
Estimate = tuple[float, float, float]
"""A number with the ends of its interval."""

STEPS_2 = "accuracy/steps_2"


def area(run: Run) -> float:
    """Return the area under the accuracy curve by trapezoids, per step."""
    return float(np.trapezoid(curve(run), run["eval_at"])) / run["eval_at"][-1]


def curve(run: Run) -> list[float]:
    """Return the accuracy at each evaluation, 0 from the step in which the run diverged."""
    sound = math.inf if run["diverged_at"] is None else run["diverged_at"]
    pairs = zip(run["eval_at"], run["evaluations"]["accuracy"], strict=True)
    return [value if value is not None and at < sound else 0.0 for at, value in pairs]


def start(run: Run) -> float:
    """Return the accuracy before training."""
    return curve(run)[0]


def end(run: Run) -> float:
    """Return the accuracy of the last evaluation."""
    return curve(run)[-1]


def two_steps(run: Run) -> float:
    """Return the share of two-step problems answered right at the end."""
    return float(run["evaluations"][STEPS_2][-1] or 0.0)


def logged(key: str, at: Sequence[int] | None = None) -> Value:
    """Return a function: the mean of the values logged under a key in some steps, or all; NaN without any."""

    def mean(run: Run) -> float:
        values = run["steps"].get(key, [])
        known = [v for i, v in enumerate(values) if v is not None and (at is None or i in at)]
        return float(np.mean(known)) if known else math.nan

    return mean


def noisy(run: Run) -> list[int]:
    """Return the 0-based steps with noise."""
    return [at for at, sigma in enumerate(run["steps"].get("noise/sigma", [])) if sigma]


def first_quarter(run: Run) -> list[int]:
    """Return the first quarter of the steps with noise."""
    steps = noisy(run)
    return steps[: max(1, len(steps) // 4)]


@dataclass(frozen=True)
class Judged:
    """The results of a comparison of a study; fields as in docs/studies.md."""

    differences: st.Array
    p: float
    holm: float
    equivalent: float
    detectable: float
    collapses: tuple[int, int]
    apart: int
    margin: float

    @cached_property
    def interval(self) -> tuple[float, float]:
        return st.bca(self.differences)

    @property
    def verdict(self) -> str:
        mean, (low, high) = self.differences.mean(), self.interval
        claimed = self.holm < st.LEVEL and (low > 0 or high < 0)
        claimed = claimed and np.sign(mean) == np.sign(st.hodges_lehmann(self.differences))
        margin = f"{self.margin:g}".lstrip("0")
        if claimed:
            word = "helps" if mean > 0 else "harms"
            return word + f", by less than {margin}" * (self.equivalent < st.LEVEL)
        return f"no effect beyond ±{margin}" if self.equivalent < st.LEVEL else "undecided"


@dataclass(frozen=True)
class Side:
    """One endpoint of a comparison: a difference with its interval, corrected p, counts of runs, verdict, and
    as ``rates`` the rate of false claims and the smallest difference that is found."""

    difference: float
    interval: tuple[float, float]
    holm: float
    counts: str
    rates: tuple[float, float]
    verdict: str = ""

    def judged(self, above: str, below: str, otherwise: str) -> "Side":
        """Return the endpoint with its verdict."""
        claimed = self.holm < st.LEVEL and abs(self.difference) > st.TIE
        return replace(self, verdict=(above if self.difference > 0 else below) if claimed else otherwise)


class Study:
    """A study's raw file.

    Args:
        plain: Content of the file.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.spec, self.runs = plain["study"], plain["runs"]
        self.pairs = [tuple(pair) for pairs in self.spec["comparisons"].values() for pair in pairs]

    def rate(self, arm: str) -> float | None:
        """Return an arm's learning rate on the test seeds: its only one, or its grid's best on tuning seeds.

        None if runs of the tuning seeds are missing.
        """
        fields = self.spec["arms"][arm]
        own = fields.get("learning_rate")
        rates = [own] if own is not None else fields.get("learning_rates") or self.spec["learning_rates"]
        if len(rates) == 1:
            return float(rates[0])
        means = {}
        for rate in sorted(rates):
            found = self.of(arm, rate, self.spec["tuning_seeds"])
            if len(found) < len(self.spec["tuning_seeds"]) or not found:
                return None
            means[rate] = np.mean([area(run) for run in found])
        return float(max(means, key=lambda rate: means[rate]))

    def of(self, arm: str, rate: float | None, seeds: Sequence[int]) -> list[Run]:
        """Return an arm's runs at a learning rate on some seeds, in order of seed."""
        found = [
            r for r in self.runs if r["arm"] == arm and r["learning_rate"] == rate and r["seed"] in seeds
        ]
        return sorted(found, key=lambda run: int(run["seed"]))

    def tested(self, arm: str) -> list[Run]:
        """Return an arm's runs on the test seeds; empty if the study does not have the arm."""
        if arm not in self.spec["arms"]:
            return []
        return self.of(arm, self.rate(arm), self.spec["test_seeds"])

    def by_seed(self, arm: str, value: Value) -> dict[int, float]:
        """Return a value of each test run of an arm, by seed."""
        return {run["seed"]: value(run) for run in self.tested(arm)}

    def paired(self, first: str, second: str, value: Value = area) -> st.Array:
        """Return the differences [N] of two arms over the seeds that both have."""
        return subtract(self.by_seed(first, value), self.by_seed(second, value))

    def collapsed(self, arm: str) -> int:
        """Return the number of an arm's test runs that end below the study's bound of a collapse."""
        return sum(end(run) < self.spec["collapse_below"] for run in self.tested(arm))

    @cached_property
    def judged(self) -> dict[tuple[str, str], Judged]:
        """All comparisons with at least two seeds; Holm's correction also counts those that have not run."""
        margin, count = self.spec["equivalence"], len(self.pairs)
        found = {pair: self.paired(*pair) for pair in self.pairs}
        p = [st.signed_ranks(d) if len(d) > 1 else 1.0 for d in found.values()]
        equal = [st.equivalence(d, margin) if len(d) > 1 else 1.0 for d in found.values()]
        rows = zip(found.items(), p, st.holm(p), st.holm(equal), strict=True)
        return {
            pair: Judged(
                d, p, holm, equivalent, st.detectable(len(d), st.LEVEL / count) * d.std(ddof=1),
                (self.collapsed(pair[0]), self.collapsed(pair[1])), self._apart(*pair), margin,
            )
            for (pair, d), p, holm, equivalent in rows
            if len(d) > 1
        }  # fmt: skip

    @cached_property
    def endpoints(self) -> dict[tuple[str, str], tuple["Side", "Side"]]:
        """Both endpoints, typical seed and share of runs, of all comparisons with at least two seeds."""
        margin = self.spec["equivalence"]
        found = {pair: self.paired(*pair) for pair in self.pairs}
        there = {pair: d for pair, d in found.items() if len(d) > 1}
        counts = {pair: self._both(*pair) for pair in there}
        tests = [st.signed_ranks(d) for d in there.values()]
        tests += [st.fisher(*counts[pair], len(d)) for pair, d in there.items()]
        corrected = st.holm([*tests, *[1.0] * (2 * (len(found) - len(there)))])
        within = [max(st.ranks_above(margin + d), st.ranks_above(margin - d)) for d in there.values()]
        equal = st.holm([*within, *[1.0] * (len(found) - len(there))])
        sides = {}
        for at, (pair, d) in enumerate(there.items()):
            (a, b), runs = counts[pair], len(d)
            centre = st.hodges_lehmann(d)
            count = 2 * len(found)
            typical = Side(centre, st.centre_interval(d), corrected[at], "", st.rates_of_typical(d, count))
            share = Side(
                (a - b) / runs, st.newcombe(a, b, runs), corrected[len(there) + at],
                f"{a} and {b} of {runs}", st.rates_of_share((a + b) / (2 * runs), runs, count),
            )  # fmt: skip
            no_effect = f"no effect beyond ±{margin:g}".replace("±0", "±")
            words = no_effect if equal[at] < st.LEVEL else "undecided"
            sides[pair] = (
                typical.judged("helps", "harms", words),
                share.judged("more", "fewer", "undecided"),
            )
        return sides

    def _both(self, first: str, second: str) -> tuple[int, int]:
        """Count runs of two arms that escaped, or collapsed in a study without escapes, on common seeds."""
        seeds = self.by_seed(first, end).keys() & self.by_seed(second, end).keys()
        one, other = (
            sum(self._counts(run) for run in self.tested(arm) if run["seed"] in seeds)
            for arm in (first, second)
        )
        return one, other

    def _counts(self, run: Run) -> bool:
        above = self.spec.get("escape_above")
        if above is None:
            return bool(end(run) < self.spec["collapse_below"])
        last = run["evaluations"][self.spec["escape_key"]][-1] or 0.0
        return run["diverged_at"] is None and last > above

    def _apart(self, first: str, second: str) -> int:
        """Count seeds in which two arms differ before noise begins, if exactly one of them has noise."""
        ones, others = ({r["seed"]: r for r in self.tested(arm)} for arm in (first, second))
        count = 0
        for seed in ones.keys() & others.keys():
            pair = ones[seed], others[seed]
            begins = [noisy(run)[0] for run in pair if noisy(run)]
            if len(begins) == 1:
                before = [run["steps"]["rollout/entropy"][: begins[0]] for run in pair]
                count += before[0] != before[1]
        return count


def subtract(ones: Mapping[int, float], others: Mapping[int, float]) -> st.Array:
    """Return the differences [N] over common seeds, without those that are not finite."""
    found = np.array([ones[seed] - others[seed] for seed in ones if seed in others], dtype=np.float64)
    return found[np.isfinite(found)]


class Probe:
    """A probe's raw file: counts and sums of each problem, by cell.

    Args:
        plain: Content of the file.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.cells, self.samples = plain["cells"], plain["probe"]["samples"]

    def interval(self, statistic: Callable[..., Any], *addends: Any) -> Estimate:
        """Return a statistic of sums over problems, and its bootstrap interval over problems."""
        columns = [np.asarray(values, dtype=np.float64) for values in addends]
        drawn = st.times(len(columns[0]), 2000)
        low, high = np.quantile(statistic(*(drawn @ column for column in columns)), [0.025, 0.975])
        return float(statistic(*(column.sum() for column in columns))), float(low), float(high)

    def gain(self, cell: str, other: str) -> Estimate:
        """Return the difference of ln P(one of 8 samples is right), one cell minus another, by problem."""
        return self.interval(lambda a, b: np.log(a / b), self._one_of_8(cell), self._one_of_8(other))

    def mean(self, cell: str, key: str, other: str | None = None) -> Estimate:
        """Return the mean over problems of a number of own samples, or of its difference to another cell."""
        return self._per_problem(lambda name: self.cells[name]["numbers"][key], cell, other)

    def right(self, cell: str, other: str | None = None) -> Estimate:
        """Return the share of right samples, or its difference to another cell."""
        return self._per_problem(lambda name: self._right(name) / self.samples, cell, other)

    def solved(self, cell: str, other: str | None = None) -> Estimate:
        """Return the share of problems with a right sample, or its difference to another cell."""
        return self._per_problem(lambda name: self._right(name) > 0, cell, other)

    def _per_problem(self, of: Callable[[str], Any], cell: str, other: str | None) -> Estimate:
        values = np.asarray(of(cell), dtype=np.float64)
        if other is not None:
            values = values - np.asarray(of(other), dtype=np.float64)
        return self.interval(lambda a, n: a / n, values, np.ones(len(values)))

    def per_token(self, cell: str, key: str) -> Estimate:
        """Return a sum over own samples, per token."""
        numbers = self.cells[cell]["numbers"]
        return self.interval(lambda a, n: a / n, numbers[key], numbers["tokens"])

    def entropy_more(self, cell: str, other: str) -> Estimate:
        """Return the difference of the entropy per token of own samples, one cell minus another."""
        own, its = (self.cells[name]["numbers"] for name in (cell, other))
        columns = own["entropy"], own["tokens"], its["entropy"], its["tokens"]
        return self.interval(lambda a, n, b, m: a / n - b / m, *columns)

    def along_prefixes(self, cell: str, key: str) -> Estimate:
        """Return a sum along given prefixes, per token."""
        given = self.cells[cell]["prefixes"]
        return self.interval(lambda a, n: a / n, given[key], given["tokens"])

    def prefix_more(self, cell: str, other: str) -> Estimate:
        """Return the difference of the entropy per token along given prefixes, one cell minus another."""
        own, its = (self.cells[name]["prefixes"] for name in (cell, other))
        more = np.subtract(own["entropy"], its["entropy"])
        return self.interval(lambda a, n: a / n, more, own["tokens"])

    def along(self, cell: str, key: str) -> Estimate:
        """Return the mean of a number over the decisive tokens of worked solutions, drawn by problem."""
        tokens, problems = self.cells[cell]["solutions"], len(self._right(cell))
        sums, count = np.zeros(problems), np.zeros(problems)
        np.add.at(sums, tokens["problem"], tokens[key])
        np.add.at(count, tokens["problem"], 1)
        return self.interval(lambda a, n: a / n, sums, count)

    def gains(self, reference: str = "clean") -> dict[tuple[str, str, float], Estimate]:
        """Return the gain of each perturbed cell over its policy's clean one, by policy, kind and KL."""
        found = {}
        for name, cell in self.cells.items():
            beside = f"{cell['policy']}-{cell['task']}-{reference}"
            if cell.get("target") is not None and beside in self.cells:
                found[cell["policy"], cell["what"], cell["target"]] = self.gain(name, beside)
        return found

    def _one_of_8(self, cell: str) -> list[float]:
        """Return per problem the chance that 8 of its samples, without replacement, include a right one."""
        n = self.samples
        return [1 - math.comb(n - int(right), 8) / math.comb(n, 8) for right in self._right(cell)]

    def _right(self, cell: str) -> st.Array:
        """Return the number of right samples of each problem, [P]."""
        return np.asarray(self.cells[cell]["numbers"]["right"], dtype=np.float64)


@cache
def read(name: str) -> dict[str, Any]:
    """Return the content of a result file; the name of an uncompressed one ends in .json."""
    file = RESULTS / (name if name.endswith(".json") else f"{name}.json.gz")
    content = file.read_bytes()
    plain: dict[str, Any] = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
    return plain


def there(name: str) -> bool:
    """Return True if a study has results."""
    return (RESULTS / f"{name}.json.gz").is_file()


@cache
def study(name: str) -> Study:
    """Return a study by the name of its file."""
    return Study(read(name))


@cache
def probe(name: str) -> Probe:
    """Return a probe by the name of its file."""
    return Probe(read(name))
