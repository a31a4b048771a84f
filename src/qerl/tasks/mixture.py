"""Several tasks in one run, with weights (``task: mixture``).

A mixture is a task whose rows are those of its parts, so that training, evaluation, resuming and studies take
it as any other. Each row names its part in the column ``task``, and its part judges it: a reward function of
the mixture hands each row to the function of that name of the row's own task, and gives None, which TRL
counts as "does not apply", where the task has none. Accuracy is reported for each part, because ``task`` is
the column of strata (`qerl.tasks.base`).

Weights are shares of the prompts that training samples. They are met by repetition: an epoch has the rows of
each part as often as its share requires, and the part that is largest relative to its share once. So an epoch
shows every problem, the order is that of any data set (seed and epoch alone), and prompts of dynamic sampling
have the same shares. Given up: shares hold on average, not in each step, and if the last repetition of a part
is not whole, its first rows are those that come once more.

Each held-out problem appears once, in an order in which every prefix has the parts in proportion to their
weights, as long as each part has problems left.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.rewards.text import Completion, Message
from qerl.tasks.base import Task, as_dataset
from qerl.tasks.guard import NOT_COLUMNS, RewardFunction, judges_alone, judges_outside, stratified

PART = "task"
"""The column that names the part to which a row belongs."""

_WHAT = "The mixture"
_PART_KEYS = ("task", "weight", "task_options")
_LONGEST_EPOCH = 2**21  # rows; the order of an epoch is a list of them


@dataclass(frozen=True)
class Part:
    """A task of a mixture; its share is its weight, above 0, over the sum of all."""

    task: Task
    weight: float = 1.0


class Mixture(Task):
    """Several tasks as one.

    Args:
        parts: The tasks by their names in the column ``task``; at least one.
    """

    strata = PART

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.name = "mixture"  # without a format: the methods that would read it ask the parts
        self.parts = dict(parts)
        self.on_hub = any(part.task.on_hub for part in self.parts.values())

    @property
    def opening(self) -> str:  # a task's attribute, which every part needs
        """The chat template's part of the assistant's turn; see :class:`Task`."""
        return next(iter(self.parts.values())).task.opening

    @opening.setter
    def opening(self, text: str) -> None:
        for part in self.parts.values():
            part.task.opening = text

    def of(self, row: Mapping[str, Any]) -> Task:
        """The part to which a row belongs."""
        return self.parts[row[PART]].task

    def ask(self, system_prompt: str | None = None, answer_format: str | None = None) -> None:
        """Raise a QeRLError: each part has prompt options of its own."""
        raise QeRLError(
            "A mixture has no system_prompt or answer_format of its own; give them in the task_options of "
            f"its tasks ({', '.join(self.parts)})."
        )

    def prompt(self, question: str, worked: Any = ()) -> list[Message]:
        """Raise a QeRLError: a question belongs to none of the tasks."""
        raise QeRLError(
            "A mixture has no prompt format of its own, and this question belongs to none of its tasks "
            f"({', '.join(self.parts)}); give the system message with --system."
        )

    def train(self) -> Dataset:
        """The training problems of all parts, each once, part after part; see :meth:`epoch`."""
        rows = [row for name, part in self.parts.items() for row in _of_part(name, part.task.train())]
        return as_dataset(rows, _WHAT)

    def test(self) -> Dataset:
        """The held-out problems of all parts, each once, in the proportion of the weights."""
        rows = {name: _of_part(name, part.task.test()) for name, part in self.parts.items()}
        weights = {name: part.weight for name, part in self.parts.items()}
        return as_dataset(_in_proportion(rows, weights), _WHAT)

    def demonstrations(self, held_out: bool = False) -> Dataset:
        """The demonstrations of all parts, in the order of :meth:`train` or :meth:`test`."""
        rows = {name: _of_part(name, part.task.demonstrations(held_out)) for name, part in self.parts.items()}
        weights = {name: part.weight for name, part in self.parts.items()}
        every = _in_proportion(rows, weights) if held_out else [row for own in rows.values() for row in own]
        return as_dataset(every, _WHAT)

    def epoch(self, rows: Dataset) -> Dataset:
        """Repeat the rows according to the weights, every row at least once.

        Raises:
            QeRLError: A part has no row, or the weights would make an epoch of millions of rows.
        """
        part_of_row = np.array(rows[PART])
        own = {name: np.flatnonzero(part_of_row == name) for name in self.parts}
        for name, indices in own.items():
            if not len(indices):
                raise QeRLError(
                    f"Task {name} of the mixture has no training prompt that is short enough; raise "
                    "max_prompt_length."
                )
        total = sum(part.weight for part in self.parts.values())
        shares = {name: part.weight / total for name, part in self.parts.items()}
        length = max(len(own[name]) / share for name, share in shares.items())
        if length > _LONGEST_EPOCH:
            largest = max(own, key=lambda name: len(own[name]) / shares[name])
            raise QeRLError(
                f"At these weights an epoch that shows all {len(own[largest])} problems of task {largest} "
                f"has {length:.0f} rows, more than {_LONGEST_EPOCH}; raise its weight, or give it fewer "
                "problems."
            )
        counts = {name: max(len(own[name]), round(length * share)) for name, share in shares.items()}
        return rows.select(np.concatenate([np.resize(own[name], counts[name]) for name in self.parts]))

    def extract(self, completion: Completion) -> str | None:
        """Raise a TypeError: the answer of a completion depends on its row; ask the task of :meth:`of`."""
        raise TypeError("a mixture reads an answer as the task of its row does; ask of(row)")

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The reward functions of all parts; functions with the same name are joined into one."""
        by_name: dict[str, dict[str, RewardFunction]] = {}
        for part, choice in self.parts.items():
            for function in choice.task.rewards:
                by_name.setdefault(function.__name__, {})[part] = function
        functions = [_handing_on(name, of_part) for name, of_part in by_name.items()]
        return [stratified(f, PART) if f.__name__ == "accuracy" else f for f in functions]


def make_mixture(make: Callable[..., Task], parts: Mapping[str, Any]) -> Mixture:
    """Make a mixture of the parts that a recipe names.

    Args:
        make: Makes a task from its name and its options.
        parts: Options by the part's name: `task` (else the name itself), `weight` (else 1) and
            `task_options`.

    Raises:
        QeRLError: There are no parts, or a part is malformed.
    """
    if not parts:
        raise QeRLError(
            "Task mixture has no tasks; name them in task_options, for example "
            "{gsm8k: {weight: 2}, words: {task: arithmetic}}."
        )
    return Mixture({name: _part(make, name, options) for name, options in parts.items()})


def _part(make: Callable[..., Task], name: str, options: Any) -> Part:
    of_it = options if options is not None else {}
    if not isinstance(of_it, Mapping):
        raise QeRLError(
            f"Task {name} of the mixture is {options!r}; give a mapping with {', '.join(_PART_KEYS)}."
        )
    for key in of_it:
        if key not in _PART_KEYS:
            raise QeRLError(
                f"Task {name} of the mixture has the unknown key {key!r}; its keys are: "
                f"{', '.join(_PART_KEYS)}."
            )
    spec, weight, own = of_it.get("task", name), of_it.get("weight", 1.0), of_it.get("task_options") or {}
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise QeRLError(f"The weight of task {name} is {weight!r}; it must be a number above 0.")
    if not isinstance(own, Mapping):
        raise QeRLError(f"The task_options of task {name} are {own!r}; they must be a mapping.")
    if spec == "mixture":
        raise QeRLError(f"Task {name} of the mixture is a mixture; name its tasks beside the others.")
    return Part(make(str(spec), **own), float(weight))


def _handing_on(name: str, of_part: Mapping[str, RewardFunction]) -> RewardFunction:
    """Return a reward function that passes each row to the function of the row's part."""

    def calls(arguments: Mapping[str, Any]) -> Iterator[tuple[list[int], Any]]:
        """Yield the indices of the rows of each part that has the function, and its result for them."""
        extra: dict[str, list[Any]] = {}
        for part, function in of_part.items():
            own = [index for index, of_row in enumerate(arguments[PART]) if of_row == part]
            if own:
                yield own, function(**_of_rows(arguments, own, extra))
        for column, values in extra.items():
            arguments["log_extra"](column, values)

    def plain(**arguments: Any) -> list[float | None]:
        return _in_place(len(arguments[PART]), calls(arguments))

    async def awaiting(**arguments: Any) -> list[float | None]:
        pairs = [(own, await got if inspect.isawaitable(got) else got) for own, got in calls(arguments)]
        return _in_place(len(arguments[PART]), pairs)

    functions = of_part.values()
    joined: Any = awaiting if any(map(inspect.iscoroutinefunction, functions)) else plain
    joined.__name__ = name
    if not all(getattr(function, "judges_alone", False) for function in functions):
        return joined
    outside = [getattr(function, "judges_outside", False) for function in functions]
    joined.computes_too = not all(outside)
    return judges_outside(joined) if any(outside) else judges_alone(joined)


def _of_rows(arguments: Mapping[str, Any], own: list[int], extra: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the arguments of a reward function for some of the rows.

    The values that it logs for them go into `extra`, whose columns have a value per row, as in TRL's table.
    """
    chosen = {
        name: value if name in NOT_COLUMNS else [value[index] for index in own]
        for name, value in arguments.items()
    }
    count = len(arguments[PART])

    def log_extra(column: str, values: Iterable[Any]) -> None:
        every = extra.setdefault(column, [None] * count)
        for index, value in zip(own, values, strict=True):
            every[index] = value

    return chosen | {"log_extra": log_extra} if "log_extra" in chosen else chosen


def _in_place(count: int, pairs: Iterable[tuple[list[int], Iterable[Any]]]) -> list[Any]:
    """A list of that length with each pair's values at its indices, and None elsewhere."""
    placed = [None] * count
    for indices, values in pairs:
        for index, value in zip(indices, values, strict=True):
            placed[index] = value
    return placed


def _of_part(name: str, rows: Dataset) -> list[dict[str, Any]]:
    if PART in rows.column_names:
        raise QeRLError(f"The rows of task {name} have the mixture's own column {PART!r}; rename it.")
    return [{**row, PART: name} for row in rows]


def _in_proportion(
    rows: Mapping[str, list[dict[str, Any]]], weights: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Interleave the rows of all parts: the next row is always of the part furthest behind its weight."""
    places = [
        ((index + 0.5) / weights[name], number, row)
        for number, (name, own) in enumerate(rows.items())
        for index, row in enumerate(own)
    ]
    return [row for *_, row in sorted(places, key=lambda place: place[:2])]
