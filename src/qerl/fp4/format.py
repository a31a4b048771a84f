"""Four-bit block formats: what the bytes mean.

A weight is cut into blocks of consecutive inputs (along K, the dimension a matrix product sums over). Every
element of a block is one of sixteen E2M1 values,

    code   0   1    2   3    4   5   6   7        bit 3 is the sign
    value  0  0.5   1  1.5   2   3   4   6

times a scale that the block shares. The two formats differ in that scale:

* NVFP4: blocks of 16, scale in E4M3 (three mantissa bits, so a block's maximum lands close to 6), and because
  E4M3 ends at 448, one FP32 number for the whole matrix on top ("two-level scaling"):
  ``w = code * (scale / global_scale)``, ``global_scale = 448 * 6 / amax``.
* MXFP4: blocks of 32, scale a power of two in E8M0 (an exponent byte), no second level:
  ``w = code * 2^(scale - 127)``.

This module and `qerl.fp4.rounding`, which turns a matrix into these bytes, are the specification: plain torch
on any device, against which kernels are tested. They are themselves tested bit for bit against
compressed-tensors 0.20, whose on-disk layout they share: ``codes`` hold two elements a byte, the even column
in the low nibble; ``global_scale`` is a divisor. All arithmetic is FP32.

Sources: OCP Microscaling Formats (MX) 1.0, sections 5 and 6 (E2M1, E8M0, blocks); NVIDIA, "Pretraining Large
Language Models with NVFP4" (arXiv 2509.25149), appendix B (two levels); QeRL (arXiv 2510.11696), section 3.

Shapes: N outputs, K inputs, G = K / block size blocks a row, n some of the rows.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from qerl import weight_formats
from qerl.errors import QeRLError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0


@dataclass(frozen=True)
class BlockFormat:
    """The meaning of the bytes of one four-bit format.

    Attributes:
        name: Its name in `qerl.weight_formats`.
        scale_dtype: ``float8_e4m3fn``, or ``uint8`` for an E8M0 exponent with bias 127.
        scale_bytes: The lowest and the highest byte that rounding gives a block scale: E4M3's smallest and
            largest positive number; for powers of two, those whose sixfold FP32 holds.
        search_steps: Offsets of the scales that ``mse`` tries, in representable scales from that of ``rtn``.
        checkpoint_format: Name of the format in compressed-tensors' ``config.json``.
    """

    name: weight_formats.WeightFormatName
    scale_dtype: torch.dtype
    scale_bytes: tuple[int, int]
    search_steps: tuple[int, ...]
    checkpoint_format: str

    @property
    def block_size(self) -> int:
        """Elements along K that share a scale."""
        size = weight_formats.FORMATS[self.name].block_size
        assert size is not None
        return size

    @property
    def has_global_scale(self) -> bool:
        """True if one FP32 number per matrix scales the block scales."""
        return weight_formats.FORMATS[self.name].matrix_scale_bytes > 0


# The search steps: in E4M3 the block maximum falls on 6 at 0 and on 4 ("four over six", arXiv 2512.02010) at
# +4 or +5; negative steps clip it in favour of the others. Relative error of a normal 1024 x 1024 matrix: rtn
# .0952, four over six alone .0852, these steps .0813, twice as many .0813; a global scale that leaves the
# largest block room for 4 (256 * 6 / amax) changes less than .0002. A power of two has one neighbour worth
# trying, the smaller: .1121 becomes .1115.
NVFP4 = BlockFormat(
    "nvfp4",
    scale_dtype=torch.float8_e4m3fn,
    scale_bytes=(1, 126),
    search_steps=(-2, -1, 1, 2, 3, 4, 5, 6),
    checkpoint_format="nvfp4-pack-quantized",
)
MXFP4 = BlockFormat(
    "mxfp4",
    scale_dtype=torch.uint8,
    scale_bytes=(0, 252),
    search_steps=(-1,),
    checkpoint_format="mxfp4-pack-quantized",
)
BLOCK_FORMATS: dict[str, BlockFormat] = {format.name: format for format in (NVFP4, MXFP4)}
"""The formats of this module by name: those of `qerl.weight_formats.PACKED_FORMATS`."""


def block_format(name: str) -> BlockFormat:
    """The four-bit format of this name.

    Raises:
        QeRLError: No four-bit format has this name.
    """
    if name not in BLOCK_FORMATS:
        raise QeRLError(f"There is no four-bit format {name}; choose one of {', '.join(BLOCK_FORMATS)}.")
    return BLOCK_FORMATS[name]


@dataclass(frozen=True)
class PackedRows:
    """A quantised matrix [N, K] as it lies on disk; a `qerl.fp4.storage.PackedWeight`.

    Attributes:
        codes: uint8 [N, K/2], two E2M1 codes a byte, even column in the low nibble.
        scales: [N, G] in the format's scale dtype.
        global_scale: fp32 [1], the divisor of the scales; None where the format has none.
        format: Format of codes and scales.

    Raises:
        QeRLError: The tensors do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    format: BlockFormat

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != torch.uint8:
            raise QeRLError(
                f"Packed codes are {self.codes.dtype} {list(self.codes.shape)}; they must be a uint8 matrix."
            )
        n, k = self.shape
        expected = [n, k // self.format.block_size]
        if list(self.scales.shape) != expected or k % self.format.block_size:
            raise QeRLError(
                f"Block scales have shape {list(self.scales.shape)}; a {self.format.name} weight of "
                f"{n} x {k} needs {expected}."
            )
        if self.scales.dtype != self.format.scale_dtype:
            raise QeRLError(
                f"Block scales are {self.scales.dtype}; {self.format.name} needs {self.format.scale_dtype}."
            )
        if self.format.has_global_scale != (self.global_scale is not None):
            rule = "needs a" if self.format.has_global_scale else "has no"
            raise QeRLError(f"A {self.format.name} weight {rule} global scale.")
        if self.global_scale is not None and (
            self.global_scale.dtype != torch.float32 or list(self.global_scale.shape) != [1]
        ):
            raise QeRLError(
                f"The global scale is {self.global_scale.dtype} {list(self.global_scale.shape)}; "
                "it must be float32 [1]."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def in_tiles(self) -> bool:
        """False; see `qerl.fp4.storage.PackedWeight`."""
        return False

    @classmethod
    def of_tensors(cls, tensors: dict[str, torch.Tensor], format: BlockFormat) -> "PackedRows":
        """See `PackedWeight.of_tensors`."""
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        codes, scales, global_scale = (tensors.get(name) for name in names)
        assert codes is not None and scales is not None
        return cls(codes, scales, global_scale, format)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `PackedWeight.tensors`."""
        tensors = {"weight_packed": self.codes, "weight_scale": self.scales}
        if self.global_scale is not None:
            tensors["weight_global_scale"] = self.global_scale
        return tensors

    def to_rows(self) -> "PackedRows":
        """The weight itself."""
        return self

    @torch.no_grad()
    def write_dense(self, out_NK: torch.Tensor) -> None:
        """Write the matrix into ``out``, whose rows need not be adjacent.

        FP32 throughout, one cast at the end: ``code * (scale / global_scale)``, the division first, which is
        the order of compressed-tensors and decides the last bit.
        """
        # One gather turns a byte into both its elements: a table row is two FP32 numbers, moved as one int64.
        table = _byte_table(self.codes.device)
        fits = out_NK.dtype == torch.float32 and out_NK.is_contiguous() and out_NK.device == self.codes.device
        whole_NK = out_NK if fits else torch.empty(self.shape, device=self.codes.device)
        pairs = whole_NK.view(torch.int64).flatten()
        torch.index_select(table, 0, self.codes.flatten().int(), out=pairs)
        blocks = whole_NK.view(self.shape[0], -1, self.format.block_size)
        blocks.mul_(block_steps(self.scales, self.global_scale))
        if whole_NK is not out_NK:
            out_NK.copy_(whole_NK)


def dequantize(packed: PackedRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [N, K] in new memory; see :meth:`PackedRows.write_dense`."""
    out_NK = torch.empty(packed.shape, dtype=dtype, device=packed.codes.device)
    packed.write_dense(out_NK)
    return out_NK


def block_steps(scales: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """fp32 [n, G, 1]: the value in each block of the E2M1 number 1."""
    if global_scale is None:
        return scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    return (scales.float() / global_scale).unsqueeze(-1)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 values in fp32 of codes stored one per byte, any shape."""
    return _code_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


@lru_cache
def _code_table(device: torch.device) -> torch.Tensor:
    """fp32 [16]: value of each code."""
    magnitudes = torch.tensor(E2M1_VALUES, device=device)
    return torch.cat([magnitudes, -magnitudes])


@lru_cache
def _byte_table(device: torch.device) -> torch.Tensor:
    """int64 [256]: bit patterns of the two fp32 values that a byte of codes stands for, low nibble first."""
    values = _code_table(device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).view(torch.int64).flatten()
