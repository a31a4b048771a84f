"""The tables that answer what noise does: one line a question, and what the noise of each arm reached.

Legend: a value of a run is a number; a cell is its mean over test seeds with the 95 % interval of that mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from bench import probe_tables
from bench.captions import table
from bench.draw import STUDIES as TASKS
from bench.draw import shown
from bench.study_tables import (
    NOT_RUN,
    absent,
    arms,
    compared,
    comparisons,
    difference,
    pair_words,
    source,
    study,
)
from qerl.study.arms import Arm
from qerl.study.results import ROLLOUT_ENTROPY, SIGMA, RunResult
from qerl.study.statistics import mean_interval

QUESTIONS = (
    ("Does AQN help, with the correction?", "aqn", "none"),
    ("Does it uncorrected, as in the paper?", "aqn_uncorrected", "none_uncorrected"),
    ("Does a better design? Noise relative to the weight", "relative", "none"),
    ("the same with the one-sided correction", "one_sided", "none_one_sided"),
    ("the same uncorrected", "relative_uncorrected", "none_uncorrected"),
    ("the same in the loss too", "in_loss", "none"),
    ("the same for half of each group", "half", "none"),
    ("Is temperature as good? The noise against the temperature with its entropy", "relative", "temperature"),
    ("that temperature against none", "temperature", "none"),
    ("a fixed temperature of 1.25 against none", "warm", "none"),
    ("Do other ways? Noise on logits", "logits", "none"),
    ("advantages of pass@4", "pass_at_4", "none"),
    ("an entropy bonus", "entropy_bonus", "none"),
    ("Does NVFP4 learn better? Than BF16", "none", "bf16"),
    ("than NF4", "none", "nf4"),
    ("than MXFP4", "none", "mxfp4"),
    ("than any error as large", "none", "bf16_any_error"),
    ("NVFP4 with AQN against BF16 without", "aqn", "bf16"),
)
"""Questions, and the two arms whose difference answers each."""

EARLIER = {"noise-wp12": "noise-wp12-6b0a637"}
"""Studies of an earlier commit, for arms that the one in their place has not run."""

FORMATS = {"bf16": "BF16", "nf4": "NF4", "mxfp4": "MXFP4"}
FORMATTED = ("wp12", "wp1")
"""Tasks whose comparisons of formats have a table of their own."""

SETTLED = 10
"""Noisy steps after which a temperature that follows an entropy is expected to have met it."""


def answers() -> str:
    """One line a question: the difference in area on each task, its interval, seeds and verdict."""
    lines = [
        (question, pair_words(first, second), *(_answer(name, first, second) for name in TASKS.values()))
        for question, first, second in QUESTIONS
    ]
    there = [name for name in TASKS.values() if study(name) is not None]
    return table(
        ("question", "arms", *TASKS),
        lines,
        "Difference in the area under the curve of accuracy, first minus second arm, paired by seed, with "
        "its 95 % interval. The verdict, of the first arm, is corrected for the number of comparisons; a "
        "pair of this study without one was none of its comparisons. An earlier study let eight other "
        "seeds choose the learning rate of each arm; that of none and bf16 is the same. "
        f"Files: {', '.join(f'{name}.json.gz' for name in [*there, *EARLIER.values()])}.",
    )


def _answer(name: str, first: str, second: str) -> str:
    for one in compared(name):
        if (one.first, one.second) == (first, second):
            low, high = one.interval
            return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}), {one.seeds} seeds: **{one.verdict}**"
    return _difference(name, first, second, lambda run: run.area)


def _difference(name: str, first: str, second: str, value: Callable[[RunResult], float]) -> str:
    """The difference in a study, or else in the earlier one."""
    found = difference(name, first, second, value)
    if found == NOT_RUN and name in EARLIER:
        found = difference(EARLIER[name], first, second, value)
        return found if found == NOT_RUN else f"{found} of an earlier study"
    return found


def entropies() -> str:
    """What NVFP4's entropy is above that of other formats, before training and while training."""
    lines = []
    for arm, words in FORMATS.items():
        lines.append(
            (
                f"NVFP4 \N{MINUS SIGN} {words}",
                *(probe_tables.more("probe", task, "nvfp4", arm, "entropy_more") for task in ("wp12", "wp2")),
                *(probe_tables.more("probe", task, "nvfp4", arm, "prefix_more") for task in ("wp12", "wp2")),
                *(
                    _difference(TASKS[task], "none", arm, lambda run: _mean(run, ROLLOUT_ENTROPY))
                    for task in ("wp12", "wp1")
                ),
            )
        )
    head = (
        "entropy, nats per token", "own samples, wp12", "own samples, wp2", "given prefixes, wp12",
        "given prefixes, wp2", "while training, wp12", "while training, wp1",
    )  # fmt: skip
    return table(
        head,
        lines,
        "With 95 % intervals. Untrained: over problems; file probe.json.gz. While training: mean over the "
        "steps of a run, paired by seed, intervals over seeds.",
    )


def learned() -> str:
    """What training adds to each format: the area above the accuracy at the start."""
    lines = [
        (
            f"NVFP4 \N{MINUS SIGN} {words}",
            *(
                _difference(TASKS[task], "none", arm, lambda run: run.area - run.accuracy[0])
                for task in ("wp12", "wp1")
            ),
        )
        for arm, words in FORMATS.items()
    ]
    return table(
        ("area above the start", "wp12", "wp1"), lines, "Paired by seed, with 95 % intervals over seeds."
    )


def reached(name: str) -> str:
    """How far the noise of each arm moved the sampler from the policy, and what was left of the samples."""
    results, lines = study(name), []
    if results is None:
        return absent(name)
    for arm in results.study.arms:
        runs = results.tested(arm)
        noisy = _noisy(runs[0]) if runs else []
        if len(runs) > 1 and noisy:
            first = noisy[: len(noisy) // 4 or 1]
            control = _control(results.study.arms, arm)
            clean = {run.run.seed: run for run in results.tested(control)} if control else {}
            pairs = [(run, clean[run.run.seed]) for run in runs if run.run.seed in clean]
            entropy = [
                _mean(run, ROLLOUT_ENTROPY, noisy) - _mean(own, ROLLOUT_ENTROPY, noisy) for run, own in pairs
            ]
            lines.append(
                (
                    arm,
                    f"{noisy[0] + 1} to {noisy[-1] + 1}",
                    *(
                        f"{fmean(_mean(run, SIGMA, [at]) for run in runs):.2g}"
                        for at in (noisy[0], noisy[-1])
                    ),
                    *(_spread([_mean(run, "sampling/kl", at) for run in runs], 4) for at in (first, noisy)),
                    _spread([_mean(run, "sampling/ratio/effective_sample_size", noisy) for run in runs]),
                    _spread(entropy) if len(entropy) > 1 else None,
                )
            )
    head = (
        "arm", "noisy steps", "sigma, first", "last", "KL, first quarter of them", "KL, all of them",
        "effective samples, share", "entropy above that without noise",
    )  # fmt: skip
    return table(head, lines, f"KL(sampler || policy) in nats per token, means over seeds. {source(name)}")


def follows() -> str:
    """How well the controlled temperature met the entropy that it follows."""
    lines = []
    for task, name in TASKS.items():
        results = study(name)
        for arm, fields in results.study.arms.items() if results is not None else ():
            runs = results.tested(arm) if results is not None and fields.match_entropy else []
            later = [_later(run) for run in runs]
            if len(runs) > 1 and all(later):
                errors = [_mean(run, "temperature/error", at) for run, at in zip(runs, later, strict=True)]
                heats = [_mean(run, "temperature", at) for run, at in zip(runs, later, strict=True)]
                each = f"{min(errors):+.3f} to {max(errors):+.3f}"
                lines.append(
                    (f"{task}: {arm} after {fields.match_entropy}", _spread(errors), each, _spread(heats))
                )
    if not lines:
        return "No study with a temperature that follows an entropy has run yet.\n"
    return table(
        ("study and arm", "temperature/error", "least to most of a seed", "temperature"),
        lines,
        "Logarithm of the followed entropy over the own, mean of the steps of a run after the first "
        f"{SETTLED} noisy ones; 95 % intervals over seeds.",
    )


def _control(arms: Mapping[str, Arm], name: str) -> str | None:
    """The arm that differs from one in noise alone, or else in the correction too; None where none does."""
    usual = vars(Arm(""))
    plain: dict[str, Any] = {
        key: value for key, value in usual.items() if key.startswith("noise") or key == "logits_noise"
    }
    for correction in (arms[name].correction, usual["correction"]):
        wanted = replace(arms[name], name="", correction=correction, **plain)
        for other, arm in arms.items():
            if replace(arm, name="") == wanted:
                return other
    return None


def _noisy(run: RunResult) -> list[int]:
    """0-based steps with noise."""
    return [at for at, sigma in enumerate(run.steps.get(SIGMA, [])) if sigma]


def _later(run: RunResult) -> list[int]:
    """0-based steps in which the followed run has noise, without the first."""
    sigmas = [] if run.followed is None else run.followed.sigma
    return [at for at, sigma in enumerate(sigmas) if sigma][SETTLED:]


def _mean(run: RunResult, key: str, at: Sequence[int] | None = None) -> float:
    """Mean of what was logged in some steps, or all, where it is a number; NaN where it never is."""
    values = run.steps.get(key, [])
    found = values if at is None else [values[step] for step in at if step < len(values)]
    known = [value for value in found if value is not None]
    return fmean(known) if known else float("nan")


def _spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean over seeds with its interval; seeds without a number are left out."""
    known = np.array([value for value in values if np.isfinite(value)])
    if len(known) < 2:
        return NOT_RUN
    low, high = mean_interval(known[:, None])
    return f"{known.mean():.{digits}f} ({low[0]:.{digits}f} to {high[0]:.{digits}f})"


def _of_task(task: str, name: str) -> dict[str, Callable[[], str]]:
    """The tables and figures of one study, by their marks."""
    return {
        f"{task}-arms": lambda: arms(name),
        f"{task}-comparisons": lambda: comparisons(
            name,
            "primary",
            "designs",
            "others",
            "rate",
            "correction",
            *(() if task in FORMATTED else ("formats",)),
        ),
        f"{task}-reached": lambda: reached(name),
        f"{task}-figures": lambda: shown(task, ""),
    }


def _of_formats(task: str, name: str) -> dict[str, Callable[[], str]]:
    """The tables of a study that has arms with other formats, schedules and ranks."""
    return {
        f"{task}-formats": lambda: comparisons(name, "formats", "noise_by_format"),
        f"{task}-ablations": lambda: comparisons(name, "schedules", "ranks"),
    }


TABLES: dict[str, Callable[[], str]] = {
    "noise-answers": answers,
    "noise-entropies": entropies,
    "noise-learned": learned,
    "noise-follows": follows,
    "earlier-arms": lambda: arms(EARLIER["noise-wp12"]),
    "earlier-comparisons": lambda: comparisons(
        EARLIER["noise-wp12"], "primary", "designs", "formats", "correction"
    ),
    "noise-figures": lambda: shown("wp12", "differences", "accuracy-primary", "rollout-entropy-primary"),
    "probe-noise": lambda: probe_tables.perturbations("probe", "start", "wp12"),
    "probe-beside": lambda: probe_tables.beside("probe", "probe-trained", "wp12", "gain"),
    "probe-formats": lambda: probe_tables.formats("probe", "wp12"),
    "probe-formats-wp2": lambda: probe_tables.formats("probe", "wp2"),
    "probe-figures": lambda: shown("probe", "") + shown("probe-trained", ""),
}
"""What the marks in the pages stand for."""
for _task, _name in TASKS.items():
    TABLES |= _of_task(_task, _name) | (_of_formats(_task, _name) if _task in FORMATTED else {})
