"""One forward pass of the decoder over T tokens, for decoding (inside a CUDA graph) and for prefill alike.

Launches a layer: GEMM, rope_kv, attend, merge, GEMM, residual_norm, GEMM, silu_mul, GEMM, residual_norm; with
LoRA as without. See qerl.kernels.common for how LoRA and normalisation ride along.
"""

from dataclasses import dataclass
from typing import Any

import torch

from qerl.kernels import attention, gemm, residual_norm, rope_kv, silu_mul
from qerl.kernels.blob import Blob
from qerl.kernels.common import PAGE, partial_count
from qerl.rollout.paged.weights import Decoder, Lora, Matrix


@dataclass
class Cache:
    """Keys and values of all layers, each [layers, blocks, kv heads, 64, head size]."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def empty(cls, decoder: Decoder, blocks: int, device: torch.device | str) -> "Cache":
        shape = (len(decoder.layers), blocks, decoder.kv_heads, PAGE, decoder.head_size)
        return cls(*(torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)))


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


class Step:
    """Buffers for T tokens and the pass over them.

    Args:
        decoder: The weights.
        tokens: T.
        splits: Parallel pieces of each attention item.
        lora: Whether an adapter's buffers are read.
    """

    def __init__(self, decoder: Decoder, tokens: int, splits: int, lora: bool) -> None:
        device = decoder.embedding_VD.device
        hidden, heads, size = decoder.hidden, decoder.heads, decoder.head_size
        self.decoder, self.tokens, self.splits = decoder, tokens, splits
        self.lora = lora

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        layer = decoder.layers[0]
        matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
        self.scratch = new(
            max(gemm.scratch_bytes(tokens, *m.shape, isinstance(m.weight, Blob)) for m in matrices),
            dtype=torch.uint8,
        )
        self.residual_TD = new(tokens, hidden, dtype=torch.bfloat16)
        self.u_TD = new(tokens, hidden, dtype=torch.bfloat16)
        columns = partial_count(hidden, residual_norm.BLOCK_D)
        self.squares_PT = new(columns, tokens)
        self.q_THE = new(tokens, heads, size, dtype=torch.bfloat16)
        self.attended_TC = new(tokens, heads * size, dtype=torch.bfloat16)
        self.out_ZTHE = new(2 * splits, tokens, heads, size)
        self.lse_ZTH = new(2 * splits, tokens, heads).fill_(-torch.inf)
        self.h_TI = new(tokens, decoder.intermediate, dtype=torch.bfloat16)
        if self.lora:
            stacks = {
                "qkv": layer.lora_qkv, "o": layer.lora_o, "gate_up": layer.lora_gate_up,
                "down": layer.lora_down,
            }  # fmt: skip
            self.low = {
                name: torch.zeros(tokens, stack.a_RK.shape[0], dtype=torch.int64, device=device)
                for name, stack in stacks.items()
                if stack is not None
            }

    def _multiply(self, x_TK: torch.Tensor, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        out_STN, small = gemm.multiply(x_TK, matrix.weight, self.scratch)
        return out_STN, matrix.raised_P if small else matrix.scale_P

    def __call__(self, cache: Cache, inputs: Inputs) -> torch.Tensor:
        """Writes the tokens' keys and values and returns the final norm's output [T, D] without its 1/rms.

        The partial sums of squares that 1/rms comes from are in ``squares_PT``.
        """
        decoder = self.decoder
        layers = decoder.layers
        width, eps = decoder.hidden, decoder.eps
        first = layers[0]
        residual_norm.residual_norm(
            self.residual_TD, first.input_norm_D, self.u_TD, self.squares_PT,
            embedding=(decoder.embedding_VD, inputs.token_T),
            **self._after(first.lora_qkv, "a_RD", "qkv"),
        )  # fmt: skip
        for i, layer in enumerate(layers):
            out, scale = self._multiply(self.u_TD, layer.qkv)
            k, v = cache.k[i], cache.v[i]
            rope_kv.rope_kv(
                out, scale, self.squares_PT, decoder.cos_ME, decoder.sin_ME, inputs.position_T, inputs.slot_T,
                self.q_THE, k, v, width=width, eps=eps, bias_N=layer.bias_N, qk_norm_2E=layer.qk_norm_2E,
                **self._lora(layer.lora_qkv, "qkv", "down"),
            )  # fmt: skip
            attention.attend(
                self.q_THE, k, v, inputs.tables_GB, inputs.item_4, inputs.order, inputs.limit_2T,
                self.out_ZTHE, self.lse_ZTH, splits=self.splits,
            )  # fmt: skip
            attention.merge(
                self.out_ZTHE, self.lse_ZTH, self.attended_TC,
                **self._after(layer.lora_o, "a_RC", "o"),
                spent_TR=self.low["qkv"] if self.lora else None,
            )  # fmt: skip
            out, scale = self._multiply(self.attended_TC, layer.o)
            self._residual_norm(
                out, scale, layer.lora_o, "o", layer.post_norm_D, layer.lora_gate_up, "gate_up"
            )
            out, scale = self._multiply(self.u_TD, layer.gate_up)
            silu_mul.silu_mul(
                out, scale, self.squares_PT, self.h_TI, width=width, eps=eps,
                **self._lora(layer.lora_gate_up, "gate_up", "o"), **self._after(layer.lora_down, "a_RI",
                "down"),
            )  # fmt: skip
            out, scale = self._multiply(self.h_TI, layer.down)
            if i + 1 < len(layers):
                following, norm = layers[i + 1].lora_qkv, layers[i + 1].input_norm_D
            else:
                following, norm = None, decoder.final_norm_D
            self._residual_norm(out, scale, layer.lora_down, "down", norm, following, "qkv", "gate_up")
        return self.u_TD

    def _after(self, lora: Lora | None, name: str, low: str) -> dict[str, Any]:
        """Arguments by which a kernel leaves x A^T for the GEMM after it."""
        if not self.lora or lora is None:
            return {}
        return {name: lora.a_RK, "next_TR": self.low[low]}

    def _lora(self, lora: Lora | None, low: str, spent: str) -> dict[str, Any]:
        """Arguments by which a kernel applies B, and clears a sum that was read before."""
        if not self.lora or lora is None:
            return {}
        return {"low_TR": self.low[low], "b_NR": lora.b_NR, "spent_TR": self.low[spent]}

    def _residual_norm(
        self,
        out: torch.Tensor,
        scale: torch.Tensor,
        lora: Lora | None,
        low: str,
        norm_D: torch.Tensor,
        next_lora: Lora | None,
        next_low: str,
        spent: str | None = None,
    ) -> None:
        own: dict[str, Any] = {}
        if self.lora and lora is not None:
            own = {"low_TR": self.low[low], "b_DR": lora.b_NR}
        residual_norm.residual_norm(
            self.residual_TD, norm_D, self.u_TD, self.squares_PT, gemm_STN=out, scale_1=scale,
            spent_TR=self.low[spent] if self.lora and spent is not None else None,
            **own, **self._after(next_lora, "a_RD", next_low),
        )  # fmt: skip
