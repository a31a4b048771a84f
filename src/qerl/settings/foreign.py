"""Names that users may take for fields, from TRL's scripts, `from_pretrained` and `qerl plan`, and what to do
instead.

Users of TRL's command line type the names of its `ModelConfig` and `ScriptArguments`. Most of these have a
field here that does the same under a name too different to be guessed from the letters. Users of QeRL 0.2 may
type fields that were removed.
"""

import difflib
from collections.abc import Collection
from typing import Any

from qerl.errors import QeRLError

_RENAMED = {"dynamic_sampling_rounds": "dynamic_sampling_batches"}
"""Fields of QeRL 0.2 that were renamed."""

_OF_STUDIES = {"noise_target_kl": None, "noise_share": 1.0, "noise_in_loss": False}
GONE = _OF_STUDIES | {"speculative_tokens": 0}
"""Fields of QeRL 0.2 that were removed, with the value at which they had no effect."""

_NO_CHOICE = "early_rewards"
"""A removed field of QeRL 0.2 that changed no reward."""

_IN_STUDIES = (
    "it moved from the trainer to the studies in lab/ because it helped in none of them; leave it out"
)
_QUANTISED = "set weights, which says how the model is quantised"
_DATA = "set task, which names the data and their splits (--task jsonl:PATH for a file of your own)"
_LORA_CONFIG = "set it in a LoraConfig and pass that to QeRLTrainer as peft_config"
_REWARD = "set reward_files, each PATH.py:function"
_REVISION = "download it with `hf download NAME --revision REVISION` and give the folder as model"

OF_LOADING = {
    "revision": _REVISION,
    "subfolder": "download the model and give the folder as model",
    "attn_implementation": "the loader takes the attention that the family needs",
    "device_map": "each process loads the whole model onto its own GPU",
    "cache_dir": "set the environment variable HF_HUB_CACHE",
    "token": "set the environment variable HF_TOKEN",
    "quantization_config": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
}
"""What to do instead of passing an argument to `from_pretrained`, as the end of a sentence."""

INSTEAD = {
    # The model
    **OF_LOADING,
    "model_name_or_path": "its name here is model",
    "model_revision": _REVISION,
    "torch_dtype": "its name here is dtype",
    "bnb_4bit_quant_type": _QUANTISED,
    "bnb_4bit_quant_storage": _QUANTISED,
    "use_bnb_nested_quant": _QUANTISED,
    # The adapter
    "use_peft": "adapters are trained unless tuning: full is set",
    "lora_task_type": "an adapter's task type is always CAUSAL_LM",
    "lora_target_parameters": _LORA_CONFIG,
    "lora_modules_to_save": _LORA_CONFIG,
    "use_rslora": _LORA_CONFIG,
    "use_dora": _LORA_CONFIG,
    # Data and rewards
    "dataset": _DATA,
    "train_dataset": _DATA,
    "dataset_path": _DATA,
    "dataset_name": _DATA,
    "dataset_config": _DATA,
    "dataset_train_split": _DATA,
    "dataset_test_split": _DATA,
    "dataset_streaming": _DATA,
    "reward_funcs": _REWARD,
    "reward_model_name_or_path": "QeRLTrainer takes reward models as reward_funcs",
    # Sampling and optimizer
    "max_new_tokens": "its name here is max_completion_length",
    "max_tokens": "its name here is max_completion_length",
    "lr": "its name here is learning_rate",
    # Demonstrations
    "packing": "rows are always packed, which changes no loss",
    "padding_free": "rows are always packed, without padding",
    "dataset_text_field": "algorithm: sft reads the columns messages, or prompt and completion",
    # Fields of QeRL 0.2
    **dict.fromkeys(_OF_STUDIES, _IN_STUDIES),
    "speculative_tokens": "speculative decoding hardly made rollouts faster and was dropped; leave it out",
    _NO_CHOICE: "rewards that wait for other processes now always start as completions end; leave it out",
    "dynamic_sampling_rounds": "its name is dynamic_sampling_batches now, with the same value",
    # The command
    "config": "recipes are given without a flag: `qerl train RECIPE.yaml`",
    "ignore_bias_buffers": "no model here has buffers that need it; leave it out",
    "gpu": "`qerl plan` takes it, as --gpu",
    "processes": "`qerl plan` takes it, as --processes; for a run, torchrun starts the processes",
}
"""The same for every name that a user may take for a field."""


def without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings under today's names, without removed fields that had no effect, since runs of
    QeRL 0.2 wrote all fields."""
    kept = {name: value for name, value in values.items() if name not in GONE or value != GONE[name]}
    kept.pop(_NO_CHOICE, None)
    return {_RENAMED.get(name, name): value for name, value in kept.items()}


def not_of_studies_alone(mode: Any) -> Any:
    """Return a mode of the importance correction; the validator of its field's type.

    Raises:
        ValueError: The mode exists only in studies.
    """
    if mode in ("token_one_sided", "token_balance"):
        raise ValueError(_IN_STUDIES)
    return mode


def refuse_foreign(word: str, where: str) -> None:
    """Raise if a key is in `INSTEAD`, with what to do instead.

    Args:
        word: The key that was given.
        where: Where it was given, as the start of a sentence.

    Raises:
        QeRLError: The key is in `INSTEAD`.
    """
    if word in INSTEAD:
        raise QeRLError(f"{where} has the unknown key {word!r}; {INSTEAD[word]}.")


def refuse_unknown(key: str, where: str, fields: Collection[str], own: Collection[str]) -> None:
    """Raise if a key is no field, with what to do instead or the nearest field's name.

    Args:
        key: The key that was given.
        where: Where it was given, as the start of a sentence.
        fields: The names of all fields.
        own: Names of this project's fields, which are searched first.

    Raises:
        QeRLError: The key is no field.
    """
    if key in fields:
        return
    refuse_foreign(key, where)
    near = [name for names in (own, fields) for name in difflib.get_close_matches(key, names, 1, 0.7)]
    hint = f"did you mean {near[0]!r}?" if near else "`qerl fields` lists the fields."
    raise QeRLError(f"{where} has the unknown key {key!r}; {hint}")
