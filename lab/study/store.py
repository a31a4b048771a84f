"""The folder of a study: what is finished, what is under way, and who computes what.

    FOLDER/
      study.json             the study with every default, all arms that ever ran here, by which commit the
                             folder was continued last, and the fingerprint of the model; `unpacking` while
                             runs/ is made from results.json.gz
      runs/NAME.json         a finished run with its whole curve
      former/NAME-COMMIT.json     a run that was computed again
      batches/NAME.pt        a batch that was interrupted, to go on from
      batches/NAME.lock      held by the process that computes the batch
      results.json.gz        all finished runs of the study, made from runs/
      study.html             the page, made from results.json.gz

A run's file is written aside and renamed: it is whole or not there, and a run that has one is never computed
again. Several processes, on several GPUs, may work in one folder: each claims a batch by a lock that the
system releases when the process ends, however it ends.

A folder with nothing but results.json.gz goes on from it, so a study that was kept as that one file can grow
on another machine. Where making runs/ from it was interrupted, it is done anew by the next process.

A study may grow: arms, seeds, learning rates and comparisons may be added or left out between two calls, and
what is finished is kept. What all runs share, what an arm is, and the model may not change in a folder,
because its runs would no longer be comparable. Another commit may go on with it, which is said: whether it
computes the same is for people to know, and arms that they name are computed again by it.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from lab.study.arms import Run
from lab.study.files import claimed
from lab.study.results import RESULTS_FILE, Results, RunResult, from_plain, read_results, write_results
from lab.study.spec import Study
from qerl.atomic import write_whole
from qerl.errors import QeRLError
from qerl.run_folder import read_json
from qerl.source import commit

STUDY_FILE = "study.json"
PAGE_FILE = "study.html"

_UNPACKING = "unpacking"
"""Key of study.json, true while runs/ may lack runs that the results have."""

CHANGEABLE = (
    "learning_rates", "tuning_seeds", "test_seeds", "runs_per_batch", "tokens_per_forward", "collapse_below",
    "equivalence", "comparisons",
)  # fmt: skip
"""Keys of a study that say which runs there are and how they are read, and not what a run is."""


@dataclass(frozen=True)
class Checkpoint:
    """A batch that was interrupted.

    Attributes:
        names: Names of its runs, in order.
        records: Of each step done, one record for each run.
        evaluations: Of each evaluation done, one record for each run.
        state: State of the trainer.
        seconds: Time that it has taken so far.
        followed: What each run follows, as plain values; None where nothing.
        commit: Of the source that computed it.
    """

    names: list[str]
    records: list[list[dict[str, float]]]
    evaluations: list[list[dict[str, float]]]
    state: Any
    seconds: float
    followed: list[dict[str, Any] | None]
    commit: str


class Store:
    """The folder of one study.

    Args:
        folder: The folder, which is made.
        study: The study.
        looking: Change nothing there.
        again: Names of arms whose runs of other commits do not count as finished.

    Attributes:
        commit: Of the source that runs now.
        again: As given.

    Raises:
        QeRLError: The folder holds another study, runs of several models or other files, or cannot be
            written; or `again` names an arm that does not exist.
    """

    def __init__(
        self, folder: Path, study: Study, looking: bool = False, again: Collection[str] = ()
    ) -> None:
        self.folder = folder
        self.study = study
        self.commit = commit()
        self.again = again
        if unknown := sorted(set(again) - study.arms.keys()):
            raise QeRLError(
                f"There is no arm {unknown[0]!r} to compute again; there are {', '.join(study.arms)}."
            )
        self._read: dict[Path, tuple[int, RunResult]] = {}  # by time of writing; every plan asks for all runs
        self._packed: dict[str, RunResult] = {}  # by name; what a folder that is looked at would unpack
        if looking:
            packed = _still_packed(folder)
            self._joined(packed)
            self._packed = {result.run.name: result for result in packed.runs} if packed else {}
            return
        with self._writing():
            (folder / "batches").mkdir(parents=True, exist_ok=True)
            (folder / "runs").mkdir(exist_ok=True)
            with self._alone():
                packed = _still_packed(folder)
                joined = self._joined(packed)
                if packed:
                    self._unpack(packed)
                self._write_study(joined)

    def _unpack(self, packed: Results) -> None:
        """Make the files of runs; who is interrupted leaves a study.json that says so."""
        self._write_study(_values(packed) | {_UNPACKING: True})
        for result in packed.runs:
            write_whole(self._path(result.run), (json.dumps(result.plain(), allow_nan=False) + "\n").encode())

    def _write_study(self, values: dict[str, Any]) -> None:
        write_whole(self.folder / STUDY_FILE, (json.dumps(values, indent=1) + "\n").encode())

    def _joined(self, packed: Results | None) -> dict[str, Any]:
        """The study with all arms that the folder knows; refused where the folder is another one's."""
        path, new = self.folder / STUDY_FILE, self.study.values()
        if not path.is_file() and any(self.folder.glob("runs/*")):
            raise QeRLError(f"{self.folder} has runs but no {STUDY_FILE}; choose another --output_dir.")
        old = _values(packed) if packed else read_json(path)
        if old:
            self._check(old, new)
            new["arms"] = old["arms"] | new["arms"]
            new |= {key: old[key] for key in ("commit", "fingerprint") if key in old}
        return new

    def continue_with(self, fingerprint: str | None) -> str | None:
        """Write down with which model and by which commit the folder is continued.

        Args:
            fingerprint: Of the model, by `qerl.models.fingerprint`.

        Returns:
            A warning where finished runs are of other commits.

        Raises:
            QeRLError: The folder's runs are of another model.
        """
        with self._writing(), self._alone():
            old = read_json(self.folder / STUDY_FILE)
            if old.get("fingerprint", fingerprint) != fingerprint:
                raise QeRLError(
                    f"{self.folder} holds runs of another model than what {self.study.model} is now, whose "
                    f"fingerprint is {fingerprint} and not {old['fingerprint']}; choose another --output_dir."
                )
            self._write_study(old | {"commit": self.commit, "fingerprint": fingerprint})
        others = [one.commit for one in self.results().runs if one.commit != self.commit]
        if not others:
            return None
        return (
            f"{self.folder} holds {len(others)} runs of commit {', '.join(sorted(set(others)))}, and this is "
            f"{self.commit}; arms that --again names are computed again."
        )

    def _check(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        shared = [key for key in new if key not in CHANGEABLE and key != "arms"]
        differ = [(key, old.get(key), new[key]) for key in shared if old.get(key) != new[key]]
        for name, arm in new["arms"].items():
            former = old["arms"].get(name, arm)
            differ += [
                (f"arms.{name}.{key}", former.get(key), arm[key])
                for key in arm
                if former.get(key) != arm[key]
            ]
        if differ:
            key, before, now = differ[0]
            raise QeRLError(
                f"{self.folder} holds another study: its {key} is {before!r} and not {now!r}; choose another "
                "--output_dir."
            )

    def has(self, run: Run) -> bool:
        """Whether a run is there, be it one that does not count any more."""
        return run.name in self._packed or self._path(run).is_file()

    def read(self, runs: Iterable[Run]) -> list[RunResult]:
        """Those of the runs that are there.

        Raises:
            QeRLError: The file of one is damaged.
        """
        found = []
        for run in filter(self.has, runs):
            if run.name in self._packed:
                found.append(self._packed[run.name])
                continue
            path = self._path(run)
            written = path.stat().st_mtime_ns
            known = self._read.get(path)
            if known and known[0] == written:
                found.append(known[1])
                continue
            try:
                result = from_plain(json.loads(path.read_text(encoding="utf-8")), self.study.arms)
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise QeRLError(
                    f"{path} is damaged ({error}); delete it, and the run is repeated."
                ) from error
            self._read[path] = written, result
            found.append(result)
        return found

    def write(self, result: RunResult) -> None:
        """Keep a finished run; one that was there before, and did not count, is laid aside."""
        path = self._path(result.run)
        with self._writing():
            if path.is_file():
                (before,) = self.read([result.run])
                (self.folder / "former").mkdir(exist_ok=True)
                path.replace(self.folder / "former" / f"{result.run.name}-{before.commit}.json")
            write_whole(path, (json.dumps(result.plain(), allow_nan=False) + "\n").encode())

    def _path(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.name}.json"

    @contextlib.contextmanager
    def claimed(self, batch: str) -> Iterator[bool]:
        """A block in which no other process computes a batch; false where another one does already."""
        with contextlib.ExitStack() as held:
            with self._writing():  # the lock alone: what fails in the block is not about this folder
                mine = held.enter_context(claimed(self.folder / "batches" / f"{batch}.lock"))
            yield mine

    def save_checkpoint(self, batch: str, checkpoint: Checkpoint) -> None:
        """Keep a batch that is not finished."""
        path = self._checkpoint(batch)
        part = path.with_suffix(".partial")
        with self._writing():
            torch.save(vars(checkpoint), part)
            part.replace(path)

    def checkpoint(self, batch: str) -> Checkpoint | None:
        """What was kept of a batch; None if nothing.

        Raises:
            QeRLError: It cannot be read.
        """
        path = self._checkpoint(batch)
        if not path.is_file():
            return None
        try:
            return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # given a file alone; torch has several classes for a damaged one
            raise QeRLError(f"{path} is damaged; delete it, and the batch begins anew.") from error

    def drop_checkpoint(self, batch: str) -> None:
        """Forget what was kept of a batch, which is finished."""
        with self._writing():
            self._checkpoint(batch).unlink(missing_ok=True)

    def _checkpoint(self, batch: str) -> Path:
        return self.folder / "batches" / f"{batch}.pt"

    def results(self) -> Results:
        """The study with those of its runs that are finished and count."""
        study = self.study
        tuned = self._counted(self.read(run for arm in study.arms.values() for run in study.tuning_runs(arm)))
        runs = list(tuned.runs)
        for name, arm in study.arms.items():
            rate = tuned.rate(name)
            if rate is not None or not study.tunes:
                runs += self.read(study.test_runs(arm, rate))
        return self._counted(runs)

    def _counted(self, runs: Iterable[RunResult]) -> Results:
        kept = [one for one in runs if one.commit == self.commit or one.run.arm.name not in self.again]
        return Results(self.study, kept).sound()

    def write_results(self) -> Results:
        """Gather the finished runs in one file, and return them."""
        results = self.results()
        with self._writing(), self._alone():
            write_results(results, self.folder / RESULTS_FILE)
        return results

    def _alone(self) -> FileLock:
        return FileLock(self.folder / "batches" / "folder.lock")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QeRLError(
                f"The study cannot be written to {self.folder}: {error.strerror or error}; choose another "
                "--output_dir."
            ) from error


def _still_packed(folder: Path) -> Results | None:
    """The results of a folder that has nothing else, or whose unpacking was interrupted; else None."""
    path, known = folder / RESULTS_FILE, read_json(folder / STUDY_FILE)
    alone = path.is_file() and not known and not any(folder.glob("runs/*"))
    if not alone and not known.get(_UNPACKING):
        return None
    return read_results(path)


def _values(packed: Results) -> dict[str, Any]:
    """What study.json said in the folder of which these results are all that was kept.

    Raises:
        QeRLError: They are of several models.
    """
    found = {one.facts["fingerprint"] for one in packed.runs if "fingerprint" in one.facts}
    if len(found) > 1:
        raise QeRLError(
            f"{RESULTS_FILE} holds runs of several models, whose fingerprints are "
            f"{', '.join(sorted(map(str, found)))}, and they cannot be compared; choose another --output_dir."
        )
    return packed.study.values() | ({"fingerprint": found.pop()} if found else {})
