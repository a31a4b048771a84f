"""The questions that the planned studies ask, in words, and both endpoints of each of their comparisons.

A question is some families of comparisons of one study of lab/studies, whose results are taken into
bench/results under the name that stands here. What has not run is said to have not.
"""

from collections.abc import Callable
from functools import cache, partial

from lab.study.endpoints import Endpoint, endpoints
from lab.writers.captions import table
from lab.writers.endpoint_verdicts import verdicts
from lab.writers.study_tables import absent, pair_words, study

NOT_YET = "not run yet"

TASKS = (
    ("the testbed's chains", "matched-testbed-chain"),
    ("the testbed's locks", "matched-testbed-lock"),
    ("word problems", "matched-words"),
)
"""Tasks of the study `matched`, in words and by the names of their results."""

QUESTIONS: tuple[tuple[str, str, str], ...] = (
    *(
        (f"{words} on {task}", name, family)
        for words, family in (
            ("Does the paper's noise help at 0.003 to 0.1 nats per token", "paper"),
            ("Does a temperature as far from the policy", "temperature"),
            ("Do noise by sample, noise relative to the weight, or pass@4", "designs"),
            ("Are these better than a temperature as far away", "beside"),
        )
        for task, name in TASKS
    ),
    ("Does NVFP4 bear the rates at which BF16 collapses", "four-bits", "formats"),
    ("Does NF4", "four-bits", "nf4"),
    ("What does a higher rate do", "four-bits", "rates"),
    ("Is rounding to nearest as good as the least squared error", "four-bits", "rounding"),
    ("Is LoRA as good as full tuning, each at its own rate", "full", "tuning"),
    ("Are ranks alike, each at its own rate", "own-rates", "ranks"),
    ("Does noise help where answers are longer", "worked", "noise"),
    ("What do four bits cost there", "worked", "formats"),
)
"""A question without its mark, the name of results, and a family of its study's comparisons."""

STUDIES = tuple(dict.fromkeys(name for _, name, _ in QUESTIONS))


@cache
def found(name: str) -> list[Endpoint]:
    """Both endpoints of all comparisons of a study that have run; none where there are no results."""
    results = study(name)
    return [] if results is None else endpoints(results)


def questions() -> str:
    """Each question with the verdicts of its comparisons."""
    lines = [
        (f"{words}?", f"{name}: {family}", *(_said(name, family, kind) for kind in ("typical", "share")))
        for words, name, family in QUESTIONS
    ]
    return table(
        ("question", "study: comparisons", "the typical seed", "runs that escape or collapse"),
        lines,
        "Verdicts on the first arm of each pair, corrected over both endpoints of all comparisons of its "
        "study; `no effect` is a typical seed within .02. Differences, intervals and error rates are in the "
        "tables below.",
    )


def _said(name: str, family: str, kind: str) -> str:
    """Pairs of a family by what is claimed of them."""
    by_verdict: dict[str, list[str]] = {}
    for one in found(name):
        if (one.family, one.kind) == (family, kind):
            by_verdict.setdefault(one.verdict, []).append(pair_words(one.first, one.second))
    return "; ".join(f"**{verdict}**: {', '.join(pairs)}" for verdict, pairs in by_verdict.items()) or NOT_YET


def of_study(name: str) -> str:
    """Both endpoints of each comparison of a study."""
    results = study(name)
    return absent(name) if results is None else verdicts(results, f"File: {name}.json.gz.")


TABLES: dict[str, Callable[[], str]] = {
    "open-questions": questions,
    **{f"{name}-endpoints": partial(of_study, name) for name in STUDIES},
}
