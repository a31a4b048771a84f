"""Tables of the planned studies' questions, in words, and of both endpoints of each of their comparisons.

A question is a family of comparisons of one study of lab/studies, whose results are in bench/results under
the name given here. Comparisons that have not run are shown as such.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from statistics import fmean

from lab.study.doses import SETTLED, delivered, dose_of, open_stages
from lab.study.endpoints import Endpoint, endpoints
from lab.writers.captions import table
from lab.writers.endpoint_verdicts import NOT_READ, verdicts
from lab.writers.study_tables import absent, arms, pair_words, study, study_or_none, tuned

NOT_YET = "not run yet"

TASKS = (
    ("the testbed's chains", "matched-testbed-chain"),
    ("the testbed's locks", "matched-testbed-lock"),
    ("word problems", "matched-words"),
)
"""Tasks of the study `matched`: words and names of the results."""

BOTH, SHARE = ("typical", "share"), ("share",)
"""Endpoints that answer a question."""

QUESTIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    *(
        (f"{words} on {task}", name, family, BOTH)
        for words, family in (
            ("Does the paper's noise help at 0.003 to 0.1 nats per token", "paper"),
            ("Does a temperature help at the same distance from the policy", "temperature"),
            ("Do noise by sample, noise relative to the weight, or pass@4 help", "designs"),
            ("Is either noise better than a temperature at the same distance", "beside"),
            ("What does leaving out the correction do without noise", "correction"),
        )
        for task, name in TASKS
    ),
    ("Do fewer runs collapse in NVFP4 than in BF16 at 1, 2, 3 and 5 times the rate", "four-bits", "formats",
     SHARE),
    ("Do fewer runs collapse in NF4 than in BF16 at 3 times the rate", "four-bits", "nf4", SHARE),
    ("Do fewer runs collapse in NVFP4 than in NF4 at 3 times the rate", "four-bits", "four_bits", SHARE),
    ("What do 2, 3 and 5 times the rate do within a format", "four-bits", "rates", BOTH),
    ("Is rounding to nearest as good as the least squared error", "four-bits", "rounding", BOTH),
    ("Is LoRA as good as full tuning, each at its own rate", "full", "tuning", BOTH),
    ("What does LoRA on NVFP4 cost beside full tuning, start and all", "full", "recipe", BOTH),
    ("What do four bits cost LoRA, start and all", "full", "formats", BOTH),
    ("Are ranks alike, each at its own rate", "own-rates", "ranks", BOTH),
    ("Does noise help where answers have some 50 tokens", "worked", "noise", BOTH),
    ("Does a temperature at the same distance help there", "worked", "temperature", BOTH),
    ("Is noise by sample better than the temperature there", "worked", "beside", BOTH),
    ("What do four bits cost there, start and all", "worked", "formats", BOTH),
)  # fmt: skip
"""A question without its question mark, the name of its results, a family of the study's comparisons, and the
endpoints that answer it. Two formats differ at the start, so only the share of collapsed runs shows which
tolerates a learning rate."""

STUDIES = tuple(dict.fromkeys(name for _, name, *_ in QUESTIONS))

DOSED = (*(name for _, name in TASKS), "worked")
"""Studies with arms held at a given KL from the policy."""

TUNED = ("full", "own-rates")
"""Studies in which tuning seeds choose each arm's learning rate."""

_SENTENCES = (
    ("share", "matched-testbed-chain", "aqn_1", "none_uncorrected"),
    ("typical", "matched-testbed-chain", "temperature_1", "none"),
    ("typical", "matched-testbed-chain", "pass_at_4", "none"),
    ("share", "matched-testbed-chain", "pass_at_4", "none"),
    ("share", "matched-testbed-lock", "relative_03", "none"),
    ("share", "matched-testbed-lock", "pass_at_4", "none"),
    ("typical", "matched-words", "aqn_1", "none_uncorrected"),
    ("typical", "matched-words", "pass_at_4", "none"),
    ("share", "matched-words", "pass_at_4", "none"),
    ("share", "four-bits", "nvfp4_x3", "bf16_x3"),
    ("share", "four-bits", "nvfp4_x5", "bf16_x5"),
    ("share", "four-bits", "nvfp4_x5", "nvfp4"),
    ("typical", "four-bits", "nvfp4_x2", "nvfp4"),
    ("typical", "four-bits", "nvfp4_x3", "nvfp4"),
    ("typical", "four-bits", "bf16_x2", "bf16"),
    ("typical", "four-bits", "bf16_x3", "bf16"),
    ("typical", "four-bits", "nvfp4_rtn", "nvfp4"),
)
"""Endpoints of comparisons cited in a sentence: kind, name of the results and the two arms."""


@cache
def found(name: str) -> list[Endpoint]:
    """Return both endpoints of all comparisons of a study that have run; empty without results."""
    results = study_or_none(name)
    return [] if results is None else endpoints(results)


def questions() -> str:
    """Return the table of the questions with the verdicts of their comparisons."""
    lines = [
        (
            f"{words}?",
            f"{name}: {family}",
            *(_said(name, family, kind) if kind in read else NOT_READ for kind in BOTH),
        )
        for words, name, family, read in QUESTIONS
    ]
    return table(
        ("question", "study: comparisons", "the typical seed", "runs that escape or collapse"),
        lines,
        "Verdicts on the first arm of each pair, corrected over both endpoints of all comparisons of its "
        "study; `no effect` is said of typical seeds alone. Differences, intervals and error rates are in "
        "the tables below.",
    )


def _said(name: str, family: str, kind: str) -> str:
    """Format the pairs of a family, grouped by verdict."""
    by_verdict: dict[str, list[str]] = {}
    for one in found(name):
        if (one.family, one.kind) == (family, kind):
            by_verdict.setdefault(one.verdict, []).append(pair_words(one.first, one.second))
    return "; ".join(f"**{verdict}**: {', '.join(pairs)}" for verdict, pairs in by_verdict.items()) or NOT_YET


def of_study(name: str) -> str:
    """Return the table of both endpoints of each comparison of a study."""
    shares_only = {family for _, of, family, read in QUESTIONS if of == name and read == SHARE}
    return verdicts(study(name), f"File: {name}.json.gz.", shares_only)


def doses_of(name: str) -> str:
    """Return the table of the KL at which each arm was held, and whether it matches the dose in its name."""
    results, lines = study(name), []
    for arm, fields in results.study.arms.items():
        stages, dose = fields.noise_sigma_stages or fields.temperature_stages, dose_of(arm)
        runs = results.tested(arm)
        if stages is None or dose is None or not runs:
            continue
        still = [stage for stage in range(open_stages(runs, len(stages))) if stages[stage] != stages[0]]
        kls = [delivered(runs, len(stages))[stage] for stage in still]
        mean = fmean(kls) if kls else math.nan
        lines.append(
            (
                f"`{arm}`",
                f"{dose:g}",
                len(kls),
                f"{mean:.2g}" if kls else None,
                f"{min(kls):.2g} to {max(kls):.2g}" if kls else None,
                "met" if dose / 2 <= mean <= 2 * dose else "missed",
            )
        )
    return table(
        ("arm", "dose, nats per token", "open stages", "their mean", "least to most of a stage", "the dose"),
        lines,
        "Open stages are those after the clean one and before the first in which at least half of an arm's "
        f"runs have settled, below an entropy of {SETTLED:g} nats. A dose is met within a factor of 2. "
        f"File: {name}.json.gz.",
    )


def _sentence(kind: str, name: str, first: str, second: str) -> str:
    """Format one endpoint of a comparison as a part of a sentence; for shares, the counts."""
    wanted = (kind, first, second)
    one = next((one for one in found(name) if (one.kind, one.first, one.second) == wanted), None)
    if one is None:
        return NOT_YET
    (low, high), (a, b) = one.interval, one.counts
    if kind == "share":
        return f"{a} and {b} of {one.seeds}, {one.verdict}"
    return f"{one.difference:+.3f} ({low:+.3f} to {high:+.3f}), {one.verdict}"


NUMBERS: dict[str, Callable[[], str]] = {"-".join(words): partial(_sentence, *words) for words in _SENTENCES}


def _if_run(write: Callable[[str], str], name: str) -> str:
    """Return a table of a study, or the sentence that its results are missing."""
    return absent(name) if study_or_none(name) is None else write(name)


_OF_STUDIES: tuple[tuple[str, Callable[[str], str], tuple[str, ...]], ...] = (
    ("endpoints", of_study, STUDIES),
    ("doses", doses_of, DOSED),
    ("tuned", tuned, TUNED),
    ("arms", arms, ("four-bits", *TUNED)),
)
"""What a table shows, its writer, and the studies that have one."""

TABLES: dict[str, Callable[[], str]] = {
    "open-questions": questions,
    **{f"{name}-{what}": partial(_if_run, write, name) for what, write, of in _OF_STUDIES for name in of},
}
