"""Four-bit block formats: what the bytes mean, and how a matrix becomes them.

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

This module is the specification: plain torch on any device, against which kernels are tested. It is itself
tested bit for bit against compressed-tensors 0.20, whose on-disk layout it shares: ``codes`` hold two
elements a byte, the even column in the low nibble; ``global_scale`` is a divisor.

All arithmetic is FP32, whatever the dtype of the weight. compressed-tensors computes in the weight's dtype;
given the same values in FP32 it agrees with this module on every byte. Following it into 16 bits was given
up: BF16 rounds each scale once more, and in FP16 the global scale overflows for every matrix with amax
below 0.041.

Sources: OCP Microscaling Formats (MX) 1.0, sections 5 and 6 (E2M1, E8M0, blocks); NVIDIA, "Pretraining Large
Language Models with NVFP4" (arXiv 2509.25149), appendix B (two levels); QeRL (arXiv 2510.11696), section 3.

Shapes: N outputs, K inputs, G = K / block size blocks a row, n rows of one chunk.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from qerl import weight_formats
from qerl.errors import QeRLError
from qerl.weight_formats import ROUNDINGS, Rounding

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0

# A block whose scale rounds to zero still needs a divisor. Any would do, since its codes are all zero; this
# one is what compressed-tensors stores.
_ZERO_BLOCK_SCALE = 0.125

# Rows are quantised a few at a time so that the FP32 temporaries stay near 100 MB for a matrix of any size.
_CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True)
class BlockFormat:
    """What the bytes of one four-bit format mean.

    Attributes:
        name: Its name in `qerl.weight_formats`.
        scale_dtype: ``float8_e4m3fn``, or ``uint8`` for an E8M0 exponent with bias 127.
        scale_bytes: The lowest and the highest byte that a block scale may have.
        search_steps: The scales that ``mse`` tries, counted in representable scales from that of ``rtn``.
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
        """Whether one FP32 number per matrix scales the block scales."""
        return weight_formats.FORMATS[self.name].matrix_scale_bytes > 0


# The search steps: in E4M3 the block maximum falls on 6 at 0 and on 4 ("four over six", arXiv 2512.02010) at
# +4 or +5; negative steps clip it for the others' sake. Relative error of a normal 1024 x 1024 matrix: rtn
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
    scale_bytes=(0, 254),
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


def check_rounding(rounding: str) -> None:
    """Raise QeRLError unless there is such a rounding."""
    if rounding not in ROUNDINGS:
        raise QeRLError(f"There is no rounding {rounding}; choose one of {', '.join(ROUNDINGS)}.")


@dataclass(frozen=True)
class PackedRows:
    """A quantised matrix [N, K] as it lies on disk; a `qerl.fp4.storage.PackedWeight`.

    Attributes:
        codes: uint8 [N, K/2], two E2M1 codes a byte, even column in the low nibble.
        scales: [N, G] in the format's scale dtype.
        global_scale: fp32 [1], the divisor of the scales; None where the format has none.
        format: Which format it is.

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
        """(N, K) of the matrix that this stands for."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @classmethod
    def of_tensors(
        cls,
        tensors: dict[str, torch.Tensor],
        format: BlockFormat,
        rows: int,  # noqa: ARG003
    ) -> "PackedRows":
        """See `PackedWeight.of_tensors`; the codes say how many rows there are."""
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
        """Writes the matrix that the codes stand for into ``out``, whose rows need not be next to each other.

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
        blocks.mul_(_block_steps(self.scales, self.global_scale))
        if whole_NK is not out_NK:
            out_NK.copy_(whole_NK)


@torch.no_grad()
def quantize(
    weight_NK: torch.Tensor,
    format: BlockFormat,
    rounding: Rounding,
    amax: float | torch.Tensor | None = None,
) -> PackedRows:
    """Round a matrix to a four-bit format.

    Args:
        weight_NK: [N, K], floating point, finite; K a multiple of the format's block size.
        format: ``NVFP4`` or ``MXFP4``.
        rounding: ``rtn`` maps each block's maximum to 6 and rounds to nearest, ties to the even code. ``mse``
            starts there and keeps, per block, the scale with the smallest squared error
            (:func:`_search_scales`); it takes about eight times as long.
        amax: Largest magnitude of all matrices that share this one's global scale (``groups.py`` says which
            do); by default the matrix's own. MXFP4 has no global scale and takes nothing from it.

    Raises:
        QeRLError: Not a floating-point matrix, NaN or Inf in it, a width that the block size does not divide,
            or an ``amax`` below the matrix's own.
    """
    check_rounding(rounding)
    own_amax = _checked_amax(weight_NK, format)
    if amax is not None and float(amax) < float(own_amax):
        raise QeRLError(
            f"amax is {float(amax):g} but the weight reaches {float(own_amax):g}; pass the largest of "
            "the group."
        )
    global_scale = None
    if format.has_global_scale:
        shared = (
            own_amax if amax is None else torch.as_tensor(amax, dtype=torch.float32, device=weight_NK.device)
        )
        global_scale = _global_scale(shared)

    n, k = weight_NK.shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=weight_NK.device)
    scales = torch.empty(n, k // format.block_size, dtype=format.scale_dtype, device=weight_NK.device)
    for rows in _row_chunks(n, k):
        blocks = weight_NK[rows].float().unflatten(1, (-1, format.block_size))
        chosen = _rtn_scales(blocks, global_scale, format)
        if rounding == "mse":
            chosen = _search_scales(blocks, chosen, global_scale, format)
        scales[rows] = chosen
        codes[rows] = _pack(_encode(blocks, _block_steps(chosen, global_scale)).flatten(1))
    return PackedRows(codes, scales, global_scale, format)


def dequantize(packed: PackedRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [N, K] that the codes stand for, in new memory; see :meth:`PackedRows.write_dense`."""
    out_NK = torch.empty(packed.shape, dtype=dtype, device=packed.codes.device)
    packed.write_dense(out_NK)
    return out_NK


@torch.no_grad()
def error_sums(weight_NK: torch.Tensor, packed: PackedRows) -> torch.Tensor:
    """fp64 [2]: ``||w - w_hat||^2`` and ``||w||^2`` (Frobenius), which add up over matrices."""
    sums = torch.zeros(2, dtype=torch.float64, device=weight_NK.device)
    for rows in _row_chunks(*packed.shape):
        part = PackedRows(packed.codes[rows], packed.scales[rows], packed.global_scale, packed.format)
        exact = weight_NK[rows].double()
        sums += torch.stack([(exact - dequantize(part)).square().sum(), exact.square().sum()])
    return sums


def relative_error(sums: torch.Tensor) -> float:
    """``||w - w_hat|| / ||w||`` of what :func:`error_sums` gave, added up or not; 0 for matrices of zeros."""
    error, norm = sums.tolist()
    return math.sqrt(error / norm) if norm else 0.0


def largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 scalar tensor; NaN or Inf if the tensor, which must not be empty, has any."""
    low, high = tensor.aminmax()
    return torch.maximum(-low, high).float()


def _checked_amax(weight_NK: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Largest magnitude, fp32 scalar tensor, of a weight that can be quantised."""
    if weight_NK.ndim != 2 or not weight_NK.is_floating_point() or weight_NK.numel() == 0:
        raise QeRLError(
            f"A weight of shape {list(weight_NK.shape)} and type {weight_NK.dtype} cannot be quantised; "
            "it must be a floating-point matrix."
        )
    k = weight_NK.shape[1]
    if k % format.block_size:
        raise QeRLError(
            f"The weight's input width {k} is not a multiple of {format.block_size}, the block size of "
            f"{format.name}."
        )
    amax = largest_magnitude(weight_NK)
    if not torch.isfinite(amax):
        raise QeRLError(
            "The weight has NaN or Inf among its values; the checkpoint it comes from is damaged."
        )
    return amax


def _global_scale(amax: torch.Tensor) -> torch.Tensor:
    """fp32 [1]: maps the largest block scale to the end of E4M3; 1 where amax is too small for it."""
    # Times the reciprocal, not divided: it is what torch makes of ``number / tensor``, and so what
    # compressed-tensors stores; the two differ in the last bit.
    scale = E4M3_MAX * E2M1_MAX * amax.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
    return torch.where(torch.isinf(scale), torch.ones_like(scale), scale).reshape(1)


def _rtn_scales(blocks: torch.Tensor, global_scale: torch.Tensor | None, format: BlockFormat) -> torch.Tensor:
    """Scales [n, G] that map the maximum of each block [n, G, block] to (about) 6."""
    block_amax = blocks.abs().amax(-1)
    if global_scale is None:
        return _e8m0_scales(block_amax)
    # A tensor, because CUDA divides by a Python number as a product with its reciprocal: one bit off.
    most = block_amax.new_tensor(E2M1_MAX)
    # No block exceeds amax, so this is at most 448 and a rounding error, which E4M3 rounds to 448.
    scales = (global_scale * (block_amax / most)).to(format.scale_dtype)
    # Zero is tested after rounding: a block 2^-20 times smaller than the matrix's maximum rounds away too.
    return torch.where(scales.float() == 0, _ZERO_BLOCK_SCALE, scales.float()).to(format.scale_dtype)


def _e8m0_scales(block_amax: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes [n, G] of 2^(floor(log2 amax) - 2), doubled where amax >= 1.75 * 2^floor(log2 amax).

    2 is the exponent of 6, E2M1's maximum (OCP MX 1.0, section 6.3). Doubling for blocks that would reach 7
    and more, and so be clipped, departs from the standard's example and is what compressed-tensors does.
    """
    mantissa, exponent = torch.frexp(block_amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    floor_log2 = exponent - 1 + (mantissa >= 0.875)
    byte = torch.where(block_amax == 0, 0, floor_log2 - 2 + 127)
    return byte.clamp(0, 254).to(torch.uint8)


def _search_scales(
    blocks: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | None, format: BlockFormat
) -> torch.Tensor:
    """Scales [n, G] with the smallest squared error of each block among the neighbours of the rtn ``scales``.

    Positive E4M3 numbers and E8M0 exponents are both ordered like their bytes, so a neighbour is the byte
    plus or minus one. The rtn scale wins ties, so no block is worse than with rtn.
    """

    def block_error(candidate: torch.Tensor) -> torch.Tensor:
        steps = _block_steps(candidate, global_scale)
        return (blocks - _decode(_encode(blocks, steps)) * steps).square_().sum(-1)

    lowest, highest = format.scale_bytes
    rtn_bytes = scales.view(torch.uint8)
    best_bytes, best_error = rtn_bytes, block_error(scales)
    for step in format.search_steps:
        candidate = (rtn_bytes.int() + step).clamp(lowest, highest).to(torch.uint8)
        error = block_error(candidate.view(format.scale_dtype))
        better = error < best_error
        best_bytes = torch.where(better, candidate, best_bytes)
        best_error = torch.where(better, error, best_error)
    return best_bytes.view(format.scale_dtype)


def _block_steps(scales: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """fp32 [n, G, 1]: what the E2M1 value 1 stands for in each block."""
    if global_scale is None:
        return scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    return (scales.float() / global_scale).unsqueeze(-1)


def _encode(blocks: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """E2M1 codes, uint8 of the blocks' shape: nearest value, ties to the even code, zero never negative.

    A negative number that rounds to zero keeps its sign bit (code 8), as in compressed-tensors.
    """
    scaled = blocks / steps
    magnitude = scaled.abs()
    # A code counts the midpoints below the value; on the midpoint itself the even neighbour wins.
    codes = (scaled < 0).to(torch.uint8) << 3
    for lower, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
        midpoint = (low + high) / 2
        codes += (magnitude >= midpoint) if lower % 2 else (magnitude > midpoint)
    return codes


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 E2M1 values of unpacked codes, any shape."""
    return _code_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _pack(codes_NK: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, even column in the low nibble: [N, K] -> [N, K/2]."""
    return codes_NK[:, 0::2] | codes_NK[:, 1::2] << 4


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


def _row_chunks(n: int, k: int) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // k)
    return (slice(start, start + rows) for start in range(0, n, rows))
