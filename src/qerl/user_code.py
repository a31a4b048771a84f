"""Functions and classes of the user's own, named in a recipe as ``PATH.py:NAME``.

The name may be left out where the file has only one public function or class.

The file is run as a module with all the rights of this process. It is the user's own code, named in the
user's own recipe or command. Code named in the folder of a run is neither, because a folder may come from
anywhere: there `foreign_code` finds such names, and the user has to name them again.
"""

import importlib.util
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from qerl.errors import QeRLError, first_line


def names_a_file(spec: str) -> bool:
    """True for a name of the form ``PATH.py:NAME``."""
    path, separator, _ = spec.rpartition(":")
    return bool(separator) and path.endswith(".py")


FOREIGN_FAMILIES = ("openenv", "verifiers")
"""Families of environments and tasks (``FAMILY:NAME``) whose names are imported, or are a server's."""

_NAMING = ("task", "task_options", "tools", "environment", "environment_options")


def foreign_code(value: Any) -> str | None:
    """Return the first name in a setting, keys and parts included, whose code is not QeRL's; None if there is
    none."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return next((name for part in value if (name := foreign_code(part)) is not None), None)
    if isinstance(value, str) and (names_a_file(value) or value.partition(":")[0] in FOREIGN_FAMILIES):
        return value
    return None


def named_again(settings: Mapping[str, Any]) -> list[str]:
    """Return command line arguments for the names that `qerl eval` does not take from the folder of a run."""
    words: list[str] = []
    for name in _NAMING:
        value = settings.get(name)
        if foreign_code(value) is not None:
            words.append(f"--{name}")
            words += value if isinstance(value, list) else [_one_word(value)]
    return words


def _one_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def load_object(spec: str, what: str, kind: str = "function") -> Any:
    """Return the function or class named by ``PATH.py:NAME``, or the only public one that ``PATH.py``
    defines.

    Args:
        spec: The name.
        what: Its use, such as ``reward``.
        kind: ``function`` or ``class``.

    Raises:
        QeRLError: The name is malformed, the file is missing or fails to run, or the file has no such
            function or class.
    """
    if not names_a_file(spec) and not spec.endswith(".py"):
        form = "Class" if kind == "class" else "function"
        raise QeRLError(
            f"{what.capitalize()} {spec!r} is not of the form PATH.py:{form}; write the file, a colon and "
            f"the name of the {form.lower()} in it."
        )
    path, _, name = spec.rpartition(":") if names_a_file(spec) else (spec, "", "")
    module = _run(Path(path).expanduser(), what)
    is_one = inspect.isclass if kind == "class" else inspect.isfunction
    own = [n for n, f in inspect.getmembers(module, is_one) if f.__module__ == module.__name__]
    public = [n for n in own if not n.startswith("_")]
    if not name:
        if len(public) != 1:
            raise QeRLError(
                f"{path} has {len(public)} candidates for a {what} ({', '.join(public) or 'none'}); write "
                f"{path}:NAME to choose one."
            )
        (name,) = public
    found = getattr(module, name, None)
    if not (inspect.isclass(found) if kind == "class" else callable(found)):
        raise QeRLError(f"{path} has no {kind} {name!r}; it has: {', '.join(public) or 'none'}.")
    return found


def _run(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise QeRLError(f"The {what} file {path} does not exist; check the path in the recipe.")
    module_spec = importlib.util.spec_from_file_location(f"qerl_user_{what}_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise QeRLError(f"The {what} file {path} cannot be run ({cause}); fix it.") from error
    return module
