"""Distillation of SmolLM2: the endpoints of lab/trained/distilled.yaml, from the runs of its seeds.

Arms are compared paired by seed, over the seeds that both have. Captions name the arms that have not run.

Legend: a value of a seed is a number; a cell is its mean over seeds with the 95 % BCa interval of that mean.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.result import Row
from lab.study.statistics import FEWEST, bca, bca_ratio, holm, wilcoxon
from lab.writers.captions import files, rows, side_by_side, source, table
from lab.writers.study_tables import NOT_RUN, estimate
from qerl.report.runs import number

NAME = "distilled-smollm2"
NEAR = 0.01
"""Distance below a teacher's final accuracy within which an adapter counts as having reached it."""

LAST = 5
"""Final steps of a run whose divergences are averaged."""

_ARMS = (
    ("wp12", "reverse", "reverse KL"),
    ("wp1", "reverse", "reverse KL"),
    ("wp12", "forward", "forward KL"),
    ("wp12", "rtn-reverse", "rounded to nearest, reverse KL"),
)
"""Task, suffix of the arm's name, and words of each distillation from 16 bits."""

_TASKS = ("wp12", "wp1")


def _caption(words: str, missing: Sequence[str]) -> str:
    counts = sorted({row["held_out"] for row in rows(NAME)})
    not_run = f" Not run: {'; '.join(missing)}." if missing else ""
    return (
        f"{words} Accuracy is of greedy answers to {' or '.join(map(str, counts))} held-out problems of each "
        f"seed. SmolLM2-135M-Instruct, LoRA rank 16, steps of 8 x 8 samples; learning rates {_rates()}. "
        f"{source(NAME)} {files(NAME)}{not_run}"
    )


def _rates() -> str:
    """Return the learning rates of RL and of the two kinds of teachers, in words."""
    words = {"wp1-rl": "of RL", "wp1-taught": "with an adapter as teacher", "wp12-reverse": "with 16 bits"}
    found = {arm: {run["learning_rate"] for run in rows(NAME, arm=arm, tuning=False)} for arm in words}
    return ", ".join(f"{rate:g} {words[arm]}" for arm, rates in found.items() for rate in sorted(rates))


def _mean(values: Sequence[float], digits: int = 3) -> str:
    found = np.array(values)
    if len(found) < FEWEST:
        return NOT_RUN
    low, high = bca(found)
    return f"{found.mean():.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def first_step(run: Row, least: float) -> int:
    """Return the first scored step with accuracy of at least ``least``; else one interval past the last."""
    steps: list[int] = run["steps"]
    scored = zip(steps[1:], run["accuracy"][1:], strict=True)
    return next((step for step, right in scored if right >= least), 2 * steps[-1] - steps[-2])


def taught_by_adapter(rl_arm: str = "wp1-rl", taught_arm: str = "wp1-taught") -> str:
    """Return the table of a fresh adapter taught by one that RL has trained, beside that RL."""
    pairs = side_by_side(NAME, rl_arm, taught_arm)
    if len(pairs) < FEWEST:
        return f"{NAME}.json has no two seeds of {rl_arm} and {taught_arm}.\n"
    least = [rl["accuracy"][-1] - NEAR for rl, _ in pairs]
    lines: list[tuple[Any, ...]] = []
    when = []
    for words, runs in zip(("RL", "taught by its adapter"), zip(*pairs, strict=True), strict=True):
        firsts = [first_step(run, bar) for run, bar in zip(runs, least, strict=True)]
        when.append(firsts)
        reached = sum(step <= run["steps"][-1] for run, step in zip(runs, firsts, strict=True))
        lines.append(
            (
                f"{words}, {runs[0]['steps'][-1]} steps",
                f"{np.mean([run['accuracy'][0] for run in runs]):.3f}",
                _mean([run["accuracy"][-1] for run in runs]),
                f"{np.mean(firsts):.1f} ({min(firsts)} to {max(firsts)})",
                f"{reached} of {len(runs)}",
            )
        )
    ratio = [taught / rl for rl, taught in zip(*when, strict=True)]
    head = (
        "wp1, NVFP4", "accuracy at first", "at the end",
        f"first step within {NEAR:g} of RL's end", "that have one",
    )  # fmt: skip
    words = (
        f"After {pairs[0][1]['steps'][-1]} steps minus its teacher at its end: {_minus_teacher(pairs)}; "
        f"first step, taught over RL: {_mean(ratio, 2)}; {len(pairs)} seeds, paired, with 95 % intervals. "
        "Steps are means (and least to most) of scores every two steps; a run without one counts two more "
        "than it has."
    )
    return table(head, lines, _caption(words, []))


def taught_minus_teacher() -> str:
    """Format the final accuracy of the taught adapters minus that of their teachers."""
    return _minus_teacher(side_by_side(NAME, "wp1-rl", "wp1-taught"))


def _minus_teacher(pairs: Sequence[tuple[Row, ...]]) -> str:
    return estimate(np.array([taught["accuracy"][-1] - rl["accuracy"][-1] for rl, taught in pairs]))


def _closed(task: str, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy that an arm has gained [seeds], and its gap to 16 bits at the start [seeds]."""
    pairs = side_by_side(NAME, f"{task}-{arm}", f"{task}-16bit")
    part = [taught["accuracy"][-1] - taught["accuracy"][0] for taught, _ in pairs]
    whole = [sixteen["accuracy"][0] - taught["accuracy"][0] for taught, sixteen in pairs]
    return np.array(part), np.array(whole)


def share(task: str, arm: str = "reverse") -> str:
    """Format the share of the gap to 16 bits that an arm closes, with its interval."""
    part, whole = _closed(task, arm)
    if len(part) < FEWEST:
        return NOT_RUN
    if whole.mean() <= 0:
        return "no gap"
    low, high = (100 * bound for bound in bca_ratio(part, whole))
    return f"{100 * part.mean() / whole.mean():.0f} % ({low:.0f} to {high:.0f})"


def taught_by_16_bits() -> str:
    """Return the table of four-bit adapters taught by the same model in 16 bits: the gap that they close."""
    lines, missing = [], []
    for task, arm, words in _ARMS:
        pairs = side_by_side(NAME, f"{task}-{arm}", f"{task}-16bit")
        if len(pairs) < FEWEST:
            missing.append(f"{task}, {words}")
            continue
        taught = [run for run, _ in pairs]
        columns = (
            [sixteen["accuracy"][0] for _, sixteen in pairs],
            [run["accuracy"][0] for run in taught],
            [run["accuracy"][-1] for run in taught],
        )
        divergence = (
            [run["divergence"][0] for run in taught],
            [np.mean(run["divergence"][-LAST:]) for run in taught],
        )
        lines.append(
            (
                f"{task}, {words}",
                *(f"{np.mean(values):.3f}" for values in columns),
                share(task, arm),
                *(f"{np.mean(values):.3f}" for values in divergence),
                len(pairs),
            )
        )
    if not lines:
        return f"{NAME}.json has no two seeds of an arm that 16 bits taught.\n"
    head = (
        "what is taught", "16 bits", "NVFP4", "taught", "of the gap", "nats per token at first", "at the end",
        "seeds",
    )  # fmt: skip
    words = (
        "Taught by the same model in 16 bits. Of the gap: the ratio of means over seeds, with its 95 % "
        f"interval. Nats: the divergence from 16 bits on the samples of the first step and of the last "
        f"{LAST}, of problems that no earlier step had."
    )
    return table(head, lines, _caption(words, missing))


def before_rl() -> str:
    """Return the table of RL after distillation from 16 bits, beside as many steps of RL alone."""
    found = {task: side_by_side(NAME, f"{task}-rl", f"{task}-reverse-rl") for task in _TASKS}
    more = {
        task: np.array([after["accuracy"][-1] - alone["accuracy"][-1] for alone, after in pairs])
        for task, pairs in found.items()
        if len(pairs) >= FEWEST
    }
    if not more:
        return f"{NAME}.json has no two seeds of RL behind a distillation.\n"
    p_values = [wilcoxon(more[task]) if task in more else 1.0 for task in _TASKS]
    lines = [
        (
            task,
            *(_mean([run["accuracy"][-1] for run in runs]) for runs in zip(*found[task], strict=True)),
            estimate(more[task]),
            number(p),
            number(adjusted),
            len(more[task]),
        )
        for task, p, adjusted in zip(_TASKS, p_values, holm(p_values), strict=True)
        if task in more
    ]
    head = (
        "NVFP4", "40 steps of GRPO", "20 taught by 16 bits, 20 of GRPO", "difference", "p", "p, Holm",
        "seeds",
    )  # fmt: skip
    words = "Accuracy at the end with 95 % intervals; differences are paired by seed, p is Wilcoxon's."
    return table(head, lines, _caption(words, [task for task in _TASKS if task not in more]))


TABLES: dict[str, Callable[[], str]] = {
    "distilled-adapter": taught_by_adapter,
    "distilled-falling": lambda: taught_by_adapter("wp1-rl-later", "wp1-taught-falling"),
    "distilled-bits": taught_by_16_bits,
    "distilled-rl": before_rl,
}

NUMBERS: dict[str, Callable[[], str]] = {
    "distilled-difference": taught_minus_teacher,
    "distilled-share-wp12": lambda: share("wp12"),
    "distilled-share-wp1": lambda: share("wp1"),
}
