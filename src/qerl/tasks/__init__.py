"""Tasks: problems, the prompts around them, and the rewards for completions (:mod:`qerl.tasks.base`)."""

from qerl.tasks.base import Task
from qerl.tasks.formats import get_format
from qerl.tasks.registry import get_task

__all__ = ["Task", "get_format", "get_task"]
