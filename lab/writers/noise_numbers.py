"""Numbers on noise, with intervals, for sentences of README and docs, from results of studies and probes."""

from collections.abc import Callable
from functools import partial
from statistics import fmean

from lab.study.statistics import Comparison
from lab.writers import endpoint_tables, probe_tables
from lab.writers.draw import STUDIES as TASKS
from lab.writers.probe_rows import TRAINED
from lab.writers.study_tables import (
    EARLIER,
    NOT_RUN,
    after_the_fact,
    area,
    by_seed,
    collapses,
    compared,
    early,
    estimate,
    has_noise,
    mean_of,
    noisy_steps,
    paired,
    study,
    tested,
)

IN_TEXT = (
    ("wp12", "aqn", "none"),
    ("wp12", "none_uncorrected", "none"),
    ("wp12", "aqn_uncorrected", "aqn"),
    ("wp1", "none_uncorrected", "none"),
    ("wp1", "aqn_uncorrected", "aqn"),
    ("wp12", "in_loss", "none"),
    ("wp12", "in_loss", "none_uncorrected"),
    ("wp12", "half", "none"),
    ("wp12", "half", "none_uncorrected"),
    ("wp12", "decode", "none"),
    ("wp12", "decode_far", "none"),
    ("wp12", "relative_slow", "none_slow"),
    ("wp12", "linear", "aqn"),
    ("wp12", "bf16_aqn", "bf16"),
    ("wp12", "cosine", "aqn"),
    ("wp12", "logarithmic", "aqn"),
)
"""Comparisons cited in a sentence: task and the two arms."""


def comparison(task: str, first: str, second: str) -> Comparison | None:
    """Return a comparison of a study; None if it has not run."""
    found = [one for one in compared(TASKS[task]) if (one.first, one.second) == (first, second)]
    return found[0] if found else None


def said(task: str, first: str, second: str) -> str:
    """Format a difference with its interval and verdict, or with p alone if it was not planned, as a part of
    a sentence."""
    one = comparison(task, first, second)
    if one is None:
        return after_the_fact(TASKS[task], first, second)
    low, high = one.interval
    return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}), {one.verdict}"


def earlier() -> str:
    """Format the effect of AQN in the earlier study of `wp12`, with its interval."""
    return estimate(endpoint_tables.over_runs((EARLIER,), "aqn", "none", area))


def counted() -> dict[tuple[str, str], list[Comparison]]:
    """Return the comparisons of an arm with noise and the same without, on word problems, by task and arm."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for task in ("wp12", "wp1"):
        results = study(TASKS[task])
        for one in compared(TASKS[task]):
            first, second = (results.study.arms[name] for name in (one.first, one.second))
            warmed = second.match_entropy is not None or second.temperature_stages is not None
            alike = first.learning_rate == second.learning_rate and not warmed
            if has_noise(first) and not has_noise(second) and alike:
                found.setdefault((task, one.first), []).append(one)
    return found


def better() -> str:
    """Format how many arms with noise learned better than the same without, on word problems."""
    found = counted()
    helped = [
        f"`{arm}` on `{task}`"
        for (task, arm), pairs in found.items()
        if any(one.verdict.startswith("helps") for one in pairs)
    ]
    which = f" ({', '.join(helped)})" if helped else ""
    return f"{len(helped) or 'none'} of {len({arm for _, arm in found})} arms with noise{which}"


def runs() -> str:
    """Return the number of runs in the comparisons of `counted`, with the first control of each arm."""
    arms = {(task, arm) for (task, first), pairs in counted().items() for arm in (first, pairs[0].second)}
    return str(sum(len(by_seed(TASKS[task], arm, area)) for task, arm in arms))


def first_kl(*arms: str) -> str:
    """Format the range over arms on word problems of the mean KL(sampler || policy), in the first quarter of
    their noisy steps."""
    found = [
        fmean(mean_of(run, "sampling/kl", early(noisy_steps(run))) for run in runs)
        for task in ("wp12", "wp1")
        for arm in arms
        if (runs := tested(TASKS[task], arm))
    ]
    return f"{min(found):.2f} to {max(found):.2f}" if found else NOT_RUN


def doses() -> str:
    """Format that range over all arms with noise that are compared with the same without."""
    return first_kl(*(arm for _, arm in counted()))


def sound() -> str:
    """Format the effect of AQN on `wp12` over the seeds in which neither arm's run collapsed."""
    results = study(TASKS["wp12"])
    kept = [
        {run.run.seed: run.area for run in results.tested(arm) if not results.collapsed(run)}
        for arm in ("aqn", "none")
    ]
    d = paired(*kept)
    return f"{estimate(d)} over {len(d)} seeds"


NUMBERS: dict[str, Callable[[], str]] = {
    "noise-runs": runs,
    "noise-better": better,
    "noise-doses": doses,
    "aqn-first-kl": lambda: first_kl("aqn", "aqn_uncorrected"),
    "aqn-sound": sound,
    "aqn-earlier": earlier,
    "escaped": endpoint_tables.escaped,
    "escaped-pass_at_4": lambda: endpoint_tables.escaped("pass_at_4"),
    "escaped-none": lambda: endpoint_tables.escaped("none"),
    "escaped-rising": endpoint_tables.still_rising,
    "collapsed-mxfp4": lambda: collapses((TASKS["wp12"],), "mxfp4"),
    "fell-ranks": lambda: endpoint_tables.below_start("rank_32", "rank_64", "rank_128"),
    "fell-none": lambda: endpoint_tables.below_start("none"),
    "two-steps-pass_at_4": lambda: endpoint_tables.more_two_steps("pass_at_4"),
    "two-steps-aqn": lambda: endpoint_tables.more_two_steps("aqn"),
    "probe-better": lambda: probe_tables.better(["probe"]),
    "probe-trained-better": lambda: probe_tables.better(TRAINED),
    "probe-trained-better-reference": lambda: probe_tables.better_than_reference(TRAINED),
}
"""Writers of numbers by the mark in the pages."""
for _target in (0.02, 0.1):
    NUMBERS[f"probe-trained-decode-{_target}"] = partial(probe_tables.gains, TRAINED, "decode", _target)
    for _other in ("temperature", "relative"):
        NUMBERS[f"probe-trained-decode-{_other}-{_target}"] = partial(
            probe_tables.gains_over, TRAINED, "decode", _other, _target
        )
for _one in IN_TEXT:
    NUMBERS["-".join(_one)] = partial(said, *_one)
