"""The user's own reward functions, from a Python file.

The file is run as a module with all the rights of this process. It is the user's own code, named in the
user's own recipe.
"""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

from qerl.errors import QeRLError
from qerl.tasks.guard import RewardFunction


def load_reward(spec: str) -> RewardFunction:
    """Load the reward function that ``PATH.py:function`` names.

    Raises:
        QeRLError: The specification is malformed, the file is missing or fails to run, or it has no such
        function.
    """
    path, separator, name = spec.rpartition(":")
    if not separator or not path.endswith(".py"):
        raise QeRLError(f"Reward {spec!r} is not of the form PATH.py:function.")
    module = _run(Path(path).expanduser())
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__
        ]
        public = ", ".join(n for n in own if not n.startswith("_"))
        raise QeRLError(f"{path} has no function {name!r}; it has: {public or 'none'}.")
    return function


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise QeRLError(f"The reward file {path} does not exist; check the path in the recipe.")
    module_spec = importlib.util.spec_from_file_location(f"qerl_user_rewards_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise QeRLError(f"The reward file {path} cannot be run: {type(error).__name__}: {error}.") from error
    return module
