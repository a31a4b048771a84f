"""One forward pass of the decoder over T tokens, for decoding (inside a CUDA graph) and for prefill alike.

Launches a layer: GEMM, rope_kv, attend, merge, GEMM, residual_norm, GEMM, silu_mul, GEMM, residual_norm; with
LoRA as without. See qerl.kernels.decode.common for how LoRA and normalisation ride along.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from qerl.kernels.decode import attend as attention
from qerl.kernels.decode import residual_norm, rope_kv, silu_mul
from qerl.kernels.decode.common import partial_count
from qerl.kernels.limits import PAGE
from qerl.kernels.weights import gemm
from qerl.rollout.paged.weights import Decoder, Layer, Lora, Matrix


@dataclass
class Cache:
    """Keys and values of all layers, each [layers, blocks, kv heads, 64, head size], bf16 or E4M3."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def empty(
        cls, decoder: Decoder, blocks: int, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> "Cache":
        """All zeros; of the activations' dtype if none is given."""
        shape = (len(decoder.layers), blocks, decoder.kv_heads, PAGE, decoder.head_size)
        return cls(*(torch.zeros(shape, dtype=dtype or decoder.dtype, device=device) for _ in range(2)))


@dataclass
class Inputs:
    """What a pass reads, all int32: see rope_kv and attend for the meaning."""

    token_T: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor
    limit_2T: torch.Tensor
    tables_GB: torch.Tensor
    item_4: torch.Tensor
    order: torch.Tensor


def low_copies(tokens: int) -> dict[str, int]:
    """Copies of each sum x A^T, by how many programs add to it and how many read it.

    With many tokens the programs meet less often and reading the copies costs more.
    """
    if tokens > 32:
        return {"qkv": 1, "o": 1, "gate_up": 1, "down": 1}
    return {"qkv": 2, "o": 1, "gate_up": 1, "down": 2}


class Step:
    """Buffers for T tokens and the pass over them.

    Args:
        decoder: The weights.
        tokens: T.
        splits: Parallel pieces of each attention item.
        tile: Rows of an attention tile, see :func:`qerl.kernels.decode.attend.attend`.
        lora: Whether an adapter's buffers are read.
    """

    def __init__(self, decoder: Decoder, tokens: int, splits: int, tile: int, lora: bool) -> None:
        device = decoder.embedding_VD.device
        hidden, heads, size = decoder.hidden, decoder.heads, decoder.head_size
        self.decoder, self.tokens, self.splits = decoder, tokens, splits
        self.tile, self.lora = tile, lora

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        layer = decoder.layers[0]
        matrices = [m for each in decoder.layers for m in (each.qkv, each.o, each.gate_up, each.down)]
        self.scratch = new(max(gemm.scratch_bytes(m.weight, tokens) for m in matrices), dtype=torch.uint8)
        self.residual_TD = new(tokens, hidden)

        def operand(width: int) -> torch.Tensor:
            # Flat, because each GEMM says in which order it reads; what it has room for beyond T stays zero.
            room = max(tokens, *(gemm.room(m.weight, tokens) for m in matrices))
            return torch.zeros(room * width, dtype=decoder.dtype, device=device)

        self.u, self.attended, self.h = operand(hidden), operand(heads * size), operand(decoder.intermediate)
        self.u_TD = self.u[: tokens * hidden].view(tokens, hidden)
        columns = partial_count(hidden, residual_norm.block_d(tokens))
        self.squares_PT = new(columns, tokens)
        self.q_THE = new(tokens, heads, size, dtype=decoder.dtype)
        self.out_ZTHE = new(2 * splits, tokens, heads, size)
        self.lse_ZTH = new(2 * splits, tokens, heads).fill_(-torch.inf)
        if self.lora:
            stacks = {
                "qkv": layer.lora_qkv, "o": layer.lora_o, "gate_up": layer.lora_gate_up,
                "down": layer.lora_down,
            }  # fmt: skip
            copies = low_copies(tokens)
            shapes = {
                name: (copies[name], tokens, stack.a_RK.shape[0])
                for name, stack in stacks.items()
                if stack is not None
            }
            sizes = [math.prod(shape) for shape in shapes.values()]
            self._sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            parts = self._sums.split(sizes)
            self.low = {
                name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
            }

    def clear(self) -> None:
        """Forgets what a pass that was cut off between two launches has left in the sums x A^T."""
        if self.lora:
            self._sums.zero_()

    def _multiply(self, x: torch.Tensor, matrix: Matrix) -> tuple[gemm.Product, torch.Tensor]:
        product = gemm.multiply(x, matrix.weight, self.tokens, self.scratch)
        return product, matrix.raised_P if product.small else matrix.scale_P

    def _room(self, matrix: Matrix) -> int:
        return gemm.room(matrix.weight, self.tokens)

    def __call__(self, cache: Cache, inputs: Inputs) -> torch.Tensor:
        """Writes the tokens' keys and values and returns the final norm's output [T, D] without its 1/rms.

        The partial sums of squares that 1/rms comes from are in ``squares_PT``.
        """
        decoder = self.decoder
        first = decoder.layers[0]
        residual_norm.residual_norm(
            self.residual_TD, first.input_norm_D, self.u, self.squares_PT, padded=self._room(first.qkv),
            embedding=(decoder.embedding_VD, inputs.token_T),
            **self._after(first.lora_qkv, "a_RD", "qkv"),
        )  # fmt: skip
        for i, layer in enumerate(decoder.layers):
            self._attention(layer, cache.k[i], cache.v[i], inputs)
            self._mlp(layer, decoder.layers[i + 1] if i + 1 < len(decoder.layers) else None)
        return self.u_TD

    def _attention(self, layer: Layer, k: torch.Tensor, v: torch.Tensor, inputs: Inputs) -> None:
        """From the first norm's output to the second's."""
        decoder = self.decoder
        product, scale = self._multiply(self.u, layer.qkv)
        rope_kv.rope_kv(
            product.out_STN, scale, self.squares_PT, decoder.cos_ME, decoder.sin_ME, inputs.position_T,
            inputs.slot_T, self.q_THE, k, v, width=decoder.hidden, eps=decoder.eps, parts_G=product.parts_G,
            bias_N=layer.bias_N, qk_norm_2E=layer.qk_norm_2E,
            **self._lora(layer.lora_qkv, "qkv", "down"),
        )  # fmt: skip
        attention.attend(
            self.q_THE, k, v, inputs.tables_GB, inputs.item_4, inputs.order, inputs.limit_2T,
            self.out_ZTHE, self.lse_ZTH, splits=self.splits, rows=self.tile,
        )  # fmt: skip
        attention.merge(
            self.out_ZTHE, self.lse_ZTH, self.attended, padded=self._room(layer.o),
            **self._after(layer.lora_o, "a_RC", "o"),
            spent_CTR=self.low["qkv"] if self.lora else None,
        )  # fmt: skip
        self._residual_norm(
            *self._multiply(self.attended, layer.o), layer.lora_o, "o",
            layer.post_norm_D, self._room(layer.gate_up), layer.lora_gate_up, "gate_up",
        )  # fmt: skip

    def _mlp(self, layer: Layer, following: Layer | None) -> None:
        """From the second norm's output to the following layer's first, or to the final norm's."""
        decoder = self.decoder
        product, scale = self._multiply(self.u, layer.gate_up)
        silu_mul.silu_mul(
            product.out_STN, scale, self.squares_PT, self.h,
            intermediate=decoder.intermediate, width=decoder.hidden, eps=decoder.eps,
            padded=self._room(layer.down), parts_G=product.parts_G,
            **self._lora(layer.lora_gate_up, "gate_up", "o"), **self._after(layer.lora_down, "a_RI", "down"),
        )  # fmt: skip
        if following is not None:
            norm, room, lora = following.input_norm_D, self._room(following.qkv), following.lora_qkv
        else:
            norm, room, lora = decoder.final_norm_D, 0, None
        self._residual_norm(
            *self._multiply(self.h, layer.down), layer.lora_down, "down", norm, room, lora, "qkv", "gate_up"
        )

    def _after(self, lora: Lora | None, name: str, low: str) -> dict[str, Any]:
        """Arguments by which a kernel leaves x A^T for the GEMM after it."""
        if not self.lora or lora is None:
            return {}
        return {name: lora.a_RK, "next_CTR": self.low[low]}

    def _lora(self, lora: Lora | None, low: str, spent: str) -> dict[str, Any]:
        """Arguments by which a kernel applies B, and clears a sum that was read before."""
        if not self.lora or lora is None:
            return {}
        return {"low_CTR": self.low[low], "b_NR": lora.b_NR, "spent_CTR": self.low[spent]}

    def _residual_norm(
        self,
        product: gemm.Product,
        scale: torch.Tensor,
        lora: Lora | None,
        low: str,
        norm_D: torch.Tensor,
        padded: int,
        next_lora: Lora | None,
        next_low: str,
        spent: str | None = None,
    ) -> None:
        own: dict[str, Any] = {}
        if self.lora and lora is not None:
            own = {"low_CTR": self.low[low], "b_DR": lora.b_NR}
        residual_norm.residual_norm(
            self.residual_TD, norm_D, self.u, self.squares_PT, padded=padded, gemm_STN=product.out_STN,
            parts_G=product.parts_G, scale_1=scale,
            spent_CTR=self.low[spent] if self.lora and spent is not None else None,
            **own, **self._after(next_lora, "a_RD", next_low),
        )  # fmt: skip
