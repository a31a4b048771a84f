"""Several evaluations in one call: the tasks of a suite, for one or more policies.

All checks run before a model is loaded: every task's problems are loaded, every adapter is checked, every
folder is opened. An average over only the tasks that could be loaded would be a different number under the
same name, so a task that cannot be loaded ends the call. Each evaluation has its own folder, OUT/POLICY/TASK,
and the table is in OUT/suite.json; an interrupted call continues where it stopped.

The average of a policy gives each task the same weight, however many problems it has, and its interval treats
the problems of the tasks as independent (`qerl.eval.interval.mean_interval`). The best policy has the highest
average. Among many equally good policies one is best by chance, so the verdict says if the second lies within
the interval of the best. The best score is biased upwards by the selection, so a final score needs other
problems.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl.atomic import write_whole, writing
from qerl.errors import QeRLError
from qerl.eval.interval import mean_interval
from qerl.eval.policy import OneAtATime
from qerl.eval.record import EvalResult, Record
from qerl.eval.request import Suite
from qerl.eval.run import Job, Problems, prepare, score
from qerl.models.decide import Source
from qerl.run_folder import RESULT_FILE, path_labels, read_result

SUITE_FILE = "suite.json"
_KEPT = ("accuracy", "interval", "pass_at", "problems", "samples")


@dataclass(frozen=True)
class Standing:
    """The results of one policy on all tasks.

    Attributes:
        label: The policy's name, unique among the policies.
        results: Results by the task's name.
    """

    label: str
    results: dict[str, EvalResult]

    @property
    def average(self) -> float:
        """Mean accuracy over tasks, from 0 to 1."""
        return fmean(result.accuracy for result in self.results.values())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the average."""
        scored = list(self.results.values())
        return mean_interval([one.accuracy for one in scored], [one.interval for one in scored])

    def as_json(self) -> dict[str, Any]:
        """Return the scores of the policy as plain JSON values."""
        return {
            "policy": self.label,
            "average": self.average,
            "interval": list(self.interval),
            "tasks": {
                name: {key: getattr(result, key) for key in _KEPT} for name, result in self.results.items()
            },
        }


def best_first(standings: Sequence[Standing]) -> list[Standing]:
    """Return the policies by descending average, ties in the given order."""
    return sorted(standings, key=lambda standing: -standing.average)


def table(standings: Sequence[Standing]) -> Table:
    """Return a table in per cent: a row per policy, a column per task and, for several tasks, the average."""
    tasks = list(standings[0].results)
    grid = Table(title="accuracy in % (95 % interval)")
    grid.add_column("policy", overflow="fold")
    for name in tasks:
        samples = standings[0].results[name].samples
        grid.add_column(name if samples == 1 else f"{name} avg@{samples}", justify="right")
    if len(tasks) > 1:
        grid.add_column("average", justify="right")
    for standing in standings:
        cells = [_percent(one.accuracy, one.interval) for one in standing.results.values()]
        if len(tasks) > 1:
            cells.append(_percent(standing.average, standing.interval))
        grid.add_row(standing.label, *cells)
    return grid


def verdict(standings: Sequence[Standing]) -> str:
    """Return a sentence that names the best of several policies and says if that may be chance."""
    best, second, *_ = best_first(standings)
    text = f"Best: {best.label}, {_percent(best.average, best.interval)} %"
    if second.average == best.average:
        return f"{text}; {second.label} has the same score, and the one named first is taken."
    gap = f"{100 * (best.average - second.average):.1f} points above {second.label}"
    if second.average >= best.interval[0]:
        return f"{text}, {gap} but within the interval of the best, so the choice may be chance."
    return f"{text}, {gap}."


def _percent(share: float, interval: tuple[float, float]) -> str:
    low, high = (100 * bound for bound in interval)
    return f"{100 * share:.1f} ({low:.1f} to {high:.1f})"


def evaluate_all(
    sources: Sequence[Source], suite: Suite, out: Path | None, console: Console
) -> list[Standing]:
    """Score policies on the tasks of a suite, print their comparison, and return it in the order given.

    Args:
        sources: The policies, which differ in the adapter.
        suite: The tasks.
        out: Folder for results and completions; None stores nothing.
        console: Shows progress and results.

    Raises:
        QeRLError: Anything the user can fix.
    """
    labels = [""]  # a single policy needs no name
    if len(sources) > 1:
        labels = path_labels([source.adapter or Path(source.model) for source in sources], "adapter")
    problems = _load(suite)
    jobs: dict[tuple[str, str], Job] = {}
    for label, source in zip(labels, sources, strict=True):
        for name, request in suite.requests.items():
            _say(label, name, console)
            jobs[label, name] = prepare(source, request, problems, console)
    _refuse_different_tasks(jobs)
    folders = {key: None if out is None else out.joinpath(*_place(key, labels, suite)) for key in jobs}
    finished = {key: _finished(folders[key], job) for key, job in jobs.items()}
    records = {key: Record(folders[key], job.settings) for key, job in jobs.items() if not finished[key]}
    policies = OneAtATime(console)
    standings = []
    for label in labels:
        results = {}
        for name in suite.requests:
            job, known = jobs[label, name], finished[label, name]
            _say(label, name, console)
            if known is not None:
                console.print(f"{known.summary()} (finished before)", markup=False, soft_wrap=True)
            else:
                known = score(job, policies.get(job.loading), records[label, name], console)
            results[name or str(job.asked.task)] = known
        standings.append(Standing(label, results))
    _conclude(standings, suite, out, console)
    return standings


def _say(label: str, name: str, console: Console) -> None:
    """Print the policy and the task of the next lines."""
    words = " on ".join(word for word in (label, name) if word)
    console.print(words, style="bold", markup=False, highlight=False, soft_wrap=True)


def _load(suite: Suite) -> Problems:
    """Load the problems of all requests that name a task."""
    problems, failed = Problems(), {}
    for name, request in suite.requests.items():
        if request.task is not None:
            try:
                problems.of(request.task, request.task_options or {}, request.limit)
            except QeRLError as error:
                failed[name] = error
    if not failed:
        return problems
    first, *others = failed
    if not suite.name:
        raise failed[first]
    also = f", nor can {', '.join(others)}" if others else ""
    raise QeRLError(
        f"{first} of the suite {suite.name} cannot be loaded{also}, so nothing is scored: {failed[first]} "
        "Or leave it out in a suite of your own (a .yaml file)."
    )


def _refuse_different_tasks(jobs: dict[tuple[str, str], Job]) -> None:
    """Raise if the task is taken from the policies' runs and these had different tasks."""
    by_name: dict[str, Job] = {}
    for (_, name), job in jobs.items():
        first = by_name.setdefault(name, job)
        here, there = first.asked, job.asked
        if (here.task, here.task_options) != (there.task, there.task_options):
            raise QeRLError(
                f"The adapters were trained on different tasks ({here.task} {here.task_options or ''}, "
                f"{there.task} {there.task_options or ''}); name one with --task, and its --task_options."
            )


def _place(key: tuple[str, str], labels: Sequence[str], suite: Suite) -> list[str]:
    """Return the path of an evaluation's folder below --out, as parts."""
    label, name = key
    return [part for part in (label if len(labels) > 1 else "", name if suite.name else "") if part]


def _finished(folder: Path | None, job: Job) -> EvalResult | None:
    """Return the finished result in a folder, or None if there is none.

    Raises:
        QeRLError: The result belongs to another evaluation.
    """
    if folder is None or not (folder / RESULT_FILE).is_file():
        return None
    result = read_result(folder, EvalResult)
    then = {"samples": result.samples, **result.settings, **result.source, "versions": result.versions}
    now: dict[str, Any] = json.loads(json.dumps(job.settings))
    for name in now.keys() - {"task", "stop_token_ids"}:  # the ids need the loaded model
        if now[name] != then.get(name):
            raise QeRLError(
                f"{folder} holds a finished evaluation with {name} {then.get(name)!r}, not {now[name]!r}; "
                "choose another --out, or remove it."
            )
    return result


def _conclude(standings: Sequence[Standing], suite: Suite, out: Path | None, console: Console) -> None:
    """Print the comparison of the policies, and write it to disk."""
    several = len(standings) > 1
    if several or len(suite.requests) > 1:
        console.print(table(standings))
    if several:
        console.print(verdict(standings), markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        best = best_first(standings)[0].label if several else None
        content = {"suite": suite.name, "best": best, "policies": [one.as_json() for one in standings]}
        with writing(f"{out / SUITE_FILE} cannot be written"):
            write_whole(out / SUITE_FILE, json.dumps(content, indent=2) + "\n")
