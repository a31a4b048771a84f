"""MXFP4 written as NVFP4: the same numbers, so that one set of GPU kernels serves both formats.

Codes mean the same in both. A power-of-two scale is also an E4M3 number if its exponent lies between -9 (the
smallest subnormal) and 8, and the global scale, itself a power of two, moves a matrix's exponents there. Each
block of 32 becomes two of 16 with one scale: 4.5 bits a weight instead of 4.25.

Given up: matrices whose blocks differ by more than 2^17 in scale, which no trained model was seen to have.
"""

import torch

from qerl.errors import QeRLError
from qerl.fp4.format import MXFP4, NVFP4, PackedRows

_LARGEST, _SPAN = 8, 17  # E4M3 holds the powers of two from 2^-9 to 2^8
_BIAS = 127


def fits_nvfp4(packed: PackedRows) -> bool:
    """Whether an MXFP4 matrix can be written as NVFP4."""
    exponents = packed.scales[_used_blocks(packed)]
    return exponents.numel() == 0 or int(exponents.max()) - int(exponents.min()) <= _SPAN


def as_nvfp4(packed: PackedRows) -> PackedRows:
    """The MXFP4 matrix in NVFP4, equal in every element; the codes are shared, not copied.

    Raises:
        QeRLError: The scales of its blocks differ by more than 2^17.
    """
    if not fits_nvfp4(packed):
        raise QeRLError("An MXFP4 weight has block scales further apart than 2^17; NVFP4 cannot hold them.")
    used_NG = _used_blocks(packed)
    exponents_NG = torch.where(used_NG, packed.scales, 0).int()
    shift = _LARGEST - max(int(exponents_NG.max()), _LARGEST)  # 2^127 is the largest global scale
    # Blocks of zeros may have any exponent; theirs is brought into range.
    powers_NG = torch.exp2((exponents_NG + shift).clamp(min=_LARGEST - _SPAN).float())
    scales_NG = powers_NG.repeat_interleave(2, dim=1).to(torch.float8_e4m3fn)
    global_scale = torch.full((1,), 2.0 ** (shift + _BIAS), device=packed.codes.device)
    return PackedRows(packed.codes, scales_NG, global_scale, NVFP4)


def from_nvfp4(packed: PackedRows) -> PackedRows:
    """The MXFP4 matrix that :func:`as_nvfp4` wrote; only the exponents of blocks of zeros may differ."""
    assert packed.global_scale is not None
    scales_NG = packed.scales[:, ::2].float() / packed.global_scale
    exponents_NG = torch.log2(scales_NG).round().int() + _BIAS
    return PackedRows(packed.codes, exponents_NG.clamp(min=0).to(torch.uint8), None, MXFP4)


def _used_blocks(packed: PackedRows) -> torch.Tensor:
    """Blocks [N, G] with an element that is not zero."""
    n, groups = packed.scales.shape
    return ((packed.codes & 0x77) != 0).view(n, groups, -1).any(dim=-1)
