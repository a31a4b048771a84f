"""Look up the model and the task that a study's file names: QeRL's own, and those of the laboratory."""

from collections.abc import Mapping
from typing import Any

from lab.needle.folder import NEEDLE, needle_folder
from lab.needle.task import Needle
from lab.testbed.task import Testbed
from lab.worked.task import Worked
from qerl.models import hub
from qerl.models.hub import LocalModel
from qerl.tasks.base import Task
from qerl.tasks.registry import TASKS, get_task

TASKS[NEEDLE] = Needle
TASKS["testbed"] = Testbed
TASKS["worked"] = Worked


def find_model(name: str) -> LocalModel:
    """The model of a study; ``needle`` is trained on the first call.

    Raises:
        QeRLError: As `qerl.models.hub.find_model`, or the needle's policy misses its priors.
    """
    return LocalModel(NEEDLE, needle_folder()) if name == NEEDLE else hub.find_model(name)


def find_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task of a study with its options; errors are those of `qerl.tasks.get_task`."""
    return get_task(name, **options)
