"""Replicate the fewest arms that make a fair comparison on your own model, and write one file to send.

    python -m lab replicate Qwen/Qwen2.5-0.5B-Instruct --yes

Without --yes the command reads only the model's config, prints the expected cost and ends. With it, two
studies run one after the other, `replicate-doses` and then `replicate` with the doses that the first one
gave, and the results go into one file without paths of this machine. After Ctrl-C the same command resumes.
The doses are fitted in two turns, the second with arms at the doses of the first, since the law of the fit
holds only near the strengths that were run (`lab.study.doses`).

The time is scaled by the number of parameters, and the memory of activations by layers times width, from
measurements of SmolLM2 on an H200; a card of half the speed takes twice the time. Each forward pass takes as
many tokens as fit into four fifths of the GPU's memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from bench.result import read_rows
from lab.study.command import study_command
from lab.study.doses import arms_at, delivered
from lab.study.library import study_file
from lab.study.results import RESULTS_FILE, Results, portable, read_results
from lab.study.spec import Study, joined, read_study
from qerl import yaml12
from qerl.atomic import write_whole
from qerl.cli import Command, console
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.fp4.checkpoint import read_config
from qerl.models.hub import find_model, local_config
from qerl.settings.library import read_mapping
from qerl.settings.recipe import load_config

DOSES, PLAN = "replicate-doses", "replicate"
"""Names of files in lab/studies."""

KL, STAGES = 0.03, 5
"""KL at which noise and temperature are held, nats per token, and the number of stages."""

TOO_EASY, TOO_HARD = 0.8, 0.15
"""Accuracy before training outside of which a task shows no difference between arms. The lower bound is above
`collapse_below` of the plan, or a model that does not move would count as a collapse."""

MEASURED = Sizes.uniform(576, 1536, 30, 9, 3, 64, 49152, tied=True)
"""SmolLM2-135M, the model of the results `study-h200` and `demo-cpu` in bench/results."""

MOST_TOKENS, FEWEST_TOKENS = 32768, 2048
"""Tokens of one forward pass."""


@dataclass(frozen=True)
class Cost:
    """Expected cost of both studies.

    Attributes:
        runs: Number of runs of both studies.
        seconds: Time on an H200, or on two CPU cores if there is no GPU.
        gigabytes: GPU memory.
        tokens_per_forward: Largest value that fits into the memory.
    """

    runs: int
    seconds: float
    gigabytes: float
    tokens_per_forward: int


def cost_of(sizes: Sizes, studies: list[Study], memory: float | None) -> Cost:
    """Estimate the cost of some studies on a model.

    Args:
        sizes: Sizes of the model.
        studies: The studies, all with batches of one size.
        memory: Bytes of GPU memory; None without a GPU.

    Raises:
        QeRLError: The memory is too small.
    """
    steps = sum(study.count(arm) * study.steps for study in studies for arm in study.arms.values())
    scores = sum(study.count(arm) * len(study.eval_at) for study in studies for arm in study.arms.values())
    runs = sum(study.count(arm) for study in studies for arm in study.arms.values())
    larger = sizes.parameters / MEASURED.parameters
    rows = sorted(read_rows("study-h200"), key=lambda row: row["runs"])
    row = [row for row in rows if row["runs"] <= studies[0].runs_per_batch][-1]
    if memory is None:
        step = 60 * max(row.get("minutes", 0) for row in read_rows("demo-cpu"))
        step /= load_config(["demo"], {}).max_steps
        return Cost(runs, steps * step * larger, 0.0, MOST_TOKENS)
    seconds = larger * (steps * row["seed_step_s"] + scores * row["evaluation_s"] / row["runs"])
    weights, adapters = 6 * sizes.parameters, 20 * studies[0].runs_per_batch * adapter_of(sizes)
    most = rows[-1]
    of_tokens = most["update_gb"] * 1e9 - 6 * MEASURED.parameters - 20 * most["runs"] * adapter_of(MEASURED)
    of_tokens *= (
        sizes.layers * sizes.hidden / (MEASURED.layers * MEASURED.hidden) / most["tokens_per_forward"]
    )
    tokens = int(min(MOST_TOKENS, (0.8 * memory - weights - adapters) / of_tokens))
    if tokens < FEWEST_TOKENS:
        least = (weights + adapters + FEWEST_TOKENS * of_tokens) / 0.8
        raise QeRLError(
            f"The model's runs need a GPU of {least / 1e9:.0f} GB, but this one has {memory / 1e9:.0f} GB; "
            "choose a smaller model."
        )
    return Cost(runs, seconds, (weights + adapters + tokens * of_tokens) / 1e9, tokens)


def adapter_of(sizes: Sizes, rank: int = 16) -> int:
    """Number of parameters of one adapter on all linears of a model."""
    return sum(
        rank * (linear.inputs + linear.outputs)
        for spec in sizes.specs
        for product in spec.products
        for linear in product.linears
    )


def main(arguments: list[str]) -> int:
    """Run `python -m lab replicate` with these arguments; returns the exit status."""
    parser = Command("python -m lab replicate", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("model", help="Hub id, folder or .gguf file of a dense model")
    add("--level", default="wp12", help="level of the task arithmetic; harder: wp2, wp12-99, wp2-99")
    add("--learning_rate", type=float, default=2e-4, help="rate of all arms; the default suits SmolLM2")
    add("--output_dir", type=Path, help="default: runs/replicate-MODEL")
    add("--yes", action="store_true", help="run the studies; without it, only their cost is printed")
    args = parser.parse_args(arguments)
    return replicate(args.model, args.level, args.learning_rate, args.output_dir, args.yes, console)


def replicate(
    model: str, level: str, rate: float, output_dir: Path | None, yes: bool, console: Console
) -> int:
    """Print what both studies cost and, if asked to, run them and write the file.

    Args:
        model: Hub id, folder or .gguf file.
        level: Level of the task arithmetic.
        rate: Learning rate of all arms.
        output_dir: Folder of all files; None for a folder named after the model.
        yes: Whether to run the studies.
        console: Where messages are printed.

    Returns:
        Exit status, 130 where Ctrl-C or SIGTERM ended it.

    Raises:
        QeRLError: An error that the user can mend, such as a task that is too easy for the model.
    """
    short = PurePath(model).name.removesuffix(".gguf")
    folder = output_dir or Path("runs", f"replicate-{short}")
    own: dict[str, Any] = {
        "model": model, "learning_rates": [rate], "task_options": {"level": level, "examples": 2},
    }  # fmt: skip
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    place = find_model(model).folder if model.endswith(".gguf") else local_config(model)
    sizes = Sizes.from_config(read_config(place)[0])
    cost = cost_of(sizes, [_study(name, own, _stand_ins()) for name in (DOSES, PLAN)], gpu)
    own["tokens_per_forward"] = cost.tokens_per_forward
    console.print(_said(model, sizes, cost, gpu), highlight=False, soft_wrap=True)
    if not yes:
        console.print("Nothing was run; add --yes to run the studies.", highlight=False, soft_wrap=True)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "model.yaml", yaml12.dump(own))
    words = [str(folder / "model.yaml")]
    if status := study_command([DOSES, *words], folder / "doses", None, False, console):
        return status
    fit = read_results(folder / "doses" / RESULTS_FILE)
    for arm in fit.study.arms:
        _check_start(fmean(run.accuracy[0] for run in fit.of(arm)), model, level)
    arms = arms_at(fit, [KL], STAGES, list(fit.study.arms))
    first = folder / "doses-1.yaml"
    write_whole(first, yaml12.dump({"arms": arms}))
    if status := study_command([DOSES, *words, str(first)], folder / "doses", None, False, console):
        return status
    again = read_results(folder / "doses" / RESULTS_FILE)
    write_whole(folder / "doses.yaml", yaml12.dump({"arms": arms_at(again, [], STAGES, list(arms))}))
    words.append(str(folder / "doses.yaml"))
    if status := study_command([PLAN, *words], folder / "study", None, False, console):
        return status
    for line in _doses_met(read_results(folder / "study" / RESULTS_FILE)):
        console.print(line, highlight=False, soft_wrap=True)
    file = folder / f"replicate-{short}.json.gz"
    write_whole(file, portable((folder / "study" / RESULTS_FILE).read_bytes()))
    console.print(f"Wrote {file}, which is the file to send.", highlight=False, soft_wrap=True)
    return 0


def _study(name: str, own: Mapping[str, Any], more: Mapping[str, Any]) -> Study:
    file = study_file(name)
    values = joined(joined(read_mapping(file, "study"), own, name), more, name)
    return read_study(str(file), values)


def _stand_ins() -> dict[str, Any]:
    """Arms that stand for those whose doses are not known yet, to count runs."""
    return {"arms": {"aqn_03": {"noise": True}, "temperature_03": {"temperature": 1.1}}}


def _said(model: str, sizes: Sizes, cost: Cost, memory: float | None) -> str:
    """The message about the cost."""
    what = f"{model} has {sizes.parameters / 1e6:.0f}M parameters; {cost.runs} runs"
    if memory is None:
        return (
            f"{what} take some {cost.seconds / 3600:.0f} hours on two CPU cores; with a GPU it is minutes "
            "for a small model."
        )
    return (
        f"{what} take some {max(1, cost.seconds / 60):.0f} minutes on an H200, more on a slower card, and "
        f"{cost.gigabytes:.0f} of {memory / 1e9:.0f} GB of its memory. A model from the Hub is downloaded."
    )


def _doses_met(results: Results) -> list[str]:
    """One line per arm with a dose: whether the KL of each stage after the clean one is within a factor of
    2."""
    lines = []
    for name, arm in results.study.arms.items():
        if arm.noise_sigma_stages is None and arm.temperature_stages is None:
            continue
        means = delivered(results.tested(name), STAGES)[1:]
        met = all(KL / 2 <= mean <= 2 * KL for mean in means)
        lines.append(
            f"{name}: its dose of {KL:g} nats per token was {'met' if met else 'missed'}; by stage "
            f"{', '.join(f'{mean:.3f}' for mean in means)}."
        )
    return lines


def _check_start(accuracy: float, model: str, level: str) -> None:
    """Raise if the untrained model is too good or too bad at the task to show a difference."""
    if TOO_HARD <= accuracy <= TOO_EASY:
        return
    word, other = ("hard", "an easier") if accuracy < TOO_HARD else ("easy", "a harder")
    raise QeRLError(
        f"The level {level} is too {word} for {model}, which has {accuracy:.0%} right before training; name "
        f"{other} --level and another --output_dir."
    )
