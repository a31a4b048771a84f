"""LoRA on packed layers, through PEFT.

PEFT wraps a fixed list of layer types; a custom type is registered on each `LoraConfig` by a hook that is not
saved with the adapter. So adapters are created by `add_lora` and read by `load_adapter`, which set the hook,
and the saved files are a plain PEFT adapter: it loads with `PeftModel.from_pretrained` on the 16-bit model
from which the packed one was made.

An adapter of a wrapper's text decoder (`qerl.families.towers`) is saved under the wrapper's names, so it
loads on the model as published: with PEFT on the wrapper's class, and in vLLM. Both namings are read here.

An adapter's matrices are FP32 over a base of any dtype. Merging raises: rounding the sum to four bits again
would lose most of what was learned, since a typical update is smaller than the rounding step.
"""

import copy
import json
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftModelForCausalLM,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from qerl.errors import QeRLError, first_line
from qerl.families.experts import experts_of
from qerl.families.supported import lora_targets
from qerl.families.towers import WRAPPED, of_wrapper
from qerl.fp4.linear import PackedLinear
from qerl.lora.experts import leave_separate_experts, share, warn_of_merging
from qerl.lora.product import DenseLoraLinear, PackedLoraLinear
from qerl.run_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE, last_checkpoint
from qerl.seeding import derive_seed

leave_separate_experts()

PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT adds to the names of the base model's modules."""

_NEEDS_DENSE = (
    "use_dora", "use_qalora", "use_bdlora", "velora_config", "monteclora_config", "kasa_config",
    "arrow_config", "megatron_config", "layer_replication", "target_parameters",
)  # fmt: skip
"""Fields of `LoraConfig` for variants that read or replace the layer's weight."""


def add_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: int,
    dropout: float,
    target_modules: Sequence[str] | None = None,
    seed: int = 0,
    share_experts: bool = False,
) -> PeftModel:
    """Freeze a model and add new adapters to its linear layers; ``B = 0``, so its outputs do not change.

    Args:
        model: Any causal LM, packed or dense; changed in place.
        rank: r, at least 1.
        alpha: The update is scaled by ``alpha / rank``.
        dropout: Dropout probability of an adapter's input in training.
        target_modules: Last parts of the names of the layers to adapt; None adapts every linear layer of the
            decoder.
        seed: Determines A; must be the same in every process of a run.
        share_experts: As in `adapt`.

    Raises:
        QeRLError: The rank or dropout is out of range, or the model lacks one of the target modules.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=lora_targets(model, target_modules),
        task_type="CAUSAL_LM",
    )
    return adapt(model, config, seed, share_experts)


def adapt(
    model: PreTrainedModel, config: LoraConfig, seed: int = 0, share_experts: bool = False
) -> PeftModel:
    """Freeze a model and add the new adapter that a `LoraConfig` of PEFT describes.

    Args:
        model: Any causal LM, packed or dense; changed in place.
        config: As for `peft.get_peft_model`: without target modules, the family's default layers are adapted
            (query and value projections for most); "all-linear" adapts every linear layer of the decoder. The
            object is not changed.
        seed: Determines A; must be the same in every process of a run.
        share_experts: Whether the experts of a layer share one adapter (`qerl.lora.experts.share`). PEFT
            first creates one per expert; these stay in CPU memory.

    Raises:
        QeRLError: The config is not for causal LMs, needs dense weights although these are packed, names a
            layer that the model does not have, or is rejected by PEFT.
    """
    check_lora(config)
    packed = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    if packed:
        _check_packed(config, packed)
    config = copy.deepcopy(config)
    config.task_type = "CAUSAL_LM"
    if config.target_modules == "all-linear":
        config.target_modules = set(lora_targets(model, None))
    elif isinstance(config.target_modules, set):
        lora_targets(model, sorted(config.target_modules))
    shares = share_experts and any(experts_of(model))
    with _making(model, seed), _on_host() if shares else nullcontext():
        adapted = get_peft_model(model, _with_own_layers(config, model))
    if shares:
        share(adapted)
        _to_device(adapted)
    _check_head(adapted)
    warn_of_merging(adapted)
    return _finished(adapted)


@contextmanager
def _on_host() -> Iterator[None]:
    """Keep the matrices that PEFT creates inside the context in CPU memory."""
    place = "_move_adapter_to_device_of_base_layer"
    with mock.patch.object(BaseTunerLayer, place, lambda *_, **__: None):
        yield


def _to_device(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.lora_A.to(model.device)
            module.lora_B.to(model.device)


def add_adapter(model: PeftModel, name: str, config: LoraConfig, seed: int = 0, empty: bool = False) -> None:
    """Add another adapter to a model, without changing which adapters are active.

    Args:
        model: A model with an adapter from `adapt` on every layer that the new one adapts; changed in place.
        name: Name of the new adapter.
        config: As in `adapt`.
        seed: Determines A, as in `adapt`.
        empty: Whether its matrices are created on the meta device, without memory.

    Raises:
        QeRLError: PEFT rejects the config.
    """
    with _making(model, seed):
        model.add_adapter(name, copy.deepcopy(config), low_cpu_mem_usage=empty)


def _check_head(model: PeftModel) -> None:
    if isinstance(model.get_base_model().get_output_embeddings(), BaseTunerLayer):
        raise QeRLError(
            "LoRA on the output head learns nothing, because the update multiplies with the head's own "
            "weight; leave it out of the target modules."
        )


def check_lora(config: Any) -> None:
    """Raise if no model can be trained here with this ``peft_config``.

    Raises:
        QeRLError: The config is not a `LoraConfig`, is for another task, is for activated LoRA, or trains
            nothing.
    """
    if not isinstance(config, LoraConfig):
        raise QeRLError(f"peft_config is a {type(config).__name__}; only peft.LoraConfig is supported.")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise QeRLError(f"peft_config has task_type {config.task_type}; set it to CAUSAL_LM.")
    if config.inference_mode:
        raise QeRLError("peft_config has inference_mode=True, so nothing would be trained; remove it.")
    if config.lora_dropout >= 1:
        raise QeRLError(f"lora_dropout is {config.lora_dropout}, so adapters get no input; set it below 1.")
    if config.alora_invocation_tokens is not None:
        raise QeRLError("peft_config asks for activated LoRA (aLoRA); only plain LoRA is supported.")


def _check_packed(config: LoraConfig, packed: list[str]) -> None:
    """Raise if a config reads, changes or trains dense weights of the layers named in ``packed``."""
    advice = "load the model with weights: bf16"
    for saved in config.modules_to_save or ():
        if name := next((name for name in packed if f"{saved}." in f"{name}."), None):
            raise QeRLError(
                f"modules_to_save has {saved}, and the weight of {name} is packed, so it cannot train; name "
                f"it in target_modules, or {advice}."
            )
    if variant := next((name for name in _NEEDS_DENSE if getattr(config, name, None)), None):
        raise QeRLError(f"{variant} needs dense weights, and these are packed; remove it, or {advice}.")
    kind = config.init_lora_weights
    if not isinstance(kind, bool) and kind not in ("gaussian", "orthogonal"):
        raise QeRLError(
            f"init_lora_weights {kind!r} starts from dense weights, and these are packed; set it to True, "
            f"'gaussian' or 'orthogonal', or {advice}."
        )


def load_adapter(model: PreTrainedModel, folder: str | Path, trainable: bool = False) -> PeftModel:
    """Add a saved LoRA adapter to a model, whose own weights stay frozen.

    Args:
        model: The model that the adapter was trained on, packed or dense; changed in place.
        folder: Folder written by `PeftModel.save_pretrained`, here or elsewhere.
        trainable: Whether the adapter is trained further, in FP32; otherwise it is frozen too.

    Raises:
        QeRLError: Files are missing or damaged, the adapter is no LoRA, or it belongs to another model.
    """
    folder = Path(folder)
    with _reading(folder):
        config, stored = _saved_config(folder, model)
        with _quiet():
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable, config=config)
        read = set(_state(adapted))
    unmatched = sorted(stored ^ read)
    if unmatched:
        raise QeRLError(
            f"The adapter {folder} does not fit this model: {unmatched[0]} is in only one of the two; give "
            "the model that it was trained on."
        )
    if trainable:
        _check_head(adapted)
    return _finished(adapted)


def add_frozen_adapter(model: PeftModel, name: str, folder: Path) -> None:
    """Load a saved LoRA adapter into a model, frozen and without dropout; active adapters stay active.

    Args:
        model: A model with an adapter on every layer that the saved one adapts; changed in place.
        name: Name of the adapter in the model.
        folder: As in `load_adapter`.

    Raises:
        QeRLError: As in `load_adapter`, or the adapter adapts a layer that has no adapter in the model.
    """
    base = model.get_base_model()
    with _reading(folder):
        config, stored = _saved_config(folder, base)
        config.inference_mode, config.lora_dropout = True, 0.0
        adapted = {key for key, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
        places = {key.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for key in stored}
        if beyond := sorted(places - adapted):
            raise QeRLError(
                f"The adapter {folder} changes {beyond[0]}, which the adapter in training does not adapt; "
                "add its layers to lora_target_modules."
            )
        with _quiet():
            model.add_adapter(name, config)
        weights = {own_name(key, base): tensor for key, tensor in load_file(adapter_file(folder)).items()}
        read = set(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
        if not (unmatched := sorted(stored ^ read)):
            set_peft_model_state_dict(model, weights, adapter_name=name)
    if unmatched:
        raise QeRLError(
            f"The adapter {folder} does not fit this model: {unmatched[0]} is in only one of the two; give "
            "the model that it was trained on."
        )
    share(model, name, strict=False)
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.requires_grad_(False)


def _saved_config(folder: Path, model: nn.Module) -> tuple[LoraConfig, set[str]]:
    """Return the config of a saved adapter, for this base model, and the names of its matrices there."""
    file = adapter_file(folder)
    config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise QeRLError(f"{folder} is a {config.peft_type} adapter; only LoRA adapters are read.")
    if getattr(config, "alora_invocation_tokens", None) is not None:
        raise QeRLError(f"{folder} is an activated LoRA adapter (aLoRA); only plain LoRA is read.")
    if config.use_dora and any(isinstance(module, PackedLinear) for module in model.modules()):
        raise QeRLError(
            f"{folder} is a DoRA adapter, which needs the norms of dense weights; load it with weights: bf16."
        )
    with safe_open(file, framework="pt") as weights:
        stored = {own_name(name, model) for name in weights.keys()}  # noqa: SIM118
    if of_wrapper(model) and isinstance(config.target_modules, str):
        config.target_modules = set(_targets_of(stored, model))  # the saved pattern has the wrapper's names
    return _with_own_layers(config, model), stored


def exchange_adapter(model: PeftModel, folder: Path) -> None:
    """Replace the weights of an adapter from `load_adapter` by those of another with the same config.

    Raises:
        QeRLError: The files are damaged or do not fit.
    """
    with _reading(folder):
        base = model.get_base_model()
        weights = {own_name(name, base): tensor for name, tensor in load_file(adapter_file(folder)).items()}
        unmatched = sorted(weights.keys() ^ _state(model).keys())
        if not unmatched:
            set_peft_model_state_dict(model, weights)
    if unmatched:
        raise QeRLError(f"The adapter {folder} does not fit its own config: {unmatched[0]}; copy it again.")


def adapter_file(folder: Path) -> Path:
    """Return the path of the file with an adapter's matrices.

    Raises:
        QeRLError: The folder has no adapter.
    """
    file = folder / ADAPTER_FILE
    for path in (folder / ADAPTER_CONFIG_FILE, file):
        if not path.is_file():
            last = last_checkpoint(folder)
            instead = (
                f"its run has not ended, so name its last checkpoint, {last}, or go on with the run"
                if last
                else "give the folder of an adapter saved as safetensors"
            )
            raise QeRLError(f"There is no {path}; {instead}.")
    return file


def check_adapter(folder: Path) -> None:
    """Raise if an adapter diverged or is damaged, without loading a model.

    Raises:
        QeRLError: A matrix has NaN or Inf, or the files are missing or damaged.
    """
    with _reading(folder), safe_open(adapter_file(folder), framework="pt") as weights:
        bad = [name for name in weights.keys() if not weights.get_tensor(name).isfinite().all()]  # noqa: SIM118
    if bad:
        raise QeRLError(
            f"The adapter {folder} diverged: {bad[0]} and {len(bad) - 1} more matrices hold NaN or Inf; take "
            "an earlier checkpoint."
        )


def _with_own_layers(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """Register on a config which adapter class wraps which layer; bitsandbytes linears are left to PEFT."""
    layers: dict[type[nn.Module], type[LoraLinear]] = {PackedLinear: PackedLoraLinear}
    if all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear)):
        layers[nn.Linear] = DenseLoraLinear
    config._register_custom_module(layers)
    return config


@contextmanager
def _making(model: PreTrainedModel | PeftModel, seed: int) -> Iterator[None]:
    """Make A depend only on the seed inside the context, and turn PEFT's exceptions into a QeRLError."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _quiet():
        torch.manual_seed(derive_seed("lora", seed))
        try:
            yield
        except (ValueError, TypeError, ImportError) as error:
            raise QeRLError(
                f"LoRA cannot be added ({first_line(error)}); change peft_config or the fields lora_*."
            ) from error


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn exceptions from adapter files that are damaged or do not fit the model into a QeRLError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise QeRLError(f"The adapter {folder} is damaged or incomplete ({error}); copy it again.") from error
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        raise QeRLError(
            f"The adapter {folder} does not fit this model ({first_line(error)}); give the model that it was "
            "trained on."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress PEFT's warnings about custom layer types and about missing keys, which are an error here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        yield


def own_name(stored: str, base: nn.Module) -> str:
    """Return PEFT's name, around this base model, of a saved adapter's matrix."""
    wrapped = f"{PEFT_PREFIX}{WRAPPED}"
    return stored.replace(wrapped, f"{PEFT_PREFIX}model.", 1) if of_wrapper(base) else stored


def stored_name(own: str, base: nn.Module) -> str:
    """Return the name under which a matrix of an adapter around this base model is saved."""
    inner = f"{PEFT_PREFIX}model."
    return own.replace(inner, f"{PEFT_PREFIX}{WRAPPED}", 1) if of_wrapper(base) else own


def stored_targets(targets: Collection[str], base: nn.Module) -> str | list[str]:
    """Return the ``target_modules`` to save with an adapter around this base model.

    For a wrapper's text decoder they are a pattern, since image towers have layers of the same names.
    """
    if not of_wrapper(base):
        return list(targets)
    ends = "|".join(re.escape(name.removeprefix("model.")) for name in targets)
    return rf"{re.escape(WRAPPED)}.*\b({ends})"


def _targets_of(own: Collection[str], base: nn.Module) -> list[str]:
    """Return the last name parts of the adapted modules, or whole names if other linears end the same."""
    found = {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in own if ".lora_" in name}
    ends = {name.rpartition(".")[2] for name in found}
    linears = (name for name, module in base.named_modules() if hasattr(module, "in_features"))
    others = {name.replace(".base_layer", "") for name in linears} - found
    return sorted(found if ends & {name.rpartition(".")[2] for name in others} else ends)


def _state(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the matrices of the adapter by PEFT's names."""
    layers = False if of_wrapper(model.get_base_model()) else "auto"  # as `_OfWrapper` saves them
    return get_peft_model_state_dict(model, save_embedding_layers=layers)


class _OfWrapper(PeftModelForCausalLM):
    """PEFT's model around a wrapper's text decoder, whose adapters are saved for the wrapper."""

    def save_pretrained(
        self,
        save_directory: str,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: bool | str = False,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save as PEFT does, under the wrapper's names.

        Embeddings are left out: PEFT would look for the vocabulary size in the wrapper's config.

        Raises:
            QeRLError: ``safe_serialization`` is false; pickles are not renamed.
        """
        if not safe_serialization:
            raise QeRLError(
                "The adapter of a text decoder is saved only as safetensors; leave safe_serialization at "
                "True."
            )
        super().save_pretrained(
            save_directory, True, selected_adapters, save_embedding_layers, is_main_process, **kwargs
        )
        if not is_main_process:
            return
        base = self.get_base_model()
        for name in selected_adapters or list(self.peft_config):
            folder = Path(save_directory) / ("" if name == "default" else name)
            weights = load_file(folder / ADAPTER_FILE)
            renamed = {stored_name(key, base): tensor.clone() for key, tensor in weights.items()}
            config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
            config["target_modules"] = stored_targets(_targets_of(weights, base), base)
            save_file(renamed, folder / ADAPTER_FILE, metadata={"format": "pt"})
            (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load as PEFT does, from either naming."""
        kwargs.setdefault("key_mapping", self.get_base_model()._checkpoint_conversion_mapping)
        return super().load_adapter(*args, **kwargs)


def _finished(model: PeftModel) -> PeftModel:
    """Prepare a model for saving and for training by several processes, and return it."""
    if of_wrapper(model.get_base_model()):
        model.__class__ = _OfWrapper
    return _skip_packed_buffers_in_ddp(model)


def _skip_packed_buffers_in_ddp(model: PeftModel) -> PeftModel:
    """Keep DistributedDataParallel from broadcasting the base weights at start and in every forward pass.

    Every process reads the same bytes from the same file, they never change, and Gloo cannot send FP8.
    """
    names = [
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if isinstance(module, PackedLinear)
        for name, _ in module.named_buffers()
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model
