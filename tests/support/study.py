"""A trainer of batches that computes curves from the seed alone, and a study for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from lab.study.arms import Run
from lab.study.followed import Followed
from lab.study.runner import Runner
from lab.study.spec import Study, make_study
from lab.study.store import Store

QUIET = Console(quiet=True)


def tiny_study(**fields) -> Study:
    """Two arms, two learning rates, two tuning seeds and three test seeds; aqn is better, by seed."""
    values = {
        "model": "m",
        "task": "arithmetic",
        "steps": 4,
        "eval_steps": 2,
        "learning_rates": [1e-4, 2e-4],
        "tuning_seeds": 2,
        "test_seeds": 3,
        "runs_per_batch": 3,
        "arms": {"none": None, "aqn": {"noise": True, "noise_stages": 2}},
        "comparisons": {"primary": [["aqn", "none"]]},
    }
    return make_study(values | fields)


def accuracy(run: Run, step: int) -> float:
    """Accuracy of a run after some steps: 2e-4 learns faster than 1e-4, aqn a little faster than none."""
    speed = run.learning_rate / 2e-4 * (0.12 if run.arm.noise else 0.1)
    return step * (speed + 0.001 * (run.seed % 1000) ** 2 * run.arm.noise)


@dataclass
class FakeMake:
    """Makes fake trainers and remembers what was asked for.

    Attributes:
        on_step: Called with the trainer before each step.
        made: Runs of each trainer, and what they follow.
    """

    on_step: Callable[["FakeTrainer"], None] = lambda trainer: None
    made: list[tuple[list[Run], Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=lambda: {"device": "fake", "fingerprint": "f"})

    def __call__(self, runs: Sequence[Run], followed: Sequence[Followed | None]) -> "FakeTrainer":
        self.made.append((list(runs), followed))
        return FakeTrainer(list(runs), self.on_step)


@dataclass
class FakeTrainer:
    """Counts its steps; the run of seed 666 diverges in the third one."""

    runs: list[Run]
    on_step: Callable[["FakeTrainer"], None]
    done: int = 0
    samples: list[int] = field(default_factory=list)

    def step(self) -> list[dict[str, float]]:
        self.on_step(self)
        self.done += 1
        sick = [run.seed == 666 and self.done >= 3 for run in self.runs]
        return [
            {
                "rollout/entropy": float(self.done) + run.seed % 1000,
                "noise/sigma": 0.5 * run.arm.noise * (self.done > 2),
                "rewards/accuracy/mean": float("nan") if ill else 0.5,
                "diverged": float(ill),
            }
            for run, ill in zip(self.runs, sick, strict=True)
        ]

    def evaluate(self, samples: int) -> list[dict[str, float]]:
        self.samples.append(samples)
        return [{"accuracy": accuracy(run, self.done)} for run in self.runs]

    def state(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def computed(folder, study, make=None):
    """Compute all runs of a study, and give what made its trainers."""
    make = make or FakeMake()
    assert Runner(Store(folder, study), make, QUIET).run()
    return make


def files(folder):
    """Names of the finished runs."""
    return sorted(path.stem for path in (folder / "runs").iterdir())
