"""`python -m lab study`: compute a study's unfinished runs and draw its page, or redraw the page."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lab.study.library import study_file
from lab.study.page import write_figures, write_page
from lab.study.plan import make_plan
from lab.study.results import RESULTS_FILE, Results, read_results
from lab.study.runner import Runner
from lab.study.spec import Study, joined, read_study
from lab.study.store import PAGE_FILE, Store
from qerl.cli import Command, console
from qerl.errors import QeRLError
from qerl.settings.library import read_mapping

_HELP = """\
Train many small runs side by side, arms x seeds x learning rates, and compare them on one page.

STUDY is a .yaml file, or the name of a file of lab/studies (sweep, noise). Of several files, later keys
override earlier ones, and arms and comparisons are merged. Finished runs in the study's folder are not
computed again: repeat the command to continue after Ctrl-C, or start it once per GPU to share the work.
With a study's folder or its results.json.gz as STUDY, the command only redraws the page. docs/studies.md
describes the file."""


def main(arguments: list[str]) -> int:
    """Run `python -m lab study` with these arguments; returns the exit status."""
    args = _parser().parse_args(arguments)
    return study_command(args.studies, args.output_dir, args.figures, args.dry_run, console, args.again)


def _parser() -> argparse.ArgumentParser:
    parser = Command("python -m lab study", description=_HELP)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "studies",
        nargs="+",
        metavar="STUDY",
        help="a .yaml file, a name, a study's folder or its results.json.gz",
    )
    add("--output_dir", type=Path, metavar="DIR", help="the study's folder; default: runs/NAME")
    add("--figures", type=Path, metavar="DIR", help="also write the figures there, as SVG files")
    again = "compute these arms' runs of other commits again"
    add("--again", nargs="+", default=(), metavar="ARM", help=again)
    add("--dry_run", action="store_true", help="check the study and print what there is to compute")
    return parser


def study_command(
    words: Sequence[str],
    output_dir: Path | None,
    figures: Path | None,
    dry_run: bool,
    console: Console,
    again: Sequence[str] = (),
) -> int:
    """Compute a study and draw its page, or redraw the page of its results.

    Args:
        words: YAML files of a study, by path or by name in lab/studies, merged as `lab.study.spec.joined`
            does; or one word, the folder or results file of a study, whose page is redrawn.
        output_dir: The study's folder; None for one in runs/ named after the files. For results, the folder
            of the page; None for the folder of the results.
        figures: Folder for the figures as SVG files; None for none.
        dry_run: Print what there is to compute and do nothing.
        console: Where progress is shown.
        again: Names of arms whose runs of other commits are computed again.

    Returns:
        Exit status, 130 where Ctrl-C or SIGTERM ended it.

    Raises:
        QeRLError: An error that the user can mend in the study, its folder or the machine.
    """
    place = Path(words[0]).expanduser()
    if len(words) == 1 and (found := _results_file(place)):
        if again:
            raise QeRLError(
                f"--again needs the study's YAML files; {place} holds results, which are only redrawn."
            )
        _draw(read_results(found), output_dir or found.parent, figures, console)
        return 0
    files = [study_file(word) for word in words]
    values: dict[str, Any] = {}
    for file in files:
        values = joined(values, read_mapping(file, "study"), str(file))
    where = ", ".join(map(str, files))
    folder = output_dir or Path("runs", "-".join(file.stem for file in files))
    study = read_study(where, values)
    if dry_run:
        console.print(_outline(study, folder, again), highlight=False, soft_wrap=True)
        return 0
    return _compute(Store(folder, study, again=again), figures, console)


def _results_file(place: Path) -> Path | None:
    """The results file that a path names, itself or by its folder; None if the path names neither."""
    if place.is_dir():
        return place / RESULTS_FILE
    return place if place.name.endswith(".json.gz") else None


def _compute(store: Store, figures: Path | None, console: Console) -> int:
    folder, finished = store.folder, True
    if make_plan(store).open:
        from lab.study.compute import StudyMake  # loads the model's libraries, which a page does not need

        finished = Runner(store, StudyMake(store.study), console).run()
    results = store.write_results()
    if not finished:
        console.print(f"Saved to {folder}. Run the same command to continue.", soft_wrap=True)
    if results.runs:
        try:
            _draw(results, folder, figures, console)
        except QeRLError as error:  # the computed runs are saved
            console.print(f"No page was drawn. {error}", highlight=False, soft_wrap=True)
    return 0 if finished else 130


def _draw(results: Results, folder: Path, figures: Path | None, console: Console) -> None:
    write_page(results, folder / PAGE_FILE)
    written = [folder / PAGE_FILE, *(write_figures(results, figures) if figures else [])]
    for path in written:
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)


def _outline(study: Study, folder: Path, again: Sequence[str]) -> str:
    """Describe a study, and how many runs are left in its folder."""
    rates = ", ".join(f"{rate:g}" for rate in study.learning_rates)
    tuning = f"{len(study.tuning_seeds)} tuning seeds at each of {rates}, then " if study.tunes else ""
    at = "the best of them" if study.tunes else f"learning rate {rates}"
    runs = sum(map(study.count, study.arms.values()))
    options = f" {study.task_options}" if study.task_options else ""
    lines = [
        f"{study.model} on {study.task}{options}",
        f"{len(study.arms)} arm{'s' if len(study.arms) > 1 else ''}: {', '.join(study.arms)}",
        f"per arm: {tuning}{len(study.test_seeds)} test seeds at {at}",
        *(
            f"{name} at learning rate {arm.learning_rate:g} of its own"
            for name, arm in study.arms.items()
            if arm.learning_rate is not None
        ),
        *(
            f"{name} at the best of its own {', '.join(f'{rate:g}' for rate in arm.learning_rates)}"
            for name, arm in study.arms.items()
            if arm.learning_rates is not None
        ),
        f"{runs} runs of {study.steps} steps of {study.prompts_per_step} x "
        f"{study.samples_per_prompt} samples, up to {study.runs_per_batch} side by side",
    ]
    if folder.is_dir():
        plan = make_plan(Store(folder, study, looking=True, again=again))
        lines.append(f"{folder}: {plan.open} runs are left")
    return "\n".join(lines)
