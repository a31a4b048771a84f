"""The page of a study: both endpoints, paired differences, curves by arm, every learning rate, collapses.

The page is made from results alone, needs no network and holds no script, like the report of runs, whose
style it has. A study in progress has a page too, of its finished runs.
"""

from collections.abc import Collection, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from lab.study.endpoints import endpoints
from lab.study.error_rates import of_endpoint
from lab.study.figures import Band, band, band_chart, difference_chart, standalone
from lab.study.results import ACCURACY, ROLLOUT_ENTROPY, Results, RunResult, Values
from lab.study.spec import Study
from lab.study.statistics import Comparison, compare
from qerl.atomic import writing
from qerl.report.page import differing, document
from qerl.report.runs import Metric, number

EVALUATED = (
    Metric(ACCURACY, "Greedy accuracy on held-out problems, without noise", "%", share=True),
    Metric("entropy", "Entropy of the clean policy on fixed prefixes", "nats per token"),
)
LOGGED = (
    Metric("rewards/accuracy/mean", "Accuracy of samples", "%", share=True),
    Metric(ROLLOUT_ENTROPY, "Entropy of the policy that samples", "nats per token"),
    Metric("sampling/kl", "KL of sampler and trainer", "nats per token"),
    Metric("temperature/error", "Entropy that a temperature follows over its own, logarithm", ""),
)
"""Metrics of evaluations and of steps that are drawn where they were recorded."""

ROUNDING = 1e-9
"""Values of a step up to this size are rounding errors."""

DIFFERENCES = "differences"
"""Name of the drawing of paired differences."""

FOUND = Metric("found", "Accuracy of noisy and of clean samples of the same groups", "%", share=True)
AREA = Metric("area", "Area under the curve of accuracy", "%", share=True)


def write_page(results: Results, path: Path) -> None:
    """Write the page of a study.

    Raises:
        QeRLError: A comparison needs scipy and it is not installed, or the file cannot be written.
    """
    text = render(results, compare(results))
    with writing(f"The page cannot be written to {path}", "choose another --output_dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_figures(results: Results, folder: Path, without: Collection[str] = ()) -> list[Path]:
    """Write each drawing of the page as an SVG file of its own, and return the files.

    Args:
        results: Results of the study.
        folder: Folder of the files.
        without: Keys of metrics that are not drawn, as `rewards/accuracy/mean`.

    Raises:
        QeRLError: As :func:`write_page`.
    """
    drawings = dict(_drawings(results, compare(results), without))
    with writing(f"Figures cannot be written to {folder}", "choose another --figures"):
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, (_, svg) in drawings.items():
            paths.append(folder / f"{name}.svg")
            paths[-1].write_text(standalone(svg), encoding="utf-8")
    return paths


def render(results: Results, comparisons: Sequence[Comparison]) -> str:
    """The page as HTML text."""
    study = results.study
    intro = (
        f"{len(results.runs)} finished runs of {study.steps} steps, {study.prompts_per_step} prompts x "
        f"{study.samples_per_prompt} samples. Bands and whiskers are 95 % intervals of the mean over seeds. "
        "Arms share their seeds: what carries a claim is the difference seed by seed, not whether bands "
        "overlap."
    )
    drawings = dict(_drawings(results, comparisons))
    figures = {
        name: f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for name, (title, svg) in drawings.items()
    }
    differences = figures.pop(DIFFERENCES, "")  # as wide as the page
    body = "\n".join(
        [
            _endpoints(results),
            _means(comparisons),
            differences,
            f'<div class="charts">{"".join(figures.values())}</div>',
            "<h2>Arms</h2>",
            _arms(results),
            "<h2>Learning rates</h2>",
            _rates(results),
            _settings(results),
        ]
    )
    return document(f"QeRL study: {study.model} on {study.task}", intro, body)


def _drawings(
    results: Results, comparisons: Sequence[Comparison], without: Collection[str] = ()
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, title and SVG of each drawing."""
    evaluated, logged = (
        [metric for metric in metrics if metric.key not in without]
        for metrics in ((*EVALUATED, *_strata(results)), LOGGED)
    )
    if comparisons:
        yield DIFFERENCES, ("Paired differences", difference_chart(comparisons))
    for group, labelled in _groups(results):
        suffix, of = (f"-{group}", f", {group}") if group else ("", "")
        for metric in evaluated:
            if bands := list(_evaluated(metric, labelled)):
                yield _name(metric, suffix), (f"{metric.title}{of}", band_chart(metric, bands))
        for metric in logged:
            if bands := _logged(metric, labelled):
                yield _name(metric, suffix), (f"{metric.title}{of}", band_chart(metric, bands))
    for name in results.study.arms:
        if bands := list(_found(results.tested(name))):
            yield f"found-{name}", (f"{FOUND.title}, {name}", band_chart(FOUND, bands))
    if bands := list(_by_rate(results)):
        labels = [f"{rate:g}" for rate in _all_rates(results.study)]
        seeds = "tuning seeds" if results.study.tunes else "all seeds"
        yield (
            "rates",
            (f"{AREA.title} by learning rate, {seeds}", band_chart(AREA, bands, labels, "learning rate")),
        )


def _name(metric: Metric, suffix: str) -> str:
    return metric.key.replace("/", "-") + suffix


Labelled = list[tuple[int, str, list[RunResult]]]
"""For each curve of a drawing: its index, which decides its colour, its label and its runs."""


def _groups(results: Results) -> Iterator[tuple[str, Labelled]]:
    """Curves that share a drawing: arms of a family of comparisons, all arms, or a sweep's learning rates."""
    study = results.study
    if not study.tunes and len(study.learning_rates) > 1:
        for name in study.arms:
            rates = sorted(study.rates(study.arms[name]))
            curves = [(f"{rate:g}", results.of(name, rate)) for rate in rates]
            yield (
                (name if len(study.arms) > 1 else ""),
                [(i, label, runs) for i, (label, runs) in enumerate(curves) if runs],
            )
        return
    tested = {name: results.tested(name) for name in study.arms}
    families = study.comparisons or {"": [[name] for name in study.arms]}
    drawn = {}
    for family, pairs in families.items():
        wanted = {name for pair in pairs for name in pair}
        drawn[family] = [(name, runs) for name, runs in tested.items() if name in wanted and runs]
    # One curve compares nothing; until some family has two, single curves are shown.
    several = {family: curves for family, curves in drawn.items() if len(curves) > 1}
    for family, curves in (several or drawn).items():
        yield (
            (family if len(families) > 1 else ""),
            [(i, name, runs) for i, (name, runs) in enumerate(curves)],
        )


def _strata(results: Results) -> list[Metric]:
    """Metrics of the accuracy on each stratum of the problems, where the task has strata."""
    keys = dict.fromkeys(key for result in results.runs for key in result.evaluations)
    return [
        Metric(key, f"Greedy accuracy, {key.removeprefix(f'{ACCURACY}/').replace('_', ' ')}", "%", share=True)
        for key in keys
        if key.startswith(f"{ACCURACY}/")
    ]


def _evaluated(metric: Metric, labelled: Labelled) -> Iterator[Band]:
    for index, label, runs in labelled:
        if metric.key == ACCURACY:
            rows = [list(result.accuracy) for result in runs]
        else:
            rows = [found for result in runs if (found := _whole(result.evaluations.get(metric.key, [])))]
        if rows:
            yield band(index, label, runs[0].eval_at, np.array(rows))


def _logged(metric: Metric, labelled: Labelled) -> list[Band]:
    """Curves of a step metric; none where all values are rounding errors, as the KL without noise."""
    bands = []
    for index, label, runs in labelled:
        rows = [found for result in runs if (found := _whole(result.steps.get(metric.key, [])))]
        if rows:
            bands.append(band(index, label, range(1, len(rows[0]) + 1), np.array(rows)))
    return bands if any(max(map(abs, one.mean)) > ROUNDING for one in bands) else []


def _found(runs: list[RunResult]) -> Iterator[Band]:
    """Accuracy of the noisy and of the clean samples of the same groups, of an arm that has both."""
    for index, key in enumerate(("noisy", "clean")):
        yield from _logged(Metric(key, key), [(index, f"{key} samples", runs)])


def _whole(values: Values) -> list[float]:
    """The values if all are finite, else none: of a diverged run only the accuracy is drawn."""
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else []


def _all_rates(study: Study) -> list[float]:
    """The learning rates of all arms with a grid, in order."""
    return sorted({rate for arm in study.arms.values() if len(of := study.rates(arm)) > 1 for rate in of})


def _by_rate(results: Results) -> Iterator[Band]:
    study = results.study
    ticks = _all_rates(study)
    seeds = study.tuning_seeds if study.tunes else study.test_seeds
    for index, (name, arm) in enumerate(study.arms.items()):
        rates = sorted(study.rates(arm))
        found = [results.of(name, rate, seeds) for rate in rates]
        if len(rates) > 1 and all(len(runs) == len(seeds) for runs in found):
            areas = np.array([[result.area for result in runs] for runs in found]).T
            yield band(index, name, [ticks.index(rate) for rate in rates], areas)


def _endpoints(results: Results) -> str:
    """Table of both endpoints of each comparison, with the error rates of their verdicts."""
    found, study = endpoints(results), results.study
    if not found:
        return ""
    counted = (
        f"end with {study.escape_key} above {study.escape_above:g}, which is an escape"
        if study.escape_above is not None
        else f"end with an accuracy below {study.collapse_below:g}, which is a collapse"
    )
    rows = []
    for one in found:
        rates, (low, high) = of_endpoint(results, one), one.interval
        kind = "typical seed" if one.kind == "typical" else "share of runs"
        words = (one.family, f"{one.first} \N{MINUS SIGN} {one.second}", kind, one.verdict)
        numbers = (
            f"{one.difference:+.4f}",
            f"{low:+.4f} to {high:+.4f}",
            number(one.holm),
            f"{one.counts[0]} and {one.counts[1]}" if one.kind == "share" else "",
            f"{rates.false:.3f}",
            "none" if np.isnan(rates.found) else f"{rates.found:.3f}",
            str(one.seeds),
        )
        rows.append((words, numbers))
    heads = (
        ("family", "first \N{MINUS SIGN} second", "endpoint", "verdict"),
        ("difference", "95 % interval", "p, Holm", "runs", "false claims", "would have seen", "seeds"),
    )
    return (
        "<h2>Verdicts</h2><p>Two endpoints of each comparison. Typical seed: Hodges and Lehmann's centre of "
        "the paired differences of the area under the curve of greedy accuracy, by the signed-rank test. "
        f"Share: of runs that {counted}, by Fisher's exact test. p has Holm's correction over all of these "
        "tests. False claims: how often this table would claim a difference of two arms that have none, at "
        "the level that the correction leaves to the smallest p; would have seen: the smallest difference "
        "that is found in four of five studies of this size. Undecided is no evidence of equality.</p>"
        + _table(heads, rows)
    )


def _means(comparisons: Sequence[Comparison]) -> str:
    """Table of mean differences, without verdicts: a few runs that collapse or escape can make up a mean."""
    if not comparisons:
        return ""
    rows = []
    for one in comparisons:
        low, high = one.interval
        words = (one.family, f"{one.first} \N{MINUS SIGN} {one.second}")
        rows.append((words, (f"{one.mean:+.4f}", f"{low:+.4f} to {high:+.4f}", str(one.seeds))))
    heads = (("family", "first \N{MINUS SIGN} second"), ("difference", "95 % interval", "seeds"))
    return (
        "<h2>Means of areas</h2><p>Mean difference in the area under the curve of greedy accuracy, by seed, "
        "with its BCa bootstrap interval.</p>" + _table(heads, rows) + "".join(map(_apart, comparisons))
    )


def _apart(one: Comparison) -> str:
    """A warning below the table where an arm with noise and its control differ before the noise begins."""
    if not one.apart:
        return ""
    return (
        f"<p>{escape(one.first)} \N{MINUS SIGN} {escape(one.second)}: in {one.apart} of {one.seeds} seeds "
        "the two differ before the noise begins, so their difference is not the noise's alone.</p>"
    )


Cells = tuple[Sequence[str], Sequence[str]]
"""A row of a table: words, then numbers."""


def _table(heads: Cells, rows: Sequence[Cells]) -> str:
    words, numbers = heads
    head = "".join(f"<th>{escape(text)}</th>" for text in words)
    head += "".join(f"<th class='num'>{escape(text)}</th>" for text in numbers)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in words)}"
        f"{''.join(f'<td class=num>{escape(text)}</td>' for text in numbers)}</tr>"
        for words, numbers in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_HEADS: Cells = (
    ("arm", "commit"),
    ("learning rate", "seeds", "area, %", "SD", "accuracy at the end, %", "SD", "collapsed", "diverged"),
)


def _arms(results: Results) -> str:
    """Table of what each arm reached on the test seeds; in a sweep, at every learning rate."""
    study, rows = results.study, []
    for name in study.arms:
        rate = results.rate(name)
        rates = [rate] if rate is not None else [] if study.tunes else sorted(study.rates(study.arms[name]))
        rows += [
            _row(results, name, at, runs) for at in rates if (runs := results.of(name, at, study.test_seeds))
        ]
    return _table(_HEADS, rows)


def _rates(results: Results) -> str:
    """Table of every learning rate of every arm, on the tuning seeds; the chosen one is marked."""
    study, rows = results.study, []
    if not study.tunes:
        return "<p>No learning rate was chosen: every seed ran at each rate of the study.</p>"
    for name in study.arms:
        chosen = results.rate(name)
        for rate in sorted(study.rates(study.arms[name])):
            if runs := results.of(name, rate, study.tuning_seeds):
                rows.append(_row(results, name, rate, runs, "chosen " if rate == chosen else ""))
    return _table(_HEADS, rows)


def _row(results: Results, name: str, rate: float, runs: Sequence[RunResult], mark: str = "") -> Cells:
    cells = [f"{mark}{rate:g}", str(len(runs))]
    for values in ([result.area for result in runs], [result.accuracy[-1] for result in runs]):
        cells += [f"{100 * fmean(values):.1f}", f"{100 * stdev(values):.1f}" if len(values) > 1 else ""]
    cells.append(str(sum(results.collapsed(result) for result in runs)))
    cells.append(str(sum(result.diverged_at is not None for result in runs)))
    return (name, ", ".join(sorted({result.commit for result in runs}))), cells


def _settings(results: Results) -> str:
    """Table of the fields in which arms differ."""
    arms = results.study.values()["arms"]
    rows = differing(list(arms.values())) if len(arms) > 1 else {}
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in arms)
    body = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, values in rows.items()
    )
    return (
        "<h2>What the arms are</h2>"
        f'<div class="scroll"><table class="settings"><thead><tr><th>field</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
