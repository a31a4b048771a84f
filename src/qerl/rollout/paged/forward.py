"""One forward pass of the decoder over T tokens, for decoding (inside a CUDA graph) and for prefill alike.

What a layer computes, by the names of transformers and vLLM, with ours behind them:

    proj(h) = h W^T + (h A^T) (B alpha / r)^T          # Projection: a GEMM, its partial sums added by its
                                                       # reader with B; h A^T is left by the maker of h
    h = rmsnorm(x, input_layernorm)                    # residual_norm; 1/rms is applied behind the next GEMM
    q, k, v = qkv_proj(h)                              # Layer.mixer.qkv: fused QKV
    q, k = rope(head_norm(q), head_norm(k), position)  # rope_kv; head_norm in Qwen3 alone (qk_norm)
    kv_cache[slot] = k, v                              # the page and the place in it (slot_T; slot mapping)
    y = paged_attention(q, kv_cache, block_tables)     # attend, combine_splits: the prompt's pages, its own
    x = x + o_proj(y)                                  # Layer.mixer.o; the sum is in the next residual_norm
    h = rmsnorm(x, post_attention_layernorm)           # residual_norm
    gate, up = gate_up_proj(h)                         # Layer.mlp.gate_up
    x = x + down_proj(silu(gate) * up)                 # silu_mul: SwiGLU; then Layer.mlp.down

Launches per layer: GEMM, rope_kv, attend, combine_splits, GEMM, residual_norm, GEMM, silu_mul, GEMM,
residual_norm; with LoRA as without where packed_gemm.cu multiplies, else add_parts before each GEMM. See
qerl.kernels.decode.common for how LoRA and normalisation ride along.
"""

import math
from dataclasses import dataclass

import torch
import triton

from qerl.kernels.decode import attend as attention
from qerl.kernels.decode import residual_norm, rope_kv, silu_mul
from qerl.kernels.decode.launch import NO_A, NO_B, LoraA, LoraB
from qerl.kernels.weights.product import NO_SUM, LoraSum, Product
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.weights import Decoder, Layer, Projection, look_ahead


@dataclass
class Inputs:
    """What a pass reads, all int32.

    Attributes:
        token_T, position_T: The tokens and their positions.
        slot_T: Where the key and value of each go, as `rope_kv` takes it; -1 for nowhere.
        limit_2T: Cached tokens that each sees: of the shared prompt, and of its own sequence.
        tables_GB: Block tables.
        item_4, order: Attention items and the tokens of each, as `attend` takes them.
    """

    token_T: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor
    limit_2T: torch.Tensor
    tables_GB: torch.Tensor
    item_4: torch.Tensor
    order: torch.Tensor


class Forward:
    """Buffers for T tokens, and the pass over them.

    Args:
        decoder: The weights.
        tokens: T.
        splits: Number of parallel splits of each attention item's keys.
        tile: Rows of an attention tile, see :func:`qerl.kernels.decode.attend.attend`.
    """

    def __init__(self, decoder: Decoder, tokens: int, splits: int, tile: int) -> None:
        device = decoder.embedding_VD.device
        spec = decoder.sizes.spec
        hidden, heads, size = spec.hidden, spec.mixer.heads, spec.mixer.head_size
        self.decoder, self.tokens, self.splits = decoder, tokens, splits
        self.tile = tile

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        weights = [each.weight for layer in decoder.layers for each in layer.projections]
        look_ahead(decoder.layers)
        self.scratch = new(max(weight.scratch_bytes(tokens) for weight in weights), dtype=torch.uint8)
        self.residual_TD = new(tokens, hidden)

        def operand(width: int) -> torch.Tensor:
            # Flat, because each GEMM says in which order it reads. What it has room for beyond T belongs to
            # no token: its products are not written.
            padded = max(tokens, *(weight.padded_tokens(tokens) for weight in weights))
            return torch.zeros(padded * width, dtype=decoder.dtype, device=device)

        self.u, self.attended, self.h = operand(hidden), operand(heads * size), operand(spec.mlp.intermediate)
        self.u_TD = self.u[: tokens * hidden].view(tokens, hidden)
        columns = triton.cdiv(hidden, residual_norm.block_d(tokens))
        self.squares_PT = new(columns, tokens)
        self.q_THE = new(tokens, heads, size, dtype=decoder.dtype)
        self.out_ZTHE = new(2 * splits, tokens, heads, size)
        self.lse_ZTH = new(2 * splits, tokens, heads).fill_(-torch.inf)
        self.sums = _lora_sums(decoder, tokens)

    def _multiply(self, x: torch.Tensor, projection: Projection, xa: LoraSum) -> Product:
        return projection.weight.multiply(x, self.tokens, self.scratch, xa)

    def _padded(self, projection: Projection) -> int:
        """Tokens for which the operand of this weight has room, 0 if it is [T, K]."""
        return projection.weight.padded_tokens(self.tokens)

    def __call__(self, cache: KVCache, inputs: Inputs) -> torch.Tensor:
        """Write the tokens' keys and values and return the final norm's output [T, D] without its 1/rms.

        The partial sums of squares that 1/rms comes from are in ``squares_PT``.
        """
        decoder = self.decoder
        first = decoder.layers[0]
        residual_norm.residual_norm(
            self.residual_TD, first.input_norm_D, self.u, self.squares_PT,
            padded_tokens=self._padded(first.mixer.qkv), embedding=(decoder.embedding_VD, inputs.token_T),
            a=_a(first.mixer.qkv, self.sums["qkv"]),
        )  # fmt: skip
        for i, layer in enumerate(decoder.layers):
            self._attention(layer, cache.k[i], cache.v[i], inputs)
            self._mlp(layer, decoder.layers[i + 1] if i + 1 < len(decoder.layers) else None)
        return self.u_TD

    def _attention(self, layer: Layer, k: torch.Tensor, v: torch.Tensor, inputs: Inputs) -> None:
        """From the first norm's output to the second's."""
        decoder, mixer, following = self.decoder, layer.mixer, layer.mlp.gate_up
        qkv, o, gate_up = self.sums["qkv"], self.sums["o"], self.sums["gate_up"]
        product = self._multiply(self.u, mixer.qkv, qkv)
        rope_kv.rope_kv(
            product.out_STN, product.scale_L, self.squares_PT, decoder.cos_ME, decoder.sin_ME,
            inputs.position_T, inputs.slot_T, self.q_THE, k, v, width=layer.spec.hidden, eps=decoder.eps,
            partials_G=product.partials_G, bias_N=mixer.bias_N, qk_norm_2E=mixer.qk_norm_2E,
            b=_b(mixer.qkv, qkv),
        )  # fmt: skip
        attention.attend(
            self.q_THE, k, v, inputs.tables_GB, inputs.item_4, inputs.order, inputs.limit_2T,
            self.out_ZTHE, self.lse_ZTH, splits=self.splits, rows=self.tile,
        )  # fmt: skip
        attention.combine_splits(
            self.out_ZTHE, self.lse_ZTH, self.attended, padded_tokens=self._padded(mixer.o),
            a=_a(mixer.o, o),
        )  # fmt: skip
        self._residual_norm(
            self._multiply(self.attended, mixer.o, o), layer.post_norm_D, self._padded(following),
            b=_b(mixer.o, o), a=_a(following, gate_up),
        )  # fmt: skip

    def _mlp(self, layer: Layer, following: Layer | None) -> None:
        """From the second norm's output to the following layer's first, or to the final norm's."""
        decoder, spec, mlp = self.decoder, layer.spec, layer.mlp
        gate_up, down = self.sums["gate_up"], self.sums["down"]
        product = self._multiply(self.u, mlp.gate_up, gate_up)
        silu_mul.silu_mul(
            product.out_STN, product.scale_L, self.squares_PT, self.h,
            intermediate=spec.mlp.intermediate, width=spec.hidden, eps=decoder.eps,
            padded_tokens=self._padded(mlp.down), partials_G=product.partials_G,
            b=_b(mlp.gate_up, gate_up), a=_a(mlp.down, down),
        )  # fmt: skip
        if following is not None:
            qkv = following.mixer.qkv
            norm, padded, a = following.input_norm_D, self._padded(qkv), _a(qkv, self.sums["qkv"])
        else:
            norm, padded, a = decoder.final_norm_D, 0, NO_A
        self._residual_norm(
            self._multiply(self.h, mlp.down, down), norm, padded, b=_b(mlp.down, down), a=a
        )  # fmt: skip

    def _residual_norm(
        self,
        product: Product,
        norm_D: torch.Tensor,
        padded_tokens: int,
        *,
        b: LoraB,
        a: LoraA,
    ) -> None:
        residual_norm.residual_norm(
            self.residual_TD, norm_D, self.u, self.squares_PT, padded_tokens=padded_tokens,
            gemm_STN=product.out_STN, partials_G=product.partials_G, scale_1=product.scale_L, b=b, a=a,
        )  # fmt: skip


def _lora_sums(decoder: Decoder, tokens: int) -> dict[str, LoraSum]:
    """The sums x A^T of a pass over ``tokens`` tokens, by product; used again by every layer.

    Those of products without an adapter are empty. The parts of a sum live from the kernel that makes x to
    the product after it, so those of all products lie in one place. All layers have the first one's
    description and adapters.
    """
    layer, spec = decoder.layers[0], decoder.sizes.spec
    columns = triton.cdiv(spec.hidden, residual_norm.block_d(tokens))
    blocks = triton.cdiv(spec.mlp.intermediate, silu_mul.BLOCK_I)
    made_by = {"qkv": columns, "o": spec.mixer.heads, "gate_up": columns, "down": blocks}
    shapes = {
        product.name: (made_by[product.name], tokens, each.lora.a_RK.shape[0])
        for product, each in zip(spec.products, layer.projections, strict=True)
        if each.lora is not None
    }
    most = max((math.prod(shape) for shape in shapes.values()), default=0)
    parts = torch.empty(most, dtype=torch.float32, device=layer.input_norm_D.device)

    def of(shape: tuple[int, int, int]) -> LoraSum:
        return LoraSum(parts[: math.prod(shape)].view(shape), parts.new_empty(shape[1:]))

    return {name: of(shapes[name]) if name in shapes else NO_SUM for name in made_by}


def _a(projection: Projection, xa: LoraSum) -> LoraA:
    """What leaves x A^T for a product; nothing without an adapter."""
    return NO_A if projection.lora is None else LoraA(projection.lora.a_RK, xa)


def _b(projection: Projection, xa: LoraSum) -> LoraB:
    """What adds (x A^T) B^T to a product; nothing without an adapter."""
    return NO_B if projection.lora is None else LoraB(xa, projection.lora.b_NR)
