"""Making the policy of a run whose settings name a model: memory plan, loading, adapter.

`qerl train` and `QeRLTrainer(model="name", ...)` share this code, so both train the same model for the same
settings. On a GPU the memory plan comes first: before anything is loaded, it says whether the run will fit,
and chooses the values that the settings leave open.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from rich.console import Console
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.gpu_memory import is_unified, keep_within_limit, total_bytes
from qerl.host_memory import host_bytes
from qerl.lora.adapter import adapt, add_lora, check_adapter, load_adapter
from qerl.lora.experts import share
from qerl.models.fingerprint import check_base
from qerl.models.hub import LocalModel
from qerl.models.load import check_model, load_model
from qerl.plan.propose import fits
from qerl.plan.render import advice, verdict, would_fit
from qerl.plan.settings import (
    plan_beyond_host,
    plan_settings,
    propose_settings,
    refuse_full_tuning_that_cannot_fit,
)
from qerl.plan.work import Work
from qerl.settings.config import QeRLConfig
from qerl.update.recompute import set_checkpointing


def make_policy(
    config: QeRLConfig, model: LocalModel, console: Console, peft_config: LoraConfig | None = None
) -> PreTrainedModel | PeftModel:
    """Return the base model in the settings' format, on their device, with an adapter unless fully tuned.

    Args:
        config: Settings; the values that they leave to the memory plan are written into them.
        model: The model of the settings, resolved.
        console: Where the plan is printed.
        peft_config: A fresh adapter; None takes the saved or fresh one that the settings describe.

    Raises:
        QeRLError: The model cannot be loaded in this format, full tuning cannot fit the GPU, or the saved
            adapter is damaged or another model's.
    """
    if config.adapter is not None:
        check_adapter(Path(config.adapter).expanduser())
        warning = check_base(Path(config.adapter).expanduser(), model)
        if warning:
            console.print(warning, highlight=False)
    if config.device.type == "cuda":
        keep_within_limit(config.device)
        plan_memory(config, total_bytes(config.device), console, model)
    return load_policy(config, model, peft_config)


def check_trainable(config: QeRLConfig, model: LocalModel) -> None:
    """Raise if the model's config and tensor names rule it out as the policy of these settings.

    `config.weights` is set to the resolved weight format.

    Raises:
        QeRLError: As `load_model`, before it reads weights.
    """
    config.weights = check_model(model, config.weights, config.trust_remote_code, _targets(config))


def _targets(config: QeRLConfig) -> list[str] | None:
    return config.lora_target_modules if config.tuning == "lora" else None


def plan_memory(config: QeRLConfig, capacity: int, console: Console, model: LocalModel | None = None) -> None:
    """Print whether a run fits a GPU, and write the plan's choices into the settings.

    Args:
        config: Settings of the run.
        capacity: Bytes of the GPU.
        console: Where the plan is printed.
        model: The model of the settings, if already resolved.

    Raises:
        QeRLError: Full tuning cannot fit, or `QERL_HOST_GB` is not an amount of memory.
    """
    if config.tuning == "full":
        refuse_full_tuning_that_cannot_fit(config, capacity, model)
    may = not is_unified(config.device)
    host = host_bytes(config.world_size) if may else None
    try:
        plan = plan_settings(config, capacity, config.world_size, model, may_offload=may, host_bytes=host)
    except QeRLError as error:
        console.print(f"Memory was not planned. {error}", highlight=False)
        return
    console.print(verdict(plan), highlight=False)
    if not fits(plan):
        beyond = plan_beyond_host(config, plan)
        if beyond is not None:
            console.print(would_fit(beyond), highlight=False)
        console.print(advice(plan, propose_settings(config, plan)), highlight=False)
    take_plan(config, plan.work)


def take_plan(config: QeRLConfig, planned: Work) -> None:
    """Write the plan's choices into the settings, in transformers' fields where these exist."""
    config.tokens_per_forward = planned.tokens_per_forward
    if config.gradient_checkpointing:
        set_checkpointing(config, **planned.checkpointing)


def load_policy(
    config: QeRLConfig, found: LocalModel, peft_config: LoraConfig | None = None
) -> PreTrainedModel | PeftModel:
    """Load the policy as `make_policy` does, without the memory plan."""
    model = load_model(
        found,
        weights=config.weights,
        dtype=compute_dtype(config, config.device),
        device=config.device,
        rounding=config.rounding,
        trust_remote_code=config.trust_remote_code,
        lora_targets=_targets(config),
    )
    if config.tuning == "full":
        return model
    shares = config.lora_experts == "shared"
    if config.adapter is not None:
        adapted = load_adapter(model, Path(config.adapter).expanduser(), trainable=True)
        if shares:
            share(adapted)
        return adapted
    if peft_config is not None:
        return adapt(model, peft_config, config.seed, shares)
    return add_lora(
        model,
        rank=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        seed=config.seed,
        share_experts=shares,
    )


def compute_dtype(config: QeRLConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the settings, with `auto` resolved for a device."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" or config.tuning == "full" else torch.bfloat16
    return getattr(torch, config.dtype)
