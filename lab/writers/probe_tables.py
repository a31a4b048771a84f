"""Tables of probes for the docs, and numbers of probes for sentences."""

from collections.abc import Sequence

from lab.writers.captions import table
from lab.writers.probe_rows import Estimate, Row, over, probe, read


def perturbations(name: str, policy: str, task: str) -> str:
    """Return the table of each perturbation's effects against clean samples of the same problems."""
    lines = []
    for row in read(name):
        if row.policy == policy and row.task == task and row.target is not None:
            numbers = row.numbers
            lines.append(
                (
                    row.what,
                    f"{numbers['kl'].value:.4f}",
                    f"{numbers['entropy'].value:.2f}",
                    *(_signed(numbers[key]) for key in ("success", "gain", "solved_more")),
                    _signed(numbers["answers_more"], 1),
                    *(_signed(numbers[key]) for key in ("shift", "lift")),
                    f"{numbers['ess'].value:.2f}",
                )
            )
    head = (
        "perturbation", "KL, nats per token", "entropy", "one sample is right", "ln P(one of 8 is right)",
        "problems solved", "distinct answers", "log-odds of right tokens", "ln mean P of right tokens", "ESS",
    )  # fmt: skip
    return table(head, lines, f"{_clean(name, policy, task)} {source(name)}")


def _clean(name: str, policy: str, task: str) -> str:
    """Describe the clean samples with which perturbed ones are compared, as a caption's sentence."""
    (row,) = (row for row in read(name) if (row.policy, row.task, row.what) == (policy, task, "clean"))
    return (
        f"Clean: {row.numbers['pass@1'].value:.3f} of the samples are right, "
        f"{row.numbers['solved'].value:.3f} of the problems are solved by one of theirs, with "
        f"{row.numbers['answers'].value:.1f} distinct answers each."
    )


def better(names: Sequence[str]) -> str:
    """Format how many cells of probes raise P(one of 8 samples is right), judged by the interval."""
    return _counted([row.numbers["gain"] for name in names for row in read(name) if row.target is not None])


def better_than_reference(names: Sequence[str]) -> str:
    """Format the same count against each policy's second set of clean samples, with other uniform numbers."""
    found = []
    for name in names:
        for row in read(name):
            reference = f"{row.policy}-{row.task}-clean-reference"
            if row.target is not None and reference in probe(name)["cells"]:
                found.append(over(name, row.cell, reference)["gain"])
    return _counted(found)


def _counted(gains: Sequence[Estimate]) -> str:
    return f"{sum(gain.low > 0 for gain in gains) or 'none'} of {len(gains)}"


def roundings(name: str) -> str:
    """Return the table of the effects of formats and roundings on given text and own samples, by task."""
    found = probe(name)
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in read(name):
        if row.policy is None and "prefix_kl" in row.numbers:
            cells.setdefault((row.what, row.task), []).append(row)
    tasks, lines = list(found["probe"]["tasks"]), []
    for what in dict.fromkeys(what for what, _ in cells):
        every = [cells.get((what, task), []) for task in tasks]
        error = every[0][0].numbers["error"].value
        words = f"{what}, {len(every[0])} draws" if len(every[0]) > 1 else what
        kl = [_plain(rows, "prefix_kl") if error else None for rows in every]
        lines.append((words, f"{error:.3f}", *kl, *(_plain(rows, "pass@1") for rows in every)))
    head = (
        "weights", "relative error", *(f"KL, {task}" for task in tasks),
        *(f"right samples, {task}" for task in tasks),
    )  # fmt: skip
    spec = found["probe"]
    return table(
        head,
        lines,
        "KL(unrounded || rounded) in nats per token along what the unrounded policy wrote; with 95 % "
        f"intervals over {spec['problems']} problems, of several draws least to most. {spec['model']}, "
        f"{found['device']}, {found['date'][:10]}, commit {found['commit']}. File: {name}.json.gz.",
    )


def _plain(rows: list[Row], key: str) -> str:
    """Format a number of a format with its interval, or the range over several draws."""
    values = [row.numbers[key] for row in rows]
    if len(values) > 1:
        return f"{min(one.value for one in values):.3f} to {max(one.value for one in values):.3f}"
    return f"{values[0].value:.3f} ({values[0].low:.3f} to {values[0].high:.3f})"


def gains(names: Sequence[str], what: str, target: float) -> str:
    """Format the change of ln P(one of 8 is right) by a perturbation at a KL, per policy of some probes."""
    found = [row for name in names for row in read(name) if (row.what, row.target) == (what, target)]
    return ", ".join(_signed(row.numbers["gain"]) for row in found)


def gains_over(names: Sequence[str], what: str, other: str, target: float) -> str:
    """Format the gain of a perturbation minus that of another at the same KL, per policy with both."""
    found = []
    for name in names:
        cells = {(row.policy, row.what): row.cell for row in read(name) if row.target == target}
        for policy in dict.fromkeys(policy for policy, _ in cells):
            if {(policy, what), (policy, other)} <= cells.keys():
                found.append(over(name, cells[policy, what], cells[policy, other])["gain"])
    return ", ".join(map(_signed, found))


def formats(name: str, task: str) -> str:
    """Return the table of the formats at temperature 1 and at the first format's entropy, against the first.

    A format with several draws of its error is shown as a range.
    """
    groups: dict[tuple[bool, str], list[Row]] = {}
    for row in read(name):
        if row.policy is None and row.task == task:
            groups.setdefault((row.cell.endswith("-matched"), row.what), []).append(row)
    lines = []
    for (_, what), rows in sorted(groups.items(), key=lambda group: group[0][0]):
        heats = [row.strength for row in rows]
        heat = f"{min(heats):.3g}" + f" to {max(heats):.3g}" * (min(heats) < max(heats))
        error = f"{groups[False, what][0].numbers['error'].value:.3f}" if (False, what) in groups else ""
        if len(rows) == 1:
            numbers = rows[0].numbers
            own = [_signed(numbers[key], digits) if key in numbers else "" for key, digits in _FORMAT.items()]
        else:
            own = [_range(rows, key, digits) for key, digits in _FORMAT.items()]
            what = f"{what}, {len(rows)} draws"
        lines.append((what, heat, error, *own))
    head = (
        "weights", "temperature", "relative error", "entropy, own samples", "entropy, given prefixes",
        "one sample is right", "ln P(one of 8 is right)", "problems solved", "distinct answers",
    )  # fmt: skip
    return table(head, lines, source(name))


def beside(start: str, trained: Sequence[str], task: str, key: str) -> str:
    """Return the table of each perturbation's effect on the untrained and on trained policies, at equal KL.

    Args:
        start: File of the probe of the untrained policy.
        trained: Files of the probes of the trained policies, whose target KLs the table has.
        task: Name of the task.
        key: Name of an estimate of `lab.writers.probe_rows.beside`.
    """
    here = [row for name in (*trained, start) for row in read(name) if row.task == task and row.target]
    policies = list(dict.fromkeys(row.policy for row in here if row.policy is not None))
    targets = sorted({row.target for name in trained for row in read(name) if row.target is not None})
    policies.sort(key=lambda policy: int(policy.rpartition("_")[2]) if "_" in policy else 0)
    found = {(row.what, row.target, row.policy): row for row in here}
    lines = []
    for what in dict.fromkeys(row.what for row in here):
        for target in targets:
            cells = [found.get((what, target, policy)) for policy in policies]
            if any(cells):
                own = [None if row is None else _signed(row.numbers[key]) for row in cells]
                lines.append((what, f"{target:g}", *own))
    head = ("perturbation", "KL aimed at", *(policy.replace("_", " ") for policy in policies))
    return table(head, lines, f"{' '.join(source(name) for name in trained)} The start: {start}.json.gz.")


def more(name: str, task: str, first: str, second: str, key: str) -> str:
    """Format the difference of an estimate between two formats, at temperature 1, with its interval."""
    cells = (f"format-{task}-{what}-0-plain" for what in (first, second))
    return _signed(over(name, *cells)[key])


_FORMAT = {
    "entropy_more": 3, "prefix_more": 3, "success": 3, "gain": 3, "solved_more": 3, "answers_more": 1,
}  # fmt: skip
"""Estimates of a format, and the digits of each."""


def source(name: str) -> str:
    """Return the caption's sentences on problems, samples, model, provenance and the file."""
    found = probe(name)
    spec = found["probe"]
    return (
        f"Differences, with 95 % intervals over {spec['problems']} problems; {spec['samples']} samples of "
        f"each; {spec['model']}, {found['device']}, {found['date'][:10]}, commit {found['commit']}. "
        f"File: {name}.json.gz."
    )


def _signed(found: Estimate, digits: int = 3) -> str:
    return f"{found.value:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


def _range(rows: list[Row], key: str, digits: int) -> str:
    values = [row.numbers[key].value for row in rows if key in row.numbers]
    return f"{min(values):+.{digits}f} to {max(values):+.{digits}f}" if values else ""
