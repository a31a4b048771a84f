"""Merged models: the base's own folder, with ``W + s B A`` in the place of each adapted matrix, in 16 bits.

W is the weight under the adapter: the dequantised four-bit weight if the base is loaded packed, so that the
merged model is the policy that was trained; or the published 16-bit weight, which makes a slightly different
model. Either way the sum is computed in FP32 and rounded once.

Everything else passes through as it was published: embeddings, norms, image towers, merged experts under
their own names, tokenizer, config. So any program that loads the base loads the result. In memory the model
stays packed, with one shard at a time in 16 bits.

Rounding the sum to 16 bits is lossy. A step of bfloat16 is a 256th to a 128th of a weight, and an update by
reinforcement learning is often smaller; if the base's weight is itself a number of bfloat16, an update below
half a step is lost. The share of the update that is kept is therefore measured: the projection of the actual
change onto the intended one, 1 if nothing is lost. float16 has steps an eighth as large.

Given up: merging into four bits, which loses most of the update (`qerl.lora.adapter`), and merging adapters
other than plain LoRA, which PEFT does on 16-bit weights.

Shapes: N outputs, K inputs of a linear.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from rich.progress import Progress
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import whole_of_blocks
from qerl.fp4.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    copy_other_files,
    write_json,
    write_shard,
)
from qerl.fp4.linear import PackedLinear
from qerl.fp4.published import ACTIVATIONS, FP8_SCALES, block_shape, dequantize_fp8
from qerl.lora.adapter import adapter_file
from qerl.lora.kinds import active_adapter, why_not

SHARD_BYTES = 4_000_000_000
"""Largest size of a written file, unless a single tensor is larger."""

_SCALES = (*FP8_SCALES, "weight_global_scale", "weight_scale_2", *ACTIVATIONS)
"""Last parts of the names of tensors that belong to a quantised weight or its activations."""


@dataclass
class Merged:
    """Result of a merge.

    Attributes:
        adapted: Names of the matrices that an adapter changed.
        added: Sum over these matrices of (actual change) x (intended change).
        wanted: Sum of the squares of the intended change.
    """

    adapted: set[str] = field(default_factory=set)
    added: float = 0.0
    wanted: float = 0.0

    @property
    def kept(self) -> float:
        """Share of the update that remains in the weights after rounding; 1 without an update."""
        return self.added / self.wanted if self.wanted else 1.0


def check_mergeable(adapter: Path) -> None:
    """Raise if an adapter changes more than linear layers, by the names in its file.

    Raises:
        QeRLError: It changes more, or the folder holds no adapter.
    """
    with safe_open(adapter_file(adapter), framework="pt") as file:
        names = list(file.keys())
    other = next((name for name in names if ".lora_A." not in name and ".lora_B." not in name), None)
    if other is not None:
        raise QeRLError(
            f"The adapter {adapter} has {other} beside its LoRA matrices, which `qerl export` cannot merge; "
            "merge it with PEFT's merge_and_unload on the 16-bit model."
        )


def write_merged(
    model: PreTrainedModel | PeftModel,
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype,
    progress: Progress,
) -> Merged:
    """Write a model, merged with its adapter, as an unquantised folder.

    Args:
        model: Loaded from the checkpoint, in any format, with its adapter if it has one; not modified.
        checkpoint: Source of the names that are written, and of tensors that pass through.
        folder: An existing empty folder.
        dtype: bfloat16 or float16; float32 for a GGUF file of it.
        progress: Shows a bar.

    Raises:
        QeRLError: The adapter is not plain LoRA, or changes a layer that the checkpoint does not hold by
            itself; or a number is not finite in that dtype.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    linears = {name: module for name, module in base.named_modules() if _is_linear(module)}
    merged, shards = Merged(), _Shards(folder)
    task = progress.add_task("Merging", total=sum(map(len, checkpoint.shards.values())))
    for shard in checkpoint.shards:
        for name, tensor in checkpoint.read(shard):
            for own, whole in _written(checkpoint, name, tensor, linears, dtype, merged):
                shards.add(own, whole)
            progress.advance(task)
    shards.close()
    adapted = {name for name, layer in linears.items() if _adapter_of(name, layer) is not None}
    if missed := sorted(adapted - merged.adapted):
        raise QeRLError(
            f"Cannot merge: the adapter changes {missed[0]}, which is not a separate matrix in "
            f"{checkpoint.folder}; load the adapter on its base model instead."
        )
    write_json(folder / "config.json", _config(checkpoint, dtype))
    copy_other_files(checkpoint, folder)
    return merged


def _is_linear(module: nn.Module) -> bool:
    base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return isinstance(base, PackedLinear | nn.Linear)


def _written(
    checkpoint: Checkpoint,
    name: str,
    tensor: torch.Tensor,
    linears: dict[str, nn.Module],
    dtype: torch.dtype,
    merged: Merged,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor to write for a stored tensor; nothing for a scale."""
    own = checkpoint.names.get(name)
    last = name.rpartition(".")[2]
    if checkpoint.quantization is not None and (last in _SCALES or last.endswith("_scales")):
        return
    if own is None:  # of a tower
        yield name, _decoded(checkpoint, name, tensor, dtype)
        return
    parts = dict(checkpoint.separated(own, tensor))
    modules = {part: part.rpartition(".")[0] for part in parts}
    if not any(part.endswith((".weight", ".weight_packed")) and modules[part] in linears for part in parts):
        yield name, _passed(checkpoint, name, tensor, dtype)
        return
    if list(parts) == [own]:
        weight = _merge(modules[own], linears[modules[own]], tensor, dtype, merged)
        yield f"{name.rpartition('.')[0]}.weight", weight
        return
    target, shape = own, tuple(tensor.shape)
    if last.endswith("_blocks"):
        target, shape = whole_of_blocks(checkpoint.model_type, own, shape)
    whole = torch.empty(shape, dtype=dtype)
    for (part, stored), (_, place) in zip(parts.items(), checkpoint.separated(target, whole), strict=True):
        place.copy_(_merge(modules[part], linears[modules[part]], stored, dtype, merged))
    yield name.removesuffix("_blocks"), whole


def _passed(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that is no linear's weight, in the new dtype if it had that of the model."""
    config = checkpoint.config
    declared = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    own = (torch.float32,) if declared == "float32" else (torch.bfloat16, torch.float16)
    return _rounded(name, tensor, dtype) if tensor.dtype in own else _decoded(checkpoint, name, tensor, dtype)


def _decoded(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a module that was not loaded, such as a multi-token prediction head: as it is, or
    dequantised if it is in FP8, since the result has no scales.

    Raises:
        QeRLError: The tensor holds other codes.
    """
    if checkpoint.quantization is None or tensor.dtype.itemsize > 1 or tensor.dtype == torch.bool:
        return tensor
    places = [f"{name.rpartition('.')[0]}.{kind}" for kind in FP8_SCALES]
    scale = next(
        (
            stored
            for shard, headers in checkpoint.shards.items()
            if any(place in headers for place in places)
            for place, stored in checkpoint.read(shard)
            if place in places
        ),
        None,
    )
    if tensor.dtype != torch.float8_e4m3fn or tensor.ndim != 2 or scale is None:
        raise QeRLError(
            f"{checkpoint.folder} holds {name} quantised ({tensor.dtype}) in a part that is not loaded, so "
            "it cannot be dequantised; pass the 16-bit base with --model and --weights bf16."
        )
    return _rounded(name, dequantize_fp8(tensor, scale, block_shape(checkpoint.quantization)), dtype)


def _rounded(name: str, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor to another dtype.

    Raises:
        QeRLError: A finite number in it is beyond the largest of that dtype.
    """
    rounded = exact.to(dtype)
    if exact.dtype != dtype and rounded.isinf().any() and not torch.equal(rounded.isinf(), exact.isinf()):
        largest = exact[exact.isfinite()].abs().max().item()
        raise QeRLError(
            f"{name} has values up to {largest:.4g}, above the maximum of {dtype}; set --dtype bfloat16."
        )
    return rounded


def _adapter_of(name: str, layer: nn.Module) -> str | None:
    """Return the name of a linear's adapter, or None.

    Raises:
        QeRLError: The adapter is not plain LoRA.
    """
    if not isinstance(layer, BaseTunerLayer):
        return None
    if reason := why_not(layer):
        raise QeRLError(
            f"{name} {reason}, which `qerl export` cannot merge; merge it with PEFT on the 16-bit model."
        )
    return active_adapter(layer)


@torch.no_grad()
def _merge(
    name: str, layer: nn.Module, stored: torch.Tensor, dtype: torch.dtype, merged: Merged
) -> torch.Tensor:
    """``W + s B A`` [N, K] of a linear, in FP32 and rounded once; ``stored`` is W unless it is quantised."""
    adapter = _adapter_of(name, layer)
    base = cast(BaseTunerLayer, layer).get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    if isinstance(base, PackedLinear):
        weight_NK = base.dense()
    else:
        # FP8 weights, and a packed head, were converted to 16 bits on loading.
        plain = stored.dtype in (torch.bfloat16, torch.float16, torch.float32)
        loaded = cast(torch.Tensor, base.weight)
        weight_NK = (stored if plain else loaded).to(loaded.device, torch.float32)
    if adapter is None:
        return _rounded(name, weight_NK, dtype).cpu()
    lora = cast(LoraLinear, layer)
    a_RK, b_NR = lora.lora_A[adapter].weight.float(), lora.lora_B[adapter].weight.float()
    delta_NK = lora.scaling[adapter] * (b_NR @ a_RK)
    sum_NK = _rounded(name, weight_NK + delta_NK, dtype)
    if not sum_NK.isfinite().all():
        raise QeRLError(
            f"{name} with its adapter has numbers that are not finite; export an earlier checkpoint, or "
            "fetch the base again."
        )
    merged.adapted.add(name)
    merged.added += float(((sum_NK.float() - weight_NK) * delta_NK).sum(dtype=torch.float64))
    merged.wanted += float(delta_NK.square().sum(dtype=torch.float64))
    return sum_NK.cpu()


def _config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """Return the base's config.json in the new dtype, without its entries on quantised layers."""

    def plain(config: dict[str, Any]) -> dict[str, Any]:
        gone = ("quantization_config", "qerl_rounding", "torch_dtype")
        return {key: value for key, value in config.items() if key not in gone} | {
            "dtype": str(dtype).removeprefix("torch.")
        }

    config = plain(checkpoint.config)
    if checkpoint.is_wrapper:
        config["text_config"] = plain(config["text_config"])
    return config


class _Shards:
    """Writer of weight files, one after the other as they fill up, and of their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, after writing the current file to disk if the tensor would overfill it."""
        if self._open and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._open[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> None:
        """Write the last file, and the index if there are several."""
        self._write()
        if len(self._files) == 1:
            self._path(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            final = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            self._path(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_json(self._folder / INDEX_FILE, index)

    def _path(self, number: int) -> Path:
        return self._folder / f".model-{number}"

    def _write(self) -> None:
        write_shard(self._path(len(self._files)), self._open)
        self._files.append(list(self._open))
        self._open, self._bytes = {}, 0
