"""Memory layouts of a four-bit weight, behind one interface.

A weight comes from disk as rows (`qerl.fp4.format.PackedRows`). The paged engine puts it into tiles, the
layout that tensor cores read (`PackedTiles`), and training dequantises it from there. Callers ask a weight
for a dense matrix, or for its rows, regardless of its layout. A new layout is a new class with the members of
`PackedWeight`.

Tiles are NVFP4 for both formats, so that one set of GPU kernels serves them: an MXFP4 weight is written as
NVFP4, which changes no number (`as_nvfp4`), and remembers what it was, so that its rows are MXFP4 again.
Codes mean the same in both. A power-of-two scale is also an E4M3 number if its exponent lies between -9 (the
smallest subnormal) and 8, and the global scale, itself a power of two, moves a matrix's exponents there. Each
block of 32 becomes two of 16 with one scale: 4.5 bits per weight instead of 4.25. Given up: matrices whose
blocks differ by more than 2^17 in scale, which were seen in no trained model.

Shapes: N outputs, K inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qerl.errors import QeRLError
from qerl.fp4.format import MXFP4, NVFP4, BlockFormat, PackedRows, dequantize
from qerl.kernels.weights.tiles import TILE, Tiles


class PackedWeight(Protocol):
    """A matrix [N, K] in four bits, in any layout.

    Attributes:
        format: The format of its rows, in which it is saved.
        shape: (N, K).
        in_tiles: True if the weight is in tiles, which tensor cores read as they are.
    """

    @property
    def format(self) -> BlockFormat: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def in_tiles(self) -> bool: ...

    @classmethod
    def of_tensors(cls, tensors: dict[str, torch.Tensor], format: BlockFormat) -> "PackedWeight":
        """The weight whose bytes are in ``tensors``: the inverse of :meth:`tensors`."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """The bytes, named as the buffers of a `qerl.fp4.linear.PackedLinear` and as on disk; no copy."""
        ...

    def to_rows(self) -> PackedRows:
        """Return the weight in the layout on disk; a copy unless it already has that layout."""
        ...

    def write_dense(self, out_NK: torch.Tensor) -> None:
        """Write the matrix into ``out``, whose rows need not be adjacent: exact in FP32, then cast."""
        ...


@dataclass(frozen=True, eq=False)
class PackedTiles:
    """A weight in the layout that tensor cores read.

    Attributes:
        tiles: Codes and block scales in NVFP4, the weight's part of a stack without its padding.
        global_scale: fp32 [1], the divisor of the block scales.
        format: The format of its rows.
    """

    tiles: Tiles
    global_scale: torch.Tensor
    format: BlockFormat

    @classmethod
    def of_tensors(cls, tensors: dict[str, torch.Tensor], format: BlockFormat) -> "PackedTiles":
        """See `PackedWeight.of_tensors`."""
        tiles = Tiles(tensors["weight_packed"], tensors["weight_scale"])
        return cls(tiles, tensors["weight_global_scale"], format)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.tiles.shape

    @property
    def in_tiles(self) -> bool:
        """True."""
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `PackedWeight.tensors`."""
        return {
            "weight_packed": self.tiles.codes,
            "weight_scale": self.tiles.scales,
            "weight_global_scale": self.global_scale,
        }

    def to_rows(self) -> PackedRows:
        """Return a copy of the weight in the layout and format on disk."""
        codes, scales = self.tiles.rows()
        rows = PackedRows(codes, scales.view(NVFP4.scale_dtype), self.global_scale, NVFP4)
        return rows if self.format is NVFP4 else from_nvfp4(rows)

    def write_dense(self, out_NK: torch.Tensor) -> None:
        """See `PackedWeight.write_dense`; on a CPU by way of the rows, on a GPU with a kernel of its own."""
        if not self.tiles.codes.is_cuda:
            self.to_rows().write_dense(out_NK)
            return
        from qerl.kernels.weights.dequantize import dequantize_tiles  # needs cuda-bindings

        dequantize_tiles(self.tiles, self.global_scale, out_NK)

    def write_transposed_e4m3(self, factor: float, out_KN: torch.Tensor) -> None:
        """Write the transpose of code times block scale times ``factor``, rounded to E4M3.

        Args:
            factor: At most 1/6, so that the largest product is a number of E4M3.
            out_KN: E4M3; its rows need not be adjacent, but their stride is a multiple of 16 bytes.
        """
        if not self.tiles.codes.is_cuda:
            without_global = PackedTiles(self.tiles, torch.ones(1), NVFP4).to_rows()
            out_KN.copy_((dequantize(without_global) * factor).T)
            return
        from qerl.kernels.weights.dequantize import transpose_to_e4m3  # needs cuda-bindings

        transpose_to_e4m3(self.tiles, factor, out_KN)


def why_no_tiles(weight: PackedWeight) -> str | None:
    """The reason why a weight cannot be put into tiles, as the end of a sentence; None if it can."""
    rows, width = weight.shape
    if rows % TILE or width % TILE:
        return f"is {rows} x {width}, which {TILE} does not divide"
    if not weight.in_tiles and weight.format is not NVFP4 and not fits_nvfp4(weight.to_rows()):
        return "has block scales that are further apart than 2^17"
    return None


def stack_tiles(weights: Sequence[PackedWeight]) -> tuple[Tiles, list[PackedTiles]]:
    """Stack weights with the same K into tiles; return the stack, and each weight as a view of its part.

    Args:
        weights: Rows for which :func:`why_no_tiles` returns None.

    Raises:
        QeRLError: A weight is in tiles already, so it belongs to another stack.
    """
    if any(weight.in_tiles for weight in weights):
        raise QeRLError("This model already belongs to a paged engine; use that one.")
    formats = [weight.format for weight in weights]
    members = [rows if rows.format is NVFP4 else as_nvfp4(rows) for rows in (w.to_rows() for w in weights)]
    stack = Tiles.from_rows(
        torch.cat([member.codes for member in members]),
        torch.cat([member.scales.view(torch.uint8) for member in members]),
    )
    parts, first = [], 0
    for member, format in zip(members, formats, strict=True):
        assert member.global_scale is not None
        rows = member.shape[0]
        parts.append(PackedTiles(stack.part(first, rows), member.global_scale, format))
        first += rows
    return stack, parts


_LARGEST, _SPAN = 8, 17  # E4M3 holds the powers of two from 2^-9 to 2^8
_BIAS = 127


def fits_nvfp4(packed: PackedRows) -> bool:
    """Return True if an MXFP4 matrix can be written as NVFP4."""
    exponents = packed.scales[_used_blocks(packed)]
    return exponents.numel() == 0 or int(exponents.max()) - int(exponents.min()) <= _SPAN


def as_nvfp4(packed: PackedRows) -> PackedRows:
    """Convert an MXFP4 matrix to NVFP4, equal in every element; the codes are shared, not copied.

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
    """Invert :func:`as_nvfp4`; only the exponents of blocks of zeros may differ."""
    assert packed.global_scale is not None
    scales_NG = packed.scales[:, ::2].float() / packed.global_scale
    exponents_NG = torch.log2(scales_NG).round().int() + _BIAS
    return PackedRows(packed.codes, exponents_NG.clamp(min=0).to(torch.uint8), None, MXFP4)


def _used_blocks(packed: PackedRows) -> torch.Tensor:
    """Mask [N, G] of blocks with an element that is not zero."""
    n, groups = packed.scales.shape
    return ((packed.codes & 0x77) != 0).view(n, groups, -1).any(dim=-1)
