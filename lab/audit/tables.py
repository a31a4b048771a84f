"""Cells of the generated tables, recomputed from the raw files.

`TABLES` maps the name of a table, or a suffix of names, to the function that yields its cells. The result
file is taken from the table's caption if the caption names one.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lab.audit import distilled, probes, rates, refilled, trained
from lab.audit import statistics as st
from lab.audit.cells import Cell, Table, row_of_cells
from lab.audit.raw import (
    Run,
    Study,
    Value,
    area,
    end,
    first_quarter,
    logged,
    noisy,
    probe,
    start,
    study,
    subtract,
    there,
    two_steps,
)
from lab.audit.words import (
    EARLIER,
    MINUS,
    NOT_READ,
    NOT_RUN,
    TASKS,
    deviation,
    estimate,
    interval_of,
    later,
    over_seeds,
    p_value,
    plain,
    rates_of,
    signed,
)

ARMS = {
    "uncorrected, as in the paper": ("aqn_uncorrected", "none_uncorrected"),
    "corrected": ("aqn", "none"),
    "NVFP4": "none", "BF16": "bf16", "NF4": "nf4", "MXFP4": "mxfp4",
    "token truncation": "truncation", "no correction": "uncorrected",
}  # fmt: skip
"""Arms by the words of a page."""

SETTINGS = ("", "_stale_2", "_stale_4", "_stale_4_fast")
CLEAN = ("none", "none_uncorrected", "none_one_sided")


def answers(table: Table) -> Iterator[Cell]:
    """Yield differences, seeds and verdicts of each question."""
    for row in table.rows:
        first, second = row[1].split(MINUS)
        for name, cell in zip(table.files, row[2:], strict=True):
            judged = study(name).judged.get((first, second))
            found = later(study(name), first, second)
            if judged is not None:
                seeds = len(judged.differences)
                found = f"{interval_of(judged)}, {seeds} seeds: **{judged.verdict}**"
            yield Cell(f"{row[1]}, {name}", cell, found)


def comparisons(table: Table) -> Iterator[Cell]:
    """Yield the planned comparisons of one study."""
    one = study(table.files[0])
    count = re.search(r"over all (\d+) comparisons", table.text)
    yield Cell("comparisons of the study", count[1] if count else "", str(len(one.pairs)))
    for row in table.rows:
        first, second = row[0].split(MINUS)
        judged = one.judged[first, second]
        low, high = judged.interval
        fell, seeds = judged.collapses, len(judged.differences)
        found = (
            f"{judged.differences.mean():+.3f}", f"{low:+.3f} to {high:+.3f}", p_value(judged.holm),
            f"{judged.detectable:.3f}", f"{fell[0]} and {fell[1]} of {seeds}", judged.verdict,
        )  # fmt: skip
        yield from row_of_cells(row, found, table.head)


def two_endpoints(table: Table) -> Iterator[Cell]:
    """Yield both endpoints of the comparisons of one study."""
    one, name = study(table.files[0]), table.name.removesuffix("-endpoints")
    yield Cell("pairs", str(len(table.rows)), str(len(one.endpoints)))
    families = one.spec["comparisons"].items()
    unread = {tuple(pair) for of, pairs in families if (name, of) in ONLY_SHARES for pair in pairs}
    for row in table.rows:
        first, second = row[0].split(MINUS)
        typical, share = one.endpoints[first, second]
        cells = [
            (signed(s.difference, *s.interval), p_value(s.holm), s.verdict, rates_of(*s.rates))
            for s in (typical, share)
        ]
        if (first, second) in unread:
            cells[0] = (NOT_READ, "", "", "")
        yield from row_of_cells(row, (*cells[0], share.counts, *cells[1]), table.head)


def doses(table: Table) -> Iterator[Cell]:
    """Yield the KL at which the arms of one study were held, in the stages before their runs settled."""
    one = study(table.files[0])
    for row in table.rows:
        name = row[0].strip("`")
        arm, runs = one.spec["arms"][name], one.tested(name)
        strengths = arm.get("noise_sigma_stages") or arm["temperature_stages"]
        length, last = one.spec["steps"] // len(strengths), len(strengths) - 1
        kls = []
        for stage, strength in enumerate(strengths):
            steps = range(stage * length, one.spec["steps"] if stage == last else (stage + 1) * length)
            if np.nanmedian([logged("entropy", steps)(run) for run in runs]) < 0.02:
                break
            if strength != strengths[0]:
                kls.append(float(np.nanmean([logged("sampling/kl", steps)(run) for run in runs])))
        dose = float("0." + name.split("_")[-1])
        met = bool(kls) and 0.5 <= np.mean(kls) / dose <= 2
        between = f"{min(kls):.2g} to {max(kls):.2g}" if kls else ""
        found = (
            f"{dose:g}",
            str(len(kls)),
            f"{np.mean(kls):.2g}" if kls else "",
            between,
            "met" if met else "missed",
        )
        yield from row_of_cells(row, found, table.head)


ONLY_SHARES = {("four-bits", "formats"), ("four-bits", "nf4"), ("four-bits", "four_bits")}
"""Families that compare two formats; their plan does not evaluate areas."""


def questions(table: Table) -> Iterator[Cell]:
    """Yield the verdicts of families of comparisons, also of studies that have not run."""
    for row in table.rows:
        name, family = row[1].split(": ")
        said: tuple[dict[str, list[str]], ...] = ({}, {})
        if there(name):
            one = study(name)
            for pair in map(tuple, one.spec["comparisons"][family]):
                for side, by_verdict in zip(one.endpoints.get(pair, ()), said, strict=False):
                    by_verdict.setdefault(side.verdict, []).append(MINUS.join(pair))
        found = [
            "; ".join(f"**{verdict}**: {', '.join(pairs)}" for verdict, pairs in by_verdict.items())
            for by_verdict in said
        ]
        if (name, family) in ONLY_SHARES:
            found[0] = NOT_READ
        yield from row_of_cells(row, (row[1], *(words or f"{NOT_RUN} yet" for words in found)), table.head)


def arms(table: Table) -> Iterator[Cell]:
    """Yield the cells of the arms of one study."""
    one = study(table.files[0])
    yield Cell("rows", str(len(table.rows)), str(sum(len(one.tested(arm)) > 1 for arm in one.spec["arms"])))
    for row in table.rows:
        runs = one.tested(row[0])
        found = (
            f"{one.rate(row[0]):g}",
            f"{np.mean([start(run) for run in runs]):.3f}",
            deviation([area(run) for run in runs]),
            deviation([end(run) for run in runs]),
            f"{one.collapsed(row[0])} of {len(runs)}",
            str(sum(end(run) < start(run) for run in runs)),
            str(sum(run["diverged_at"] is not None for run in runs)),
            ", ".join(sorted({run["facts"]["commit"] for run in runs})),
        )
        yield from row_of_cells(row, found, table.head)


def tuned(table: Table) -> Iterator[Cell]:
    """Yield the arms of one study at each learning rate of their own grids."""
    one = study(table.files[0])
    seeds, rates = one.spec["tuning_seeds"], one.spec["learning_rates"]
    grids = {arm: sorted(fields.get("learning_rates") or rates) for arm, fields in one.spec["arms"].items()}
    tried = [(arm, rate) for arm, grid in grids.items() for rate in grid if len(one.of(arm, rate, seeds)) > 1]
    yield Cell("rows", str(len(table.rows)), str(len(tried)))
    for row in table.rows:
        arm, rate = row[0].split(", ")
        runs = one.of(arm, float(rate), seeds)
        is_end = float(rate) in (grids[arm][0], grids[arm][-1])
        found = (
            deviation([area(run) for run in runs]),
            f"{sum(end(run) < one.spec['collapse_below'] for run in runs)} of {len(runs)}",
            ("yes, an end" if is_end else "yes") if one.rate(arm) == float(rate) else "",
        )
        yield from row_of_cells(row, found, table.head)


def paper(table: Table) -> Iterator[Cell]:
    """Yield the effect of AQN; with the correction on `wp12`, the mean of two studies by seed."""
    for row in table.rows:
        words, task = re.fullmatch(r"(.*?), (\w+)(?:, two runs of each seed)?", row[0]).groups()  # type: ignore[union-attr]
        names = [TASKS[task], *([EARLIER] if "two runs" in row[0] else [])]
        fell = [sum(study(name).collapsed(arm) for name in names) for arm in ARMS[words]]
        of = [sum(len(study(name).tested(arm)) for name in names) for arm in ARMS[words]]
        first, second = ARMS[words]
        ends = [
            estimate(np.mean([study(name).paired(first, second, value) for name in names], axis=0))
            for value in (area, end)
        ]
        found = (*ends, " and ".join(f"{a} of {b}" for a, b in zip(fell, of, strict=True)))
        yield from row_of_cells(row, found, table.head)


def learned(table: Table) -> Iterator[Cell]:
    """Yield differences between formats in accuracy gained above the start, on `wp12`."""
    values = (lambda run: area(run) - start(run), lambda run: end(run) - start(run))
    for row in table.rows:
        first, second = (str(ARMS[word]) for word in row[0].split(MINUS))
        found = [over_seeds(study(TASKS["wp12"]).paired(first, second, value)) for value in values]
        yield from row_of_cells(row, found, table.head)


def entropies(table: Table) -> Iterator[Cell]:
    """Yield differences between the entropies of formats, in a probe and during training."""
    one, trained = probe("probe"), study(TASKS["wp12"])
    for row in table.rows:
        first, second = (str(ARMS.get(word, "nvfp4-rtn")) for word in row[0].split(MINUS))
        own = {"none": "nvfp4"}.get(first, first)
        pairs = [[f"format-{task}-{arm}-0-plain" for arm in (own, second)] for task in ("wp12", "wp2")]
        found = [signed(*more(*pair)) for more in (one.entropy_more, one.prefix_more) for pair in pairs]
        found.append(over_seeds(trained.paired(first, second, logged("rollout/entropy"))))
        yield from row_of_cells(row, found, table.head)


def unanswered(table: Table) -> Iterator[Cell]:
    """Yield the undecided comparisons on word problems, with the effect that would have been found."""
    for task, words in re.findall(r"- Undecided on `(\w+)`, [^:]*: (.*)\.", table.text):
        found = [
            f"{first}{MINUS}{second} ({judged.detectable:.3f})"
            for (first, second), judged in study(TASKS[task]).judged.items()
            if judged.verdict == "undecided" and not judged.apart
        ]
        yield Cell(f"undecided on {task}", words, ", ".join(found))


def beside_controls(table: Table) -> Iterator[Cell]:
    """Yield arms with noise against their control, and against the mean of four arms without noise."""
    one = study(TASKS["wp12"])
    four = [*(one.by_seed(arm, area) for arm in CLEAN), study(EARLIER).by_seed("none", area)]
    mean = {seed: float(np.mean([arm[seed] for arm in four])) for seed in four[0]}
    for row in table.rows:
        first, second = row[0].split(MINUS)
        both = one.paired(first, second), subtract(one.by_seed(first, area), mean)
        found = [cell for d in both for cell in (estimate(d), p_value(st.signed_ranks(d)))]
        yield from row_of_cells(row, found, table.head)


def hard(table: Table) -> Iterator[Cell]:
    """Yield the share of two-step problems that each arm has right at the end."""
    one = study(table.files[0])
    for row in table.rows:
        values = list(one.by_seed(row[0], two_steps).values())
        d = one.paired(row[0], "none", two_steps)
        more = ["", ""] if row[0] == "none" else [estimate(100 * d, 1), p_value(st.signed_ranks(d))]
        escaped = f"{sum(value > 0.1 for value in values)} of {len(values)}"
        found = (plain([100 * v for v in values], 1), *more, escaped, f"{100 * max(values):.1f}")
        yield from row_of_cells(row, found, table.head)


def reached(table: Table) -> Iterator[Cell]:
    """Yield how far the noise of each arm moved the sampler from the policy."""
    one = study(table.files[0])
    for row in table.rows:
        runs = one.tested(row[0])
        at, first = noisy(runs[0]), first_quarter(runs[0])
        sigma = [np.mean([run["steps"]["noise/sigma"][step] for run in runs]) for step in (at[0], at[-1])]
        control, entropy = _without_noise(one, row[0]), logged("rollout/entropy", at)
        more = [] if control is None else one.paired(row[0], control, entropy).tolist()
        found = (
            f"{at[0] + 1} to {at[-1] + 1}", *(f"{value:.2g}" for value in sigma),
            *(plain([logged("sampling/kl", steps)(run) for run in runs], 4) for steps in (first, at)),
            plain([logged("sampling/ratio/effective_sample_size", at)(run) for run in runs]),
            plain(more) if more else "",
        )  # fmt: skip
        yield from row_of_cells(row, found, table.head)


def _without_noise(one: Study, arm: str) -> str | None:
    """Return the arm without noise that equals ``arm`` in all other fields, or in all but the correction."""
    arms = one.spec["arms"]

    def other(name: str, *left_out: str) -> list[tuple[str, Any]]:
        fields = arms[name].items()
        return [
            (k, v) for k, v in fields if not k.startswith(("noise", "logits_noise")) and k not in left_out
        ]

    clean = [name for name, fields in arms.items() if not fields["noise"] and not fields["logits_noise"]]
    same = [name for name in clean if other(name) == other(arm)]
    usual = [
        name
        for name in clean
        if arms[name]["correction"] == "token_truncate"
        and other(name, "correction") == other(arm, "correction")
    ]
    return next(iter(same + usual), None)


def follows(table: Table) -> Iterator[Cell]:
    """Yield the entropy that a temperature adds which follows the entropy of an arm with noise."""
    for row in table.rows:
        task, arm, followed, first, last = re.fullmatch(
            r"(\w+): (\w+) after (\w+), steps (\d+) to (\d+)", row[0]
        ).groups()  # type: ignore[union-attr]
        one, at = study(TASKS[task]), list(range(int(first) - 1, int(last)))
        entropy = logged("rollout/entropy", at)
        pairs = ((followed, "none"), (arm, "none"), (arm, followed))
        found = (
            plain([logged("sampling/kl", at)(run) for run in one.tested(followed)], 4),
            *(estimate(one.paired(*pair, entropy)) for pair in pairs),
            plain([logged("temperature", at)(run) for run in one.tested(arm)]),
        )
        yield from row_of_cells(row, found, table.head)


def discovery(table: Table) -> Iterator[Cell]:
    """Yield the steps in which each arm has its first right sample and half of its samples right."""
    one = study(table.files[0])
    for row in table.rows:
        found = [plain([logged("rollout/entropy", [0])(run) for run in one.tested(row[0])])]
        for least in (1e-12, 0.5 - 1e-9):
            when = _first_step(least)
            found.append(plain([when(run) for run in one.tested(row[0])], 1))
            found.append("" if row[0] == "none" else estimate(one.paired(row[0], "none", when), 1))
        yield from row_of_cells(row, found, table.head)


def _first_step(least: float) -> Value:
    """Return a function: a run's first step, from 1, with a share of right samples above ``least``, or one
    past the last."""

    def when(run: Run) -> float:
        values = [value or 0.0 for value in run["steps"]["rewards/accuracy/mean"]]
        return float(next((at for at, value in enumerate(values, 1) if value > least), len(values) + 1))

    return when


def halves(table: Table) -> Iterator[Cell]:
    """Yield the shares of right samples and solved problems of noisy and clean samples of the same groups."""
    for row in table.rows:
        task, arm = row[0].split(": ")
        runs, found = study(TASKS[task]).tested(arm), []
        for keys in (("noisy", "clean"), ("only_noisy", "only_clean")):
            both = [[logged(key, noisy(run))(run) for run in runs] for key in keys]
            low, high = st.percentile(more := np.array(both[0]) - both[1])
            found += [*(plain(values) for values in both), signed(more.mean(), low, high)]
        yield from row_of_cells(row, found, table.head)


def trust(table: Table) -> Iterator[Cell]:
    """Yield the verdicts of the study of trust regions."""
    one = study(table.files[0])
    for row in table.rows:
        for setting, cell in zip(SETTINGS, row[1:], strict=True):
            judged = one.judged.get((_loss(row[0]) + setting, "truncation" + setting))
            found = NOT_RUN if judged is None else f"{interval_of(judged)}: **{judged.verdict}**"
            yield Cell(row[0] + setting, cell, found)


def trust_ends(table: Table) -> Iterator[Cell]:
    """Yield final accuracies, collapses and bound shares of the study of trust regions, and its KL."""
    one = study(table.files[0])
    for row in table.rows:
        for setting, cell in zip(SETTINGS, row[1:], strict=True):
            if row[0].startswith("KL"):
                found = plain(list(one.by_seed("truncation" + setting, logged("sampling/kl")).values()), 4)
            elif runs := one.tested(arm := _loss(row[0]) + setting):
                held = 100 * np.mean([logged("clip_ratio")(run) for run in runs])
                mean = np.mean([end(run) for run in runs])
                found = f"{mean:.3f}, {one.collapsed(arm)} of {len(runs)}, {held:.2g} %"
            else:
                found = NOT_RUN
            yield Cell(row[0] + setting, cell, found)


def _loss(words: str) -> str:
    """Return the arm of a loss given in words."""
    named = re.match(r"`(\w+)`", words)
    return named[1] if named else str(ARMS[words])


TABLES: dict[str, Callable[[Table], Iterator[Cell]]] = {
    "noise-answers": answers, "noise-paper": paper, "noise-learned": learned, "noise-entropies": entropies,
    "noise-unanswered": unanswered, "noise-controls": beside_controls, "noise-two-steps": hard,
    "trust-verdicts": trust, "trust-ends": trust_ends, "-comparisons": comparisons, "-ablations": comparisons,
    "wp12-formats": comparisons, "-arms": arms, "-tuned": tuned,
    "-reached": reached, "noise-follows": follows, "noise-halves": halves, "-endpoints": two_endpoints,
    "-doses": doses,
    "open-questions": questions, "-discovery": discovery,
    **distilled.TABLES,
    **probes.TABLES,
    **rates.TABLES,
    **refilled.TABLES,
    **trained.TABLES,
}  # fmt: skip
"""Functions by the name of a table, or a suffix of it; the longest suffix counts."""
