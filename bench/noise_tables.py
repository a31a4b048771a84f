"""The tables that answer what noise does: one line a question, and what the noise of each arm reached.

Legend: a value of a run is a number; a cell is its mean over test seeds with the 95 % interval of that mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench import found_tables, probe_tables
from bench.captions import table
from bench.draw import PROBES, shown
from bench.draw import STUDIES as TASKS
from bench.study_tables import (
    NOT_RUN,
    absent,
    arms,
    compared,
    comparisons,
    difference,
    mean_of,
    noisy_steps,
    pair_words,
    rates,
    source,
    spread,
    study,
)
from qerl.study.arms import Arm
from qerl.study.results import ROLLOUT_ENTROPY, SIGMA, RunResult

QUESTIONS = (
    ("Does AQN help, with the correction?", "aqn", "none"),
    ("Does it uncorrected, as in the paper?", "aqn_uncorrected", "none_uncorrected"),
    ("with a linear schedule", "linear", "none"),
    ("with a cosine", "cosine", "none"),
    ("with a logarithmic one", "logarithmic", "none"),
    ("on BF16", "bf16_aqn", "bf16"),
    ("on NF4", "nf4_aqn", "nf4"),
    ("on MXFP4", "mxfp4_aqn", "mxfp4"),
    ("Does a better design? Noise relative to the weight", "relative", "none"),
    ("the same with the one-sided correction", "one_sided", "none_one_sided"),
    ("the same uncorrected", "relative_uncorrected", "none_uncorrected"),
    ("the same at half the learning rate", "relative_slow", "none_slow"),
    ("the same in the loss too", "in_loss", "none"),
    ("the same for each sample, in decoding only", "decode", "none"),
    ("that at a larger distance", "decode_far", "none"),
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
    ("than BF16 with one draw of a random error of 0.09", "none", "bf16_any_error"),
    ("NVFP4 with AQN against BF16 without", "aqn", "bf16"),
)
"""Questions, and the two arms whose difference answers each."""

EARLIER = "noise-wp12-6b0a637"
"""A study of an earlier commit, which chose a learning rate for each arm."""

FORMATS = {"bf16": "BF16", "nf4": "NF4", "mxfp4": "MXFP4"}

ABLATIONS = ("linear", "cosine", "logarithmic", "rank_32", "rank_64", "rank_128")
"""Arms of `bench/studies/ablations.yaml`, which are compared with `none`."""

SETTLED = 10
"""Noisy steps after which a temperature that follows an entropy is expected to have met it."""


def answers() -> str:
    """One line a question of which a pair has run: the difference on each task, interval, seeds, verdict."""
    lines = []
    for question, first, second in QUESTIONS:
        cells = [answer(name, first, second) for name in TASKS.values()]
        if any(cell != NOT_RUN for cell in cells):
            lines.append((question, pair_words(first, second), *cells))
    there = [f"{name}.json.gz" for name in TASKS.values() if study(name) is not None]
    return table(
        ("question", "arms", *TASKS),
        lines,
        "Difference in the area under the curve of accuracy, first minus second arm, paired by seed, with "
        "its 95 % interval. The verdict, of the first arm, is corrected for the number of comparisons; a "
        f"pair without one was none of the study's comparisons. Files: {', '.join(there)}.",
    )


def answer(name: str, first: str, second: str) -> str:
    """The difference of two arms of a study with interval, seeds and, where it was planned, verdict."""
    for one in compared(name):
        if (one.first, one.second) == (first, second):
            low, high = one.interval
            return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}), {one.seeds} seeds: **{one.verdict}**"
    return difference(name, first, second, lambda run: run.area)


def unanswered() -> str:
    """What has not run on word problems, and what is undecided, with the effect that would be found."""
    lines = []
    for task in ("wp12", "wp1"):
        name = TASKS[task]
        found = compared(name)
        undecided = [one for one in found if one.verdict == "undecided"]
        pairs = ", ".join(f"{pair_words(one.first, one.second)} ({one.detectable:.3f})" for one in undecided)
        if pairs:
            lines.append(
                f"- Undecided on `{task}`, with the difference that would have been found: {pairs}.\n"
            )
        answered = {(one.first, one.second) for one in found}
        missing = [
            pair_words(first, second) for first, second in _planned(name) if (first, second) not in answered
        ]
        if missing:
            lines.append(f"- Not run on `{task}`: {', '.join(missing)}.\n")
    if probe_tables.probe("probe-trained") is None:
        lines.append("- What noise does to policies that training has sharpened, without more training.\n")
    return "".join(lines)


def _planned(name: str) -> list[tuple[str, str]]:
    """The pairs of a study's file; of `wp12` also the schedules and ranks, which join it last."""
    results = study(name)
    if results is None:
        return []
    pairs = [(first, second) for family in results.study.comparisons.values() for first, second in family]
    if name == TASKS["wp12"]:
        pairs += [(arm, "none") for arm in ABLATIONS]
    return list(dict.fromkeys(pairs))


def entropies() -> str:
    """What NVFP4's entropy is above that of other formats, before training and while training."""
    lines = []
    for arm, words in FORMATS.items():
        lines.append(
            (
                f"NVFP4 \N{MINUS SIGN} {words}",
                *(probe_tables.more("probe", task, "nvfp4", arm, "entropy_more") for task in ("wp12", "wp2")),
                *(probe_tables.more("probe", task, "nvfp4", arm, "prefix_more") for task in ("wp12", "wp2")),
                difference(TASKS["wp12"], "none", arm, lambda run: mean_of(run, ROLLOUT_ENTROPY)),
            )
        )
    head = (
        "entropy, nats per token", "own samples, wp12", "own samples, wp2", "given prefixes, wp12",
        "given prefixes, wp2", "while training, wp12",
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
            difference(TASKS["wp12"], "none", arm, lambda run: run.area - run.accuracy[0]),
        )
        for arm, words in FORMATS.items()
    ]
    return table(("area above the start", "wp12"), lines, "Paired by seed, with 95 % intervals over seeds.")


def reached(name: str) -> str:
    """How far the noise of each arm moved the sampler from the policy, and what was left of the samples."""
    results, lines = study(name), []
    if results is None:
        return absent(name)
    for arm in results.study.arms:
        runs = results.tested(arm)
        noisy = noisy_steps(runs[0]) if runs else []
        if len(runs) > 1 and noisy:
            first = noisy[: len(noisy) // 4 or 1]
            control = _control(results.study.arms, arm)
            clean = {run.run.seed: run for run in results.tested(control)} if control else {}
            pairs = [(run, clean[run.run.seed]) for run in runs if run.run.seed in clean]
            entropy = [
                mean_of(run, ROLLOUT_ENTROPY, noisy) - mean_of(own, ROLLOUT_ENTROPY, noisy)
                for run, own in pairs
            ]
            lines.append(
                (
                    arm,
                    f"{noisy[0] + 1} to {noisy[-1] + 1}",
                    *(
                        f"{fmean(mean_of(run, SIGMA, [at]) for run in runs):.2g}"
                        for at in (noisy[0], noisy[-1])
                    ),
                    *(spread([mean_of(run, "sampling/kl", at) for run in runs], 4) for at in (first, noisy)),
                    spread([mean_of(run, "sampling/ratio/effective_sample_size", noisy) for run in runs]),
                    spread(entropy) if len(entropy) > 1 else None,
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
                errors = [mean_of(run, "temperature/error", at) for run, at in zip(runs, later, strict=True)]
                heats = [mean_of(run, "temperature", at) for run, at in zip(runs, later, strict=True)]
                each = f"{min(errors):+.3f} to {max(errors):+.3f}"
                lines.append(
                    (f"{task}: {arm} after {fields.match_entropy}", spread(errors), each, spread(heats))
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


def _later(run: RunResult) -> list[int]:
    """0-based steps in which the followed run has noise, without the first."""
    sigmas = [] if run.followed is None else run.followed.sigma
    return [at for at, sigma in enumerate(sigmas) if sigma][SETTLED:]


def _of_task(task: str, name: str) -> dict[str, Callable[[], str]]:
    """The tables and figures of one study, by their marks."""
    own = ("formats", "noise_by_format") if task == "wp12" else ()
    families = ("primary", "designs", "by_sample", "others", "rate", "correction", "formats")
    return {
        f"{task}-arms": lambda: arms(name),
        f"{task}-comparisons": lambda: comparisons(name, *(one for one in families if one not in own)),
        f"{task}-reached": lambda: reached(name),
        f"{task}-figures": lambda: shown(task, ""),
    }


TABLES: dict[str, Callable[[], str]] = {
    "noise-answers": answers,
    "noise-unanswered": unanswered,
    "noise-entropies": entropies,
    "noise-learned": learned,
    "noise-follows": follows,
    "noise-halves": lambda: found_tables.halves(TASKS),
    "needle-discovery": lambda: found_tables.discovery(TASKS["needle"]),
    "wp12-formats": lambda: comparisons(TASKS["wp12"], "formats", "noise_by_format"),
    "wp12-ablations": lambda: comparisons(TASKS["wp12"], "schedules", "ranks"),
    "earlier-rates": lambda: rates(EARLIER),
    "earlier-arms": lambda: arms(EARLIER),
    "earlier-comparisons": lambda: comparisons(EARLIER, "primary", "designs", "formats", "correction"),
    "noise-figures": lambda: shown("wp12", "differences", "accuracy-primary", "rollout-entropy-primary"),
    "probe-noise": lambda: probe_tables.perturbations("probe", "start", "wp12"),
    "probe-beside": lambda: probe_tables.beside("probe", probe_tables.TRAINED, "wp12", "gain"),
    "probe-formats": lambda: probe_tables.formats("probe", "wp12"),
    "probe-formats-wp2": lambda: probe_tables.formats("probe", "wp2"),
    "probe-figures": lambda: "".join(shown(name, "") for name in PROBES),
}
"""What the marks in the pages stand for."""
for _task, _name in TASKS.items():
    TABLES |= _of_task(_task, _name)
