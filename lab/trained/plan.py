"""A plan: which runs there are, and how their learning rates are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl import yaml12

FOLDER = Path(__file__).parent
PLANS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
"""Names of the plans."""


@dataclass(frozen=True)
class Arm:
    """One way of training, or the untrained model.

    Attributes:
        recipe: Name of a recipe of the package.
        settings: Settings that override the recipe's and the plan's; a teacher that is a model is always the
            model of the runs.
        every: Optimizer steps between two scores; None trains nothing and scores once.
        teacher: Arm whose adapter of the same seed is the teacher.
        begins_with: Arm whose adapter of the same seed is trained further.
        rate_of: Arm whose tuning chose its learning rate; None for that of its settings.
        later: Whether the arm was added when answers were known, and so runs on the plan's `later_seeds`.
    """

    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    every: int | None = None
    teacher: str | None = None
    begins_with: str | None = None
    rate_of: str | None = None
    later: bool = False


@dataclass(frozen=True)
class Tuning:
    """How learning rates are chosen: by the mean accuracy at the end, over seeds that nothing else uses.

    Attributes:
        seeds: Seeds of its runs.
        learning_rates: Learning rates to try.
        arms: Arms that run: each one that others name in `rate_of`, and the arms that these need.
    """

    seeds: tuple[int, ...] = ()
    learning_rates: tuple[float, ...] = ()
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The runs of a plan and how they are scored.

    Attributes:
        seeds: Seeds of the runs that answer the plan's questions.
        later_seeds: Seeds of arms that were added when these results were known.
        held_out: Number of problems on which a policy is scored.
        tuning: How learning rates are chosen; empty if none is.
        arms: Arms by name, in the order in which a seed runs them.
        settings: Settings that override the recipes' in all arms.
    """

    seeds: tuple[int, ...]
    held_out: int
    arms: Mapping[str, Arm]
    settings: Mapping[str, Any] = field(default_factory=dict)
    later_seeds: tuple[int, ...] = ()
    tuning: Tuning = field(default_factory=Tuning)

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        """The seeds that an arm runs on."""
        return self.later_seeds if arm.later else self.seeds

    def tuned(self) -> dict[str, None]:
        """Arms that others name in `rate_of`, as ordered keys."""
        return dict.fromkeys(arm.rate_of for arm in self.arms.values() if arm.rate_of is not None)


def read_plan(name: str) -> Plan:
    """Read a plan by its name."""
    values = yaml12.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return Plan(
        seeds=tuple(values["seeds"]),
        held_out=values["held_out"],
        arms={arm: Arm(**fields) for arm, fields in values["arms"].items()},
        settings=values.get("settings", {}),
        later_seeds=tuple(values.get("later_seeds", ())),
        tuning=Tuning(**{part: tuple(value) for part, value in values.get("tuning", {}).items()}),
    )
