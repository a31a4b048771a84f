"""What an adapter that exists says of the settings that describe adapters.

Its rank, alpha, dropout and target modules stand in its own config. Settings take them from there and may
repeat them, but not say otherwise.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from qerl.errors import QeRLError

LORA_FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
}
"""Fields of `QeRLConfig` by the attribute of PEFT's `LoraConfig` that means the same."""


def take_saved_adapter(config: GRPOConfig) -> None:
    """Describe the adapter that the field `adapter` names, if it names one.

    Raises:
        QeRLError: There is no LoRA adapter in that folder, or a field says otherwise.
    """
    if config.adapter is None:
        return
    path = Path(config.adapter).expanduser() / "adapter_config.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise QeRLError(f"adapter is {config.adapter}, but there is no {path}; check the path.") from error
    except (OSError, ValueError) as error:
        raise QeRLError(f"{path} cannot be read ({error}); copy the adapter again.") from error
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA" or not isinstance(saved.get("r"), int):
        raise QeRLError(f"{path} is not the config of a LoRA adapter; only LoRA adapters go on training.")
    take_adapter(config, saved, f"the adapter {config.adapter}")


def take_adapter(config: GRPOConfig, adapter: Mapping[str, Any], whose: str) -> None:
    """Write an adapter's rank, alpha, dropout and target modules into the settings.

    Args:
        config: Settings; changed in place.
        adapter: Attributes of a `LoraConfig` by name.
        whose: The adapter's name in an error.

    Raises:
        QeRLError: A field is set, and the adapter says otherwise.
    """
    if config.tuning == "full":
        raise QeRLError(f"tuning is 'full', which trains no adapter; remove it, or {whose}.")
    defaults = {spec.name: spec.default for spec in dataclasses.fields(config)}
    for name, attribute in LORA_FIELDS.items():
        given, held = plain(getattr(config, name)), plain(adapter.get(attribute))
        if given not in (defaults[name], held):
            raise QeRLError(f"{name} is {given!r} and {whose} has {attribute} {held!r}; remove {name}.")
        # A pattern of names, or PEFT's own choice, is no list of them.
        setattr(config, name, None if name == "lora_target_modules" and isinstance(held, str) else held)


def plain(value: Any) -> Any:
    """Names in an order; PEFT keeps them as a set."""
    return sorted(value) if isinstance(value, set | list) else value
