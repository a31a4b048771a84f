"""Suites: several tasks that are scored together, each as it is usual for it.

A suite is a YAML file, of this package (by its name) or the user's own (by its path)::

    about: What it is.
    tasks:
      math500: {}
      aime24: {samples: 16}
      mine: {task: "jsonl:my/test.jsonl", limit: 100}

Each entry has the fields of `Request`; its name is its task unless it says another one. What the command line
says holds for all tasks and wins.
"""

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qerl.errors import QeRLError
from qerl.eval.request import Request
from qerl.named_files import named_file
from qerl.settings.recipe import read_mapping

FOLDER = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class Suite:
    """Tasks that are scored together.

    Attributes:
        name: What it is called.
        about: What it is, in a sentence.
        requests: What is asked for each task, by the task's name in the suite.
    """

    name: str
    about: str
    requests: dict[str, Request]


def packaged() -> dict[str, Path]:
    """Files of the package's suites by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def load_suite(word: str, given: dict[str, Any] | None = None) -> Suite:
    """The suite that a word on the command line means.

    Args:
        word: A suite of the package, or the path of a file in .yaml.
        given: Fields of all requests, which win over the suite's.

    Raises:
        QeRLError: There is no such suite, or an entry has an unknown field or a wrong value.
    """
    path = named_file(word, packaged(), "suite")
    values = read_mapping(path, "suite")
    tasks = values.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not values.keys() <= {"about", "tasks"}:
        raise QeRLError(
            f"The suite {path} must have the key tasks, a mapping of names to what is asked of each, for "
            "example {math500: {samples: 4}}, beside about alone."
        )
    requests = {str(name): _request(path, str(name), entry, given or {}) for name, entry in tasks.items()}
    return Suite(path.stem, str(values.get("about") or ""), requests)


def _request(path: Path, name: str, entry: Any, given: dict[str, Any]) -> Request:
    if entry is None:
        entry = {}
    if not isinstance(entry, dict):
        raise QeRLError(f"{name} in {path} is {entry!r}; it must be a mapping, for example {{samples: 4}}.")
    if Path(name).name != name or name == "..":
        raise QeRLError(f"The name {name!r} in {path} becomes a folder; take one without slashes.")
    known = [spec.name for spec in fields(Request)]
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}."
            raise QeRLError(f"{name} in {path} has the unknown key {key!r}; {hint}")
    try:
        return Request(**({"task": name, "task_options": {}} | entry | given))
    except QeRLError as error:
        raise QeRLError(f"{name} in {path}: {error}") from error
