"""What is asked of a policy: a task, and how it is sampled."""

from dataclasses import dataclass, fields
from typing import Any

from qerl.errors import QeRLError
from qerl.settings.checks import (
    Names,
    NonNegative,
    Passage,
    Passages,
    PositiveInt,
    PositiveShare,
    Seed,
    Text,
    checked,
)

MOST_SAMPLES = 2**16
"""Completions of a problem at most, which one call of the engine samples before any of them is kept."""


@dataclass(frozen=True)
class Request:
    """What is asked of a policy; None takes what the run says, else the default.

    Attributes:
        task: As in a recipe; required where no run says one.
        task_options: As in a recipe; those of the run count for its own task alone.
        tools: As in a recipe; those of the run count for its own task alone, as its environment.
        environment: As in a recipe.
        environment_options: Its keyword arguments.
        max_tool_calling_iterations: Turns of the policy that are answered; else as many as its tokens allow.
        samples: Completions for each problem, at most `MOST_SAMPLES`.
        temperature: Else 0 for one sample and 0.6 for several.
        top_p: Without effect at temperature 0.
        max_tokens: Longest completion.
        stop_strings, thinking_budget, thinking_end: As in a recipe.
        limit: First problems only; None for all.
        seed: Of the sampling.

    Raises:
        QeRLError: A value is of another kind or out of its range.
    """

    task: Text | None = None
    task_options: dict[str, Any] | None = None
    tools: Names | None = None
    environment: Text | None = None
    environment_options: dict[str, Any] | None = None
    max_tool_calling_iterations: PositiveInt | None = None
    samples: PositiveInt = 1
    temperature: NonNegative | None = None
    top_p: PositiveShare = 0.95
    max_tokens: PositiveInt | None = None
    stop_strings: Passages | None = None
    thinking_budget: PositiveInt | None = None
    thinking_end: Passage | None = None
    limit: PositiveInt | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, checked(spec.name, getattr(self, spec.name), spec.type))
        if self.samples > MOST_SAMPLES:
            raise QeRLError(
                f"samples is {self.samples}; at most {MOST_SAMPLES} completions of a problem are sampled."
            )
