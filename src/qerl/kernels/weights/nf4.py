"""Products with weights in NF4, the format of QLoRA, all computed by bitsandbytes.

A code of four bits names one of 16 quantiles of the normal distribution, to be multiplied by the largest
magnitude (absmax) of its block of 64 consecutive weights. bitsandbytes stores absmax in eight bits, in groups
of 256 blocks and around one mean per layer ("double quantisation"). Groups and means of several layers cannot
be stacked, so absmax is kept decoded, in fp32: 0.047 bytes more per weight, no number changed, and q/k/v are
one product as in the other formats.

bitsandbytes decides by shape and GPU whether its fused kernel computes a product, decoding on the way, or
dequantisation and cuBLAS do. In 0.50.2, on an H100, the fused kernel is used for gate/up of 7B up to 64
tokens, q/k/v up to 16, o up to 7 and down up to 5. Both ways allocate their output, and the latter a dense
weight: during graph capture, in the graph's own memory pool.

The fused kernel for few tokens (up to 3, on small shapes 8) rounds more often than cuBLAS: code, absmax,
their product and its product with x are each rounded to bf16, and added in fp32. So an NF4 policy differs
more between sampling and training than one in another format.

Shapes: T tokens, N outputs, K inputs, a multiple of 64, L stacked linears.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.kernels.needs import how_to_install
from qerl.kernels.weights.product import NO_SUM, LoraSum, Product

BLOCK = 64
"""Consecutive weights that share an absmax; the only block size of bitsandbytes that is supported."""


def quant_state(layer: nn.Module) -> Any | None:
    """Return bitsandbytes' quantisation state of a four-bit layer's weight, or None for any other layer."""
    return getattr(getattr(layer, "weight", None), "quant_state", None)


def why_not(layer: Any) -> str | None:
    """Return why this four-bit layer of bitsandbytes cannot join an :class:`NF4Stack`, or None if it can."""
    state = layer.weight.quant_state
    if state.quant_type != "nf4" or state.blocksize != BLOCK:
        return f"is {state.quant_type} in blocks of {state.blocksize}, not nf4 in blocks of {BLOCK}"
    if layer.in_features % BLOCK:
        return f"has {layer.in_features} columns, which {BLOCK} does not divide"
    if layer.weight.dtype != torch.uint8:
        return f"stores its codes as {layer.weight.dtype}, not as torch.uint8"
    if layer.compute_dtype not in (None, torch.bfloat16):
        return f"computes in {layer.compute_dtype}, not in torch.bfloat16"
    return None


@dataclass(frozen=True, eq=False)
class NF4Stack:
    """One or several weights in NF4; a `qerl.kernels.weights.product.GemmWeight`.

    Attributes:
        codes: uint8 [N K / 2, 1], the weights with the lower column in the high half of the byte.
        absmax: fp32 [N K / 64].
        shape: (N, K).
        scale_L: fp32 [L], the factor of each linear's outputs: ones.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    shape: tuple[int, int]
    scale_L: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, layers: Sequence[Any]) -> "NF4Stack":
        """Stack the weights of layers, and turn the layers' own weights into views of the stack.

        Args:
            layers: ``bitsandbytes.nn.Linear4bit`` with the same K for which :func:`why_not` returns None.
        """
        states = [layer.weight.quant_state for layer in layers]
        codes = torch.cat([layer.weight.data for layer in layers])
        absmax = torch.cat([_flat_absmax(state) for state in states])
        row, width = 0, layers[0].in_features
        for layer, state in zip(layers, states, strict=True):
            until = row + layer.out_features
            layer.weight.data = codes[row * width // 2 : until * width // 2]
            layer.weight.compress_statistics = False
            state.absmax = absmax[row * width // BLOCK : until * width // BLOCK]
            state.offset, state.state2, state.nested = None, None, False
            row = until
        return cls(codes, absmax, (row, width), torch.ones(len(layers), device=codes.device))

    def padded_tokens(self, tokens: int) -> int:
        """0: the operand is [T, K]."""
        return 0

    def scratch_bytes(self, tokens: int) -> int:
        """0: bitsandbytes allocates the product."""
        return 0

    def multiply(self, x: torch.Tensor, tokens: int, scratch: torch.Tensor, xa: LoraSum = NO_SUM) -> Product:
        """Return x w^T in the dtype of x, by the kernel that bitsandbytes chooses; see `GemmWeight.multiply`.

        Raises:
            QeRLError: bitsandbytes is not installed.
        """
        xa.add()
        width = self.shape[1]
        x_TK = x.view(-1)[: tokens * width].view(tokens, width)
        return Product(self.gemm(x_TK)[None], None, self.scale_L)

    def gemm(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return x w^T [T, N] in the dtype of x, in new memory."""
        try:
            import bitsandbytes  # noqa: F401  its import registers the operator
        except ImportError as error:
            raise QeRLError(
                "Products of NF4 weights need the package bitsandbytes; run "
                f"`{how_to_install('bitsandbytes')}`."
            ) from error
        return torch.ops.bitsandbytes.gemm_4bit(x_TK, self.codes, self.shape, self.absmax, BLOCK, "nf4")


def _flat_absmax(state: Any) -> torch.Tensor:
    """Return absmax decoded, fp32 [blocks], by the steps of ``bitsandbytes.functional.dequantize_4bit``."""
    if not state.nested:
        return state.absmax
    from bitsandbytes.functional import dequantize_blockwise

    return dequantize_blockwise(state.absmax, state.state2) + state.offset
