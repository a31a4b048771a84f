"""What sentences of README and docs say of noise, with intervals, from results of studies and probes."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from bench import probe_tables, study_tables
from bench.draw import STUDIES as TASKS
from bench.study_tables import NOT_RUN, compared, mean_of, noisy_steps, study
from qerl.study.arms import Arm
from qerl.study.results import SIGMA
from qerl.study.statistics import Comparison

IN_TEXT = (
    ("wp12", "none_uncorrected", "none"),
    ("wp12", "aqn_uncorrected", "aqn"),
    ("wp1", "none_uncorrected", "none"),
    ("wp1", "aqn_uncorrected", "aqn"),
    ("wp12", "in_loss", "none"),
    ("wp12", "half", "none"),
    ("wp12", "decode", "none"),
    ("wp12", "decode_far", "none"),
    ("wp12", "relative_slow", "none_slow"),
    ("wp12", "linear", "aqn"),
    ("wp12", "bf16_aqn", "bf16"),
    ("wp12", "cosine", "aqn"),
    ("wp12", "logarithmic", "aqn"),
)
"""Comparisons that a sentence speaks of: task and the two arms."""


def comparison(task: str, first: str, second: str) -> Comparison | None:
    """A comparison of a study; None where it has not run."""
    found = [one for one in compared(TASKS[task]) if (one.first, one.second) == (first, second)]
    return found[0] if found else None


def said(task: str, first: str, second: str) -> str:
    """A difference with its interval and verdict, as a part of a sentence."""
    one = comparison(task, first, second)
    if one is None:
        return NOT_RUN
    low, high = one.interval
    return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}), {one.verdict}"


def lost(task: str, first: str, second: str) -> str:
    """By how much the first arm is below the second, with its interval."""
    one = comparison(task, first, second)
    if one is None:
        return NOT_RUN
    low, high = one.interval
    return f"{-one.mean:.3f} ({-high:.3f} to {-low:.3f})"


def better() -> str:
    """How many arms with noise learned better than the same without, on word problems."""
    tried: dict[str, None] = {}
    found = []
    for task in ("wp12", "wp1"):
        results = study(TASKS[task])
        for one in compared(TASKS[task]):
            assert results is not None
            first, second = (results.study.arms[name] for name in (one.first, one.second))
            alike = first.learning_rate == second.learning_rate and second.match_entropy is None
            if _noisy(first) and not _noisy(second) and alike:
                tried[one.first] = None
                found += [f"`{one.first}` on `{task}`"] if one.verdict.startswith("helps") else []
    which = f" ({', '.join(found)})" if found else ""
    return f"{len(found) or 'none'} of {len(tried)} arms with noise{which}"


def first_stage(arms: Sequence[str]) -> str:
    """The least and the most KL(sampler || policy) of arms on word problems, in their first noisy stage."""
    found = []
    for task in ("wp12", "wp1"):
        results = study(TASKS[task])
        for arm in arms if results is not None else ():
            assert results is not None
            for run in results.tested(arm)[:1]:
                sigmas = [run.steps[SIGMA][at] for at in noisy_steps(run)]
                stage = noisy_steps(run)[: sigmas.count(sigmas[0])]
                found.append(fmean(mean_of(one, "sampling/kl", stage) for one in results.tested(arm)))
    return f"{min(found):.2f} to {max(found):.2f}" if found else NOT_RUN


def _noisy(arm: Arm) -> bool:
    return arm.noise or arm.logits_noise > 0


NUMBERS: dict[str, Callable[[], str]] = {
    "noise-runs": lambda: f"{study_tables.runs(TASKS['wp12'], TASKS['wp1'])}",
    "noise-better": better,
    "noise-lost-wp12": lambda: lost("wp12", "aqn", "none"),
    "noise-lost-wp1": lambda: lost("wp1", "aqn", "none"),
    "aqn-first-kl": lambda: first_stage(("aqn", "aqn_uncorrected")),
    "two-step-most": lambda: study_tables.most(TASKS["wp12"], "accuracy/steps_2"),
    "probe-better": lambda: probe_tables.better(["probe"]),
    "probe-trained-better": lambda: probe_tables.better(probe_tables.TRAINED),
}
"""What the marks in the pages stand for."""
for _target in (0.02, 0.1):
    NUMBERS[f"probe-trained-decode-{_target}"] = partial(
        probe_tables.gains, probe_tables.TRAINED, "decode", _target
    )
    for _other in ("temperature", "relative"):
        NUMBERS[f"probe-trained-decode-{_other}-{_target}"] = partial(
            probe_tables.gains_over, probe_tables.TRAINED, "decode", _other, _target
        )
for _one in IN_TEXT:
    NUMBERS["-".join(_one)] = partial(said, *_one)
