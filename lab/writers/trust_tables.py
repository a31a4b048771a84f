"""Tables of the study of trust regions: losses against token truncation, by staleness of the sampler."""

from functools import partial
from statistics import fmean

from lab.study.results import RunResult
from lab.writers.captions import table
from lab.writers.study_tables import (
    NOT_RUN,
    compared,
    count,
    mean_of,
    source,
    spread,
    study,
    tested,
)

NAME = "trust-regions-wp12"
CONTROL = "truncation"
LOSSES = (
    ("`dapo`, ratio to the sampler", "dapo"),
    ("`cispo`, the same", "cispo"),
    ("`gspo`, the same", "gspo"),
    ("`dppo_tv`", "dppo_tv"),
    ("`dppo_kl`", "dppo_kl"),
    ("no correction", "uncorrected"),
)
"""Losses in words, and their arms' names without the setting's suffix."""

SETTINGS = (
    ("the sampler is the policy", ""),
    ("2 steps behind", "_stale_2"),
    ("4 steps behind", "_stale_4"),
    ("4 steps behind, twice the rate", "_stale_4_fast"),
)
"""Settings in words, and the suffixes of their arms' names."""

HELD, KL = "clip_ratio", "sampling/kl"


def verdicts() -> str:
    """Return the table of each loss minus token truncation in each setting."""
    found = {(one.first, one.second): one for one in compared(NAME)}

    def cell(arm: str, setting: str) -> str:
        one = found.get((arm + setting, CONTROL + setting))
        if one is None:
            return NOT_RUN
        low, high = one.interval
        return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}): **{one.verdict}**"

    lines = [(words, *(cell(arm, setting) for _, setting in SETTINGS)) for words, arm in LOSSES]
    caption = (
        "Difference in the area under the curve of accuracy to `dapo` at ratio 1 times the ratio to the "
        f"sampler, at most 3, paired by seed. {source(NAME)} Each interval is one of 95 %; verdicts are "
        f"corrected for the {count(NAME)} comparisons of the study."
    )
    return table(("loss minus token truncation", *(words for words, _ in SETTINGS)), lines, caption)


def ends() -> str:
    """Return the table of each arm's final accuracy, collapses and bounded tokens, and of the KL between
    sampler and policy."""
    results = study(NAME)

    def cell(runs: list[RunResult]) -> str:
        if not runs:
            return NOT_RUN
        collapsed = sum(map(results.collapsed, runs))
        held = 100 * fmean(mean_of(run, HELD) for run in runs)
        return f"{fmean(run.accuracy[-1] for run in runs):.3f}, {collapsed} of {len(runs)}, {held:.2g} %"

    arms = (("token truncation", CONTROL), *LOSSES)
    lines = [(words, *(cell(tested(NAME, arm + setting)) for _, setting in SETTINGS)) for words, arm in arms]
    apart = [
        spread([mean_of(run, KL) for run in tested(NAME, CONTROL + setting)], digits=4)
        for _, setting in SETTINGS
    ]
    lines.append(("KL(sampler, policy) under truncation, nats per token", *apart))
    caption = (
        f"Mean accuracy at the end, runs that ended below {results.study.collapse_below:g} (collapsed), and "
        f"the share of tokens (of samples for `gspo`) beyond a bound of the loss's ratio. {source(NAME)}"
    )
    return table(("loss", *(words for words, _ in SETTINGS)), lines, caption)


def staleness(setting: str) -> str:
    """Format the effect of a setting on token truncation, as a part of a sentence."""
    for one in compared(NAME):
        if (one.first, one.second) == (CONTROL + setting, CONTROL):
            low, high = one.interval
            return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}), {one.verdict}"
    return NOT_RUN


NUMBERS = {
    "trust-stale-2": partial(staleness, "_stale_2"),
    "trust-stale-4": partial(staleness, "_stale_4"),
}
TABLES = {"trust-verdicts": verdicts, "trust-ends": ends}
