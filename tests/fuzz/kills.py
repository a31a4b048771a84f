"""Kills runs at random points and resumes them: ``python -m tests.fuzz kills --count 500 --jobs 8``.

A tiny model trains for some steps with everything on that has state: noise, dropout, evaluation, a checkpoint
after each step, rollouts that several steps use, epochs that end within the run. It is killed once or twice,
by a signal or an exception, in a rollout, an update, an evaluation, or while a checkpoint or the final model
is written; on several processes, one of them or all. Then it is resumed to its end. What must hold:

- the final adapter and the logged losses are bit for bit those of a run that nobody stopped;
- every checkpoint that was there before is there, and whole;
- no process hangs, none that was asked to stop or ran out of something writes a traceback;
- exit codes are those that are documented, and the sentence for a failure stands there once.
"""

import argparse
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from qerl.checkpoint_folder import read_manifest
from qerl.errors import QeRLError
from qerl.run_folder import checkpoints, last_checkpoint
from tests.fuzz._forks import Forks
from tests.fuzz._kill import POINTS, SIGNALS, Kill, arm, errors_at, judge
from tests.support.models import make_tiny_model, make_tiny_tokenizer

STEPS = 5
# Variants of a run: what its checkpoints hold and how epochs fall differs.
VARIANTS: dict[str, dict[str, Any]] = {
    "rollout per step": {},
    "rollout for two steps": {"steps_per_generation": 2, "save_total_limit": 2},
    "odd epochs": {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 3},
}


@dataclass
class Case:
    """A run and its kills, and what was found.

    Attributes:
        reached: Points that were come by, of those at which something was to happen.
        findings: What does not hold, in words.
    """

    number: int
    processes: int
    variant: str
    kills: list[Kill]
    reached: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = "; ".join(map(str, self.kills))
        return f"case {self.number}, {self.processes} processes, {self.variant}: {kills}"


BOTH = (0, 1)
# Cases that must not be missed, whatever the seed. An epoch is two steps on two processes, so the checkpoint
# of step 3 lies within the second one.
NAMED = [
    (
        2,
        "rollout per step",
        [
            Kill("memory", "rollout", 2, ranks=(1,)),
            Kill("INT", "update", 2, ranks=BOTH, twice=True),
            Kill("TERM", "rollout", 1, ranks=(1,)),
            Kill("KILL", "rollout", 1, ranks=BOTH),
        ],
    ),
    (
        1,
        "odd epochs",
        [
            Kill("KILL", "renaming", 2),
            Kill("disk", "saved in part", 2),
            Kill("INT", "log", 1),
            Kill("disk", "final", 1),
        ],
    ),
]


def main(argv: list[str]) -> int:
    """Runs the cases; the exit status is 1 where something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz kills", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="random cases, after those that have names")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a run hangs")
    parser.add_argument("--keep", type=Path, help="new folder to work in; what failed stays there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    gc.freeze()  # what is here now is not looked at in each fork
    for owner, name in POINTS.values():
        getattr(owner, name)  # a process that finds none would leave the other one waiting
    cases = [Case(i, *named) for i, named in enumerate(NAMED) if named[0] in args.processes]
    cases += [draw(number, args) for number in range(len(NAMED), len(NAMED) + args.count)]
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args.keep or Path(temporary), args.limit)
        start = time.monotonic()
        bench.references({(case.processes, case.variant) for case in cases})
        done = bench.run_all(cases, args.jobs)
    gc.unfreeze()
    print(f"{time.monotonic() - start:.0f} s")
    return summary(done, len(cases))


def draw(number: int, args: argparse.Namespace) -> Case:
    """A random case; the same for the same seed and number."""
    rng = random.Random(f"{args.seed}/{number}")
    processes = rng.choice(args.processes)
    variant = rng.choice(list(VARIANTS))
    return Case(
        number, processes, variant, [_draw_kill(rng, processes) for _ in range(rng.choice((1, 1, 2)))]
    )


def _draw_kill(rng: random.Random, processes: int) -> Kill:
    ranks = rng.choice([(0,), (1,), (0, 1)]) if processes == 2 else (0,)
    if rng.random() < 0.2:
        return Kill(rng.choice(list(SIGNALS)), None, seconds=rng.uniform(0.0, 6.0), ranks=ranks)
    point = rng.choice(list(POINTS))
    how = rng.choice([*SIGNALS, *SIGNALS, *errors_at(point)])
    nth = 1 if point == "final" else rng.randint(1, STEPS * (2 if point in ("rollout", "update") else 1))
    twice = how in ("INT", "TERM") and rng.random() < 0.3
    return Kill(how, point, nth, ranks=ranks, twice=twice)


class Bench:
    """Where cases run: a model, recipes, and what runs that nobody stops end with."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        make_tiny_model("llama").save_pretrained(folder / "model")
        make_tiny_tokenizer().save_pretrained(folder / "model")
        (folder / "reward.py").write_text(
            "def digits(completions, **kwargs):\n"
            "    return [sum(ch.isdigit() for ch in c[0]['content']) / 4 for c in completions]\n"
        )

    def references(self, kinds: set[tuple[int, str]]) -> None:
        """Runs each kind to its end once."""
        for processes, variant in sorted(kinds):
            out = self.reference(processes, variant)
            forks = self.start(out, processes, variant, resume=False)
            if any(forks.wait()):
                sys.exit(f"A run that nobody stopped failed:\n{forks.text}")
            if variant == "rollout per step" and any(reward is None for _, _, reward, _ in _logged(out)):
                sys.exit(f"A step after an evaluation did not train: {_logged(out)}")

    def reference(self, processes: int, variant: str) -> Path:
        return self.folder / f"reference {processes} {variant}"

    def start(
        self,
        out: Path,
        processes: int,
        variant: str,
        resume: bool,
        prepare: Callable[[int], None] = lambda rank: None,
    ) -> Forks:
        settings = {
            "model": str(self.folder / "model"),
            "task": "arithmetic",
            "task_options": {"level": "wp1", "examples": 0, "train_size": 5 * processes, "test_size": 4},
            "reward_files": [f"{self.folder / 'reward.py'}:digits"],
            "output_dir": str(out),
            "resume_from_checkpoint": resume,
            "lora_r": 4,
            "lora_dropout": 0.1,
            "learning_rate": 1e-2,
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "max_completion_length": 4,
            "max_steps": STEPS,
            "save_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_samples": 2,
            "noise": True,
            "noise_sigma_start": 0.2,
            "noise_sigma_end": 0.1,
            "noise_stages": 3,
            "report_to": "none",
            "use_cpu": True,
        } | VARIANTS[variant]
        recipe = out.with_suffix(".yaml")
        recipe.write_text(yaml.safe_dump(settings))
        log = out.with_name(f"{out.name} log")
        shutil.rmtree(log, ignore_errors=True)
        return Forks(["train", str(recipe)], processes, log, self.limit, prepare)

    def run_all(self, cases: list[Case], jobs: int) -> list[dict[str, Any]]:
        """Each job takes every so-manieth case and writes what it found into a file of its own."""
        files = [self.folder / f"job-{job}.jsonl" for job in range(jobs)]
        workers = []
        sys.stdout.flush()
        for job, file in enumerate(files):
            file.unlink(missing_ok=True)
            if (pid := os.fork()) == 0:
                with file.open("a") as out:
                    for case in cases[job::jobs]:
                        self.run(case)
                        print(
                            json.dumps({"case": str(case), **vars(case) | {"kills": []}}),
                            file=out,
                            flush=True,
                        )
                        print(
                            f"{case}{''.join(f'{chr(10)}  {found}' for found in case.findings)}", flush=True
                        )
                os._exit(0)
            workers.append(pid)
        for pid in workers:
            os.waitpid(pid, 0)
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def run(self, case: Case) -> None:
        """Kills, resumes, compares; findings are left in the case."""
        out = self.folder / f"case-{case.number}"
        for turn, kill in enumerate(case.kills):
            self._run_and_kill(case, out, kill, turn)
        if not (out / "adapter_model.safetensors").exists() or case.kills[-1].how == "KILL":
            forks = self._go_on(case, out)
            if any(codes := forks.wait()) or forks.hung:
                case.findings.append(f"the last resume ended with {codes}, hung: {forks.hung}\n{forks.text}")
        self._compare(case, out)
        if not case.findings:
            shutil.rmtree(out)
            shutil.rmtree(out.with_name(f"{out.name} log"))

    def _go_on(self, case: Case, out: Path, prepare: Callable[[int], None] = lambda rank: None) -> Forks:
        resume = last_checkpoint(out) is not None
        if not resume:
            shutil.rmtree(out, ignore_errors=True)
        return self.start(out, case.processes, case.variant, resume, prepare)

    def _run_and_kill(self, case: Case, out: Path, kill: Kill, turn: int) -> None:
        before = _whole(out)
        mark = self.folder / f"mark-{case.number}-{turn}"
        forks = self._go_on(case, out, lambda rank: arm(kill, rank, mark))
        start = time.monotonic()
        if kill.point is None:
            while not forks.poll() and time.monotonic() - start < kill.seconds:
                time.sleep(0.01)
            forks.signal(SIGNALS[kill.how], list(kill.ranks))
        codes = forks.wait()
        reached = kill.point is None or any(mark.parent.glob(f"{mark.name}-*"))
        case.reached.append(f"{kill.how} at {kill.point or 'a time'}" if reached else "not reached")
        case.findings += [f"{kill}: {found}" for found in judge(kill, codes, forks, reached)]
        case.findings += _lost(out, before, VARIANTS[case.variant].get("save_total_limit"))

    def _compare(self, case: Case, out: Path) -> None:
        reference = self.reference(case.processes, case.variant)
        adapter = out / "adapter_model.safetensors"
        if not adapter.exists():
            case.findings.append("there is no final adapter")
        elif adapter.read_bytes() != (reference / adapter.name).read_bytes():
            case.findings.append("the final adapter is another one")
        elif _logged(out) != _logged(reference):
            case.findings.append(f"other losses were logged: {_logged(out)} for {_logged(reference)}")


def _whole(out: Path) -> set[str]:
    found = set()
    for checkpoint in checkpoints(out):
        try:
            read_manifest(checkpoint)
            found.add(checkpoint.name)
        except QeRLError:
            continue
    return found


def _lost(out: Path, before: set[str], limit: int | None) -> list[str]:
    """Checkpoints that were whole, or must have become so, and are not."""
    found, whole = [], _whole(out)
    steps = [row["step"] for row in _rows(out) if "loss" in row]
    saved = max(steps, default=0) - 1  # a step is logged before it is saved
    must = set() if limit else before | {f"checkpoint-{step}" for step in range(1, saved + 1)}
    if lost := must - whole:
        found.append(f"lost checkpoints: {sorted(lost)} of {sorted(must)}")
    newest = last_checkpoint(out)
    if saved >= 1 and (newest is None or newest.name not in whole or int(newest.name[11:]) < saved):
        found.append(f"the newest checkpoint is {newest} where step {saved} was saved")
    return found


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # the last line of a process that was killed
            continue
    return rows


def _logged(out: Path) -> list[list[float | None]]:
    names = ("step", "loss", "reward", "grad_norm")
    return [[row.get(name) for name in names] for row in _rows(out) if "loss" in row]


def summary(done: list[dict[str, Any]], cases: int) -> int:
    """Prints counts; the exit status."""
    reached = Counter(what for case in done for what in case["reached"])
    for what, count in sorted(reached.items()):
        print(f"{count:5d}  {what}")
    failed = [case for case in done if case["findings"]]
    two = sum(case["processes"] == 2 for case in done)
    kills = sum(count for what, count in reached.items() if what != "not reached")
    print(f"{len(done)} of {cases} cases, {two} on two processes, {kills} kills, {len(failed)} with findings")
    return int(bool(failed) or len(done) < cases)
