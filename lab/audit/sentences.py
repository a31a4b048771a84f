"""Numbers within sentences of the pages, recomputed from the raw files."""

from collections.abc import Callable, Sequence

import numpy as np

from lab.audit import distilled, rates, refilled, trained
from lab.audit.raw import (
    Judged,
    area,
    end,
    first_quarter,
    logged,
    probe,
    start,
    study,
    subtract,
    there,
    two_steps,
)
from lab.audit.words import EARLIER, TASKS, TRAINED, TRUST, estimate, sentence, signed


def with_noise() -> dict[tuple[str, str], Judged]:
    """Return the comparisons, on word problems, of an arm with noise and one without, at the same learning
    rate, by task and arm; without those with an arm whose temperature changes."""
    found = {}
    for task in ("wp12", "wp1"):
        one = study(TASKS[task])
        for (first, second), judged in one.judged.items():
            a, b = one.spec["arms"][first], one.spec["arms"][second]
            noise = [arm["noise"] or arm["logits_noise"] > 0 for arm in (a, b)]
            warmed = b["match_entropy"] or b.get("temperature_stages")
            if noise == [True, False] and a["learning_rate"] == b["learning_rate"] and not warmed:
                found[f"{task} {first}", second] = judged
    return found


def better() -> str:
    """Return the number of arms with noise that help."""
    pairs = with_noise()
    kinds = {words.split()[1] for words, _ in pairs}
    helped = {words for (words, _), judged in pairs.items() if judged.verdict.startswith("helps")}
    return f"{len(helped) or 'none'} of {len(kinds)} arms with noise"


def runs_with_noise() -> str:
    """Return the number of runs of the arms of `with_noise` and of each arm's first control."""
    controls: dict[str, str] = {}
    for words, second in with_noise():
        controls.setdefault(words, second)
    arms = {
        (words.split()[0], arm) for words, second in controls.items() for arm in (words.split()[1], second)
    }
    return str(sum(len(study(TASKS[task]).tested(arm)) for task, arm in arms))


def doses(*names: str) -> str:
    """Return the range over arms of word problems of the mean KL in the first quarter of the noisy steps."""
    found = []
    for task in ("wp12", "wp1"):
        for arm in names:
            runs = study(TASKS[task]).tested(arm)
            if runs:
                found.append(np.mean([logged("sampling/kl", first_quarter(run))(run) for run in runs]))
    return f"{min(found):.2f} to {max(found):.2f}"


def sound() -> str:
    """Return the effect of AQN over the seeds in which neither run collapsed."""
    one = study(TASKS["wp12"])
    below = one.spec["collapse_below"]
    kept = [{r["seed"]: area(r) for r in one.tested(arm) if end(r) >= below} for arm in ("aqn", "none")]
    d = subtract(*kept)
    return f"{estimate(d)} over {len(d)} seeds"


def escaped(arm: str | None = None) -> str:
    """Return the count of runs that have more than a tenth of the two-step problems right at the end."""
    one = study(TASKS["wp12"])
    runs = one.runs if arm is None else one.tested(arm)
    return f"{sum(two_steps(run) > 0.1 for run in runs)} of {len(runs)}"


def rising() -> str:
    """Return the count of escaped runs that had fewer right one evaluation before."""
    runs = [run for run in study(TASKS["wp12"]).runs if two_steps(run) > 0.1]
    before = [run["evaluations"]["accuracy/steps_2"][-2] or 0.0 for run in runs]
    return f"{sum(b < two_steps(run) for b, run in zip(before, runs, strict=True))} of {len(runs)}"


def collapsed(arm: str) -> str:
    """Return the count of an arm's runs that collapsed."""
    one = study(TASKS["wp12"])
    return f"{one.collapsed(arm)} of {len(one.tested(arm))}"


def below_start(*arms: str) -> str:
    """Return the counts, by arm, of runs that end below where they began, and the runs of each."""
    runs = [study(TASKS["wp12"]).tested(arm) for arm in arms]
    counts = ", ".join(str(sum(end(run) < start(run) for run in each)) for each in runs)
    return f"{' and '.join(counts.rsplit(', ', 1))} of {' or '.join({str(len(each)) for each in runs})}"


def more_two_steps(arm: str) -> str:
    """Return the difference to `none` in two-step problems right at the end, in percentage points."""
    return estimate(100 * study(TASKS["wp12"]).paired(arm, "none", two_steps), 1)


def probes_better(names: Sequence[str], reference: str = "clean") -> str:
    """Return the count of cells whose interval of the gain is above 0."""
    lows = [low for name in names for _, low, _ in probe(name).gains(reference).values()]
    return f"{sum(low > 0 for low in lows) or 'none'} of {len(lows)}"


def decode_gains(target: float, other: str | None = None) -> str:
    """Return the gain of `decode` at a KL over clean samples or over another kind, per trained policy."""
    found = []
    for one in map(probe, TRAINED):
        cells = {(c["policy"], c["what"]): n for n, c in one.cells.items() if c.get("target") == target}
        for (policy, what), cell in cells.items():
            beside = cells.get((policy, other)) if other else f"{policy}-{one.cells[cell]['task']}-clean"
            if what == "decode" and beside in one.cells:
                found.append(signed(*one.gain(cell, str(beside))))
    return ", ".join(found)


def endpoint(kind: str, name: str, first: str, second: str) -> str:
    """Return the typical seed's difference, or the counts of both arms' runs, with the verdict."""
    found = study(name).endpoints.get((first, second)) if there(name) else None
    if found is None:
        return "not run yet"
    typical, share = found
    if kind == "share":
        return f"{share.counts}, {share.verdict}"
    return f"{signed(typical.difference, *typical.interval)}, {typical.verdict}"


def number(name: str) -> str | None:
    """Return the recomputed text of a mark; None for a mark that is not recomputed."""
    if name in NUMBERS:
        return NUMBERS[name]()
    kind, _, rest = name.partition("-")
    if kind in TASKS:
        return sentence(TASKS[kind], *rest.split("-"))
    if name.startswith("trust-stale-"):
        return sentence(TRUST, f"truncation_{name.removeprefix('trust-').replace('-', '_')}", "truncation")
    if kind in ("share", "typical"):
        return endpoint(kind, *rest.rsplit("-", 2))
    if kind == "escaped":
        return escaped(rest)
    if name.startswith("two-steps-"):
        return more_two_steps(name.removeprefix("two-steps-"))
    if name.startswith("probe-trained-decode-"):
        *other, target = name.removeprefix("probe-trained-decode-").split("-")
        return decode_gains(float(target), *other)
    return None


NUMBERS: dict[str, Callable[[], str]] = {
    "noise-better": better,
    "noise-runs": runs_with_noise,
    "noise-doses": lambda: doses(*{words.split()[1] for words, _ in with_noise()}),
    "aqn-first-kl": lambda: doses("aqn", "aqn_uncorrected"),
    "aqn-sound": sound,
    "aqn-earlier": lambda: estimate(study(EARLIER).paired("aqn", "none")),
    "escaped": escaped,
    "escaped-rising": rising,
    "collapsed-mxfp4": lambda: collapsed("mxfp4"),
    "fell-ranks": lambda: below_start("rank_32", "rank_64", "rank_128"),
    "fell-none": lambda: below_start("none"),
    "probe-better": lambda: probes_better(["probe"]),
    "probe-trained-better": lambda: probes_better(TRAINED),
    "probe-trained-better-reference": lambda: probes_better(TRAINED, "clean-reference"),
    **distilled.NUMBERS,
    **rates.NUMBERS,
    **refilled.NUMBERS,
    **trained.NUMBERS,
}
