"""What the parsers of TRL's and transformers' scripts hand over in another form than a field's.

A mapping arrives as JSON text, and so does a number that could be a word. transformers decodes those of its
own fields, but only after the settings are checked.
"""

import json
from typing import Any

from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.settings.checks import Options
from qerl.settings.fields import OWN_TYPES

_MAPPINGS = [name for name, type_ in OWN_TYPES.items() if type_ == Options] + GRPOConfig._VALID_DICT_FIELDS


def of_accelerate(value: Any) -> Any:
    """What `accelerator_config` says, None for nothing; transformers makes an object of every default."""
    if isinstance(value, AcceleratorConfig):
        value = value.to_dict()
    if not isinstance(value, dict):
        return value
    defaults = AcceleratorConfig().to_dict()
    return {name: x for name, x in value.items() if name not in defaults or x != defaults[name]} or None


def take_parsed(config: Any) -> None:
    """Decode such values of the settings; changed in place.

    Raises:
        QeRLError: A text that begins as a mapping is no JSON.
    """
    for name in _MAPPINGS:
        value = getattr(config, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                setattr(config, name, json.loads(value))
            except ValueError as error:
                raise QeRLError(f"{name} is {value!r}; as text it must be valid JSON ({error}).") from None
    config.accelerator_config = of_accelerate(config.accelerator_config)
    if isinstance(config.pad_to_multiple_of, str) and config.pad_to_multiple_of.isdecimal():
        config.pad_to_multiple_of = int(config.pad_to_multiple_of)
    if config.include_num_input_tokens_seen is False:  # as transformers reads it
        config.include_num_input_tokens_seen = "no"
