"""Compute the runs of a plan: those of a seed one after the other, seeds side by side in processes.

    python -m lab trained PLAN --model PATH --output_dir DIR --processes 8 --out bench/results/NAME.json

A run is a whole run of the trainer, from a recipe of the package with the settings of its arm. Its seed draws
the adapter, the order of the data, the samples, and the problems of both sets. It is scored like `qerl eval`:
greedy answers to the held-out problems of its seed, by the engine that samples for it, so that no policy is
loaded again. All scores are computed after the last step, from copies of the adapter that were kept during
the run: an evaluation between two steps would need the engine while samples are in progress
(`max_staleness`).

    DIR/
      models/ROUNDING          the model in NVFP4, packed once, by the first process that asks
      tuning-RATE/             runs that choose the learning rates, as below
      runs/ARM-SEED.json       a finished run, written elsewhere and renamed: it is never computed again
      runs/ARM-SEED/           its adapter, which other arms of the seed may learn from or train further
      runs/SEED.lock           held by the process that computes the seed

The same command resumes after an interruption; it may also run several times at once, each on its own GPU
(`CUDA_VISIBLE_DEVICES`). Given up: an interrupted run starts over.
"""

import argparse
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from transformers import TrainerCallback

from bench.result import Row, write_result
from lab.study.files import claimed
from lab.trained.clock import step_seconds
from lab.trained.plan import PLANS, Plan, read_plan
from qerl.atomic import write_whole
from qerl.demo import one_microbatch
from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate
from qerl.fp4.quantize import quantize_checkpoint
from qerl.measure.provenance import provenance
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.hub import local_checkpoint
from qerl.models.smollm2 import HUB_ID
from qerl.rollout.engine import SamplingParams
from qerl.run_folder import read_json
from qerl.settings.config import QeRLConfig
from qerl.settings.groups import TEACHER_ADAPTER
from qerl.settings.recipe import changed, load_config
from qerl.tasks.registry import get_task
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.run import build
from qerl.trainer.sampler import Drawn

KEPT = {
    "divergence": "distillation/divergence",
    "age": "staleness/mean",
    "effective": "sampling/ratio/effective_sample_size",
}
"""Step metrics that a result keeps where they are logged, by their name in the result."""

_OF_MACHINE = ("commit", "date", "gpu", "machine", "torch")
"""Fields of `provenance` that each run keeps: runs of a folder may be of several days and machines."""


@dataclass(frozen=True)
class Folder:
    """The folder of the runs, and the model that they train.

    Attributes:
        path: The folder.
        model: Local folder of the model in 16 bits.
        packed_in: Folder of the model in NVFP4, by rounding.
    """

    path: Path
    model: Path
    packed_in: Path

    def packed(self, rounding: str) -> Path:
        """The model in NVFP4, made on the first call; other processes wait until it is made."""
        target = self.packed_in / rounding
        self.packed_in.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                quantize_checkpoint(self.model, target, "nvfp4", rounding, locked=True)  # type: ignore[arg-type]
        return target

    def tuning(self, rate: float) -> "Folder":
        """The folder of the runs that try a learning rate."""
        return replace(self, path=self.path / f"tuning-{rate:g}")

    def of(self, arm: str, seed: int) -> Path:
        """The folder of a run; its result has the same name with .json appended."""
        return self.path / "runs" / f"{arm}-{seed}"

    def finished(self, arm: str, seed: int) -> Row:
        """The result of a run; empty where it has not finished."""
        return read_json(self.path / "runs" / f"{arm}-{seed}.json")

    def keep(self, row: Row) -> None:
        """Write the result of a run."""
        write_whole(self.path / "runs" / f"{row['arm']}-{row['seed']}.json", json.dumps(row) + "\n")


def settings_of(
    plan: Plan,
    name: str,
    seed: int,
    folder: Folder,
    rates: Mapping[str, float],
    steps: int | None = None,
) -> QeRLConfig:
    """The settings of a run.

    Args:
        plan: The plan.
        name: Name of the arm.
        seed: Seed of the run.
        folder: Folder of the runs.
        rates: Learning rates of arms that are tuned.
        steps: Optimizer steps at most; None for those of the plan.

    Raises:
        QeRLError: The arm learns from another one that has not run, or its settings contradict each other.
    """
    arm = plan.arms[name]
    own = {
        "seed": seed, "output_dir": str(folder.of(name, seed)), "report_to": "none",
        "model": str(folder.model),
    }  # fmt: skip
    given = dict(plan.settings) | dict(arm.settings) | own
    for what, form, other in (("teacher", TEACHER_ADAPTER, arm.teacher), ("adapter", "", arm.begins_with)):
        # The adapter that a finished run began with is not needed any more, and may be on another machine.
        begun = what == "adapter" and bool(folder.finished(name, seed))
        if other is not None and not begun:
            if not folder.finished(other, seed):
                raise QeRLError(f"The arm {name} needs the adapter of {other}; name both with --arms.")
            given[what] = f"{form}{folder.of(other, seed)}"
    if arm.rate_of is not None:
        given["learning_rate"] = rates[arm.rate_of]
    config = load_config([arm.recipe], given)
    options = dict(config.task_options) | {"seed": seed, "test_size": plan.held_out}
    taught_by_model = config.teacher is not None and arm.teacher is None
    return changed(config, {
        **({"model": str(folder.packed(config.rounding))} if config.weights == "nvfp4" else {}),
        "task_options": options,
        "max_steps": min(config.max_steps, steps or config.max_steps),
        **({"teacher": str(folder.model)} if taught_by_model else {}),
        **(one_microbatch(config) if config.device.type == "cuda" else {}),
    })  # fmt: skip


class _Adapters(TrainerCallback):
    """Keeps copies of the trained weights: before the first step, every `every` steps, and after the last.

    Attributes:
        steps: Optimizer steps done at each copy.
    """

    def __init__(self, model: torch.nn.Module, every: int) -> None:
        self._every = every
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._kept: list[list[torch.Tensor]] = []
        self.steps: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._keep(state)

    def _keep(self, state: Any) -> None:
        self.steps.append(state.global_step)
        self._kept.append([weight.detach().to("cpu", copy=True) for weight in self._trained])

    def scored(self, score: Callable[[], float]) -> list[float]:
        """Call `score` with each copy loaded, in order; afterwards the model has the last copy."""
        found = []
        for kept in self._kept:
            with torch.no_grad():
                for weight, then in zip(self._trained, kept, strict=True):
                    weight.copy_(then)
            found.append(score())
        return found


def _lengths(trainer: QeRLTrainer) -> list[list[int]]:
    """Return a list to which each training rollout adds its samples' token counts, groups side by side."""
    found: list[list[int]] = []
    sampler = trainer.rollouts.sampler
    prepare = sampler.prepare

    def seen(drawn: Drawn, mode: str) -> None:
        found.append([len(sample.tokens) for sample in drawn.samples])
        prepare(drawn, mode)

    sampler.prepare = seen  # type: ignore[method-assign]
    return found


def learn(config: QeRLConfig, every: int | None) -> Row:
    """Compute a run, and save its adapter if it trains one.

    Args:
        config: Settings of the run.
        every: Optimizer steps between two scores; None trains nothing and scores once.

    Returns:
        ``steps`` and the ``accuracy`` after each, share of right greedy answers; by optimizer step the
        metrics of `KEPT` and, if it draws samples, their ``tokens`` and the seconds ``of_7b`` that `clock`
        estimates; ``seconds`` that the run took, scores included.
    """
    console = Console(quiet=True)
    started = time.perf_counter()
    trainer, _ = build(config, console)
    score = _scorer(trainer, config, console)
    if every is None:
        return {"steps": [0], "accuracy": [score()], "seconds": time.perf_counter() - started}
    adapters = _Adapters(trainer.model, every)
    lengths = _lengths(trainer) if config.algorithm != "sft" else []
    trainer.add_callback(adapters)
    trainer.train()
    trainer.save_final(Path(str(config.output_dir)))
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "steps": adapters.steps,
        "accuracy": adapters.scored(score),
        **{name: [row[key] for row in logged] for name, key in KEPT.items() if key in logged[0]},
        **(_of_lengths(lengths, config) if lengths else {}),
        "seconds": time.perf_counter() - started,
    }


def _of_lengths(lengths: list[list[int]], config: QeRLConfig) -> Row:
    """Fields of a result that follow from the token counts of samples, by optimizer step."""
    return {
        "tokens": [sum(step) for step in lengths],
        "of_7b": step_seconds(lengths, config.num_generations, config.max_staleness),
    }


def _scorer(trainer: QeRLTrainer, config: QeRLConfig, console: Console) -> Callable[[], float]:
    """Return a function that decodes held-out problems greedily and returns the share of right answers."""
    task = get_task(str(config.task), **config.task_options)
    problems = task.test()
    params = SamplingParams(
        config.max_completion_length, temperature=0.0, stop_token_ids=tuple(trainer.eos_token_ids)
    )

    def score() -> float:
        engine, tokenizer = trainer.engine, trainer.processing_class
        found = evaluate(engine, tokenizer, task, problems, samples=1, params=params, console=console)
        engine.release()
        return found.accuracy

    return score


@dataclass(frozen=True)
class Job:
    """The runs of a seed, for a process.

    Attributes:
        seed: Seed of the runs.
        plan: The plan.
        arms: Names of the arms to run.
        folder: Folder of the runs.
        rates: Learning rates of arms that are tuned.
        steps: Optimizer steps at most; None for those of the plan.
        ends_alone: Whether runs are scored only before the first and after the last step.
        threads: Number of torch's CPU threads.
    """

    seed: int
    plan: Plan
    arms: tuple[str, ...]
    folder: Folder
    rates: Mapping[str, float]
    steps: int | None = None
    ends_alone: bool = False
    threads: int = 1


def run_seed(job: Job) -> None:
    """Compute the missing runs of a seed; do nothing if another process is computing them.

    Raises:
        QeRLError: A run cannot be computed, or the folder holds another run of its name.
    """
    torch.set_num_threads(job.threads)
    fingerprint = checkpoint_fingerprint(job.folder.model)
    (job.folder.path / "runs").mkdir(parents=True, exist_ok=True)
    with claimed(job.folder.path / "runs" / f"{job.seed}.lock") as mine:
        for name in job.arms if mine else ():
            config = settings_of(job.plan, name, job.seed, job.folder, job.rates, job.steps)
            asked = {
                "arm": name, "seed": job.seed, "task": config.task, "held_out": job.plan.held_out,
                "max_steps": config.max_steps, "max_staleness": config.max_staleness,
                "learning_rate": config.learning_rate, "fingerprint": fingerprint,
            }  # fmt: skip
            known = job.folder.finished(name, job.seed)
            if not known:
                every = job.plan.arms[name].every
                row = asked | learn(config, config.max_steps if every and job.ends_alone else every)
                made = provenance("")
                job.folder.keep(row | {key: made[key] for key in _OF_MACHINE if key in made})
                print(_said(row), flush=True)
            elif differs := [key for key, value in asked.items() if known.get(key, "unknown") != value]:
                raise QeRLError(
                    f"{job.folder.of(name, job.seed)}.json is of another run: its {differs[0]} is "
                    f"{known.get(differs[0], 'unknown')} and not {asked[differs[0]]}; choose another "
                    "--output_dir."
                )
            gc.collect()  # a trainer and its callbacks hold each other
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _said(row: Row) -> str:
    return (
        f"{row['arm']}, seed {row['seed']}, rate {row['learning_rate']:g}: accuracy "
        f"{row['accuracy'][0]:.3f} at first, {row['accuracy'][-1]:.3f} after {row['steps'][-1]} steps, "
        f"{row['seconds']:.0f} s"
    )


def compute(
    plan: Plan, folder: Folder, arms: Collection[str] = (), processes: int = 1, steps: int | None = None
) -> None:
    """Tune if an arm needs it, and compute the missing runs.

    Args:
        plan: The plan.
        folder: Folder of the runs.
        arms: Names of arms; all of the plan unless given.
        processes: Number of seeds side by side.
        steps: Optimizer steps of a run at most; None for those of the plan.

    Raises:
        QeRLError: As `run_seed`; other seeds are run all the same.
    """
    names = tuple(name for name in plan.arms if not arms or name in arms)
    threads = max(1, (os.cpu_count() or 1) // processes)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:

        def run(jobs: list[Job]) -> None:
            list(pool.map(run_seed, jobs))

        rates: dict[str, float] = {}
        if any(plan.arms[name].rate_of for name in names):
            run(
                [
                    Job(
                        seed, plan, plan.tuning.arms, folder.tuning(rate), dict.fromkeys(plan.tuned(), rate),
                        steps, True, threads,
                    )
                    for seed in plan.tuning.seeds
                    for rate in plan.tuning.learning_rates
                ]
            )  # fmt: skip
            rates = chosen(plan, folder)
            print(", ".join(f"{arm} at {rate:g}" for arm, rate in rates.items()), flush=True)
        jobs = []
        for seed in (*plan.seeds, *plan.later_seeds):
            if own := tuple(name for name in names if seed in plan.seeds_of(plan.arms[name])):
                jobs.append(Job(seed, plan, own, folder, rates, steps, False, threads))
        run(jobs)


def chosen(plan: Plan, folder: Folder) -> dict[str, float]:
    """The learning rate of each tuned arm: the one with the highest mean accuracy at the end; of equal ones
    the lowest.

    Raises:
        QeRLError: A run of the tuning is missing.
    """

    def ends(arm: str, rate: float) -> list[float]:
        found = [folder.tuning(rate).finished(arm, seed) for seed in plan.tuning.seeds]
        if not all(found):
            raise QeRLError(f"{folder.tuning(rate).path} lacks runs of {arm}; run the command again.")
        return [row["accuracy"][-1] for row in found]

    rates = sorted(plan.tuning.learning_rates)
    return {arm: max(rates, key=lambda rate: fmean(ends(arm, rate))) for arm in plan.tuned()}


def gathered(plan: Plan, folder: Folder) -> list[Row]:
    """Results of all runs that have finished, those of the tuning last; ``tuning`` tells them apart."""
    tuning = plan.tuning
    found = [folder.finished(name, seed) for name, arm in plan.arms.items() for seed in plan.seeds_of(arm)]
    tried = [
        folder.tuning(rate).finished(name, seed)
        for name in plan.tuned()
        for rate in tuning.learning_rates
        for seed in tuning.seeds
    ]
    return [row | {"tuning": of} for of, part in ((False, found), (True, tried)) for row in part if row]


def main(arguments: list[str]) -> None:
    """Run `python -m lab trained` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab trained", description=__doc__.split("\n")[0])
    parser.add_argument("plan", choices=PLANS, help="name of a plan of lab/trained")
    parser.add_argument("--model", default=HUB_ID, help="folder or Hub id of the model in 16 bits")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--processes", type=int, default=1, help="seeds trained in parallel")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds; default: the plan's")
    parser.add_argument("--arms", nargs="+", help="names of arms; default: all of the plan")
    parser.add_argument("--steps", type=int, help="maximum steps of each run, for a trial")
    parser.add_argument("--held_out", type=int, help="number of problems to score, for a trial")
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args(arguments)
    plan = read_plan(args.plan)
    if args.seeds:
        plan = replace(plan, seeds=tuple(args.seeds), later_seeds=())
    plan = replace(plan, held_out=args.held_out or plan.held_out)
    if unknown := sorted({*(args.arms or ())} - plan.arms.keys()):
        raise QeRLError(f"The plan has no arm {unknown[0]!r}; it has {', '.join(plan.arms)}.")
    folder = Folder(args.output_dir, local_checkpoint(args.model), args.output_dir / "models")
    try:
        compute(plan, folder, args.arms or (), args.processes, args.steps)
    finally:
        rows = gathered(plan, folder)
        if args.out and rows:
            write_result(args.out, f"trained {args.plan} --processes {args.processes}", rows, program="lab")
