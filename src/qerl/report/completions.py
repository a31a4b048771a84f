"""Logged completions of a run, as groups of samples with their rewards.

With `log_completions` a run writes a table for each logged step (`qerl.run_folder.table_paths`): prompt and
completion, as text or as messages, a column for each reward function, columns of `log_extra`, the advantage.
Columns with a metric `rewards/NAME/mean` are rewards. `num_generations` in config.yaml is the size of groups;
without that file, neighbouring samples of the same prompt are a group.

A table that a killed run has left half written is left out, with a warning.

A long run still makes a small page: the chosen steps, the best and the worst group of each, at most `SAMPLES`
samples per group, the best and the worst of them, and at most `CHARACTERS` characters of text altogether,
divided equally among the texts. Given up: showing all completions of all steps; they are in the run's tables.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from qerl.report.runs import Run, number
from qerl.run_folder import table_paths

logger = logging.getLogger(__name__)

SAMPLES = 8
"""Largest number of samples that are shown of a group."""

CHARACTERS = 500_000
"""Largest number of characters of all texts together; with its markup a page has at most a few megabytes."""

LONGEST = 6_000
"""Largest number of characters of one text, however few texts there are."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: The speaker; empty where the run has no roles.
        calls: Names and arguments of the called tools.
    """

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Sample:
    """A completion and its reward.

    Attributes:
        messages: Its turns.
        reward: Weighted sum of its parts, None where no reward function scored it.
        parts: Rewards by function, None where one did not score it.
        extra: Further columns, as text.
    """

    messages: tuple[Message, ...]
    reward: float | None
    parts: dict[str, float | None]
    extra: dict[str, str]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, best first."""

    prompt: tuple[Message, ...]
    samples: tuple[Sample, ...]

    @property
    def reward(self) -> float | None:
        """Mean reward of the samples that have one."""
        known = [sample.reward for sample in self.samples if sample.reward is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Table:
    """The groups of one logged step, best first.

    Attributes:
        step: Optimizer steps done.
        evaluation: Prefix of the evaluation that sampled it, empty for training.
        groups: At least one.
    """

    step: int
    evaluation: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Shown:
    """A group as the page shows it.

    Attributes:
        run: Index of its run.
        step: Its step in words.
        rank: ``best``, ``worst`` or, where a step has one group, ``only``.
        which: The rank in words.
    """

    run: int
    step: str
    rank: str
    which: str
    group: Group

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples to show: the first and the last, if there are too many."""
        own = self.group.samples
        return own if len(own) <= SAMPLES else own[: SAMPLES // 2] + own[-(SAMPLES // 2) :]


def shown_groups(tables: Sequence[Sequence[Table]]) -> list[Shown]:
    """Return the best and the worst group of each table; ``tables`` has one sequence of tables per run."""
    shown = []
    for run, found in enumerate(tables):
        for table in found:
            step = f"step {table.step}" + (f", {table.evaluation}" if table.evaluation else "")
            count = len(table.groups)
            if count == 1:
                shown.append(Shown(run, step, "only", "only group", table.groups[0]))
                continue
            for rank, group in (("best", table.groups[0]), ("worst", table.groups[-1])):
                shown.append(Shown(run, step, rank, f"{rank} of {count} groups", group))
    return shown


def longest_text(shown: Sequence[Shown]) -> int:
    """Return the largest number of characters for each text on the page."""
    said = ((one.group.prompt, *(sample.messages for sample in one.samples)) for one in shown)
    texts = sum(1 + len(turn.calls) for parts in said for part in parts for turn in part)
    return max(min(LONGEST, CHARACTERS // max(texts, 1)), 1)


def read_tables(run: Run, count: int) -> list[Table]:
    """Tables of a run: up to ``count`` evenly spaced steps of training, including the last one, and then
    the last table of each evaluation; none for a count of 0."""
    if count == 0:
        return []
    found = table_paths(run.folder)
    chosen = [("", step) for step in spread(sorted(found.get("", {})), count)]
    chosen += [(name, max(steps)) for name, steps in found.items() if name]
    tables = (read_table(run, found[name][step], step, name) for name, step in chosen)
    return [table for table in tables if table is not None]


def read_table(run: Run, path: Path, step: int, evaluation: str = "") -> Table | None:
    """Read one table; return None if it has no rows or, with a warning, if it cannot be read."""
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
        if not rows:
            return None
        groups = [_group(group, *_rewards(run, rows[0])) for group in _cut(run, rows, evaluation)]
    except (OSError, pyarrow.ArrowException, LookupError, TypeError, ValueError, AttributeError) as error:
        logger.warning("%s is not a complete table of completions (%s); it is left out.", path, error)
        return None
    return Table(step, evaluation, tuple(sorted(groups, key=lambda group: _rank(group.reward))))


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Up to ``count`` evenly spaced steps, including the last (and the first if count > 1)."""
    if len(steps) <= count or count < 2:
        return list(steps[-count:])
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _rewards(run: Run, row: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Return the names of a table's reward columns, and their weights."""
    named = {key.removeprefix("eval_") for entry in run.rows for key in entry if key.endswith("/mean")}
    names = [name for name in row if f"rewards/{name}/mean" in named]
    weights = (run.settings or {}).get("reward_weights")
    if not isinstance(weights, list) or len(weights) != len(names):
        weights = [1.0] * len(names)
    return names, [float(weight) for weight in weights]


def _cut(run: Run, rows: list[dict[str, Any]], evaluation: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each group, which are adjacent in the table."""
    settings = run.settings or {}
    size = (settings.get("num_generations_eval") if evaluation else None) or settings.get("num_generations")
    if isinstance(size, int) and size > 0 and len(rows) % size == 0:
        yield from (rows[start : start + size] for start in range(0, len(rows), size))
    else:
        yield from (list(same) for _, same in itertools.groupby(rows, lambda row: row["prompt"]))


def _group(rows: list[dict[str, Any]], names: list[str], weights: list[float]) -> Group:
    samples = [_sample(row, names, weights) for row in rows]
    best_first = sorted(samples, key=lambda sample: _rank(sample.reward))
    return Group(_messages(rows[0]["prompt"], "prompt"), tuple(best_first))


def _rank(reward: float | None) -> float:
    return math.inf if reward is None else -reward


def _sample(row: dict[str, Any], names: list[str], weights: list[float]) -> Sample:
    parts = {name: _finite(row[name]) for name in names}
    pairs = zip(parts.values(), weights, strict=True)
    known = [weight * value for value, weight in pairs if value is not None]
    own = {"step", "prompt", "completion", *names}
    others = ((name, value) for name, value in row.items() if name not in own and value is not None)
    extra = {name: number(value) if isinstance(value, float) else str(value) for name, value in others}
    return Sample(_messages(row["completion"], "completion"), sum(known) if known else None, parts, extra)


def _finite(value: Any) -> float | None:
    """A finite number; None for anything else, such as the NaN of a sample without a score."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _messages(conversation: Any, name: str) -> tuple[Message, ...]:
    """Return the turns of a conversation; plain text is one turn whose role is ``name``."""
    if not isinstance(conversation, list):
        return (Message(name, str(conversation)),)
    return tuple(_message(message) for message in conversation)


def _message(raw: dict[str, Any]) -> Message:
    thoughts = raw.get("reasoning_content") or raw.get("thinking") or ""
    name = f" {raw['name']}" if raw.get("name") else ""
    text = "\n".join(part for part in (str(thoughts), _text(raw.get("content"))) if part)
    return Message(f"{raw.get('role') or ''}{name}", text, tuple(map(_call, raw.get("tool_calls") or ())))


def _text(content: Any) -> str:
    """A message's content, which is text or a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return "" if content is None else str(content)


def _call(raw: dict[str, Any]) -> tuple[str, str]:
    call = raw.get("function") or raw
    return str(call.get("name")), str(call.get("arguments") or "")
