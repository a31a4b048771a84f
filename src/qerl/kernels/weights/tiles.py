"""Four-bit weights in the order in which tensor cores read them: tiles of 64 x 64.

A weight on the GPU is reordered once, and this is its only copy. The layout is that of quack-kernels (see
packed_gemm.cu), so that either kernel can read it where it is the faster one.

Shapes: N outputs, K inputs.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from qerl.errors import QeRLError

TILE = 64
"""Rows and columns of a tile."""

TILE_BYTES = TILE * TILE // 2 + TILE * TILE // 16
"""Bytes of a tile's codes and scales."""

ROW_MULTIPLE = 128
"""N of a stack is padded with zeros to a multiple of this."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Codes and block scales of a weight in NVFP4, tile by tile, without the global scale.

    Attributes:
        codes: uint8 [N/64, K/64, 128, 16].
        scales: uint8 [N/64, K/64, 32, 4, 2], E4M3 bytes.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def from_rows(cls, codes_NK: torch.Tensor, scales_NK: torch.Tensor) -> "Tiles":
        """Reorder a weight as stored on disk into tiles, with N padded to `ROW_MULTIPLE`.

        Args:
            codes_NK: uint8 [N, K/2], see `qerl.fp4.format`.
            scales_NK: [N, K/16], E4M3 or its bytes.

        Raises:
            QeRLError: K is not a multiple of `TILE`.
        """
        rows, half = codes_NK.shape
        if 2 * half % TILE:
            raise QeRLError(
                f"A packed weight of width {half * 2} cannot be laid out for the GPU: {TILE} must divide it."
            )
        padding = -rows % ROW_MULTIPLE
        codes_NK = pad(codes_NK, (0, 0, 0, padding))
        scales_NK = pad(scales_NK.view(torch.uint8), (0, 0, 0, padding))
        n, k = (rows + padding) // TILE, 2 * half // TILE
        # byte = 8 b + 4 q + c and row = 16 w + 8 p + r: to (w, r, c) = thread and (b, q, p) = byte of the
        # thread.
        codes = codes_NK.view(n, 4, 2, 8, k, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2)
        scales = scales_NK.view(n, 4, 2, 8, k, 4).permute(0, 4, 1, 3, 5, 2)
        return cls(
            codes.reshape(n, k, 128, 16).contiguous(),
            scales.reshape(n, k, 32, 4, 2).contiguous(),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), padding included."""
        return self.codes.shape[0] * TILE, self.codes.shape[1] * TILE

    def part(self, first_row: int, rows: int) -> "Tiles":
        """Return a view of some rows of the weight; both numbers are multiples of `TILE`."""
        assert first_row % TILE == rows % TILE == 0
        tiles = slice(first_row // TILE, (first_row + rows) // TILE)
        return Tiles(self.codes[tiles], self.scales[tiles])

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 codes [N, K/2] and scales [N, K/16], padding included: the inverse of :meth:`from_rows`."""
        rows, width = self.shape
        n, k = rows // TILE, width // TILE
        codes = self.codes.view(n, k, 4, 8, 4, 4, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4)
        scales = self.scales.view(n, k, 4, 8, 4, 2).permute(0, 2, 5, 3, 1, 4)
        return codes.reshape(rows, width // 2), scales.reshape(rows, width // 16)
