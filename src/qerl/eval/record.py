"""The score of a policy on a task, and the files of an evaluation, from which an interrupted call continues.

A folder holds settings.json (everything that determines the completions) and completions.jsonl, to which each
slice of problems is appended when scored. When all slices are there, result.json is written and
settings.json, whose content it includes, is removed. The same call with the same settings continues after the
last complete slice. A slice is one call of the engine, so the completions are those of an uninterrupted
evaluation, to the bit on the same machine. Different settings and a folder with a finished evaluation are
errors: nothing is overwritten.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qerl.atomic import write_whole, writing
from qerl.errors import QeRLError
from qerl.run_folder import RESULT_FILE, read_json
from qerl.settings.checks import PositiveInt, checked

SETTINGS_FILE = "settings.json"
COMPLETIONS_FILE = "completions.jsonl"

Row = dict[str, Any]
_RESULT_KEYS = {"right", "judged", "answer", "finish_reason", "tokens", "thoughts_closed_by"}
"""Keys of a row from which the result is computed."""


@dataclass(frozen=True)
class Stratum:
    """Score on the problems of one stratum; units as in `EvalResult`."""

    problems: int
    accuracy: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class EvalResult:
    """Score of a policy on a task.

    Attributes:
        samples: Completions per problem (K).
        accuracy: Share of right completions, averaged over problems (avg@K).
        interval: 95 % interval of the accuracy.
        pass_at: pass@k by k, for powers of two up to K.
        pass_intervals: 95 % interval of each.
        answered: Share of completions that state a final answer.
        failed: Completions that could not be judged, by error or time limit; they count as wrong.
        errors: Completions that ended because logits were not finite; they are judged by the text so far.
        truncated: Share of completions that reached max_tokens.
        mean_tokens: Mean length of a completion.
        settings: Sampling parameters.
        source: Description of the policy.
        versions: Versions of libraries that affect the completions.
        date: UTC, ISO 8601.
        strata: Scores by stratum, such as ``steps_2``; empty if the task has none.
        thoughts_closed_by: Share of completions whose thoughts were closed by ``budget`` or, where it closed
            none, by ``model``; empty without a thinking budget.
    """

    task: str
    problems: int
    samples: int
    accuracy: float
    interval: tuple[float, float]
    pass_at: dict[int, float]
    answered: float
    failed: int
    errors: int
    truncated: float
    mean_tokens: float
    settings: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    strata: dict[str, Stratum] = field(default_factory=dict)
    pass_intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    thoughts_closed_by: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the score as one human-readable line."""
        low, high = (100 * bound for bound in self.interval)
        kind = "accuracy" if self.samples == 1 else f"avg@{self.samples}"
        line = f"{self.task}: {kind} {100 * self.accuracy:.1f} % (95 % interval {low:.1f} to {high:.1f}, "
        line += f"{self.problems} problems)"
        if self.samples > 1:
            line += ", " + ", ".join(self._pass(k) for k in self.pass_at)
        if len(self.strata) > 1:
            parts = (f"{name} {100 * part.accuracy:.1f} %" for name, part in self.strata.items())
            line += f"; {', '.join(parts)}"
        line += f"; {100 * self.answered:.1f} % of the completions state an answer"
        if self.failed:
            line += f", {self.failed} of them could not be judged and count as wrong"
        if self.thoughts_closed_by:
            shares = [f"{100 * share:.1f} % by the {by}" for by, share in self.thoughts_closed_by.items()]
            line += f"; thoughts were closed in {' and in '.join(shares)}"
        if self.errors:
            line += f"; {self.errors} completions ended at logits that are not finite: the model is damaged"
        return line

    def _pass(self, k: int) -> str:
        interval = self.pass_intervals.get(k)
        bounds = f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""
        return f"pass@{k} {100 * self.pass_at[k]:.1f} %{bounds}"


class Record:
    """The scored completions, in memory and, with a folder, on disk.

    Args:
        folder: Folder of the evaluation; None keeps the completions only in memory.
        settings: Everything that determines the completions, as plain JSON values.

    Attributes:
        rows: One per completion; problems in order, samples of a problem next to each other.

    Raises:
        QeRLError: The folder cannot be written, or has a finished evaluation or one with other settings.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self._settings = json.loads(json.dumps(settings))
        if folder is not None:
            with self._writing():
                self._open(folder)

    def problems_at_a_time(self, wanted: int, samples: int) -> int:
        """Return the number of problems per slice: ``wanted``, or that of the evaluation being continued.

        Rows of an incomplete slice are dropped.
        """
        size = self._settings.setdefault("problems_at_a_time", wanted)
        whole = len(self.rows) // (size * samples) * (size * samples)
        self.rows = self.rows[:whole]
        if self.folder is not None:
            with self._writing():
                self._write_settings(self.folder)
                write_whole(self.folder / COMPLETIONS_FILE, "".join(map(_line, self.rows)))
        return size

    def add(self, rows: list[Row]) -> None:
        """Store the completions of one slice."""
        self.rows += rows
        if self.folder is not None:
            path = self.folder / COMPLETIONS_FILE
            with self._writing(), path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, rows)))

    def finish(self, result: EvalResult) -> None:
        """Write the result, and remove the settings file."""
        if self.folder is not None:
            with self._writing():
                write_whole(self.folder / RESULT_FILE, json.dumps(asdict(result), indent=2) + "\n")
                (self.folder / SETTINGS_FILE).unlink()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"The evaluation cannot be written to {self.folder}")

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / RESULT_FILE).exists():
            raise QeRLError(
                f"{folder} holds a finished evaluation ({RESULT_FILE}); choose another --out, or remove it."
            )
        if (folder / COMPLETIONS_FILE).exists():
            self._go_on(folder)
        self._write_settings(folder)

    def _go_on(self, folder: Path) -> None:
        self.rows = _read_rows(folder / COMPLETIONS_FILE)
        if not self.rows:
            return
        try:
            former = read_json(folder / SETTINGS_FILE)
            size = checked("problems_at_a_time", former.pop("problems_at_a_time", None), PositiveInt)
        except QeRLError as error:
            raise QeRLError(
                f"{folder / COMPLETIONS_FILE} has completions, but {SETTINGS_FILE} beside it is missing or "
                "damaged; choose another --out."
            ) from error
        for name in [*self._settings, *former]:
            before, now = former.get(name), self._settings.get(name)
            if before != now:
                raise QeRLError(
                    f"{folder} holds an unfinished evaluation with {name} {_short(before)}, not "
                    f"{_short(now)}; repeat it with its own settings to go on, or choose another --out."
                )
        if not all(isinstance(row, dict) and row.keys() >= _RESULT_KEYS for row in self.rows):
            raise QeRLError(
                f"{folder / COMPLETIONS_FILE} has a line that is no scored completion; choose another --out."
            )
        self._settings["problems_at_a_time"] = size

    def _write_settings(self, folder: Path) -> None:
        write_whole(folder / SETTINGS_FILE, json.dumps(self._settings, indent=2) + "\n")


def _read_rows(path: Path) -> list[Row]:
    """Return the rows of the file, without an incomplete one after its last newline."""
    *lines, _ = path.read_bytes().split(b"\n")
    try:
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise QeRLError(f"{path} is damaged ({error}); remove it, or choose another --out.") from error


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."
