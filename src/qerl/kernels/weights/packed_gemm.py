"""The one resident form of an NVFP4 weight on the GPU, and the GEMM that reads it.

A weight is reordered once, at load, into the order in which tensor cores take their operand; that is its only
copy. The layout is that of quack-kernels (see packed_gemm.cu), so that two kernels share it, each where it is
faster: this package's own for few tokens, where a product is as fast as the weight is read, and quack's from
then on.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from qerl.errors import QeRLError
from qerl.kernels.nvrtc import Kernel, kernel

_SOURCE = Path(__file__).with_name("packed_gemm.cu")
_TOKENS = (8, 16, 32, 64, 128)
MOST_TOKENS = _TOKENS[-1]


@dataclass(frozen=True)
class Blob:
    """An NVFP4 weight in fragment order.

    Attributes:
        codes: uint8 [N/64, K/64, 128, 16].
        scales: uint8 [N/64, K/64, 32, 4, 2], E4M3 bytes.
        shape: (N, K) with N a multiple of 128 and K a multiple of 64.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]


def to_blob(codes_NK: torch.Tensor, scales_NK: torch.Tensor) -> Blob:
    """Reorders packed codes [N, K/2] and E4M3 scales [N, K/16] (see qerl.fp4.format); rows are padded to
    128.

    Raises:
        QeRLError: K is not a multiple of 64.
    """
    rows, half = codes_NK.shape
    if half % 32:
        raise QeRLError(
            f"A packed weight of width {half * 2} cannot be laid out for the GPU: 64 must divide it."
        )
    padding = -rows % 128
    codes_NK = torch.nn.functional.pad(codes_NK, (0, 0, 0, padding))
    scales_NK = torch.nn.functional.pad(scales_NK.view(torch.uint8), (0, 0, 0, padding))
    n, tiles = (rows + padding) // 64, half // 32
    # byte = 8 b + 4 q + c and row = 16 w + 8 p + r: to (w, r, c) = thread and (b, q, p) = byte of the thread.
    codes = codes_NK.view(n, 4, 2, 8, tiles, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2)
    scales = scales_NK.view(n, 4, 2, 8, tiles, 4).permute(0, 4, 1, 3, 5, 2)
    return Blob(
        codes.reshape(n, tiles, 128, 16).contiguous(),
        scales.reshape(n, tiles, 32, 4, 2).contiguous(),
        (rows + padding, half * 2),
    )


def from_blob(blob: Blob) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K/2] and scales [N, K/16] as uint8, rows padded to 128: the exact inverse of
    :func:`to_blob`."""
    rows, width = blob.shape
    n, tiles = rows // 64, width // 64
    codes = blob.codes.view(n, tiles, 4, 8, 4, 4, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4)
    scales = blob.scales.view(n, tiles, 4, 8, 4, 2).permute(0, 2, 5, 3, 1, 4)
    return codes.reshape(rows, width // 2), scales.reshape(rows, width // 16)


def padded_tokens(tokens: int) -> int:
    """Tokens that an operand for ``tokens`` tokens has room for."""
    return next(size for size in _TOKENS if size >= tokens)


def to_operand(x_TK: torch.Tensor) -> torch.Tensor:
    """Activations, at most 128 tokens, in the order :func:`small_gemm` reads, flat.

    The kernels of a decode step write this order themselves, see
    :func:`qerl.kernels.decode.common.operand_at`.
    """
    tokens, width = x_TK.shape
    padded = padded_tokens(tokens)
    slots = torch.arange(16)
    low, odd = slots < 8, slots % 2 == 1
    source = torch.where(low & odd, slots + 7, torch.where(~low & ~odd, slots - 7, slots))
    x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, padded - tokens))
    x = x_TK.view(padded, width // 16, 16)[:, :, source.to(x_TK.device)]
    return x.view(padded // 8, 8, width // 64, 8, 8).permute(2, 0, 3, 1, 4).reshape(-1)


@dataclass(frozen=True)
class Cut:
    """How packed_gemm.cu cuts a product.

    Attributes:
        warpgroups: Warpgroups that multiply, 2 to 4.
        row_groups: 64-row groups of a row tile, one warpgroup each; warpgroups that are left share K.
        tiles: 64-wide tiles of K in a stage.
        together: Of these, how many a warpgroup multiplies before it waits: more overlap, more registers.
        shared_bytes: Most shared memory for the stages. What is left is room for the kernels before and after
            this one to sit on the same multiprocessor.
    """

    warpgroups: int
    row_groups: int
    tiles: int
    together: int = 2
    shared_bytes: int = 176_000

    def sums_bytes(self, tokens: int) -> int:
        """Shared memory in which warpgroups that share K add up."""
        return 2 * (self.warpgroups // self.row_groups - 1) * self.row_groups * padded_tokens(tokens) * 256

    def stage_bytes(self, tokens: int) -> int:
        """Shared memory of one stage: codes, scales and activations."""
        return self.tiles * (self.row_groups * 2304 + padded_tokens(tokens) * 128)

    def stages(self, tokens: int) -> int:
        """Stages that fit, at most 16."""
        return min(16, (self.shared_bytes - self.sums_bytes(tokens)) // self.stage_bytes(tokens))


@cache
def parts(cut: Cut, shape: tuple[int, int], device: torch.device) -> tuple[int, torch.Tensor]:
    """Partial sums that a product leaves: the most of any row, and those of each 64 rows, int32 [N/64]."""
    groups, k_tiles = shape[0] // 64, shape[1] // 64
    total = -(-groups // cut.row_groups) * k_tiles
    blocks = min(_multiprocessors(device), total)
    counts = []
    for group in range(groups):
        first = group // cut.row_groups * k_tiles
        ends = [((at + 1) * blocks - 1) // total for at in (first, first + k_tiles - 1)]
        counts.append(ends[1] - ends[0] + 1)
    return max(counts), torch.tensor(counts, dtype=torch.int32, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def small_gemm(x: torch.Tensor, blob: Blob, out_STN: torch.Tensor, cut: Cut) -> None:
    """out[s] = part s of x w^T, times 2^-8 and without the global scale; see :func:`parts`.

    Args:
        x: bf16, as :func:`to_operand` gives it for T tokens.
        blob: The weight.
        out_STN: fp32, contiguous. Parts that a row does not have are left as they are.
        cut: The cut.
    """
    (rows, width), tokens = blob.shape, out_STN.shape[1]
    padded = padded_tokens(tokens)
    most, _ = parts(cut, blob.shape, x.device)
    if x.numel() != padded * width or not x.is_contiguous():
        raise QeRLError(f"small_gemm takes {padded} x {width} activations, not {tuple(x.shape)}.")
    if out_STN.shape != (most, tokens, rows) or out_STN.dtype != torch.float32:
        raise QeRLError(f"small_gemm writes fp32 {(most, tokens, rows)}, not {tuple(out_STN.shape)}.")
    stages = cut.stages(tokens)
    _compiled(cut, padded, stages, x.device.index or 0)(
        (min(_multiprocessors(x.device), -(-rows // (64 * cut.row_groups)) * (width // 64)), 1),
        cut.warpgroups * 128 + 32,
        stages * cut.stage_bytes(tokens) + cut.sums_bytes(tokens),
        (x, blob.codes, blob.scales, out_STN),
        (tokens, rows, width),
    )


@cache
def _compiled(cut: Cut, tokens: int, stages: int, device: int) -> Kernel:
    defines = {
        "TOKENS": tokens,
        "WARPGROUPS": cut.warpgroups,
        "ROW_GROUPS": cut.row_groups,
        "TILES": cut.tiles,
        "TOGETHER": cut.together,
        "STAGES": stages,
    }
    return kernel(_SOURCE, "packed_gemm", tuple(defines.items()), device)
