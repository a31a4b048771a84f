"""TRL's `model_init_kwargs`: each argument of `from_pretrained` sets the field of its meaning, or is refused.

Settings written for TRL may have them; a model is loaded here by the fields `weights`, `rounding` and
`dtype`. They describe the policy alone; in TRL they load reward models as well.
"""

from typing import Any

from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.settings.foreign import OF_LOADING

_FIELDS = {"dtype": "dtype", "torch_dtype": "dtype", "trust_remote_code": "trust_remote_code"}
_DEFAULTS: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False}
_TRUE_ANYWAY = {"device_map": None, "use_cache": False}
"""Values that say what is done in any case."""

_ANY_OTHER = "model, weights, rounding and dtype say how the model is loaded"
_REASONS = OF_LOADING | {"use_cache": "an update needs no cache, and the engine has its own"}


def take_model_kwargs(config: GRPOConfig) -> None:
    """Move what `model_init_kwargs` says into the fields that say the same; nothing is left of it.

    Args:
        config: Settings; changed in place.

    Raises:
        QeRLError: An argument is not supported, or contradicts a field.
    """
    given = config.model_init_kwargs or {}
    if not isinstance(given, dict):
        raise QeRLError(f"model_init_kwargs is {given!r}; it must be a mapping of names to values.")
    for name, value in given.items():
        if name in _TRUE_ANYWAY and value == _TRUE_ANYWAY[name]:
            continue
        field = _FIELDS.get(name)
        if field is None:
            reason = _REASONS.get(name, _ANY_OTHER)
            raise QeRLError(f"model_init_kwargs has {name}, which is not supported: {reason}.")
        value = str(value).removeprefix("torch.") if field == "dtype" else value
        if getattr(config, field) not in (_DEFAULTS[field], value):
            raise QeRLError(
                f"{field} is {getattr(config, field)!r} and model_init_kwargs has {name} {value!r}; remove "
                "one of them."
            )
        setattr(config, field, value)
    config.model_init_kwargs = None
