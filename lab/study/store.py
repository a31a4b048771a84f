"""The folder of a study: finished runs, interrupted batches, and locks of the processes at work.

    FOLDER/
      study.json             the study with every default, all arms that ever ran here, the commit that last
                             continued the folder, and the fingerprint of the model; `unpacking` while runs/
                             is made from results.json.gz
      runs/NAME.json         a finished run with its whole curve
      former/NAME-COMMIT.json     a run that was computed again
      batches/NAME.pt        the checkpoint of an unfinished batch
      batches/NAME.lock      held by the process that computes the batch
      results.json.gz        all finished runs of the study, made from runs/
      study.html             the page, made from results.json.gz

A run's file is written under another name and renamed, so it is complete or absent. A run with a file is
computed again only if it no longer counts: its arm is named in `again` and its commit is another one, or it
followed curves that have changed. Several processes, on several GPUs, may work in one folder: each claims a
batch by a lock that the kernel releases when the process ends, however it ends.

A folder with nothing but results.json.gz is continued from it, so a study that was kept as that one file can
grow on another machine. If making runs/ from it was interrupted, the next process starts over.

A study may grow: arms, seeds, learning rates and comparisons may be added or left out between two calls, and
finished runs are kept. The settings that all runs share, the fields of an arm and the model may not change in
a folder, because its runs would no longer be comparable. Another commit may continue a folder, with a
warning: the user has to know whether it computes the same, and can name arms to compute again.
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
"""Key of study.json, true while runs/ may lack runs that results.json.gz has."""

CHANGEABLE = (
    "learning_rates", "tuning_seeds", "test_seeds", "runs_per_batch", "tokens_per_forward", "rows_at_once",
    "collapse_below", "equivalence", "comparisons",
)  # fmt: skip
"""Keys of a study that decide which runs there are and how results are read, but not what a run computes."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of an unfinished batch.

    Attributes:
        names: Names of its runs, in order.
        records: For each step done, one record per run.
        evaluations: For each evaluation done, one record per run.
        state: State of the trainer.
        seconds: Time spent on the batch so far.
        followed: Rollouts that each run follows, as plain values; None for none.
        commit: Commit of the source that computed it.
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
        folder: The folder; created unless `looking`.
        study: The study.
        looking: Change nothing in the folder.
        again: Names of arms whose runs of other commits do not count as finished.

    Attributes:
        commit: Commit of the running source.
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
                f"--again names the unknown arm {unknown[0]!r}; the arms are {', '.join(study.arms)}."
            )
        self._read: dict[Path, tuple[int, RunResult]] = {}  # with modification times; plans read all runs
        self._packed: dict[str, RunResult] = {}  # by name; with `looking`, the runs that would be unpacked
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
        """Write the files of runs; an interrupted process leaves a study.json that says so."""
        self._write_study(_values(packed) | {_UNPACKING: True})
        for result in packed.runs:
            write_whole(self._path(result.run), (json.dumps(result.plain(), allow_nan=False) + "\n").encode())

    def _write_study(self, values: dict[str, Any]) -> None:
        write_whole(self.folder / STUDY_FILE, (json.dumps(values, indent=1) + "\n").encode())

    def _joined(self, packed: Results | None) -> dict[str, Any]:
        """The study's values with all arms that the folder knows; raises if it holds another study."""
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
        """Record the model and the commit with which the folder is continued.

        Args:
            fingerprint: Fingerprint of the model, by `qerl.models.fingerprint`.

        Returns:
            A warning if finished runs are of other commits, else None.

        Raises:
            QeRLError: The folder's runs are of another model.
        """
        with self._writing(), self._alone():
            old = read_json(self.folder / STUDY_FILE)
            if old.get("fingerprint", fingerprint) != fingerprint:
                raise QeRLError(
                    f"{self.folder} holds runs of another model: the fingerprint of {self.study.model} is "
                    f"now {fingerprint}, not {old['fingerprint']}; choose another --output_dir."
                )
            self._write_study(old | {"commit": self.commit, "fingerprint": fingerprint})
        others = [one.commit for one in self.results().runs if one.commit != self.commit]
        if not others:
            return None
        return (
            f"{self.folder} holds {len(others)} runs of commit {', '.join(sorted(set(others)))}, but the "
            f"current commit is {self.commit}; --again ARM computes an arm's runs again."
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
        """Return True if a run has a result, even one that no longer counts."""
        return run.name in self._packed or self._path(run).is_file()

    def read(self, runs: Iterable[Run]) -> list[RunResult]:
        """Read the results of those runs that have one.

        Raises:
            QeRLError: The file of a run is damaged.
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
        """Store a finished run; an earlier result, which did not count any more, moves to former/."""
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
        """Claim a batch for the block; yields False if another process already computes it."""
        with contextlib.ExitStack() as held:
            with self._writing():  # the lock alone: errors in the block are not about this folder
                mine = held.enter_context(claimed(self.folder / "batches" / f"{batch}.lock"))
            yield mine

    def save_checkpoint(self, batch: str, checkpoint: Checkpoint) -> None:
        """Save the checkpoint of an unfinished batch."""
        path = self._checkpoint(batch)
        part = path.with_suffix(".partial")
        with self._writing():
            torch.save(vars(checkpoint), part)
            part.replace(path)

    def checkpoint(self, batch: str) -> Checkpoint | None:
        """Load the checkpoint of a batch; None if there is none.

        Raises:
            QeRLError: The checkpoint cannot be read.
        """
        path = self._checkpoint(batch)
        if not path.is_file():
            return None
        try:
            return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises several classes for a damaged file
            raise QeRLError(f"{path} is damaged; delete it, and the batch is computed again.") from error

    def drop_checkpoint(self, batch: str) -> None:
        """Delete the checkpoint of a finished batch."""
        with self._writing():
            self._checkpoint(batch).unlink(missing_ok=True)

    def _checkpoint(self, batch: str) -> Path:
        return self.folder / "batches" / f"{batch}.pt"

    def results(self) -> Results:
        """The study with its finished runs that count."""
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
    """Results of a folder that has nothing else, or whose unpacking was interrupted; else None."""
    path, known = folder / RESULTS_FILE, read_json(folder / STUDY_FILE)
    alone = path.is_file() and not known and not any(folder.glob("runs/*"))
    if not alone and not known.get(_UNPACKING):
        return None
    return read_results(path)


def _values(packed: Results) -> dict[str, Any]:
    """Rebuild the content of study.json from results that are all that was kept of a folder.

    Raises:
        QeRLError: The results are of several models.
    """
    found = {one.facts["fingerprint"] for one in packed.runs if "fingerprint" in one.facts}
    if len(found) > 1:
        raise QeRLError(
            f"{RESULTS_FILE} holds runs of several models (fingerprints "
            f"{', '.join(sorted(map(str, found)))}), which cannot be compared; choose another --output_dir."
        )
    return packed.study.values() | ({"fingerprint": found.pop()} if found else {})
