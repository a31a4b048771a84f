"""``qerl quantize``: a 16- or 32-bit checkpoint in, a four-bit one out, without building the model.

There are two passes over the shards, one tensor at a time. The first finds every layer's largest magnitude,
and NaN or Inf; it has to come first because q/k/v and gate/up share a global scale and the members of such a
group may lie in different shards. The second quantises and writes shard by shard under the names the shards
had, so memory holds one quantised shard and the matrix being packed. Tensors that are not quantised pass
through untouched. A matrix is packed on the GPU if there is one: the search for scales ("mse") is many small
sums, for which a shared CPU of 16 cores took more than 100 s at 135M parameters.

Given up: reading the checkpoint once, as the first pass costs a tenth of the second; and the same bits from
every device: if two scales are equally good to FP32's rounding, the order of a sum decides.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from qerl.errors import QeRLError
from qerl.families.supported import check_experts
from qerl.fp4.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    copy_other_files,
    new_checkpoint,
    open_checkpoint,
    packed_tensors,
    quantization_config,
    write_json,
    write_shard,
)
from qerl.fp4.format import BlockFormat, block_format
from qerl.fp4.groups import fused_group, is_quantized, left_out
from qerl.fp4.published import Header
from qerl.fp4.rounding import check_rounding, error_sums, largest_magnitude, quantize, relative_error
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, Rounding

_ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass
class QuantizeReport:
    """Result of a quantisation.

    Attributes:
        target: The written folder.
        format: Name of the format.
        layers: Number of quantised matrices.
        parameters: Their elements.
        bytes_before, bytes_after: Size of all shards read and of all shards written.
        relative_error: By rounding, ``||w - w_hat|| / ||w||`` over all quantised matrices together; after
            ``mse`` that of ``rtn`` stands beside it.
    """

    target: Path
    format: str
    layers: int
    parameters: int
    bytes_before: int
    bytes_after: int
    relative_error: dict[str, float]

    def __str__(self) -> str:
        errors = ", ".join(f"{error:.4f} ({rounding})" for rounding, error in self.relative_error.items())
        return (
            f"{self.target}: {self.layers} layers, {self.parameters / 1e6:.1f} M weights in {self.format}\n"
            f"size {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB\n"
            f"relative error {errors}"
        )


@dataclass
class _Written:
    """Results of the second pass: the index of the new shards, and error sums by rounding."""

    weight_map: dict[str, str] = field(default_factory=dict)
    total_bytes: int = 0
    error_sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def add_error(self, rounding: Rounding, sums: torch.Tensor) -> None:
        self.error_sums[rounding] = self.error_sums.get(rounding, 0) + sums

    def relative_error(self) -> dict[str, float]:
        return {rounding: relative_error(sums) for rounding, sums in self.error_sums.items()}


def quantize_checkpoint(
    source: Path,
    target: Path,
    format: str = DEFAULT_FORMAT,
    rounding: Rounding = DEFAULT_ROUNDING,
    locked: bool = False,
) -> QuantizeReport:
    """Write a four-bit copy of a checkpoint, show progress, and print sizes and error.

    Args:
        source: Folder of a plain transformers checkpoint in safetensors, one file or shards.
        target: Folder to make; the output is compressed-tensors ``nvfp4-pack-quantized`` or
            ``mxfp4-pack-quantized``, weights only.
        format: ``nvfp4`` or ``mxfp4``.
        rounding: ``rtn`` or ``mse``, see :func:`qerl.fp4.rounding.quantize`.
        locked: True if no other process can be writing the target; remains of a killed one are then deleted.

    Raises:
        QeRLError: The source is damaged, already quantised, has no layer to quantise, NaN or Inf or a width
            that the block size does not divide; the target exists or is being written; the disk is full.
            Nothing of a new target is left then.
    """
    blocks = block_format(format)
    check_rounding(rounding)
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is not None:
        raise QeRLError(f"{source} is quantised already; quantise its 16-bit model.")
    layers = _layers_to_quantize(checkpoint, blocks)
    console = Console()
    with (
        new_checkpoint(target, locked) as folder,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        _check_room(checkpoint, layers, blocks, folder)
        amax = _group_amax(checkpoint, layers, progress)
        written = _write_shards(checkpoint, folder, amax, blocks, rounding, progress)
        _write_rest(checkpoint, folder, layers, blocks, rounding, written)
    report = QuantizeReport(
        target,
        format,
        layers=len(layers),
        parameters=sum(math.prod(header.shape) for header in layers.values()),
        bytes_before=checkpoint.size(),
        bytes_after=sum(file.stat().st_size for file in target.glob("*.safetensors")),
        relative_error=written.relative_error(),
    )
    console.print(str(report), highlight=False, soft_wrap=True)
    return report


def _layers_to_quantize(checkpoint: Checkpoint, format: BlockFormat) -> dict[str, Header]:
    """Qualified name -> header of the weight, of every layer to quantise; all of them fit the format."""
    layers, others = {}, []
    if merged := set(checkpoint.names.values()) - checkpoint.separate_headers.keys():
        raise QeRLError(
            f"{checkpoint.folder} holds the experts of a layer as one tensor ({min(merged)}), which cannot "
            f"be saved packed; set weights: {format.name} when you load the model, which packs them then."
        )
    check_experts(str(checkpoint.folder), (name for name, _ in checkpoint.headers))
    for shard, headers in checkpoint.shards.items():
        for name, header in headers.items():
            module = name.removesuffix(".weight")
            if module == name or len(header.shape) != 2 or not is_quantized(module):
                others += [module] if len(header.shape) == 2 and left_out(module) else []
                continue
            if header.dtype not in _ELEMENT_BYTES:
                raise QeRLError(
                    f"{name} in {checkpoint.folder / shard} is {header.dtype}; it must be BF16, FP16 or FP32."
                )
            if header.shape[1] % format.block_size:
                raise QeRLError(
                    f"{name} in {checkpoint.folder / shard} has {header.shape[1]} inputs, not a multiple of "
                    f"{format.block_size}, so {format.name} cannot store it."
                )
            layers[module] = header
    if not layers:
        raise QeRLError(
            f"{checkpoint.folder} has no decoder layers with projections named *_proj, as Llama, Qwen and "
            "Mistral have; this model family is not supported."
        )
    if others:
        raise QeRLError(
            f"{checkpoint.folder} has matrices in its decoder layers that are not named *_proj ({others[0]}) "
            "and would stay unquantised; this model family is not supported."
        )
    return layers


def _check_room(
    checkpoint: Checkpoint, layers: Mapping[str, Header], format: BlockFormat, folder: Path
) -> None:
    """Raise if the disk has too little room, before the work rather than after it."""
    needed = checkpoint.size()
    for header in layers.values():
        elements = math.prod(header.shape)
        needed += elements // 2 + elements // format.block_size - elements * _ELEMENT_BYTES[header.dtype]
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise QeRLError(
            f"The quantised checkpoint takes {needed / 1e9:.2f} GB but the disk of {folder.parent} has "
            f"{free / 1e9:.2f} GB free; make room or choose another disk."
        )


def _group_amax(checkpoint: Checkpoint, layers: Mapping[str, Header], progress: Progress) -> dict[str, float]:
    """First pass: layer -> largest magnitude of all layers that share its global scale."""
    amax: dict[tuple[str, ...], float] = {}
    task = progress.add_task("Ranges", total=sum(map(len, checkpoint.shards.values())))
    for shard, headers in checkpoint.shards.items():
        for name, tensor in checkpoint.read(shard):
            if headers[name].dtype in _ELEMENT_BYTES and tensor.numel():
                largest = float(largest_magnitude(tensor))
                if not math.isfinite(largest):
                    raise QeRLError(f"{name} in {checkpoint.folder / shard} has NaN or Inf; fetch it again.")
                group = fused_group(name.removesuffix(".weight"))
                amax[group] = max(largest, amax.get(group, 0.0))
            progress.advance(task)
    return {module: amax[fused_group(module)] for module in layers}


def _write_shards(
    checkpoint: Checkpoint,
    folder: Path,
    amax: Mapping[str, float],
    format: BlockFormat,
    rounding: Rounding,
    progress: Progress,
) -> _Written:
    """Second pass: each shard becomes one of the same name in ``folder``."""
    written = _Written()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = progress.add_task("Quantising", total=sum(map(len, checkpoint.shards.values())))
    for shard in checkpoint.shards:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in checkpoint.read(shard):
            module = name.removesuffix(".weight")
            if module != name and module in amax:
                weight_NK = tensor.to(device)
                packed = quantize(weight_NK, format, rounding, amax[module])
                written.add_error(rounding, error_sums(weight_NK, packed).cpu())
                if rounding != "rtn":
                    nearest = quantize(weight_NK, format, "rtn", amax[module])
                    written.add_error("rtn", error_sums(weight_NK, nearest).cpu())
                made = packed_tensors(module, packed)
                tensors |= {key: value.cpu() for key, value in made.items()}
            else:
                tensors[name] = tensor
            progress.advance(task)
        write_shard(folder / shard, tensors)
        written.weight_map |= dict.fromkeys(tensors, shard)
        written.total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    return written


def _write_rest(
    checkpoint: Checkpoint,
    folder: Path,
    layers: Mapping[str, Header],
    format: BlockFormat,
    rounding: Rounding,
    written: _Written,
) -> None:
    """Write everything that is not a shard: config, index, and copies of the source's other files."""
    ignore = ["lm_head", *_other_linears(checkpoint, layers)]
    config = {
        **checkpoint.config,
        "quantization_config": quantization_config(format, ignore),
        "qerl_rounding": rounding,
    }
    write_json(folder / "config.json", config)
    if list(checkpoint.shards) != [SINGLE_FILE]:
        index = {"metadata": {"total_size": written.total_bytes}, "weight_map": written.weight_map}
        write_json(folder / INDEX_FILE, index)
    copy_other_files(checkpoint, folder)


def _other_linears(checkpoint: Checkpoint, layers: Mapping[str, Header]) -> list[str]:
    """Matrices outside the decoder layers, which stay as they are; readers expect codes in unlisted ones."""
    matrices = (
        name.removesuffix(".weight")
        for headers in checkpoint.shards.values()
        for name, header in headers.items()
        if name.endswith(".weight") and len(header.shape) == 2
    )
    return [
        module
        for module in matrices
        if module not in layers and module != "lm_head" and not module.endswith("embed_tokens")
    ]
