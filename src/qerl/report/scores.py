"""Held-out scores of runs, as `qerl eval --out` leaves them.

The results in a run folder (RUN/eval, where the command goes that a run prints at its end, and others up to
three levels down) belong to that run. Results elsewhere are named, and belong to the run whose adapter or
model they scored; what is left, such as the base model, stands for itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl.errors import QeRLError
from qerl.report.runs import Run
from qerl.run_folder import RESULT_FILE

_PLACES = ("", "*/", "*/*/", "*/*/*/")


@dataclass(frozen=True)
class Score:
    """One evaluation.

    Attributes:
        run: Index of the run that it scored, None for a policy of no run that is shown.
        folder: Where its result.json lies.
        what: The scored adapter or model, as the evaluation was told.
        task: Name of the task.
        measure: ``accuracy``, or ``avg@K`` with K samples for each problem.
        problems: Problems scored.
        accuracy: A share of one.
        interval: 95 % interval of it.
        weights: Format that the policy was scored on.
    """

    run: int | None
    folder: Path
    what: str
    task: str
    measure: str
    problems: int
    accuracy: float
    interval: tuple[float, float]
    weights: str

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint that it scored, empty for another policy."""
        name = Path(self.what).name
        return name if name.startswith("checkpoint-") else ""


def read_scores(runs: Sequence[Run], more: Sequence[Path] = ()) -> list[Score]:
    """Scores of the runs in their order, then those of other policies.

    Args:
        runs: Runs of the page.
        more: Further folders with a result.json.

    Raises:
        QeRLError: A result cannot be read, or a folder that was named has none.
    """
    found: dict[Path, int | None] = {}
    for index, run in enumerate(runs):
        for place in _PLACES:
            found |= {path.resolve(): index for path in sorted(run.folder.glob(place + RESULT_FILE))}
    for folder in more:
        if not (folder / RESULT_FILE).is_file():
            raise QeRLError(f"{folder} has no {RESULT_FILE}; name the --out of a finished evaluation.")
        found.setdefault((folder / RESULT_FILE).resolve(), None)
    scores = [_read(path, index, runs) for path, index in found.items()]
    return sorted(scores, key=lambda score: len(runs) if score.run is None else score.run)


def _read(path: Path, run: int | None, runs: Sequence[Run]) -> Score:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        source = result["source"]
        what = str(source.get("adapter") or source.get("model"))
        samples = int(result["samples"])
        low, high = result["interval"]
        return Score(
            run=_run_of(Path(what), runs) if run is None else run,
            folder=path.parent,
            what=what,
            task=str(result["task"]),
            measure="accuracy" if samples == 1 else f"avg@{samples}",
            problems=int(result["problems"]),
            accuracy=float(result["accuracy"]),
            interval=(float(low), float(high)),
            weights=str(source.get("weights", "")),
        )
    except (
        OSError,
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise QeRLError(f"{path} is not the result of an evaluation ({error}); remove it.") from error


def _run_of(policy: Path, runs: Sequence[Run]) -> int | None:
    """The run that saved a policy, at its end or in a checkpoint."""
    places = (policy.resolve(), policy.resolve().parent)
    return next((i for i, run in enumerate(runs) if run.folder.resolve() in places), None)
