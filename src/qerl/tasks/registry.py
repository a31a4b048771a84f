"""Tasks by name, as recipes and the command line give them.

Several tasks are combined by ``mixture``, whose options are its parts by their names in logs::

    task: mixture
    task_options:
      words: {task: arithmetic, weight: 2, task_options: {level: wp2}}
      gsm8k: {}
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from qerl.errors import QeRLError, did_you_mean
from qerl.tasks.arithmetic import Arithmetic
from qerl.tasks.base import Task
from qerl.tasks.code import Code
from qerl.tasks.custom import load_task
from qerl.tasks.demonstrations import Demonstrations
from qerl.tasks.guess_number import GuessNumber
from qerl.tasks.hub import SOURCES, HubTask, bigmath
from qerl.tasks.jsonl import Jsonl
from qerl.tasks.mixture import make_mixture
from qerl.tasks.verifiers import Verifiers
from qerl.user_code import names_a_file

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    **{name: partial(HubTask, name, source) for name, source in SOURCES.items()},
    "bigmath": bigmath,
    "guess_number": GuessNumber,
    "mixture": lambda **parts: make_mixture(get_task, parts),
}
"""The function or class that makes each task; its keyword arguments are the task's options."""

FAMILIES: dict[str, tuple[Callable[..., Task], str]] = {
    "jsonl": (Jsonl, "jsonl:PATH for a file of your own"),
    "code": (Code, "code:PATH for programming problems with tests"),
    "demonstrations": (Demonstrations, "demonstrations:PATH for conversations to learn from"),
    "verifiers": (Verifiers, "verifiers:NAME for a task set of verifiers"),
}
"""The class of the tasks FAMILY:NAME, which takes the name and the options, and a description for errors."""

_OF_EVERY_TASK = tuple(inspect.signature(Task.ask).parameters)[1:]


def get_task(spec: str, **options: Any) -> Task:
    """Make the task that a specification names.

    Args:
        spec: A name from :data:`TASKS`; FAMILY:NAME with one of :data:`FAMILIES`, such as ``jsonl:PATH``,
            for which a path in .jsonl is short; or ``PATH.py:Class`` for the user's own class.
        options: The options documented by the task's class, and those of :meth:`Task.ask`.

    Raises:
        QeRLError: The task or an option is unknown (the nearest name is given), or an option's value is
            wrong.
    """
    make = _maker(spec)
    asked = {name: options.pop(name) for name in _OF_EVERY_TASK if name in options}
    parameters = inspect.signature(make).parameters
    known = list(parameters)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in known and not open_ended:
            every = [*known, *_OF_EVERY_TASK]
            raise QeRLError(
                f"Task {spec} has no option {option!r}{did_you_mean(option, every)}; its options are: "
                f"{', '.join(every)}; --task_options '{{}}' drops those of a recipe for another task."
            )
    task = make(**options)
    if asked:
        task.ask(**asked)
    return task


def _maker(spec: str) -> Callable[..., Task]:
    family, _, name = spec.partition(":")
    if family in FAMILIES and name:
        return partial(FAMILIES[family][0], name)
    if names_a_file(spec):
        return load_task(spec)
    if spec.endswith(".jsonl"):
        return partial(Jsonl, spec)
    if spec not in TASKS:
        on_hub = [task for task, source in SOURCES.items() if source.dataset == spec]
        near = f" (did you mean {on_hub[0]!r}?)" if on_hub else did_you_mean(spec, TASKS)
        if not on_hub and re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
            raise QeRLError(
                f"Task {spec!r} is unknown; if it is a data set of the Hub, whose columns have no common "
                f"names, write its problems as lines with question and answer (load_dataset({spec!r}) of the "
                "package datasets, then to_json) and name that file: --task PATH.jsonl."
            )
        raise QeRLError(
            f"Task {spec!r} is unknown{near}; the tasks are: {', '.join(TASKS)}, and "
            f"{', '.join(what for _, what in FAMILIES.values())}, PATH.py:Class for a class of your own."
        )
    return TASKS[spec]
