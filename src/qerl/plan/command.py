"""From a model's name and settings to what is said of them: all of it by `qerl plan`, a line before a run."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl.errors import QeRLError
from qerl.families.layer import LINEARS
from qerl.families.sizes import SIZES, Sizes
from qerl.fp4.checkpoint import read_config
from qerl.models.hub import local_config
from qerl.plan.phases import MemoryPlan, make_plan
from qerl.plan.propose import fastest, fits, propose
from qerl.plan.render import advice, render, verdict
from qerl.plan.work import FULL, HALF, Work
from qerl.rollout.engine import KV_DTYPES
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import load_config

DEFAULT_PROMPT = 512  # tokens, where max_prompt_length sets no limit
USABLE = 0.985  # of a GPU's GiB; the rest is the driver's and ECC's (H100 80GB: 84.9 of 85.9 GB)


def plan_command(
    name: str, recipes: list[str], fields: dict[str, Any], gpu: Any, console: Console, processes: Any = 1
) -> MemoryPlan:
    """Print what fits, and return the plan of the settings as they are.

    Args:
        name: Local folder, Hub id, or a name of `qerl.families.sizes.SIZES` such as ``32b``.
        recipes: As for training; none are needed.
        fields: Settings over those of the recipes.
        gpu: Memory of the GPU as its vendor counts, 80 for an H100 80GB.
        processes: GPUs of a data-parallel run, each with a whole model.

    Raises:
        QeRLError: No such model, a family that is not planned, wrong settings, full tuning.
    """
    if isinstance(gpu, bool) or not isinstance(gpu, int | float) or not 0 < gpu < math.inf:
        raise QeRLError(f"--gpu is {gpu}; it must be the GPU's memory in GB, such as 80.")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise QeRLError(f"--processes is {processes}; it must be a number of GPUs, at least 1.")
    config = load_config(recipes, fields | {"model": name}, required=("model",))
    plan, proposal = _plan(config, round(gpu * 2**30 * USABLE), processes)
    console.print(render(plan, proposal, name))
    return plan


def announce(config: QeRLConfig, capacity: int, console: Console) -> Work | None:
    """Say before a run loads anything whether it will fit, and with which settings it would.

    Args:
        config: Settings of the run.
        capacity: Bytes of the GPU.
        console: Where it is said.

    Returns:
        The work with `tokens_per_forward` and `every_n_layers` as set, else as planned; None where nothing
        could be planned.
    """
    try:
        plan, proposal = _plan(config, capacity, config.world_size)
    except QeRLError as error:
        console.print(f"Memory was not planned. {error}", highlight=False)
        return None
    console.print(verdict(plan), highlight=False)
    if not fits(plan):
        console.print(advice(plan, proposal), highlight=False)
    return plan.work


def refuse_full_tuning_that_cannot_fit(config: QeRLConfig, capacity: int) -> None:
    """Refuse full tuning whose weights, gradients and optimizer alone exceed the GPU.

    Args:
        config: Settings of the run, with ``tuning: full``.
        capacity: Bytes of the GPU.

    Raises:
        QeRLError: They exceed it.
    """
    try:
        sizes = _sizes(str(config.model), config)
    except QeRLError:
        return  # a family or a name that the plan does not know may still be loaded
    if _full_tuning_bytes(sizes, config) > capacity:
        raise QeRLError(_full_tuning(sizes, config, capacity))


def _full_tuning_bytes(sizes: Sizes, config: QeRLConfig) -> int:
    """Bytes of weights, gradients and Adam's moments, all in the weights' dtype or the moments in 8 bits.

    A KL penalty (``beta`` above 0) needs the weights a second time, as its reference.
    """
    size = HALF if config.dtype == "bfloat16" else FULL
    moments = 2 if "8bit" in str(config.optim) else 2 * size
    copies = 3 if config.beta else 2
    return sizes.parameters * (copies * size + moments)


def _full_tuning(sizes: Sizes, config: QeRLConfig, capacity: int) -> str:
    needed = _full_tuning_bytes(sizes, config)
    fits = "more than" if needed > capacity else "of"
    return (
        f"Full tuning takes at least {needed / 1e9:.1f} GB on each GPU for weights, gradients and Adam's "
        f"moments of {sizes.parameters / 1e9:.2f} billion parameters, {fits} the {capacity / 1e9:.1f} GB "
        "there are, and activations, keys and values on top, which are planned for LoRA only; set "
        "tuning: lora, or take a smaller model."
    )


def _plan(config: QeRLConfig, capacity: int, processes: int) -> tuple[MemoryPlan, MemoryPlan | None]:
    """The settings as they are, with the default of what is left to the plan, and settings that fit."""
    sizes = _sizes(str(config.model), config)
    if config.tuning == "full":
        raise QeRLError(_full_tuning(sizes, config, capacity))
    work = _work(config, processes)
    if work.prompt_tokens + work.completion_tokens > sizes.positions:
        raise QeRLError(
            f"A prompt of {work.prompt_tokens} and a completion of {work.completion_tokens} tokens exceed "
            f"the model's {sizes.positions} positions; lower max_prompt_length or max_completion_length."
        )
    tokens = config.tokens_per_forward
    left_open = config.gradient_checkpointing and every_n_layers(config) is None
    every = None if left_open else [work.every_n_layers]
    chosen = fastest(sizes, work, capacity, [tokens] if tokens else None, every)
    work = chosen or dataclasses.replace(work, tokens_per_forward=tokens or work.tokens_of(1))
    return make_plan(sizes, work, capacity), propose(sizes, work, capacity, _samples(config))


def every_n_layers(config: QeRLConfig) -> int | None:
    """What the settings say of gradient checkpointing, as transformers names it; None if they do not."""
    kwargs = config.gradient_checkpointing_kwargs
    return kwargs.get("every_n_layers") if isinstance(kwargs, dict) else None


def _samples(config: QeRLConfig) -> int:
    """Samples of one rollout."""
    return config.per_device_train_batch_size * (config.steps_per_generation or 1)


def _sizes(name: str, config: QeRLConfig) -> Sizes:
    if name in SIZES and not Path(name).is_dir():
        return SIZES[name]
    try:
        folder = local_config(name)
    except QeRLError as error:
        if "/" in name:
            raise
        raise QeRLError(f"{error} Sizes that are known by name: {', '.join(SIZES)}.") from error
    content, _, format = read_config(folder)
    if format is not None and format.name != config.weights:
        raise QeRLError(
            f"{name} holds {format.name} weights, which cannot become {config.weights}; set weights to "
            f"{format.name} or name the 16-bit model."
        )
    return Sizes.from_config(content)


def _work(config: QeRLConfig, processes: int) -> Work:
    assert config.num_generations is not None and config.max_completion_length is not None
    return Work(
        weights=config.weights,
        rank=config.lora_r,
        targets=tuple(config.lora_target_modules or LINEARS),
        prompt_tokens=config.max_prompt_length or DEFAULT_PROMPT,
        completion_tokens=config.max_completion_length,
        group=config.num_generations,
        sequences=min(config.max_sequences or MAX_ROWS, _samples(config), MAX_ROWS),
        microbatch=config.per_device_train_batch_size,
        microbatches=config.gradient_accumulation_steps,
        tokens_per_forward=config.tokens_per_forward,
        every_n_layers=(every_n_layers(config) or 1) if config.gradient_checkpointing else 0,
        cache_bytes=KV_DTYPES[config.kv_cache_dtype].itemsize,
        optimizer_bytes=2 if "8bit" in str(config.optim) else 2 * FULL,
        filtered=config.top_p < 1 or bool(config.top_k) or bool(config.min_p),
        processes=processes,
        lora_dropout=config.lora_dropout,
    )
