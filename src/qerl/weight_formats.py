"""Weight formats of a model's linear layers, and the facts about each that other packages need.

One entry of `FORMATS` is all that settings, command line, memory plan, benchmarks, doctor and loader know of
a format; none of them names one. `qerl.fp4.format` says what the bytes mean, for each format whose `packed`
is true.

This module imports neither torch nor another package of the project, so a command that only prints its help
can use it too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

WeightFormatName = Literal["nvfp4", "mxfp4", "nf4", "bf16", "as-published"]
"""Name of a format in recipes and on the command line."""

Rounding = Literal["rtn", "mse"]
"""How a 16-bit weight becomes a packed one: nearest value, or the scale of least squared error."""

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

DEFAULT_FORMAT: WeightFormatName = "nvfp4"
"""Default for a folder in 16 bits; a quantised one has its own (`qerl.fp4.published.choose_weights`)."""
AS_PUBLISHED: WeightFormatName = "as-published"
DEFAULT_ROUNDING: Rounding = "mse"


@dataclass(frozen=True)
class WeightFormat:
    """One format of the linear layers.

    Attributes:
        name: As written in recipes and on the command line.
        summary: For help texts and `qerl doctor`.
        element_bits: Bits per element, scales not counted.
        block_size: Consecutive elements along K that share a scale; None where there are no scales.
        scale_bytes: Bytes per block scale as the GPU holds it.
        matrix_scale_bytes: Bytes of the scale per matrix on top of the block scales.
        engine_format: Name of the format in which the paged engine holds it.
        packed: True if this package packs it itself (`qerl.fp4`): `qerl quantize` writes it and a rounding
            applies to it.
        fused_update: True if the update computes these layers and their adapters with its own fused products
            (`qerl.lora.product`) and not one by one with PEFT.
        trains_in_full: True if the weights themselves can be trained, and not only an adapter on top.
        needs_cuda: True if a CUDA device is needed to load it.
        package: Python package that it needs besides the required ones.
    """

    name: WeightFormatName
    summary: str
    element_bits: int
    block_size: int | None = None
    scale_bytes: int = 0
    matrix_scale_bytes: int = 0
    engine_format: WeightFormatName | None = None
    packed: bool = False
    fused_update: bool = True
    trains_in_full: bool = False
    needs_cuda: bool = False
    package: str | None = None

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of a matrix, block scales included, the scale per matrix not."""
        scale = self.scale_bytes / self.block_size if self.block_size else 0.0
        return self.element_bits / 8 + scale

    @property
    def on_engine(self) -> "WeightFormat":
        """The format in which the paged engine holds these weights."""
        return FORMATS[self.engine_format or self.name]

    def matrix_bytes(self, elements: int) -> int:
        """Bytes of one matrix with this many elements."""
        return round(elements * self.bytes_per_element) + self.matrix_scale_bytes


FORMATS: dict[WeightFormatName, WeightFormat] = {
    format.name: format
    for format in (
        WeightFormat(
            name="nvfp4",
            summary="four bits, blocks of 16 with an E4M3 scale, one FP32 scale per matrix",
            element_bits=4,
            block_size=16,
            scale_bytes=1,
            matrix_scale_bytes=4,
            packed=True,
        ),
        WeightFormat(
            name="mxfp4",
            summary="four bits, blocks of 32 with a power of two as scale",
            element_bits=4,
            block_size=32,
            scale_bytes=1,
            engine_format="nvfp4",
            packed=True,
        ),
        WeightFormat(
            name="nf4",
            summary="four bits, quantiles of the normal distribution in blocks of 64 (QLoRA)",
            element_bits=4,
            block_size=64,
            scale_bytes=4,  # FP32, because the paged engine undoes bitsandbytes' double quantisation
            fused_update=False,
            needs_cuda=True,
            package="bitsandbytes",
        ),
        WeightFormat(
            name="bf16",
            summary="unquantised, in the dtype that the model is loaded in",
            element_bits=16,
            trains_in_full=True,
        ),
        WeightFormat(
            name=AS_PUBLISHED,
            summary="each layer as its folder holds it: four bits stay packed, FP8 becomes 16 bits",
            element_bits=16,  # of what is not packed; the plan counts each layer by its own format
            engine_format="bf16",
        ),
    )
}
"""Every format, by name, in the order in which help texts list them."""

PACKED_FORMATS: tuple[WeightFormatName, ...] = tuple(
    name for name, format in FORMATS.items() if format.packed
)
"""Names of the formats that `qerl quantize` writes."""
