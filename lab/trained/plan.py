"""What a plan says: which runs there are, and how their learning rates are chosen."""

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
    """One way of training, or none.

    Attributes:
        recipe: Name of a recipe of the package.
        settings: What differs from it, and from the plan's; a teacher that is a model is always the model of
            the runs.
        every: Optimizer steps between two scores; None trains nothing and scores once.
        teacher: Arm whose adapter of the same seed is the teacher.
        begins_with: Arm whose adapter of the same seed is trained further.
        rate_of: Arm whose tuning chose its learning rate; None for that of its settings.
        later: Whether it was added when answers were known, and runs on the plan's `later_seeds`.
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
        seeds: Of its runs.
        learning_rates: What is tried.
        arms: What runs, arms and what they need; each arm that others name in `rate_of` is among them.
    """

    seeds: tuple[int, ...] = ()
    learning_rates: tuple[float, ...] = ()
    arms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a plan says.

    Attributes:
        seeds: Of the runs that answer.
        later_seeds: Of arms that were added when these had been looked at.
        held_out: Problems that a policy is scored on.
        tuning: How learning rates are chosen, where they are.
        arms: By name, in the order in which a seed runs them.
        settings: What differs from the recipes in all of them.
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
    """The plan of a name."""
    values = yaml12.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return Plan(
        seeds=tuple(values["seeds"]),
        held_out=values["held_out"],
        arms={arm: Arm(**fields) for arm, fields in values["arms"].items()},
        settings=values.get("settings", {}),
        later_seeds=tuple(values.get("later_seeds", ())),
        tuning=Tuning(**{part: tuple(value) for part, value in values.get("tuning", {}).items()}),
    )
