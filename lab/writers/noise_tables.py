"""Tables of the effects of noise: one line per question, and the divergence that each arm's noise reached.

Legend: a value of a run is a number; a cell is its mean over test seeds with the 95 % interval of that mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from lab.study.arms import Arm
from lab.study.results import ROLLOUT_ENTROPY, SIGMA
from lab.study.statistics import FEWEST
from lab.writers import found_tables, probe_tables
from lab.writers.captions import table
from lab.writers.draw import PROBES, shown
from lab.writers.draw import STUDIES as TASKS
from lab.writers.endpoint_tables import PLAIN, controls, paper, two_steps
from lab.writers.probe_rows import TRAINED
from lab.writers.study_tables import (
    EARLIER,
    NOT_RUN,
    after_the_fact,
    arms,
    by_seed,
    claimed,
    compared,
    comparisons,
    difference,
    early,
    estimate,
    mean_of,
    noisy_steps,
    pair_words,
    paired,
    source,
    spread,
    study,
    tuned,
)

QUESTIONS = (
    ("Does AQN help uncorrected, as in the paper?", "aqn_uncorrected", "none_uncorrected"),
    ("Does it with the correction?", "aqn", "none"),
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
    ("the same in the loss too", "in_loss", "none_uncorrected"),
    ("the same for each sample, in decoding only", "decode", "none"),
    ("that at a larger distance", "decode_far", "none"),
    ("the same for half of each group", "half", "none_uncorrected"),
    ("The noise against a temperature that follows its entropy, and lags", "relative", "temperature"),
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
"""Questions, each with the two arms whose difference answers it."""

FORMATS = {"bf16": "BF16", "nf4": "NF4", "mxfp4": "MXFP4"}

ABLATIONS = ("linear", "cosine", "logarithmic", "rank_32", "rank_64", "rank_128")
"""Arms of `lab/studies/ablations.yaml`, which are compared with `none`."""


def answers() -> str:
    """Return the table of questions whose arms have run: difference per task, interval, seeds, verdict."""
    lines = []
    for question, first, second in QUESTIONS:
        cells = [answer(name, first, second) for name in TASKS.values()]
        if any(cell != NOT_RUN for cell in cells):
            lines.append((question, pair_words(first, second), *cells))
    return table(
        ("question", "arms", *TASKS),
        lines,
        "Difference in the area under the curve of accuracy, first minus second arm, paired by seed, each "
        "with a 95 % interval of its own. The verdict, of the first arm, is corrected for the number of "
        "comparisons of its study; a pair with a p was none of them and is looked at after the fact. "
        f"Files: {', '.join(f'{name}.json.gz' for name in TASKS.values())}.",
    )


def answer(name: str, first: str, second: str) -> str:
    """Format the difference of two arms with interval, seeds and verdict, or with p if it was not planned."""
    for one in compared(name):
        if (one.first, one.second) == (first, second):
            low, high = one.interval
            return f"{one.mean:+.3f} ({low:+.3f} to {high:+.3f}), {one.seeds} seeds: **{one.verdict}**"
    return after_the_fact(name, first, second)


def unanswered() -> str:
    """List comparisons on word problems that are undecided, with the detectable effect, or have not run."""
    lines = []
    for task in ("wp12", "wp1"):
        name = TASKS[task]
        found = compared(name)
        undecided = [one for one in found if one.verdict == "undecided" and not one.apart]
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
    return "".join(lines)


def _planned(name: str) -> list[tuple[str, str]]:
    """Return the pairs of a study's file; for `wp12` also those of `ABLATIONS`."""
    pairs = [(first, second) for family in study(name).study.comparisons.values() for first, second in family]
    if name == TASKS["wp12"]:
        pairs += [(arm, "none") for arm in ABLATIONS]
    return list(dict.fromkeys(pairs))


def entropies() -> str:
    """Return the table of NVFP4's entropy above that of other formats, before and during training."""
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
    lines.append(
        (
            "NVFP4 with `rtn` \N{MINUS SIGN} BF16",
            *(
                probe_tables.more("probe", task, "nvfp4-rtn", "bf16", key)
                for key in ("entropy_more", "prefix_more")
                for task in ("wp12", "wp2")
            ),
            NOT_RUN,
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
    """Return the table of NVFP4's gain over the start minus other formats', over the run and at its end."""
    lines = [
        (
            f"NVFP4 \N{MINUS SIGN} {words}",
            difference(TASKS["wp12"], "none", arm, lambda run: run.area - run.accuracy[0]),
            difference(TASKS["wp12"], "none", arm, lambda run: run.accuracy[-1] - run.accuracy[0]),
        )
        for arm, words in FORMATS.items()
    ]
    return table(
        ("above the start, wp12", "area", "at the end"),
        lines,
        "Paired by seed, with 95 % intervals over seeds.",
    )


def reached(name: str) -> str:
    """Return the table of each arm's divergence of sampler and policy by noise, and of effective samples."""
    results, lines = study(name), []
    for arm in results.study.arms:
        runs = results.tested(arm)
        noisy = noisy_steps(runs[0]) if runs else []
        if len(runs) > 1 and noisy:
            first = early(noisy)
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
    """Return the table of entropy added by noise and by a temperature that follows it, early and later."""
    lines = []
    for task, name in TASKS.items():
        results = study(name)
        for arm, fields in results.study.arms.items():
            followed = fields.match_entropy
            runs = [] if followed is None else results.tested(followed)
            if followed is None or len(runs) < FEWEST or len(results.tested(arm)) < FEWEST:
                continue
            noisy = noisy_steps(runs[0])
            for at in (early(noisy), noisy[len(early(noisy)) :]):
                entropy = partial(mean_of, key=ROLLOUT_ENTROPY, at=at)
                clean, own, other = (by_seed(name, one, entropy) for one in (PLAIN, followed, arm))
                lines.append(
                    (
                        f"{task}: {arm} after {followed}, steps {at[0] + 1} to {at[-1] + 1}",
                        spread([mean_of(run, "sampling/kl", at) for run in runs], 4),
                        *(estimate(paired(*two)) for two in ((own, clean), (other, clean), (other, own))),
                        spread([mean_of(run, "temperature", at) for run in results.tested(arm)]),
                    )
                )
    if not lines:
        return "No study with a temperature that follows an entropy has run yet.\n"
    head = (
        "study and arms", "KL of the noise", "entropy that the noise adds", "that the temperature adds",
        "temperature \N{MINUS SIGN} noise", "temperature",
    )  # fmt: skip
    return table(
        head,
        lines,
        "The first quarter of the noisy steps, and the others. Nats per token; entropies of the rollouts "
        f"above `{PLAIN}`, paired by seed, with 95 % intervals over seeds.",
    )


def _control(arms: Mapping[str, Arm], name: str) -> str | None:
    """Return the arm that differs from ``name`` in noise alone, or else also in the correction, or None."""
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


def _of_task(task: str, name: str) -> dict[str, Callable[[], str]]:
    """Return the writers of one study's tables and figures, by mark."""
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
    "noise-paper": paper,
    "noise-controls": controls,
    "noise-two-steps": two_steps,
    "noise-follows": follows,
    "noise-halves": lambda: found_tables.halves(TASKS),
    "needle-discovery": lambda: found_tables.discovery(TASKS["needle"]),
    "wp12-formats": lambda: comparisons(TASKS["wp12"], "formats", "noise_by_format"),
    "wp12-ablations": lambda: comparisons(TASKS["wp12"], "schedules", "ranks"),
    "earlier-tuned": lambda: tuned(EARLIER),
    "earlier-arms": lambda: arms(EARLIER),
    "earlier-comparisons": lambda: comparisons(EARLIER, "primary", "designs", "formats", "correction"),
    "verdict-rates": claimed,
    "noise-figures": lambda: shown("wp12", "differences", "accuracy-primary", "rollout-entropy-primary"),
    "probe-noise": lambda: probe_tables.perturbations("probe", "start", "wp12"),
    "probe-beside": lambda: probe_tables.beside("probe", TRAINED, "wp12", "gain"),
    "probe-formats": lambda: probe_tables.formats("probe", "wp12"),
    "probe-formats-wp2": lambda: probe_tables.formats("probe", "wp2"),
    "rounding-kl": lambda: probe_tables.roundings("probe"),
    "probe-figures": lambda: "".join(shown(name, "") for name in PROBES),
}
"""Writers of tables by the mark in the pages."""
for _task, _name in TASKS.items():
    TABLES |= _of_task(_task, _name)
