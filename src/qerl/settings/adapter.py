"""Settings from other sources: a saved adapter, and TRL's fields that hold arguments of other libraries.

An adapter's rank, alpha, dropout and target modules stand in its own config. Settings take them from there
and may repeat them, but not contradict them.

Settings written for TRL may have `model_init_kwargs`, for `from_pretrained`; a model is loaded here by the
fields `weights`, `rounding` and `dtype`. These arguments describe only the policy; in TRL they load reward
models as well. Settings may also have `generation_kwargs`, for transformers' `generate` or vLLM. In TRL these
change only the sampler; here sampler and loss share the fields, so that the loss is of the policy that
sampled. Each argument sets the field with the same meaning, or is refused.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.settings.checks import Options, checked
from qerl.settings.foreign import OF_LOADING
from qerl.settings.parents import default_of

LORA_FIELDS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
}
"""Fields of `QeRLConfig` by the attribute of PEFT's `LoraConfig` that means the same."""

_LOADING = {"dtype": "dtype", "torch_dtype": "dtype", "trust_remote_code": "trust_remote_code"}
_LOADED_ANYWAY = {"device_map": None, "use_cache": False}
_NOT_LOADED = OF_LOADING | {"use_cache": "an update needs no cache, and the engine has its own"}
_OF_THE_MODEL = "model, weights, rounding and dtype say how the model is loaded"

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "stop_strings": "stop_strings",
    "repetition_penalty": "repetition_penalty",
    "cache_implementation": "cache_implementation",
}
_SAMPLED_ANYWAY = {
    "do_sample": True, "num_beams": 1, "n": 1, "use_cache": True, "include_stop_str_in_output": True,
    "ignore_eos": False, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
    "min_new_tokens": 0,
}  # fmt: skip
_NOT_SAMPLED = {
    "stop": "set stop_strings, which keeps the text in the completion",
    "seed": "set the field seed, from which all random numbers follow",
}
_OF_THE_ENGINES = (
    "sampling is controlled by temperature, top_p, top_k, min_p, stop_strings and max_completion_length alone"
)

_KWARGS: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, str], str]] = {
    "model_init_kwargs": (_LOADING, _LOADED_ANYWAY, _NOT_LOADED, _OF_THE_MODEL),
    "generation_kwargs": (_SAMPLING, _SAMPLED_ANYWAY, _NOT_SAMPLED, _OF_THE_ENGINES),
}
"""For each field that holds arguments: the fields that mean the same, values that are in effect anyway, why
others are refused, and what takes the place of any other."""


def take_saved_adapter(config: GRPOConfig) -> None:
    """Write the saved adapter's rank, alpha, dropout and target modules into the settings, if there is one.

    Raises:
        QeRLError: There is no LoRA adapter in that folder, or a field contradicts it.
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
        raise QeRLError(
            f"{path} is not the config of a LoRA adapter; only LoRA adapters can be trained further."
        )
    take_adapter(config, saved, f"the adapter {config.adapter}")


def take_adapter(config: GRPOConfig, adapter: Mapping[str, Any], whose: str) -> None:
    """Write an adapter's rank, alpha, dropout and target modules into the settings.

    Args:
        config: Settings; changed in place.
        adapter: Attributes of a `LoraConfig` by name.
        whose: The adapter's name in an error.

    Raises:
        QeRLError: A field that is set contradicts the adapter.
    """
    if config.tuning == "full":
        raise QeRLError(f"tuning is 'full', which trains no adapter; remove it, or {whose}.")
    defaults = _defaults(config)
    for name, attribute in LORA_FIELDS.items():
        given, held = plain(getattr(config, name)), plain(adapter.get(attribute))
        if given not in (defaults[name], held):
            raise QeRLError(f"{name} is {given!r} and {whose} has {attribute} {held!r}; remove {name}.")
        # A pattern of names, or PEFT's own choice, is no list of them.
        setattr(config, name, None if name == "lora_target_modules" and isinstance(held, str) else held)


def plain(value: Any) -> Any:
    """Return names in sorted order, since PEFT keeps them as a set; other values as they are."""
    return sorted(value) if isinstance(value, set | list) else value


def _defaults(config: GRPOConfig) -> dict[str, Any]:
    return {spec.name: default_of(spec) for spec in dataclasses.fields(config)}


def take_kwargs(config: GRPOConfig) -> None:
    """Move the arguments in `model_init_kwargs` and `generation_kwargs` into the fields that mean the same;
    both are None afterwards.

    Args:
        config: Settings; changed in place.

    Raises:
        QeRLError: An argument is not supported, or contradicts a field.
    """
    defaults = _defaults(config)
    for which, (fields, anyway, reasons, any_other) in _KWARGS.items():
        given = checked(which, getattr(config, which), Options | None) or {}
        for name, value in given.items():
            if name in anyway and value == anyway[name]:
                continue
            field = fields.get(name)
            if field is None:
                reason = reasons.get(name, any_other)
                raise QeRLError(f"{which} has {name}, which is not supported: {reason}.")
            value = str(value).removeprefix("torch.") if field == "dtype" else value
            held = getattr(config, field)
            if held not in (defaults[field], value):
                raise QeRLError(f"{field} is {held!r} and {which} has {name} {value!r}; remove one of them.")
            setattr(config, field, value)
        setattr(config, which, None)
