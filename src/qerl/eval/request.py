"""A request for an evaluation: a task with its sampling settings, or a suite of several tasks.

A suite is a YAML file, either of this package (by name) or the user's own (by path)::

    about: What it is.
    tasks:
      math500: {}
      aime24: {samples: 16}
      mine: {task: "jsonl:my/test.jsonl", limit: 100}

Each entry has the fields of `Request`; its name is its task unless it has the field `task`. Values from the
command line apply to all tasks and win.
"""

from dataclasses import dataclass, fields
from pathlib import Path
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
from qerl.settings.library import named_file, nearest, read_mapping

SUITES = Path(__file__).parent / "suites"

MAX_SAMPLES = 2**16
"""Maximum completions per problem; one call of the engine samples all of them before any is stored."""


@dataclass(frozen=True)
class Request:
    """A task and its sampling settings; None takes the run's value, else the default.

    Attributes:
        task: As in a recipe; required if no run provides one.
        task_options: As in a recipe; those of the run apply only to its own task.
        tools, environment, environment_options: As in a recipe; those of the run apply only to its own task.
        max_tool_calling_iterations: Maximum number of the policy's turns that are answered; by default as
            many as its tokens allow.
        samples: Completions per problem, at most `MAX_SAMPLES`.
        temperature: By default 0 for one sample and 0.6 for several; never taken from the run.
        top_p: Without effect at temperature 0.
        max_tokens: Maximum length of a completion in tokens.
        stop_strings, thinking_budget, thinking_end: As in a recipe.
        limit: Number of first problems to score; None for all.
        seed: Seed of the sampling.

    Raises:
        QeRLError: A value is of the wrong kind or out of its range.
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
        if self.samples > MAX_SAMPLES:
            raise QeRLError(f"samples is {self.samples}; it must be at most {MAX_SAMPLES}.")

    @property
    def ends(self) -> dict[str, Any]:
        """Settings other than stop tokens that end or interrupt completions, without unset ones."""
        thinking = () if self.thinking_budget is None else ("thinking_budget", "thinking_end")
        return {name: value for name in ("stop_strings", *thinking) if (value := getattr(self, name))}


@dataclass(frozen=True)
class Suite:
    """Tasks that are scored together.

    Attributes:
        about: A description in one sentence.
        requests: Requests by the task's name in the suite.
    """

    name: str
    about: str
    requests: dict[str, Request]


def packaged() -> dict[str, Path]:
    """Return the files of the package's suites by name."""
    return {path.stem: path for path in sorted(SUITES.glob("*.yaml"))}


def load_suite(word: str, given: dict[str, Any] | None = None) -> Suite:
    """Load the suite named on the command line.

    Args:
        word: A suite of the package, or the path of a .yaml file.
        given: Fields for all requests, which win over the suite's.

    Raises:
        QeRLError: There is no such suite, or an entry has an unknown field or a wrong value.
    """
    path = named_file(word, packaged(), "suite")
    values = read_mapping(path, "suite")
    tasks = values.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not values.keys() <= {"about", "tasks"}:
        raise QeRLError(
            f"The suite {path} must have the key tasks, a mapping of names to settings, for example "
            "{math500: {samples: 4}}, and no other key than about."
        )
    requests = {str(name): _request(path, str(name), entry, given or {}) for name, entry in tasks.items()}
    return Suite(path.stem, str(values.get("about") or ""), requests)


def _request(path: Path, name: str, entry: Any, given: dict[str, Any]) -> Request:
    entry = {} if entry is None else entry
    if not isinstance(entry, dict):
        raise QeRLError(f"{name} in {path} is {entry!r}; it must be a mapping, for example {{samples: 4}}.")
    if Path(name).name != name or name == "..":
        raise QeRLError(f"The name {name!r} in {path} becomes a folder; take one without slashes.")
    known = [spec.name for spec in fields(Request)]
    for key in entry:
        if key not in known:
            raise QeRLError(f"{name} in {path} has the unknown key {key!r}{nearest(key, known)}.")
    try:
        return Request(**({"task": name, "task_options": {}} | entry | given))
    except QeRLError as error:
        raise QeRLError(f"{name} in {path}: {error}") from error
