"""What settings mean for a trainer that is made by hand, and not by `qerl train`.

Some fields say how a run is put together: which model, which task, which adapter, which engine. `trainer.run`
acts on them before there is a trainer and says so (``acted_on``). In a trainer that gets its model, data and
engine from the caller they must not be ignored: a field that contradicts what was handed in, or that names a
source of something that was handed in, is refused where it is set. Defaults say nothing and are not compared.
Three act here for every trainer: the length penalty, the limit on prompts, the time limit on rewards.
"""

import logging
from collections.abc import Collection
from typing import Any

from datasets import IterableDataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.rewards import get_soft_overlong_punishment

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import PackedLinear
from qerl.models.chat import Chat
from qerl.settings.config import QeRLConfig, default_of
from qerl.settings.recipe import FIELDS

logger = logging.getLogger(__name__)

_INSTEAD = {
    "model": "hand the model to the trainer, made by `load_model`",
    "task": "hand the data to the trainer as train_dataset",
    "task_options": "hand the data to the trainer as train_dataset",
    "reward_files": "hand the functions to the trainer as reward_funcs",
    "eval_samples": "select the rows of eval_dataset",
    "rounding": "`load_model` takes it",
    "max_sequences": "`make_engine` takes it",
    "kv_cache_dtype": "`make_engine` takes it",
    "resume_from_checkpoint": "`trainer.train` takes it",
}
_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
}

RUN_FIELDS = frozenset({*_INSTEAD, *_LORA, "weights", "tuning", "dtype", "max_prompt_length"})
"""Fields that `trainer.run.build` acts on before it makes a trainer."""


def check_by_hand(args: QeRLConfig, acted_on: Collection[str], model: nn.Module) -> None:
    """Refuse what a trainer made by hand would ignore.

    Args:
        args: Settings.
        acted_on: Fields that the caller has acted on.
        model: The policy that was handed in.

    Raises:
        QeRLError: A field is set that contradicts the model, or names a source of what was handed in.
    """
    said = {name for name in RUN_FIELDS - set(acted_on) if getattr(args, name) != default_of(FIELDS[name])}
    for name in sorted(said & _INSTEAD.keys()):
        raise QeRLError(f"{name} is set, and `qerl train` alone reads it; remove it: {_INSTEAD[name]}.")
    held = _held(model)
    for name in sorted(said & held.keys()):
        value = getattr(args, name)
        value = sorted(value) if isinstance(value, list) else value  # PEFT keeps names as a set
        if value != held[name]:
            raise QeRLError(
                f"{name} is {value!r} and the model that was handed in has {held[name]!r}; set it to "
                "that, or remove it."
            )
    for name in sorted(said & _LORA.keys() - held.keys()):
        raise QeRLError(f"{name} is set and the model that was handed in has no LoRA adapter; remove it.")


def _held(model: nn.Module) -> dict[str, Any]:
    """What a model says of the fields that describe one."""
    held: dict[str, Any] = {
        "tuning": "full",
        "weights": _weights(model),
        "dtype": str(base_model(model).dtype).removeprefix("torch."),
    }
    if not isinstance(model, PeftModel):
        return held
    adapter = model.active_peft_config
    values = {name: getattr(adapter, attribute, None) for name, attribute in _LORA.items()}
    targets = values["lora_target_modules"]
    if isinstance(targets, set):
        values["lora_target_modules"] = sorted(targets)
    return held | values | {"tuning": "lora"}


def _weights(model: nn.Module) -> str:
    packed = next((module for module in model.modules() if isinstance(module, PackedLinear)), None)
    if packed is not None:
        return packed.format.name
    return "nf4" if getattr(base_model(model), "is_loaded_in_4bit", False) else "bf16"


def with_length_penalty(rewards: Any, args: QeRLConfig) -> list[Any]:
    """The reward functions (one or a list), and DAPO's soft overlong punishment where it is on."""
    every = [*rewards] if isinstance(rewards, list) else [rewards]
    buffer = round((args.overlong_buffer or 0.0) * (args.max_completion_length or 0))
    if buffer:
        every.append(get_soft_overlong_punishment(args.max_completion_length, buffer))
    return every


def short_prompts(
    rows: Any, args: QeRLConfig, acted_on: Collection[str], tokenizer: PreTrainedTokenizerBase | None
) -> Any:
    """The rows whose prompt has at most `max_prompt_length` tokens; how many have more is logged.

    Raises:
        QeRLError: There is no tokenizer to count with, or no row is left.
    """
    limit = args.max_prompt_length
    if limit is None or "max_prompt_length" in acted_on:
        return rows
    if tokenizer is None:
        raise QeRLError(
            "max_prompt_length counts tokens; hand the tokenizer to the trainer as processing_class."
        )
    chat = Chat(tokenizer, args.chat_template_kwargs) if tokenizer.chat_template else None

    def short(row: dict[str, Any]) -> bool:
        prompt = row["prompt"]
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) or chat is None else chat.ids(prompt)
        return len(ids) <= limit

    kept = rows.filter(short)
    if isinstance(rows, IterableDataset):
        return kept
    if not len(kept):
        raise QeRLError(f"No prompt has at most {limit} tokens; raise max_prompt_length.")
    if len(kept) < len(rows):
        logger.warning(
            "%d of %d prompts are longer than %d tokens and are left out.",
            *(len(rows) - len(kept), len(rows), limit),
        )
    return kept
