"""Runs outside of studies: accuracies, rewards, losses and KL of the pages, recomputed from the runs.

Legend: a run is a row of a file.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from lab.audit import statistics as st
from lab.audit.cells import Cell, Table, row_of_cells
from lab.audit.raw import read

Row = dict[str, Any]
PART = 4
"""Steps averaged at the start and at the end of a run."""


def runs(name: str) -> list[Row]:
    """Return the rows of an uncompressed file, with the fields that they share."""
    whole = read(f"{name}.json")
    return [{**whole, **row} for row in whole["rows"]]


def priors(table: Table) -> Iterator[Cell]:
    """Yield the priors of the testbed's model; the interval of samples from their count."""
    rows = [row for row in runs("testbed-h200") if row["row"] == "prior"]
    found = {(f"{r['kind']}, {r['length']}", f"{r['prior']:g}", r["weights"]): r for r in rows}
    yield Cell("cells", str(len(table.rows) * (len(table.head) // 2 - 1)), str(len(found)))
    for row in table.rows:
        cells = []
        for at in range(2, len(row), 2):
            one = found[row[0], row[1], table.head[at].rpartition(", ")[2]]
            share, low, high = st.wilson(round(one["sampled"] * one["samples"]), one["samples"])
            cells.append(f"{one['exact']:.2g} ({one['spread']:.2g})")
            cells.append(f"{share:.2g} ({low:.2g} to {high:.2g})")
        yield from row_of_cells([f"{row[0]}, {row[1]}", *row[2:]], cells, table.head[1:])


SETTINGS = {
    "noise 1e-2 to 5e-4, learning rate 3e-4": (1, "base"),
    "noise 3e-3 to 5e-4, learning rate 3e-4": (1, "small-noise"),
    "no noise, learning rate 3e-4": (1, "nonoise"),
    "noise, learning rate 5e-4": (1, "lr5"),
    "noise, learning rate 1e-3": (1, "lr10"),
    "noise, learning rate 3e-4, 24 new tokens, 20 steps": (2, "C8x8"),
}
"""Waves and settings by the words of the table."""


def final(table: Table) -> Iterator[Cell]:
    """Yield the final accuracies of the demo's task by settings and seed."""
    ends = {
        (r["wave"], r["name"]): r["greedy_accuracy_by_step"][-1][1] for r in runs("learning-smollm2-h100")
    }
    for row in table.rows:
        wave, setting = SETTINGS[row[0]]
        names = [f"{setting}-s{seed.removeprefix('seed ')}" for seed in table.head[1:]]
        found = [f"{ends[wave, name]:.3f}".removeprefix("0") for name in names]
        yield from row_of_cells(row, found, table.head)


def newest(name: str) -> list[Row]:
    """Return the runs of a demo at the commit of its last one."""
    every = runs(name)
    return [run for run in every if run["commit"] == every[-1]["commit"]]


def demo(table: Table) -> Iterator[Cell]:
    """Yield accuracies and minutes of a demo's runs."""
    for row, run in zip(table.rows, newest(f"{table.name}-cpu"), strict=True):
        found = (f"{run['before']:.0f}", f"{run['after']:.0f}", str(run.get("minutes", "not timed")))
        yield Cell("seed", row[0], str(run["seed"]))
        yield from row_of_cells(row, found, table.head)


def percent(values: Sequence[float]) -> str:
    """Format percentages as one number or a range."""
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values)))) + " %"


def learned(table: Table) -> Iterator[Cell]:
    """Yield rewards and right answers of the arithmetic recipe at start and end, by arm."""
    for row in table.rows:
        every = runs(f"cookbook-smollm2-{'h200' if row[0] == 'GPU' else 'cpu'}")
        steps = min(len(run["reward"]) for run in every)
        arm = [r for r in every if (r["noise"], r["learning_rate"]) == (row[1] == "yes", float(row[2]))]
        found = []
        for key in ("reward", "correct"):
            for at in (range(PART), range(steps - PART, steps)):
                means = [fmean(run[key][step] for step in at) for run in arm]
                found.append(f"{fmean(means):.3f} ({min(means):.3f} to {max(means):.3f})")
        yield from row_of_cells([" ".join(row[:3]), *row[3:]], found, table.head[2:])


def losses(table: Table) -> Iterator[Cell]:
    """Yield the losses of supervised fine-tuning."""
    for row, run in zip(table.rows, runs("serve-sft-smollm2-cpu"), strict=True):
        ends = [tuple(map(int, re.findall(r"\d+", words))) for words in table.head[1:]]
        found = [f"{fmean(run['train_mean_nll'][first - 1 : last]):.2f}" for first, last in ends]
        yield Cell("learning rate", row[0], f"{run['learning_rate']:g}")
        yield from row_of_cells(row, found, table.head)


def sums(when: str) -> str:
    """Format the range of accuracies of a mixture of experts on sums, over seeds that learn."""
    return percent([100 * run[when] for run in runs("sums-h200") if run["learning_rate"]])


def sample_train(noise: bool) -> str:
    """Format the range over runs of the mean KL of the server's sampler and trainer."""
    found = [fmean(run["kl_sample_train"]) for run in runs("cookbook-smollm2-h200") if run["noise"] == noise]
    return f"{min(found):.4f} to {max(found):.4f}"


def logits_kl(commit: str) -> str:
    """Format the KL of sampler and trainer of a run, over its steps."""
    (run,) = (run for run in runs("sampling-kl-smollm2-h200") if run["commit"] == commit)
    return f"{fmean(run['kl_of_steps']):.5f}"


TABLES: dict[str, Callable[[Table], Iterator[Cell]]] = {
    "testbed-priors": priors,
    "learning": final,
    "demo": demo,
    "demo-tools": demo,
    "demo-verifiers": demo,
    "serve-learning": learned,
    "serve-sft": losses,
}

NUMBERS: dict[str, Callable[[], str]] = {
    "demo-before": lambda: percent([newest("demo-cpu")[-1]["before"]]),
    "demo-after": lambda: percent([run["after"] for run in newest("demo-cpu")]),
    "sums-before": lambda: sums("before"),
    "sums-after": lambda: sums("after"),
    "sample-train": lambda: sample_train(False),
    "sample-train-noise": lambda: sample_train(True),
    "logits-kl": lambda: logits_kl("edea30a"),
    "logits-kl-rounded": lambda: logits_kl("52c9949"),
}
