"""What a run says about the policy that it made, so that the policy is scored as it was trained.

Whoever saves a policy writes config.yaml and policy.json beside it (`qerl.trainer.resume.provenance`). From
there evaluation takes what it is not told: the format and rounding of the weights, the dtype, the task with
its options, the length of a completion, and the arguments of the chat template. What is told always wins,
and where each value came from is kept, to be said once before anything is scored. Names of code that is not
QeRL's have to be told, because whoever made the folder wrote them.

The file lies beside an adapter, or beside the weights of a fully tuned model. An older checkpoint-N folder
has none; its run's lies one folder up.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl.errors import QeRLError
from qerl.run_folder import CONFIG_FILE, policy_folders, read_policy, read_settings
from qerl.settings.recipe import FIELDS
from qerl.user_code import foreign_code, named_again
from qerl.weight_formats import FORMATS, ROUNDINGS


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in choices, f"one of {', '.join(choices)}"


# Setting -> whether a value is one, and what it has to be.
_KNOWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weights": _one_of(*FORMATS),
    "rounding": _one_of(*ROUNDINGS),
    "dtype": _one_of("auto", "float32", "bfloat16"),
    "tuning": _one_of("lora", "full"),
    "model": (lambda value: isinstance(value, str), "text"),
    "task": (lambda value: isinstance(value, str), "text"),
    "task_options": (lambda value: isinstance(value, dict), "a mapping"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "a mapping"),
    "tools": (lambda value: isinstance(value, list), "a list"),
    "environment": (lambda value: isinstance(value, str), "text"),
    "environment_options": (lambda value: isinstance(value, dict), "a mapping"),
    "tool_timeout": (lambda value: type(value) in (int, float) and value > 0, "a positive number"),
    "tool_errors": _one_of("text", "end"),
    "tool_output_limit": (lambda value: type(value) is int and value > 0, "a number of characters"),
    "max_tool_calling_iterations": (lambda value: type(value) is int and value > 0, "a number of turns"),
    "max_completion_length": (lambda value: type(value) is int and value > 0, "a number of tokens"),
    "stop_strings": (
        lambda value: isinstance(value, list) and all(isinstance(each, str) and each for each in value),
        "a list of texts",
    ),
    "thinking_budget": (lambda value: type(value) is int and value > 0, "a number of tokens"),
    "thinking_end": (lambda value: isinstance(value, str), "text"),
    "temperature": (lambda value: type(value) in (int, float) and value > 0, "a positive number"),
}


# Those that config.yaml leaves out where they stand at their defaults.
_DEFAULTS = ("max_completion_length", "temperature")


@dataclass(frozen=True)
class Trained:
    """Settings of the run that made a policy.

    Attributes:
        where: The config.yaml that they stand in; None where no run is known.
        settings: Those of them that evaluation knows.
    """

    where: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def refuse_foreign(self, value: Any, instead: str) -> None:
        """Refuse a value of these settings that names code which is not QeRL's.

        Args:
            value: The value.
            instead: What the user can do.

        Raises:
            QeRLError: It does.
        """
        name = foreign_code(value)
        if name is not None:
            raise QeRLError(
                f"{self.where} names {name!r}, whose code is not QeRL's and may be anybody's, as the folder "
                f"may; {instead}."
            )


def read_trained(adapter: Path | None, model: str) -> Trained:
    """What the run says that made an adapter, or without one the run that tuned a whole model.

    Args:
        adapter: Folder of the adapter, if there is one.
        model: Name of the model; its folder counts where a run with ``tuning: full`` saved it.

    Raises:
        QeRLError: A config.yaml cannot be read or has a value of a wrong kind.
    """
    folder = Path(model).expanduser() if adapter is None else adapter
    for place in policy_folders(folder):
        settings = read_settings(place)
        if settings is None:
            continue
        if adapter is None and settings.get("tuning") != "full":
            return Trained()  # not a run's: the file is somebody else's
        path = place / CONFIG_FILE
        unset = {name: FIELDS[name].default for name in _DEFAULTS}
        facts = {name: value for name, value in read_policy(folder).items() if name in _KNOWN}
        return Trained(path, _checked(unset | settings | facts, path))
    return Trained()


def _checked(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    known = {key: value for key, value in settings.items() if key in _KNOWN and value is not None}
    for key, value in known.items():
        fits, expected = _KNOWN[key]
        if not fits(value):
            raise QeRLError(f"{path} sets {key} to {value!r}, which must be {expected}; restore the file.")
    return known


class Choices:
    """Values, each from the first of a flag, the run and a default, with where it came from.

    Args:
        trained: What the run says.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self._said: dict[str, tuple[Any, str]] = {}

    def take(self, name: str, given: Any, default: Any, key: str | None = None) -> Any:
        """A value; ``given`` and what the run says count unless they are None.

        Args:
            name: The flag's name.
            given: What the user said.
            default: Where neither says anything.
            key: The run's name for it, if it is another one; empty where the run has no say.

        Raises:
            QeRLError: What the run says names code that is not QeRL's.
        """
        of_run = self.trained.settings.get(name if key is None else key)
        if given is not None:
            return self.note(name, given, f"from --{name}")
        if of_run is not None:
            again = shlex.join(named_again({name: of_run}))
            self.trained.refuse_foreign(of_run, f"if you trust it, name it yourself with {again}")
            return self.note(name, of_run, f"from {self.trained.where}")
        return self.note(name, default, "default")

    def note(self, name: str, value: Any, origin: str) -> Any:
        """Keep where a value came from, in the place of an earlier one of this name, and give the value."""
        if value not in (None, {}, []):
            self._said[name] = value, origin
        return value

    def __str__(self) -> str:
        """Names and values by origin: ``task gsm8k, weights nvfp4 (from FILE); max_tokens 64 (default)``."""
        by_origin: dict[str, list[str]] = {}
        for name, (value, origin) in self._said.items():
            by_origin.setdefault(origin, []).append(f"{name} {value}")
        return "; ".join(f"{', '.join(values)} ({origin})" for origin, values in by_origin.items())
