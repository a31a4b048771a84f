"""Memory plan of a run's settings, which also chooses the settings that are left unset.

`qerl plan` and a run on a GPU plan by the same functions, so the run does what the command says. Nothing is
printed here.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.errors import QeRLError
from qerl.families.layer import Linear, RoutedMLP
from qerl.families.sizes import PUBLISHED, SIZES, Sizes
from qerl.families.towers import text_fields
from qerl.fp4.checkpoint import open_checkpoint, read_config
from qerl.fp4.published import Held, check_declared, choose_weights, declared_format
from qerl.lora.adapter import adapter_file
from qerl.models.hub import LocalModel, local_config
from qerl.plan.parts import Weights
from qerl.plan.phases import MemoryPlan, make_plan
from qerl.plan.propose import beyond_host, fastest, fits, propose
from qerl.plan.work import FULL, HALF, Work
from qerl.rollout.engine import KV_DTYPES, check_keys
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.settings.config import QeRLConfig
from qerl.settings.groups import TEACHER_ADAPTER
from qerl.weight_formats import DEFAULT_FORMAT, FORMATS, WeightFormatName

DEFAULT_PROMPT = 512
"""Tokens of a prompt if max_prompt_length is unset."""


def plan_settings(
    config: QeRLConfig,
    capacity: int,
    processes: int,
    found: LocalModel | None = None,
    adapters: int = 1,
    serves: bool = False,
    may_offload: bool = True,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """Plan the settings as given, with unset ones chosen for speed.

    Args:
        config: Settings of the run.
        capacity: Bytes of the GPU.
        processes: GPUs of a data-parallel run, each with a whole model.
        found: The model of the settings, if it has been found already.
        adapters: Adapters that a server keeps on the GPU; a run has one.
        serves: True for a server, whose engine reserves room for further requests.
        may_offload: True if layer inputs may be offloaded to CPU memory when the settings leave that open.
        host_bytes: Bytes of CPU memory per process; None if unknown.

    Returns:
        The plan, whose work has `tokens_per_forward` and each key of `checkpointing` as set, else as chosen.
        It may not fit, see `qerl.plan.propose.fits`.

    Raises:
        QeRLError: The model is not found or its family has no plan, tuning is full, the KV cache is FP8 and
            the model's keys have a bias, or samples exceed the model's positions.
    """
    sizes, weights, published = _read_model(found or str(config.model), config.weights)
    check_keys(config.kv_cache_dtype, sizes)
    if config.tuning == "full":
        raise QeRLError(_full_tuning(sizes, config, capacity))
    work = dataclasses.replace(
        _work(config, sizes, processes), weights=weights, published=published, adapters=adapters,
        serves=serves, may_offload=may_offload, host_bytes=host_bytes, **_teacher(config, sizes),
    )  # fmt: skip
    if work.prompt_tokens + work.completion_tokens > sizes.positions:
        raise QeRLError(
            f"A prompt of {work.prompt_tokens} and a completion of {work.completion_tokens} tokens exceed "
            f"the model's {sizes.positions} positions; lower max_prompt_length or max_completion_length."
        )
    chosen = fastest(sizes, work, capacity, *_choices(config))
    tokens = config.tokens_per_forward or work.tokens_of(1)
    return make_plan(sizes, chosen or dataclasses.replace(work, tokens_per_forward=tokens), capacity)


def plan_beyond_host(config: QeRLConfig, plan: MemoryPlan) -> MemoryPlan | None:
    """Return the plan of these settings that would fit if CPU memory had room for the layer inputs; None if
    ``plan`` fits, or if that would not help."""
    if fits(plan) or plan.on_host:
        return None
    return beyond_host(plan.sizes, plan.work, plan.capacity, *_choices(config))


def propose_settings(config: QeRLConfig, plan: MemoryPlan) -> MemoryPlan | None:
    """Return the plan of the fastest settings that fit, regardless of those set; None if nothing fits."""
    return propose(plan.sizes, plan.work, plan.capacity, rollout_samples(config))


def refuse_full_tuning_that_cannot_fit(
    config: QeRLConfig, capacity: int, found: LocalModel | None = None
) -> None:
    """Raise if weights, gradients and optimizer of full tuning alone exceed the GPU.

    Raises:
        QeRLError: They exceed ``capacity``.
    """
    try:
        sizes = _read_model(found or str(config.model), config.weights)[0]
    except QeRLError:
        return  # a family or a name that the plan does not know may still be loaded
    if _full_tuning_bytes(sizes, config) > capacity:
        raise QeRLError(_full_tuning(sizes, config, capacity))


def _full_tuning_bytes(sizes: Sizes, config: QeRLConfig) -> int:
    """Bytes of weights, gradients and Adam's moments, all in the weights' dtype or the moments in 8 bits.

    A KL penalty (``beta`` above 0) needs another copy of the weights as its reference, and so does the
    teacher ``base``.
    """
    size = HALF if config.dtype == "bfloat16" else FULL
    moments = 2 if "8bit" in str(config.optim) else 2 * size
    copies = 2 + (config.beta > 0) + (config.teacher == "base")
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


def _checkpointing(config: QeRLConfig) -> dict[str, Any]:
    """The settings of gradient checkpointing."""
    kwargs = config.gradient_checkpointing_kwargs
    return kwargs if isinstance(kwargs, dict) else {}


def _choices(config: QeRLConfig) -> tuple[list[int] | None, list[int] | None, bool | None]:
    """The choices that the settings leave to `fastest`: limits, every and offload, each None if unset."""
    tokens = config.tokens_per_forward
    given: dict[str, Any] = {"every_n_layers": 0, "offload": False}
    if config.gradient_checkpointing:
        given = _checkpointing(config)
    every = [given["every_n_layers"]] if "every_n_layers" in given else None
    return [tokens] if tokens else None, every, given.get("offload")


def rollout_samples(config: QeRLConfig) -> int:
    """Number of samples of one rollout."""
    return config.per_device_train_batch_size * (config.steps_per_generation or 1)


def _teacher(config: QeRLConfig, sizes: Sizes) -> dict[str, Any]:
    """The fields of `Work` for the memory of a teacher.

    Args:
        config: Settings of the run.
        sizes: Sizes of the run's model.
    """
    name = config.teacher
    if name is None or name == "base":
        return {} if name is None else {"teacher": sizes}
    if name.startswith(TEACHER_ADAPTER):
        file = adapter_file(Path(name.removeprefix(TEACHER_ADAPTER)).expanduser())
        return {"teacher": sizes, "teacher_bytes": file.stat().st_size}
    theirs, weights, published = _read_model(name, config.teacher_weights)
    held = Weights(theirs, FORMATS[weights].on_engine)
    return {"teacher": theirs, "teacher_bytes": held.bytes if published is None else published + held.dense}


def _read_model(
    name: str | LocalModel, wanted: WeightFormatName | None
) -> tuple[Sizes, WeightFormatName, int | None]:
    """Return a model's sizes, the format in which it is loaded, and the bytes of its linears as published.

    They come from the model's config, and from the headers of its tensors if these are on disk. The bytes are
    None for a model that is not quantised; ``wanted`` is the user's choice of format.
    """
    known = (*SIZES, *PUBLISHED)
    if isinstance(name, str) and name.lower() in known and not Path(name).is_dir():
        sizes, declared = Sizes.by_name(name.lower()), PUBLISHED.get(name.lower(), {})
        quantization = declared.get("quantization_config")
        return sizes, *_formats(name, sizes, quantization, {}, wanted)
    try:
        folder = local_config(name)
    except QeRLError as error:
        if isinstance(name, LocalModel) or Path(name).expanduser().exists():
            raise
        raise QeRLError(
            f"{error} Sizes that are known by name, without network: {', '.join(known)}."
        ) from error
    content, quantization = read_config(folder)
    sizes = Sizes.from_config(text_fields(content))
    stored: dict[str, Held] = {}
    if quantization is not None:
        check_declared(quantization, folder)
        stored = open_checkpoint(folder).formats if any(folder.glob("*.safetensors")) else {}
    return sizes, *_formats(name, sizes, quantization, stored, wanted)


def _formats(
    name: object,
    sizes: Sizes,
    quantization: dict[str, Any] | None,
    stored: dict[str, Held],
    wanted: WeightFormatName | None,
) -> tuple[WeightFormatName, int | None]:
    """Return the format in which a model is loaded, and the bytes of its linears as published, None if it is
    not quantised.

    Args:
        name: The user's name for the model.
        sizes: Sizes of the model.
        quantization: The ``quantization_config`` of the model; None if it is not quantised.
        stored: Formats of linears whose headers were read, by qualified name.
        wanted: The user's choice of format.
    """
    if quantization is None:
        return choose_weights(name, [], wanted), None
    held = [stored.get(place) or declared_format(quantization, place) for place, _ in _linears(sizes)]
    return choose_weights(name, held, wanted), published_bytes(sizes, quantization, stored)


def published_bytes(
    sizes: Sizes, quantization: dict[str, Any] | None, stored: dict[str, Held] | None = None
) -> int:
    """Bytes of a model's linears on the engine, each in the format in which it is published.

    Args:
        sizes: Sizes of the model.
        quantization: The ``quantization_config`` of its config.json.
        stored: Formats of linears whose headers were read, by qualified name.
    """
    held = (
        ((stored or {}).get(place) or declared_format(quantization, place), linear.elements)
        for place, linear in _linears(sizes)
    )
    as_loaded = ((FORMATS["bf16" if format == "fp8" else format], elements) for format, elements in held)
    return sum(format.on_engine.matrix_bytes(elements) for format, elements in as_loaded)


def _linears(sizes: Sizes) -> Iterator[tuple[str, Linear]]:
    """The linears of all decoder layers and of their experts, each with its qualified name."""
    for index, spec in enumerate(sizes.specs):
        layer = f"model.layers.{index}"
        yield from ((f"{layer}.{linear.place}", linear) for linear in spec.linears)
        for expert in range(spec.experts):
            place = f"{layer}.{RoutedMLP.EXPERTS}.{expert}"
            yield from ((f"{place}.{linear.place}", linear) for linear in spec.expert_linears)


def _work(config: QeRLConfig, sizes: Sizes, processes: int) -> Work:
    assert config.num_generations is not None and config.max_completion_length is not None
    checkpointing = _checkpointing(config)
    prompt, completion = config.max_prompt_length or DEFAULT_PROMPT, config.max_completion_length
    group = config.num_generations
    if config.algorithm == "sft":  # demonstrations share no prompt
        completion, group = max(completion, (config.max_length or 0) - prompt), 1
    return Work(
        weights=config.weights or DEFAULT_FORMAT,
        rank=config.lora_r,
        targets=tuple(config.lora_target_modules or sizes.targets),
        prompt_tokens=prompt,
        completion_tokens=completion,
        group=group,
        sequences=min(config.max_sequences or MAX_ROWS, rollout_samples(config), MAX_ROWS),
        max_sequences=min(config.max_sequences or MAX_ROWS, MAX_ROWS),
        microbatch=config.per_device_train_batch_size,
        microbatches=config.gradient_accumulation_steps,
        tokens_per_forward=config.tokens_per_forward,
        every_n_layers=checkpointing.get("every_n_layers", 1) if config.gradient_checkpointing else 0,
        offload=config.gradient_checkpointing and checkpointing.get("offload", False),
        cache_bytes=KV_DTYPES[config.kv_cache_dtype].itemsize,
        optimizer_bytes=2 if "8bit" in str(config.optim) else 2 * FULL,
        processes=processes,
        lora_dropout=config.lora_dropout,
        shared_lora=config.lora_experts == "shared",
        copies_adapter=config.beta > 0 and config.adapter is not None,
        keeps_keys=config.max_staleness > 0,
        fp8_backward=config.backward_dtype == "fp8",
    )
