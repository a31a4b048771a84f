"""What rows refilled across optimizer steps cost: the endpoints of lab/trained/refilled.yaml, from its runs.

Arms are compared with the synchronous one seed by seed, of the seeds that both have.

Legend: a value of a seed is a number; a cell is its mean over seeds, of differences with the 95 % BCa
interval of that mean.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from bench.result import RESULTS, Row
from lab.study.statistics import FEWEST, bca
from lab.trained.clock import DECODE, STEP, TOKENS
from lab.writers.captions import files, rows, side_by_side, source, table
from lab.writers.study_tables import NOT_RUN, estimate

NAME = "refilled-smollm2"
MARGIN = 0.02
"""Accuracy that refilled rows may cost, by the plan."""

_CONTROL, _UNCORRECTED, _ITS_CONTROL = "synchronous", "uncorrected-4", "refilled-4"
_ARMS = (("1", "refilled-1"), ("2", "refilled-2"), ("4", _ITS_CONTROL), ("4, no ratio", _UNCORRECTED))
"""Words and arms, in the order of the plan's claims."""


def at_equal_steps(run: Row, control: Row) -> float:
    """Accuracy behind the last step minus that of the synchronous run."""
    return float(run["accuracy"][-1] - control["accuracy"][-1])


def at_equal_time(run: Row, control: Row) -> float:
    """The same at the seconds that the run's steps took, on a line between the synchronous run's scores."""
    times = np.cumsum([0.0, *control["of_7b"]])[control["steps"]]
    return float(run["accuracy"][-1] - np.interp(sum(run["of_7b"]), times, control["accuracy"]))


def in_area(run: Row, control: Row) -> float:
    """Area under the curve of accuracy, per step, minus that of the synchronous run."""
    return area(run) - area(control)


def area(run: Row) -> float:
    """Area under the curve of accuracy by trapezoids, per step."""
    return float(np.trapezoid(run["accuracy"], run["steps"]) / run["steps"][-1])


def _differences(value: Callable[[Row, Row], float], arm: str, control: str = _CONTROL) -> np.ndarray:
    """Of each seed that has both arms, [seeds]."""
    return np.array([value(*pair) for pair in side_by_side(NAME, arm, control)])


def verdicts() -> dict[str, str]:
    """By arm, what the plan says of the interval at equal steps; arms without one are left out.

    No more than the margin is claimed in the order of the arms, and of none behind one without the claim.
    """
    found, goes_on = {}, True
    for _, arm in _ARMS[:3]:
        differences = _differences(at_equal_steps, arm)
        if len(differences) < FEWEST:
            goes_on = False
            continue
        low, high = bca(differences)
        goes_on = goes_on and low > -MARGIN
        said = ["costs"] * (high < 0) + [f"no more than {MARGIN:g}"] * goes_on
        found[arm] = ", ".join(said) or "undecided"
    return found


def learned() -> str:
    """What was learned with groups that started early, beside the synchronous run."""
    if not _is_there():
        return f"Not run yet: bench/results has no {NAME}.json.\n"
    said = verdicts()
    lines: list[Sequence[object]] = [("0", *_of_arm(_CONTROL), None, None, None)]
    for words, arm in _ARMS:
        verdict = f": **{said[arm]}**" if arm in said else ""
        more = [estimate(_differences(value, arm)) for value in (at_equal_steps, at_equal_time, in_area)]
        lines.append((words, *_of_arm(arm), more[0] + verdict * (more[0] != NOT_RUN), *more[1:]))
    head = (
        "`max_staleness`", "tokens, thousands", "accuracy", "ended below their start", "age of tokens",
        "effective sample size", "a step of 7B, s", "minus 0, at equal steps", "at equal time",
        "area under the curve",
    )  # fmt: skip
    counts = sorted({row["held_out"] for row in rows(NAME)})
    caption = (
        "Accuracy, before RL to behind its last step, is of greedy answers to "
        f"{' or '.join(map(str, counts))} held-out problems of each seed; "
        "differences are paired by seed, with 95 % intervals. Ages are in optimizer steps, the effective "
        "sample size is a share of the tokens; both are means over all steps. No ratio: the loss has none to "
        "the sampler. Seconds are not measured: "
        f"each of a run's tokens stands for {TOKENS} of a 7B on an H200, on a line through {DECODE}.json and "
        f"with the update of {STEP}.json. SmolLM2-135M-Instruct, NVFP4, LoRA rank 16, steps of 8 x 8 "
        f"samples. {source(NAME)} {files(NAME)}"
    )
    return table(head, lines, caption)


def _of_arm(arm: str) -> tuple[str, ...]:
    """Cells of an arm by itself."""
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
    """Mean over runs of the mean over steps; one in which no sample has an advantage has no ratios."""
    return fmean(fmean(value for value in run[name] if value is not None) for run in found)


def without_ratio() -> str:
    """Accuracy at the end without any ratio to the sampler, minus that with it."""
    return estimate(_differences(at_equal_steps, _UNCORRECTED, _ITS_CONTROL)) if _is_there() else NOT_RUN


def _is_there() -> bool:
    return (RESULTS / f"{NAME}.json").is_file()


def _costs(arm: str) -> str:
    """The difference at equal steps, as a part of a sentence."""
    if not _is_there() or arm not in (said := verdicts()):
        return NOT_RUN
    return f"{estimate(_differences(at_equal_steps, arm))}, {said[arm]}"


TABLES: dict[str, Callable[[], str]] = {"refilled-learned": learned}

NUMBERS: dict[str, Callable[[], str]] = {
    "refilled-costs-1": lambda: _costs("refilled-1"),
    "refilled-costs-2": lambda: _costs("refilled-2"),
    "refilled-costs-4": lambda: _costs("refilled-4"),
    "refilled-without-ratio": without_ratio,
}
