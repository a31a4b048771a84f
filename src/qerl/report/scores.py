"""Held-out scores of runs, as `qerl eval --out` writes them.

Results in a run folder belong to that run: in RUN/eval, to which the command writes that a run prints at its
end, and in other folders up to three levels down. Results elsewhere are named by the caller, and belong to
the run whose adapter or model they scored; others, such as those of the base model, belong to no run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qerl.errors import QeRLError
from qerl.report.runs import Run
from qerl.run_folder import RESULT_FILE, read_result

_PLACES = ("", "*/", "*/*/", "*/*/*/")


@dataclass(frozen=True)
class Result:
    """The shown part of a result.json (`qerl.eval.record.EvalResult`)."""

    task: str
    problems: int
    samples: int
    accuracy: float
    interval: tuple[float, float]
    source: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """One evaluation.

    Attributes:
        run: Index of the scored run; None if the policy belongs to no shown run.
        folder: The folder of its result.json.
        result: The content of that file.
    """

    run: int | None
    folder: Path
    result: Result

    @property
    def what(self) -> str:
        """The scored adapter or model, as the evaluation was told."""
        return str(self.result.source.get("adapter") or self.result.source.get("model"))

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint that it scored, empty for another policy."""
        name = Path(self.what).name
        return name if name.startswith("checkpoint-") else ""

    @property
    def measure(self) -> str:
        """``accuracy``, or ``avg@K`` with K samples for each problem."""
        return "accuracy" if self.result.samples == 1 else f"avg@{self.result.samples}"


def read_scores(runs: Sequence[Run], more: Sequence[Path] = ()) -> list[Score]:
    """Scores of the runs in their order, then those of other policies.

    Args:
        runs: Runs of the page.
        more: Further folders with a result.json.

    Raises:
        QeRLError: A result cannot be read, or a named folder has none.
    """
    found: dict[Path, int | None] = {}
    for index, run in enumerate(runs):
        for place in _PLACES:
            found |= {path.resolve().parent: index for path in sorted(run.folder.glob(place + RESULT_FILE))}
    for folder in more:
        if not (folder / RESULT_FILE).is_file():
            raise QeRLError(f"{folder} has no {RESULT_FILE}; name the --out of a finished evaluation.")
        found.setdefault(folder.resolve(), None)
    scores = [Score(index, folder, read_result(folder, Result)) for folder, index in found.items()]
    owned = [replace(score, run=_run_of(score, runs)) if score.run is None else score for score in scores]
    return sorted(owned, key=lambda score: len(runs) if score.run is None else score.run)


def _run_of(score: Score, runs: Sequence[Run]) -> int | None:
    """Return the index of the run that saved the scored policy, at its end or in a checkpoint."""
    policy = Path(score.what).resolve()
    return next((i for i, run in enumerate(runs) if run.folder.resolve() in (policy, policy.parent)), None)
