"""Ends a run at a point that it comes by, and says which ends are right."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from qerl.trainer import grpo
from qerl.trainer.callbacks import MetricsFile
from qerl.trainer.sampler import Sampler
from qerl.trainer.update_step import UpdateStep
from tests.fuzz._forks import Forks

POINTS: dict[str, tuple[Any, str]] = {
    "rollout": (Sampler, "_call"),
    "update": (UpdateStep, "_forward"),
    "evaluation": (grpo.QeRLTrainer, "prediction_step"),
    "log": (MetricsFile, "on_log"),
    "saving": (transformers.Trainer, "_save_optimizer_and_scheduler"),
    "saved in part": (transformers.Trainer, "_save_rng_state"),
    "publishing": (grpo, "publish"),
    "renaming": (Path, "rename"),
    "deleting": (grpo, "rotate_checkpoints"),
    "final": (grpo, "move_into"),
}
WRITING = ("saving", "saved in part", "publishing", "renaming", "final")
SIGNALS = {"KILL": signal.SIGKILL, "INT": signal.SIGINT, "TERM": signal.SIGTERM}
ERRORS: dict[str, Callable[[], Exception]] = {
    "memory": lambda: MemoryError(),
    "gpu memory": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "disk": lambda: OSError(28, "No space left on device"),
    "defect": lambda: RuntimeError("injected defect"),
}


@dataclass(frozen=True)
class Kill:
    """What ends a run: at the n-th time a process comes by a point, or after some seconds."""

    how: str
    point: str | None
    nth: int = 1
    seconds: float = 0.0
    ranks: tuple[int, ...] = (0,)
    twice: bool = False  # a launcher forwards the terminal's signal

    def __str__(self) -> str:
        where = f"{self.point} {self.nth}" if self.point else f"{self.seconds:.1f} s"
        return f"{self.how} at {where} in {','.join(map(str, self.ranks))}{' twice' if self.twice else ''}"


def errors_at(point: str) -> list[str]:
    """Exceptions that may come at a point; memory of an update is another test's: it is done again."""
    if point in WRITING:
        return ["disk", "memory"]
    return {"update": ["memory", "defect"], "deleting": []}.get(point, ["memory", "gpu memory", "defect"])


def arm(kill: Kill, rank: int, mark: Path) -> None:
    """Lets this process meet its kill when it comes by."""
    if kill.point is None or rank not in kill.ranks:
        return
    owner, name = POINTS[kill.point]
    original, passed = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed == kill.nth:
            mark.with_name(f"{mark.name}-{rank}").touch()
            if kill.how in ERRORS:
                raise ERRORS[kill.how]()
            for _ in range(1 + kill.twice):
                os.kill(os.getpid(), SIGNALS[kill.how])
                time.sleep(0.05)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def judge(kill: Kill, codes: list[int], forks: Forks, reached: bool) -> list[str]:
    """What does not hold of the way in which processes ended."""
    found = []
    if forks.hung:
        found.append("hangs")
    wanted = {0} if not reached else _codes(kill)
    if not set(codes) <= wanted:
        found.append(f"exit codes {codes}, not among {sorted(wanted)}")
    if kill.how != "KILL" and len(set(codes)) > 1 and kill.point:
        found.append(f"exit codes differ: {codes}")
    text = forks.text
    tracebacks = text.count("Traceback (most recent call last)")
    if tracebacks and kill.how != "defect":
        found.append("a traceback")
    if codes and set(codes) == {2} and text.count("error:") != 1:
        found.append(f"{text.count('error:')} sentences instead of one")
    if "Stopping after this step" in text and text.count("Stopping after this step") > 1:
        found.append("it says more than once that it stops")
    return [f"{each}\n{text}" for each in found]


def _codes(kill: Kill) -> set[int]:
    """Exit codes that are right; a run that was ready before its kill came ends with 0."""
    if kill.how == "KILL":
        return {-signal.SIGKILL, 2, 0}
    if kill.how in SIGNALS:
        before_training = {-signal.SIGTERM, 2} if kill.point is None else set()
        return {130, 0} | before_training
    return {1} if kill.how == "defect" else {2}
