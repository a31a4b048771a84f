"""Rounding of a matrix to the codes and scales of a four-bit format, and its error.

All arithmetic is FP32, whatever the dtype of the weight. compressed-tensors computes in the weight's dtype;
given the same values in FP32 it agrees with this module on every byte. Computing in 16 bits as it does was
given up: BF16 rounds each scale once more, and in FP16 the global scale overflows for every matrix with amax
below 0.041.

Shapes: N outputs, K inputs, G = K / block size blocks a row, n rows of one chunk.
"""

import itertools
import math
from collections.abc import Iterator

import torch

from qerl.errors import QeRLError
from qerl.fp4.format import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    MXFP4,
    BlockFormat,
    PackedRows,
    block_steps,
    decode,
    dequantize,
)
from qerl.weight_formats import ROUNDINGS, Rounding

# A block whose scale rounds to zero still needs a divisor. Any would do, since its codes are all zero; this
# one is what compressed-tensors stores.
_ZERO_BLOCK_SCALE = 0.125

# Rows are quantised a few at a time so that the FP32 temporaries stay near 100 MB for a matrix of any size.
_CHUNK_ELEMENTS = 2**22


def check_rounding(rounding: str) -> None:
    """Raise QeRLError unless there is such a rounding."""
    if rounding not in ROUNDINGS:
        raise QeRLError(f"There is no rounding {rounding}; choose one of {', '.join(ROUNDINGS)}.")


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
        amax: Largest magnitude of all matrices that share this one's global scale (`qerl.fp4.groups`); by
            default the matrix's own. MXFP4 has no global scale and ignores it.

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
        codes[rows] = _pack(_encode(blocks, block_steps(chosen, global_scale)).flatten(1))
    return PackedRows(codes, scales, global_scale, format)


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
    """``||w - w_hat|| / ||w||`` from :func:`error_sums` of one or more matrices; 0 if all are zero."""
    error, norm = sums.tolist()
    return math.sqrt(error / norm) if norm else 0.0


def largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of a tensor that is not empty, fp32 scalar tensor; NaN or Inf if it has any."""
    low, high = tensor.aminmax()
    return torch.maximum(-low, high).float()


def _checked_amax(weight_NK: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Check that a weight can be quantised, and return its largest magnitude, fp32 scalar tensor."""
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
        raise QeRLError("The weight has NaN or Inf among its values; its checkpoint is damaged.")
    return amax


def _global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Global scale, fp32 [1], that maps the largest block scale to E4M3's maximum; 1 if amax is too small."""
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
    largest = block_amax.new_tensor(E2M1_MAX)
    # No block exceeds amax, so this is at most 448 and a rounding error, which E4M3 rounds to 448.
    scales = (global_scale * (block_amax / largest)).to(format.scale_dtype)
    # Zero is tested after rounding: a block 2^-20 times smaller than the matrix's maximum rounds away too.
    return torch.where(scales.float() == 0, _ZERO_BLOCK_SCALE, scales.float()).to(format.scale_dtype)


def _e8m0_scales(block_amax: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes [n, G] of 2^(floor(log2 amax) - 2), doubled where amax >= 1.75 * 2^floor(log2 amax).

    2 is the exponent of 6, E2M1's maximum (OCP MX 1.0, section 6.3). Doubling for blocks that would reach 7
    and more, and so be clipped, departs from the standard's example and is what compressed-tensors does. From
    2.9e38 on a doubled scale times 6 is infinite in FP32, and compressed-tensors stores 1; here such blocks
    are clipped.
    """
    mantissa, exponent = torch.frexp(block_amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    floor_log2 = exponent - 1 + (mantissa >= 0.875)
    byte = torch.where(block_amax == 0, 0, floor_log2 - 2 + 127)
    return byte.clamp(*MXFP4.scale_bytes).to(torch.uint8)


def _search_scales(
    blocks: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | None, format: BlockFormat
) -> torch.Tensor:
    """Scales [n, G] with the smallest squared error of each block among the neighbours of the rtn ``scales``.

    Positive E4M3 numbers and E8M0 exponents are both ordered like their bytes, so a neighbour is the byte
    plus or minus one. The rtn scale wins ties, so no block is worse than with rtn. A block so far below the
    matrix's maximum that its rtn scale rounds to zero has the lowest scales for neighbours.
    """

    def block_error(candidate: torch.Tensor) -> torch.Tensor:
        steps = block_steps(candidate, global_scale)
        return (blocks - decode(_encode(blocks, steps)) * steps).square_().sum(-1)

    lowest, highest = format.scale_bytes
    rtn_bytes = scales.view(torch.uint8)
    lost = (blocks.abs().amax(-1, keepdim=True) < block_steps(scales, global_scale)).squeeze(-1)
    middle = torch.where(lost, lowest, rtn_bytes.int())
    best_bytes, best_error = rtn_bytes, block_error(scales)
    for step in format.search_steps:
        candidate = (middle + step).clamp(lowest, highest).to(torch.uint8)
        error = block_error(candidate.view(format.scale_dtype))
        better = error < best_error
        best_bytes = torch.where(better, candidate, best_bytes)
        best_error = torch.where(better, error, best_error)
    return best_bytes.view(format.scale_dtype)


def _encode(blocks: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """E2M1 codes, uint8 of the blocks' shape: nearest value, ties to the even code, code 0 for -0.0.

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


def _pack(codes_NK: torch.Tensor) -> torch.Tensor:
    """Pack two codes per byte, even column in the low nibble: [N, K] -> [N, K/2]."""
    return codes_NK[:, 0::2] | codes_NK[:, 1::2] << 4


def _row_chunks(n: int, k: int) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // k)
    return (slice(start, start + rows) for start in range(0, n, rows))
