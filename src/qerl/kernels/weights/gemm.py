"""Which kernel computes a product, and its output as the reader wants it.

bf16 weights go to cuBLAS, NF4 weights to bitsandbytes. NVFP4 weights go to this package's kernel up to as
many tokens as it takes, where it is the faster one (gate_up of 32B on an H100: 57 us, and 84 with
quack-kernels, at 8 tokens, 77 and 104 at 64, 119 and 132 at 128), and to quack-kernels from then on; both
read the same bytes.
"""

from dataclasses import dataclass
from functools import cache

import torch

from qerl.errors import QeRLError
from qerl.kernels.weights import nf4
from qerl.kernels.weights.nf4 import NF4
from qerl.kernels.weights.packed_gemm import MOST_TOKENS, Blob, Cut, padded_tokens, parts, small_gemm

Weight = Blob | NF4 | torch.Tensor
"""NVFP4, NF4, or bf16 [N, K]."""


@dataclass(frozen=True)
class Product:
    """A GEMM's output, in the scratch; of NF4 weights where bitsandbytes put it.

    Attributes:
        out_STN: fp32 or bf16 [S, T, N], whose parts are to be added.
        parts_G: int32 [N/64], how many of the S each 64 columns have; None if S is 1.
        small: Whether it is 2^-8 too small.
    """

    out_STN: torch.Tensor
    parts_G: torch.Tensor | None
    small: bool


# By padded tokens. H100, microseconds of gate_up and down of 32B, beside what other cuts took.
_CUTS = {
    8: Cut(2, 2, 8, 4),  # 57.1 and 30.5; four warpgroups on 256 rows 57.9 and 31.2
    16: Cut(2, 2, 8, 4),  # 57.8 and 32.3; four warpgroups on 256 rows 58.3 and 32.5
    32: Cut(3, 3, 4, 4),  # 62.0 and 34.0; four warpgroups on 256 rows 61.8 and 34.6
    64: Cut(3, 3, 4, 4, 200_000),  # 77.1 and 40.9; two warpgroups on 128 rows 83.2 and 43.8
    128: Cut(2, 2, 4, 4, 215_000),  # 119.2 and 61.4; stages half as long 130.6 and 65.8
}


def small_cut(tokens: int) -> Cut:
    """The cut of a product for so few tokens, from the table above."""
    return _CUTS[padded_tokens(tokens)]


def room(weight: Weight, tokens: int) -> int:
    """Tokens an operand of this weight must have room for, in the order of :func:`small_gemm`; 0 if the
    product wants it as [T, K]."""
    return padded_tokens(tokens) if isinstance(weight, Blob) and tokens <= MOST_TOKENS else 0


def scratch_bytes(weight: Weight, tokens: int) -> int:
    """Bytes of scratch that :func:`multiply` needs."""
    rows = weight.shape[0]
    if isinstance(weight, NF4):
        return 0
    if isinstance(weight, Blob) and room(weight, tokens):
        return parts(small_cut(tokens), weight.shape, weight.codes.device)[0] * tokens * rows * 4
    return tokens * rows * (2 if isinstance(weight, Blob) else weight.element_size())


def multiply(x: torch.Tensor, weight: Weight, tokens: int, scratch: torch.Tensor) -> Product:
    """x w^T, into ``scratch`` where the kernel takes a place for its output.

    Args:
        x: bf16, contiguous: in the order of :func:`small_gemm` where :func:`room` asks for it, else [T, K];
            either may be flat.
        weight: The weight.
        tokens: T.
        scratch: uint8, at least :func:`scratch_bytes` long.
    """
    rows, width = weight.shape
    if isinstance(weight, Blob) and room(weight, tokens):
        cut = small_cut(tokens)
        most, counts = parts(cut, weight.shape, x.device)
        out = scratch[: most * tokens * rows * 4].view(torch.float32).view(most, tokens, rows)
        small_gemm(x, weight, out, cut)
        return Product(out, counts, True)
    x_TK = x.view(-1)[: tokens * width].view(tokens, width)
    if isinstance(weight, NF4):
        return Product(nf4.product(x_TK, weight)[None], None, False)
    out = scratch[: tokens * rows * x.element_size()].view(x.dtype).view(1, tokens, rows)
    if isinstance(weight, Blob):
        quack(x_TK, weight, out[0])
    else:
        torch.mm(x_TK, weight.T, out=out[0])
    return Product(out, None, False)


@cache
def quack_tile(tokens: int, rows: int, width: int) -> tuple[int, int, int]:
    """(tile_m, tile_n, split_k): rows of the weight and tokens a block computes, cuts of K.

    Where this package's kernel takes so few tokens, only the benchmark asks, to compare with a good one.

    H100, Qwen2.5-7B shapes, microseconds against quack's own choice: qkv 12.9 / 22.9 at 64 tokens, 15.1 /
    25.3 at 128, 19.1 / 31.3 at 256; o 10.7 / 12.1; gate_up 98.7 / 113 at 256; down 54.5 / 66.4 at 256, 33.3 /
    34.2 at 64.
    """
    tile_n = min(256, max(32, 1 << (tokens - 1).bit_length()))
    long = width >= 8192
    if tokens > 512:
        return 128, 256, 1
    if tokens > 64:
        return 64, tile_n, 2 if long else 1 if rows >= 4608 else 2 if tile_n == 128 else 1
    if rows >= 112 * 128:
        return 128, tile_n, 1
    if rows <= 66 * 64 and not long:
        return 64, tile_n, 2
    return 128, tile_n, max(1, min(4, 132 * 128 // rows))


def quack(
    x_TK: torch.Tensor, weight: Blob, out_TN: torch.Tensor, tile: tuple[int, int, int] | None = None
) -> None:
    """x w^T without the global scale, bf16 [T, N], by quack-kernels.

    Raises:
        QeRLError: quack-kernels is not installed.
    """
    try:
        from quack.gemm_w4 import gemm_w4a16
    except ImportError as error:
        raise QeRLError(
            f"Products of NVFP4 weights with more than {MOST_TOKENS} tokens need the package quack-kernels: "
            "install it, or use the portable engine."
        ) from error
    tile_m, tile_n, split_k = tile or quack_tile(x_TK.shape[0], *weight.shape)
    gemm_w4a16(
        x_TK, weight.codes, sf=weight.scales, out=out_TN, wformat="nvfp4",
        tile_m=tile_m, tile_n=tile_n, split_k=split_k,
    )  # fmt: skip
