"""`python -m lab study` on a probe: its cells are measured, kept one by one, and drawn, finished or not."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from lab.study.probe.calibrate import find_strengths
from lab.study.probe.material import Material, make_material, strata_of
from lab.study.probe.measure import by_problem, on_prefixes, on_solutions
from lab.study.probe.page import write_figures, write_page
from lab.study.probe.perturb import CLEAN, Perturbation
from lab.study.probe.plan import Job, all_cells, cells_of, jobs_of
from lab.study.probe.policies import Policies
from lab.study.probe.spec import Probe, make_probe, read_probe
from lab.study.probe.store import PAGE_FILE, Cell, Store, read_results, refuse_results_alone
from lab.study.probe.walk import Floats, Rows, Walk, Walker
from qerl.eval.evaluate import versions
from qerl.families.parts import base_model
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.load import end_token_ids, load_tokenizer
from qerl.source import UNKNOWN, commit

TEMPERATURES = (0.25, 4.0)
"""Between which a format's entropy is matched."""


def run_probe(
    where: str,
    values: Mapping[str, Any],
    folder: Path,
    figures: Path | None,
    dry_run: bool,
    console: Console,
) -> int:
    """Measure what is missing of a probe, and draw what there is.

    Args:
        where: The probe's files, for messages.
        values: What they hold.
        folder: The probe's folder; several processes may share it.
        figures: Folder for the figures as SVG files; None for none.
        dry_run: Say what would be measured, and measure nothing.
        console: Where progress is shown, a line for each cell.

    Returns:
        The exit status.

    Raises:
        QeRLError: Anything the user can mend.
    """
    probe = read_probe(where, values)
    policies = Policies(probe, folder, console)
    policies.check()
    refuse_results_alone(folder)
    jobs = jobs_of(probe)
    if dry_run:
        count = sum(len(cells_of(probe, job)) for job in jobs)
        console.print(
            f"{count} cells in {len(jobs)} jobs: {', '.join(job.name for job in jobs)}.", highlight=False
        )
        return 0
    fingerprint = checkpoint_fingerprint(policies.model.folder)
    store = Store(folder, {"probe": probe.values(), "fingerprint": fingerprint})
    try:
        Run(probe, store, policies, console).measure(jobs)
    finally:  # what is measured can be looked at, whatever ended it
        draw_folder(folder, folder, figures, console)
    return 0


def draw_folder(probe_folder: Path, folder: Path, figures: Path | None, console: Console) -> None:
    """Write the results of a probe's cells, finished or not, into one file, and draw its page.

    Args:
        probe_folder: The probe's folder.
        folder, figures, console: As in `draw_probe`.

    Raises:
        QeRLError: A file is damaged or cannot be written.
    """
    store = Store.opened(probe_folder)
    probe = make_probe(store.head["probe"])
    cells = {name: store.read(name) for name in all_cells(probe) if store.has(name)}
    if not cells:
        console.print("No cell is measured yet.")
        return
    results = {
        "probe": probe.values(),
        "strata": {name: strata_of(probe, name) for name in probe.tasks},
        "device": ", ".join(dict.fromkeys(cell["device"] for cell in cells.values() if "device" in cell)),
        "commit": ", ".join(dict.fromkeys(cell.get("commit", UNKNOWN) for cell in cells.values())),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cells": cells,
    }
    draw_probe(store.write_results(results), folder, figures, console)


def draw_probe(file: Path, folder: Path, figures: Path | None, console: Console) -> None:
    """Draw the page of a probe from its results alone.

    Args:
        file: The results.
        folder: Where the page goes.
        figures: Folder for the figures as SVG files; None for none.
        console: Where it is said what was written.

    Raises:
        QeRLError: A file is damaged or cannot be written.
    """
    results = read_results(file)
    if missing := len(all_cells(make_probe(results["probe"]))) - len(results["cells"]):
        console.print(f"{missing} cells are missing, with other processes or not yet measured.")
    write_page(results, folder / PAGE_FILE)
    written = [folder / PAGE_FILE, *(write_figures(results, figures) if figures else [])]
    for path in written:
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)


class Run:
    """Measures jobs.

    Args:
        probe: The probe.
        store: Its folder.
        policies: Its policies.
        console: Where progress is shown.
    """

    def __init__(self, probe: Probe, store: Store, policies: Policies, console: Console) -> None:
        self._probe, self._store, self._policies, self._console = probe, store, policies, console
        self._written: dict[str, tuple[Walk, float]] = {}
        self._device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._policies.model)

    @cached_property
    def _materials(self) -> dict[str, Material]:
        return {task: make_material(self._probe, task, self._tokenizer) for task in self._probe.tasks}

    def measure(self, jobs: Sequence[Job]) -> None:
        """Measure the cells of all jobs that no other process has measured or is measuring.

        What a cell's completions say is read in a thread of its own while the next cell is sampled.
        """
        left = len([name for job in jobs for name in cells_of(self._probe, job) if not self._store.has(name)])
        start, done = time.perf_counter(), 0
        with ThreadPoolExecutor(max_workers=1) as reader:
            for job in jobs:
                with self._store.claimed(job.name) as mine:
                    wanted = [name for name in cells_of(self._probe, job) if not self._store.has(name)]
                    if not mine or not wanted:
                        continue
                    for name, cell in _one_behind(self._cells(job, wanted, reader)):
                        cell["numbers"] = cell["numbers"].result()
                        self._store.write(name, cell)
                        done += 1
                        minutes = (time.perf_counter() - start) / 60
                        self._console.print(
                            f"{name}: {_said(cell)}; {done} of {left} cells in {minutes:.1f} min",
                            highlight=False, soft_wrap=True,
                        )  # fmt: skip

    def _cells(self, job: Job, wanted: Sequence[str], reader: Executor) -> Iterator[tuple[str, Cell]]:
        """The cells of a job, their numbers still being read."""
        if job.policy is None:
            cells = self._format(job, wanted)
        elif job.what == "clean":
            cells = self._clean(job, wanted)
        else:
            cells = self._perturbed(job, wanted)
        start = time.perf_counter()
        for name, cell in cells:
            shared = Cell(
                policy=job.policy, task=job.task, what=job.what, draw=job.draw, device=self._device,
                commit=commit(),
            )  # fmt: skip
            rows, walk = cell.pop("sampled")
            numbers = reader.submit(by_problem, rows, walk, self._materials[job.task].judge)
            seconds = round(time.perf_counter() - start, 2)
            yield name, shared | cell | {"numbers": numbers, "seconds": seconds}
            start = time.perf_counter()

    def _clean(self, job: Job, wanted: Sequence[str]) -> Iterator[tuple[str, Cell]]:
        assert job.policy is not None
        model = self._policies.policy(job.policy)
        for name in wanted:
            reference = name.endswith("-reference")
            walker = self._walker(model, self._materials[job.task].prompts, self._probe.seed + reference)
            yield name, {"strength": 0.0, "sampled": self._sampled(walker, CLEAN, 0.0)}

    def _perturbed(self, job: Job, wanted: Sequence[str]) -> Iterator[tuple[str, Cell]]:
        assert job.policy is not None
        perturbation = self._probe.perturbations[job.what]
        model = self._policies.policy(job.policy)
        material = self._materials[job.task]
        calibration = self._walker(model, material.calibration)
        both = zip(self._probe.target_kl, cells_of(self._probe, job), strict=True)
        targets = [target for target, name in both if name in wanted]
        found = find_strengths(
            self._means(calibration, perturbation, lambda walk: walk.kl), targets, *perturbation.range
        )
        walker = self._walker(model, material.prompts)
        for name, target, strength, measured in zip(
            wanted, targets, found.strengths, found.measured, strict=True
        ):
            cell = Cell(target=target, strength=strength, calibrated=measured, curve=found.curve)
            cell["sampled"] = self._sampled(walker, perturbation, strength)
            cell["solutions"] = self._solutions(walker, job.task, perturbation, strength)
            yield name, cell

    def _format(self, job: Job, wanted: Sequence[str]) -> Iterator[tuple[str, Cell]]:
        writer, entropy = self._baseline(job.task)
        model = self._policies.format(job.what, job.draw)
        material = self._materials[job.task]
        walker = self._walker(model, material.prompts)
        for name in wanted:
            temperature, cell = 1.0, Cell()
            if name.endswith("-matched"):
                calibration = self._walker(model, material.calibration)
                entropies = self._means(calibration, CLEAN, lambda walk: walk.entropy, zero=1)
                found = find_strengths(entropies, [entropy], *TEMPERATURES)
                (temperature,), (measured,) = found.strengths, found.measured
                cell |= {"target_entropy": entropy, "calibrated": measured, "curve": found.curve}
            else:
                rows = Rows.of(range(len(material.prompts)), self._probe.prefix_samples)
                cell["prefixes"] = on_prefixes(rows, walker.walk(rows, CLEAN, writer.tokens), writer)
                cell["error"] = self._policies.error(job.what, job.draw)
            cell["sampled"] = self._sampled(walker, CLEAN, temperature - 1)
            yield name, cell | {"temperature": temperature}

    def _baseline(self, task: str) -> tuple[Walk, float]:
        """What the first format writes, and the entropy that the others are brought to."""
        if task not in self._written:
            model, material = self._policies.format(next(iter(self._probe.formats))), self._materials[task]
            rows = Rows.of(range(len(material.prompts)), self._probe.prefix_samples)
            walk = self._walker(model, material.prompts).walk(rows)
            calibration = self._walker(model, material.calibration)
            (entropy,) = self._means(calibration, CLEAN, lambda walk: walk.entropy)([0.0])
            self._written[task] = walk, entropy
        return self._written[task]

    def _walker(self, model: nn.Module, prompts: Sequence[Sequence[int]], seed: int | None = None) -> Walker:
        return Walker(
            model,
            prompts,
            list(end_token_ids(base_model(model), self._tokenizer)),
            self._tokenizer.pad_token_id,
            self._probe.max_completion_length,
            self._probe.seed if seed is None else seed,
            self._probe.batch_rows,
        )

    def _means(
        self, walker: Walker, perturbation: Perturbation, of: Callable[[Walk], Floats], zero: float = 0.0
    ) -> Callable[[Sequence[float]], list[float]]:
        """Means of something over the tokens of the calibration set, at strengths counted from `zero`."""

        def means(strengths: Sequence[float]) -> list[float]:
            rows = Rows.of(
                range(len(walker.prompts)), self._probe.calibration_samples, [s - zero for s in strengths]
            )
            walk = walker.walk(rows, perturbation)
            parts = np.arange(len(rows)).reshape(len(strengths), -1)
            return [float(of(walk)[part][walk.valid[part]].mean(dtype=np.float64)) for part in parts]

        return means

    def _sampled(self, walker: Walker, perturbation: Perturbation, strength: float) -> tuple[Rows, Walk]:
        rows = Rows.of(range(self._probe.problems), self._probe.samples, [strength])
        return rows, walker.walk(rows, perturbation)

    def _solutions(
        self, walker: Walker, task: str, perturbation: Perturbation, strength: float
    ) -> dict[str, Any]:
        solutions = self._materials[task].solutions
        rows = Rows.of(range(len(solutions)), self._probe.solution_draws, [strength])
        if not len(rows):
            return {}
        own = replace(perturbation, noise_per="sample")  # each row has a draw of its own
        return on_solutions(rows, walker.walk(rows, own, solutions[rows.problem]))


def _one_behind(cells: Iterable[tuple[str, Cell]]) -> Iterator[tuple[str, Cell]]:
    """The cells, each after the next one has been sampled."""
    before = None
    for item in cells:
        if before is not None:
            yield before
        before = item
    if before is not None:
        yield before


def _said(cell: Cell) -> str:
    """A cell in a few words."""
    numbers = cell["numbers"]
    tokens = sum(numbers["tokens"])
    right = np.mean(numbers["right"])
    return (
        f"{right:.2f} right samples a problem, {sum(numbers['kl']) / tokens:.4f} nats of KL and "
        f"{sum(numbers['entropy']) / tokens:.3f} of entropy a token, {cell['seconds']:.1f} s"
    )
