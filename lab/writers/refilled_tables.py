"""Cost of rows refilled across optimizer steps: the endpoints of lab/trained/refilled.yaml, from its runs.

Arms are compared with the synchronous one, paired by seed, over the seeds that both have.

Legend: a value of a seed is a number; a cell is its mean over seeds, and for differences Hodges and Lehmann's
centre with its 95 % interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from bench.result import Row
from lab.study.statistics import FEWEST, LEVEL, holm, signed_rank_above
from lab.trained.clock import DECODE, STEP, TOKENS
from lab.trained.plan import read_plan
from lab.writers.captions import files, rows, side_by_side, source, table
from lab.writers.study_tables import NOT_RUN, centre
from qerl.report.runs import number

NAME = "refilled-smollm2"
MARGIN = 0.02
"""Accuracy that refilled rows may cost, by the plan."""

_CONTROL, _UNCORRECTED, _ITS_CONTROL = "synchronous", "uncorrected-4", "refilled-4"
_ARMS = (("1", "refilled-1"), ("2", "refilled-2"), ("4", _ITS_CONTROL), ("4, no ratio", _UNCORRECTED))
"""Words and arms, in the order of the plan's claims."""


def at_equal_steps(run: Row, control: Row) -> float:
    """Return the accuracy after the last step minus that of the synchronous run."""
    return float(run["accuracy"][-1] - control["accuracy"][-1])


def at_equal_time(run: Row, control: Row) -> float:
    """Return the final accuracy minus that of the synchronous run, interpolated at equal seconds."""
    return float(run["accuracy"][-1] - _after(sum(run["of_7b"]), "of_7b", control))


def at_equal_tokens(run: Row, control: Row) -> float:
    """Return the accuracy minus that of the synchronous run, where the run with fewer tokens ends.

    Tokens are those that steps trained on. No group starts that would train after the last step, so in a
    whole run these are all that were drawn.
    """
    fewer = min(sum(run["tokens"]), sum(control["tokens"]))
    return _after(fewer, "tokens", run) - _after(fewer, "tokens", control)


def _after(amount: float, spent: str, run: Row) -> float:
    """Return the accuracy of a run after so many of its seconds or tokens, on a line between its scores."""
    at = np.cumsum([0.0, *run[spent]])[run["steps"]]
    return float(np.interp(amount, at, run["accuracy"]))


def in_area(run: Row, control: Row) -> float:
    """Return the area under the accuracy curve, per step, minus that of the synchronous run."""
    return area(run) - area(control)


def area(run: Row) -> float:
    """Return the area under the accuracy curve by trapezoids, per step."""
    return float(np.trapezoid(run["accuracy"], run["steps"]) / run["steps"][-1])


def _differences(value: Callable[[Row, Row], float], arm: str, control: str = _CONTROL) -> np.ndarray:
    """Return the differences of two arms, per seed that has both, [seeds]."""
    return np.array([value(*pair) for pair in side_by_side(NAME, arm, control)])


@dataclass(frozen=True)
class Claim:
    """The claims about an arm against the synchronous one, at equal steps.

    Attributes:
        costs: One-sided p of the signed-rank test that the arm ends lower, corrected by Holm's method over
            the arms of the plan.
        no_more: One-sided p that the arm ends no more than the margin lower, uncorrected.
        verdict: The claims in words.
    """

    costs: float
    no_more: float
    verdict: str


def claims(differences: Mapping[str, np.ndarray], seeds: int) -> dict[str, Claim]:
    """Return the plan's claims by arm; arms with fewer than `FEWEST` differences are left out.

    For each kind of claim, the chance that it is false for any arm is at most `LEVEL` / 2. That an arm costs
    something is tested by Holm's method, which also counts arms that have not run. That it costs no more than
    the margin is tested in the order of the arms, up to the first that fails.

    Args:
        differences: Accuracies [seeds] after the last step minus those of the synchronous runs, by arm.
        seeds: Number of seeds of the plan; an arm that lacks one is undecided.
    """
    own = {arm: differences.get(arm, np.array([])) for _, arm in _ARMS[:3]}
    whole = [len(d) == seeds for d in own.values()]
    lower = holm(
        [signed_rank_above(-d) if there else 1.0 for d, there in zip(own.values(), whole, strict=True)]
    )
    found, goes_on = {}, True
    for (arm, d), there, costs in zip(own.items(), whole, lower, strict=True):
        no_more = signed_rank_above(MARGIN + d) if there else 1.0
        goes_on = goes_on and no_more < LEVEL / 2
        said = ["costs"] * (costs < LEVEL / 2) + [f"no more than {MARGIN:g}"] * goes_on
        if len(d) >= FEWEST:
            found[arm] = Claim(costs, no_more, ", ".join(said) or "undecided")
    return found


def _claims() -> dict[str, Claim]:
    at_the_end = {arm: _differences(at_equal_steps, arm) for _, arm in _ARMS[:3]}
    return claims(at_the_end, len(read_plan("refilled").seeds))


def learned() -> str:
    """Return the table of learning with groups that started early, beside the synchronous run."""
    said = _claims()
    lines: list[Sequence[object]] = [("0", *_of_arm(_CONTROL), *[None] * 7)]
    for words, arm in _ARMS:
        equal, *more = [
            centre(_differences(value, arm))
            for value in (at_equal_steps, at_equal_tokens, at_equal_time, in_area)
        ]
        judged = [NOT_RUN if equal == NOT_RUN else ""] * 3
        if arm in said:
            judged = [number(said[arm].costs), number(said[arm].no_more), f"**{said[arm].verdict}**"]
        lines.append((words, *_of_arm(arm), equal, *judged, *more))
    head = (
        "`max_staleness`", "tokens, thousands", "accuracy", "ended below their start", "age of tokens",
        "effective sample size", "a step of 7B, s", "minus 0, at equal steps", "p, costs, Holm",
        f"p, no more than {MARGIN:g}", "claim", "at equal tokens", "at equal time", "area under the curve",
    )  # fmt: skip
    counts = sorted({row["held_out"] for row in rows(NAME)})
    caption = (
        "Accuracy, before RL to behind its last step, is of greedy answers to "
        f"{' or '.join(map(str, counts))} held-out problems of each seed; "
        "differences are paired by seed, Hodges and Lehmann's centres with 95 % intervals, p of one-sided "
        f"signed-rank tests, 1 where an arm lacks seeds; a claim needs one below {LEVEL / 2:g}. Ages are in "
        "optimizer steps, the effective sample size is a share of the tokens; both are means over all steps. "
        "Equal tokens: both accuracies are on lines between scores, after as many tokens as the run with "
        "fewer trained on. "
        "No ratio: the loss has none to the sampler. Seconds are not measured: each of a run's tokens stands "
        f"for {TOKENS} of a 7B on an H200, on a line through {DECODE}.json and with the update of "
        f"{STEP}.json. "
        f"SmolLM2-135M-Instruct, NVFP4, LoRA rank 16, steps of 8 x 8 samples. {source(NAME)} {files(NAME)}"
    )
    return table(head, lines, caption)


def _of_arm(arm: str) -> tuple[str, ...]:
    """Return the cells of an arm that need no comparison."""
    found = rows(NAME, arm=arm, tuning=False)
    if not found:
        return (NOT_RUN,) * 6
    fell = sum(run["accuracy"][-1] < run["accuracy"][0] for run in found)
    return (
        f"{fmean(sum(run['tokens']) for run in found) / 1e3:.0f}",
        f"{fmean(run['accuracy'][0] for run in found):.3f} to "
        f"{fmean(run['accuracy'][-1] for run in found):.3f}",
        f"{fell} of {len(found)}",
        f"{_over_steps(found, 'age'):.2f}" if "age" in found[0] else "0",
        f"{_over_steps(found, 'effective'):.3f}",
        f"{_over_steps(found, 'of_7b'):.2f}",
    )


def _over_steps(found: Sequence[Row], name: str) -> float:
    """Return the mean over runs of the mean over steps, without steps in which no sample has an advantage."""
    return fmean(fmean(value for value in run[name] if value is not None) for run in found)


def without_ratio() -> str:
    """Format the final accuracy without any ratio to the sampler, minus that with it."""
    return centre(_differences(at_equal_steps, _UNCORRECTED, _ITS_CONTROL))


def _costs(arm: str) -> str:
    """Format the difference at equal steps and its verdict, as a part of a sentence."""
    said = _claims()
    if arm not in said:
        return NOT_RUN
    return f"{centre(_differences(at_equal_steps, arm))}, {said[arm].verdict}"


def least_effective() -> str:
    """Format the least effective sample size of runs that start groups four steps early, and what became of
    the accuracy of the run that had it."""
    if not (found := rows(NAME, arm=_ITS_CONTROL, tuning=False)):
        return NOT_RUN
    run = min(found, key=_least)
    first, *_, last = run["accuracy"]
    return f"{_least(run):.3f}, in a run whose accuracy went from {first:.3f} before RL to {last:.3f}"


def as_low() -> str:
    """Format how many runs without any ratio that ended below their start had as low a sample size.

    As low as the least of runs with the ratio that started groups as early.
    """
    found, own = (rows(NAME, arm=arm, tuning=False) for arm in (_ITS_CONTROL, _UNCORRECTED))
    if not found or not own:
        return NOT_RUN
    least, fell = min(map(_least, found)), [run for run in own if run["accuracy"][-1] < run["accuracy"][0]]
    return f"{sum(_least(run) <= least for run in fell)} of {len(fell)}"


def _least(run: Row) -> float:
    """Return the least effective sample size of a run's steps, as a share of the tokens."""
    return min(value for value in run["effective"] if value is not None)


TABLES: dict[str, Callable[[], str]] = {"refilled-learned": learned}

NUMBERS: dict[str, Callable[[], str]] = {
    "refilled-costs-1": lambda: _costs("refilled-1"),
    "refilled-costs-2": lambda: _costs("refilled-2"),
    "refilled-costs-4": lambda: _costs("refilled-4"),
    "refilled-without-ratio": without_ratio,
    "refilled-least-effective": least_effective,
    "refilled-as-low": as_low,
}
