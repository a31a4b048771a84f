"""One forward pass of the decoder over T tokens, for decoding (inside a CUDA graph) and for prefill alike.

What a layer computes, by the names of transformers and vLLM, with ours behind them:

    proj(h) = h W^T + (h A^T) (B alpha / r)^T          # Projection: a GEMM, its partial sums added by its
                                                       # reader with B; h A^T is left by the maker of h
    h = rmsnorm(x, input_layernorm)                    # residual_norm; 1/rms is applied behind the next GEMM
    q, k, v = qkv_proj(h)                              # Layer.mixer.qkv: fused QKV
    q, k = rope(head_norm(q), head_norm(k), position)  # rope_kv, as the layer's description says (Heads)
    kv_cache[place] = k, v                             # the page and the place in it
    y = paged_attention(q, kv_cache, block_tables)     # attend, combine_splits: the prompt's pages, its own
    x = x + o_proj(y)                                  # Layer.mixer.o; the sum is in the next residual_norm
    h = rmsnorm(x, post_attention_layernorm)           # residual_norm
    gate, up = gate_up_proj(h)                         # Layer.mlp.gate_up
    x = x + down_proj(act(gate) * up)                  # act_mul: SwiGLU or GELU; then Layer.mlp.down

Launches per layer: GEMM, rope_kv, attend, combine_splits, GEMM, residual_norm, GEMM, act_mul, GEMM,
residual_norm; with LoRA as without where packed_gemm.cu multiplies, else add_parts before each GEMM. A norm
behind attention or MLP, one of all heads together, and a bias elsewhere than at q, k and v cost a sum_product
each. See qerl.kernels.decode.common for how LoRA and normalisation ride along.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton

from qerl.families.layer import LayerSpec
from qerl.kernels.decode import act_mul, residual_norm, rope_kv
from qerl.kernels.decode import attend as attention
from qerl.kernels.decode.launch import NO_A, NO_B, LoraA, LoraB
from qerl.kernels.decode.sum_product import block_of, sum_product
from qerl.kernels.limits import PAGE
from qerl.kernels.weights.product import NO_SUM, LoraSum, Product
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.weights import Decoder, Kind, Layer, Projection, kinds_of, look_ahead


@dataclass
class Inputs:
    """What a pass reads, all int32.

    Attributes:
        token_T, position_T: The tokens and their positions.
        limit_2T: Cached tokens that each sees: of the shared prompt, and of its own sequence, of which it is
            the last; 0 of the latter for a token whose key and value go nowhere.
        table_T: The row of block tables that lists each token's own blocks.
        tables: Block tables [G, B] of each pool.
        items: Of each kind of attention, items [.., 4] and the tokens of each, as `attend` takes them.
    """

    token_T: torch.Tensor
    position_T: torch.Tensor
    limit_2T: torch.Tensor
    table_T: torch.Tensor
    tables: list[torch.Tensor]
    items: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Attending:
    """Buffers of one kind of attention, in the memory that all kinds share, and its splits.

    Attributes:
        number: Of the kind, in the order of :func:`qerl.rollout.paged.weights.kinds_of`.
        pool: Of its keys and values.
        splits: Number of parallel splits of each item's keys.
        tile: Rows of a tile, see :func:`qerl.kernels.decode.attend.attend`.
        q_THE: Queries.
        out_ZTHE: Outputs of splits.
        lse_ZTH: Their log-sum-exp, this kind's own: halves that no item covers stay at -inf.
    """

    number: int
    pool: int
    splits: int
    tile: int
    q_THE: torch.Tensor
    out_ZTHE: torch.Tensor
    lse_ZTH: torch.Tensor


class Forward:
    """Buffers for T tokens, and the pass over them.

    Args:
        decoder: The weights.
        tokens: T.
        splits: Of each kind of attention, number of parallel splits of an item's keys.
        tiles: Of each kind of attention, rows of a tile.

    Attributes:
        squares_PT: Sums of squares of the residual stream, of which 1/rms is made.
    """

    def __init__(self, decoder: Decoder, tokens: int, splits: list[int], tiles: list[int]) -> None:
        device, specs = decoder.embedding_VD.device, [run.spec for run in decoder.sizes.runs]
        hidden = decoder.sizes.hidden
        self.decoder, self.tokens = decoder, tokens

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

        queries, inner = max(s.mixer.queries for s in specs), max(s.mlp.intermediate for s in specs)
        self.u, self.attended, self.h = operand(hidden), operand(queries), operand(inner)
        self.u_TD = self.u[: tokens * hidden].view(tokens, hidden)
        columns = triton.cdiv(hidden, residual_norm.block_d(tokens))
        self.squares_PT, self._no_squares_PT = new(columns, tokens), new(0, tokens)
        kinds, windows = kinds_of(decoder.sizes), decoder.sizes.windows
        q = new(tokens * queries, dtype=decoder.dtype)
        most = max(2 * count * tokens * k.heads * k.head_size for k, count in zip(kinds, splits, strict=True))
        out = new(most)

        def of_kind(number: int, kind: Kind, count: int, tile: int) -> Attending:
            shape = (2 * count, tokens, kind.heads)
            heads = (tokens, kind.heads, kind.head_size)
            whole = (*shape, kind.head_size)
            return Attending(
                number, windows.index(kind.window), count, tile, q[: math.prod(heads)].view(heads),
                out[: math.prod(whole)].view(whole), new(*shape).fill_(-torch.inf),
            )  # fmt: skip

        self._attending = [of_kind(i, *each) for i, each in enumerate(zip(kinds, splits, tiles, strict=True))]
        self._slots = [new(tokens, dtype=torch.int32) for _ in windows]
        # By layer and not by description, whose hash takes longer than a launch.
        sums = _lora_sums(decoder, tokens)
        self._kinds = [self._attending[kinds.index(Kind.of(layer.spec))] for layer in decoder.layers]
        self._sums = [sums[layer.spec] for layer in decoder.layers]
        self._summed = new(tokens * max(sum(of) for s in specs for of in ((), *s.summed.values())))
        self._one_L = torch.ones(3, device=device)

    def forget_attention(self) -> None:
        """Forget what attended before, for tokens whose halves no item covers."""
        for each in self._attending:
            each.lse_ZTH.fill_(-torch.inf)

    def _multiply(self, x: torch.Tensor, projection: Projection, xa: LoraSum) -> Product:
        used = self._padded(projection) * projection.weight.shape[1]  # the operand may be of wider layers
        return projection.weight.multiply(x[: used or None], self.tokens, self.scratch, xa)

    def _padded(self, projection: Projection) -> int:
        """Tokens for which the operand of this weight has room, 0 if it is [T, K]."""
        return projection.weight.padded_tokens(self.tokens)

    def _squares(self, norm: str) -> torch.Tensor:
        """Sums of squares behind a place of a norm; none where there is no norm."""
        return self.squares_PT if norm else self._no_squares_PT

    def _sum(
        self, product: Product, projection: Projection, xa: LoraSum, outputs: tuple[int, ...], norm: str
    ) -> tuple[Product, torch.Tensor]:
        """A product with its LoRA, 1/rms and bias, and sums of its squares by blocks of columns."""
        width = sum(outputs)
        y_TN = self._summed[: self.tokens * width].view(self.tokens, width)
        squares_PT = torch.empty(width // block_of(outputs), self.tokens, device=y_TN.device)
        sum_product(
            product, self._squares(norm), y_TN, squares_PT, outputs=outputs, width=self.decoder.sizes.hidden,
            eps=self.decoder.eps, bias_N=projection.bias_N, b=_b(projection, xa),
        )  # fmt: skip
        return Product(y_TN[None], None, self._one_L), squares_PT

    def __call__(self, cache: KVCache, inputs: Inputs) -> torch.Tensor:
        """Write the tokens' keys and values and return the final norm's output [T, D] without its 1/rms.

        The partial sums of squares that 1/rms comes from are in ``squares_PT``.
        """
        decoder = self.decoder
        first = decoder.layers[0]
        for tables_GB, slot_T in zip(inputs.tables, self._slots, strict=True):
            rope_kv.find_slots(inputs.limit_2T, inputs.table_T, tables_GB, slot_T, PAGE)
        residual_norm.residual_norm(
            self.residual_TD, first.before_mixer_D, self.u, self.squares_PT,
            padded_tokens=self._padded(first.mixer.qkv), embedding=(decoder.embedding_VD, inputs.token_T),
            gain=decoder.embedding_scale, a=_a(first.mixer.qkv, self._sums[0]["qkv"]),
        )  # fmt: skip
        for i in range(len(decoder.layers)):
            self._attention(i, cache.k[i], cache.v[i], inputs)
            self._mlp(i)
        return self.u_TD

    def _attention(self, i: int, k: torch.Tensor, v: torch.Tensor, inputs: Inputs) -> None:
        """From the first norm's output to the second's."""
        decoder, layer, sums, kind = self.decoder, self.decoder.layers[i], self._sums[i], self._kinds[i]
        mixer, following, spec = layer.mixer, layer.mlp.gate_up, layer.spec
        tables_GB, (item_4, order) = inputs.tables[kind.pool], inputs.items[kind.number]
        product = self._multiply(self.u, mixer.qkv, sums["qkv"])
        heads, norm = mixer.heads, spec.around.before_mixer
        b, bias_N = _b(mixer.qkv, sums["qkv"]), mixer.qkv.bias_N
        if outputs := spec.summed.get("qkv"):
            product, squares_PT = self._sum(product, mixer.qkv, sums["qkv"], outputs, norm)
            heads, norm, b, bias_N = replace(heads, squares_PT=squares_PT), "", NO_B, None
        rope_kv.rope_kv(
            product.out_STN, product.scale_L, self._squares(norm), mixer.cos_MP, mixer.sin_MP,
            inputs.position_T, self._slots[kind.pool], kind.q_THE, k, v,
            width=spec.hidden, eps=decoder.eps, heads=heads, partials_G=product.partials_G, bias_N=bias_N,
            b=b,
        )  # fmt: skip
        attention.attend(
            kind.q_THE, k, v, tables_GB, item_4, order, inputs.limit_2T, kind.out_ZTHE, kind.lse_ZTH,
            splits=kind.splits, rows=kind.tile, scale=spec.mixer.scale, window=spec.mixer.window,
        )  # fmt: skip
        attention.combine_splits(
            kind.out_ZTHE, kind.lse_ZTH, self.attended, padded_tokens=self._padded(mixer.o),
            sink_H=mixer.sink_H, a=_a(mixer.o, sums["o"]),
        )  # fmt: skip
        self._add(
            layer, "o", mixer.o, self.attended, sums["o"], layer.behind_mixer_D, None,
            layer.before_mlp_D, self._padded(following), _a(following, sums["gate_up"]),
        )  # fmt: skip

    def _mlp(self, i: int) -> None:
        """From the second norm's output to the following layer's first, or to the final norm's."""
        decoder, layer, sums = self.decoder, self.decoder.layers[i], self._sums[i]
        spec, mlp, norm = layer.spec, layer.mlp, layer.spec.around.before_mlp
        product, b = self._multiply(self.u, mlp.gate_up, sums["gate_up"]), _b(mlp.gate_up, sums["gate_up"])
        if outputs := spec.summed.get("gate_up"):
            product, _ = self._sum(product, mlp.gate_up, sums["gate_up"], outputs, norm)
            norm, b = "", NO_B
        act_mul.act_mul(
            product.out_STN, product.scale_L, self._squares(norm), self.h,
            intermediate=spec.mlp.intermediate, width=spec.hidden, eps=decoder.eps,
            gelu=spec.mlp.activation == "gelu_tanh", fused=spec.mlp.fused,
            padded_tokens=self._padded(mlp.down), partials_G=product.partials_G, b=b,
            a=_a(mlp.down, sums["down"]),
        )  # fmt: skip
        if i + 1 < len(decoder.layers):
            following = decoder.layers[i + 1]
            qkv, before_D = following.mixer.qkv, following.before_mixer_D
            padded, a = self._padded(qkv), _a(qkv, self._sums[i + 1]["qkv"])
        else:
            before_D, padded, a = decoder.final_norm_D, 0, NO_A
        self._add(
            layer, "down", mlp.down, self.h, sums["down"], layer.behind_mlp_D, layer.scalar_1,
            before_D, padded, a,
        )  # fmt: skip

    def _add(
        self,
        layer: Layer,
        name: str,
        projection: Projection,
        x: torch.Tensor,
        xa: LoraSum,
        behind_D: torch.Tensor | None,
        scalar_1: torch.Tensor | None,
        before_D: torch.Tensor,
        padded_tokens: int,
        a: LoraA,
    ) -> None:
        """Add what a part gives to the residual stream, and make the input of the next part."""
        product, b, behind = self._multiply(x, projection, xa), _b(projection, xa), None
        if outputs := layer.spec.summed.get(name):
            product, squares_PT = self._sum(product, projection, xa, outputs, "")
            b, behind = NO_B, None if behind_D is None else (behind_D, squares_PT)
        residual_norm.residual_norm(
            self.residual_TD, before_D, self.u, self.squares_PT, padded_tokens=padded_tokens,
            gemm_STN=product.out_STN, partials_G=product.partials_G, scale_1=product.scale_L,
            behind=behind, eps=self.decoder.eps, gain=layer.spec.gain, scalar_1=scalar_1, b=b, a=a,
        )  # fmt: skip


def _lora_sums(decoder: Decoder, tokens: int) -> dict[LayerSpec, dict[str, LoraSum]]:
    """The sums x A^T of a pass over ``tokens`` tokens, by product; used again by every layer of a kind.

    Those of products without an adapter are empty. The parts of a sum live from the kernel that makes x to
    the product after it, so those of all products lie in one place. Layers with one description have the
    adapters of the first of them.
    """
    shapes: dict[LayerSpec, dict[str, tuple[int, int, int]]] = {}
    for layer in decoder.layers:
        if layer.spec not in shapes:
            spec = layer.spec
            columns = triton.cdiv(spec.hidden, residual_norm.block_d(tokens))
            blocks = triton.cdiv(spec.mlp.intermediate, act_mul.BLOCK_I)
            made_by = {"qkv": columns, "o": spec.mixer.heads, "gate_up": columns, "down": blocks}
            shapes[spec] = {
                product.name: (made_by[product.name], tokens, each.lora.a_RK.shape[0])
                for product, each in zip(spec.products, layer.projections, strict=True)
                if each.lora is not None
            }
    most = max((math.prod(shape) for each in shapes.values() for shape in each.values()), default=0)
    parts = torch.empty(most, dtype=torch.float32, device=decoder.embedding_VD.device)

    def of(shape: tuple[int, int, int] | None) -> LoraSum:
        if shape is None:
            return NO_SUM
        return LoraSum(parts[: math.prod(shape)].view(shape), parts.new_empty(shape[1:]))

    names = ("qkv", "o", "gate_up", "down")
    return {spec: {name: of(each.get(name)) for name in names} for spec, each in shapes.items()}


def _a(projection: Projection, xa: LoraSum) -> LoraA:
    """What leaves x A^T for a product; nothing without an adapter."""
    return NO_A if projection.lora is None else LoraA(projection.lora.a_RK, xa)


def _b(projection: Projection, xa: LoraSum) -> LoraB:
    """What adds (x A^T) B^T to a product; nothing without an adapter."""
    return NO_B if projection.lora is None else LoraB(xa, projection.lora.b_NR)
