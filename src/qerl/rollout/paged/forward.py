"""One forward pass of the decoder over T tokens, for decoding (inside a CUDA graph) and for prefill alike.

A layer's computation in the names of transformers and vLLM, with ours in the comments:

    proj(h) = h W^T + (h A^T) (B alpha / r)^T          # Projection: a GEMM; the kernel that reads it adds its
                                                       # partial sums and B; the one that makes h adds h A^T
    h = rmsnorm(x, input_layernorm)                    # residual_norm; 1/rms is applied after the next GEMM
    q, k, v = qkv_proj(h)                              # Layer.mixer.qkv: fused QKV
    q, k = rope(head_norm(q), head_norm(k), position)  # rope_kv, as the layer's description says (Heads)
    kv_cache[place] = k, v                             # a page and a place in it
    y = paged_attention(q, kv_cache, block_tables)     # attend, combine_splits: the prompt's and own pages
    x = x + o_proj(y)                                  # Layer.mixer.o; the sum is in the next residual_norm

or, where the mixer is a delta net (`qerl.rollout.paged.delta_net`),

    qkv, z = in_proj_qkv(h), in_proj_z(h)              # Layer.mixer.qkvz: one GEMM; gates come with x A^T
    q, k, v = conv1d(qkv)                              # delta_inputs, with the last inputs of each sequence
    state, y = delta_rule(state, q, k, v, decay, beta) # delta_step
    x = x + out_proj(norm(y) * silu(z))                # gated_norm, Layer.mixer.out

and then

    h = rmsnorm(x, post_attention_layernorm)           # residual_norm
    gate, up = gate_up_proj(h)                         # Layer.mlp.gate_up
    x = x + down_proj(act(gate) * up)                  # act_mul: SwiGLU or GELU; then Layer.mlp.down

or, where that is a mixture (`qerl.rollout.paged.experts`), with the router's logits left by residual_norm,

    expert, weight = top(softmax(h W_router^T))        # route; arrange and spread: tokens by expert
    y = down(act(gate(h)) * up(h)) of each expert      # Layer.mlp.gate_up, act_items, Layer.mlp.down
    x = x + sum(weight * y)                            # the sum is in the next residual_norm

Launches per layer: GEMM, rope_kv, attend (two with many tokens), combine_splits, GEMM, residual_norm, GEMM,
act_mul, GEMM, residual_norm. LoRA adds none where packed_gemm.cu multiplies, else add_parts before each GEMM.
A norm after attention or MLP, a norm over all heads together, and a bias other than that of q, k and v cost
one sum_product each. A mixture has route, arrange, spread, GEMM, act_items and GEMM instead of GEMM, act_mul
and GEMM. See qerl.kernels.decode.common for how LoRA and normalisation are fused into these kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
import triton

from qerl.families.layer import Attention, DeltaNet, LayerSpec
from qerl.kernels.decode import act_mul, residual_norm, rope_kv
from qerl.kernels.decode import attend as attention
from qerl.kernels.decode.attend import Cut
from qerl.kernels.decode.launch import NO_A, NO_B, LoraA, LoraB
from qerl.kernels.decode.route import Kept
from qerl.kernels.decode.sum_product import block_of, sum_product
from qerl.kernels.limits import PAGE
from qerl.kernels.weights.product import NO_SUM, LoraSum, Product
from qerl.rollout.paged.delta_net import DeltaNets, Runs
from qerl.rollout.paged.experts import Mixtures
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import KVGeometry
from qerl.rollout.paged.weights import (
    AttentionWeights,
    Decoder,
    DeltaNetWeights,
    Kind,
    Layer,
    MLPWeights,
    Projection,
    RoutedWeights,
    kinds_of,
    look_ahead,
)


@dataclass
class Inputs:
    """Inputs of a forward pass, all int32.

    Attributes:
        token_T, position_T: The tokens and their positions.
        limit_2T: Number of cached tokens that each token attends to: of the shared prompt, and of its own
            sequence up to itself. The latter is 0 for a token whose key and value are not stored.
        table_T: The row of block tables that lists each token's own blocks.
        tables: Block tables [G, B] of each pool.
        items: Per kind of attention, work items [.., 4] and their tokens, as `attend` takes them.
        runs: The sequences of a prefill pass, for models with delta nets; None if each token belongs to
            another sequence.
    """

    token_T: torch.Tensor
    position_T: torch.Tensor
    limit_2T: torch.Tensor
    table_T: torch.Tensor
    tables: list[torch.Tensor]
    items: list[tuple[torch.Tensor, torch.Tensor]]
    runs: Runs | None = None


class Sums(NamedTuple):
    """The sums x A^T of a layer's four products."""

    into_mixer: LoraSum
    from_mixer: LoraSum
    gate_up: LoraSum
    down: LoraSum


@dataclass
class Attending:
    """Buffers of one kind of attention, in memory that all kinds share, and the cuts of its work items.

    Attributes:
        number: Index of the kind in :func:`qerl.rollout.paged.weights.kinds_of`.
        pool: Index of the pool of its keys and values.
        prompts, own: Cuts of items at shared prompts and at own tokens, see
            :func:`qerl.kernels.decode.attend.attend`.
        q_THE: Queries.
        gate_THE: Gates of the heads' outputs before the sigmoid; None without gates.
        out_ZTHE: Outputs of splits.
        lse_ZTH: Log-sum-exp of splits, not shared between kinds: halves that no item covers stay at -inf.
    """

    number: int
    pool: int
    prompts: Cut
    own: Cut
    q_THE: torch.Tensor
    gate_THE: torch.Tensor | None
    out_ZTHE: torch.Tensor
    lse_ZTH: torch.Tensor


class Forward:
    """A forward pass over T tokens, with its buffers.

    Args:
        decoder: The weights.
        tokens: T.
        cuts: Ways to attend, of which `cut_as` selects one, initially the first. Each has, per kind of
            attention, the cuts of items at shared prompts and at own tokens.

    Attributes:
        squares_PT: Partial sums of squares of the residual stream, from which 1/rms is computed.
    """

    def __init__(self, decoder: Decoder, tokens: int, *cuts: Sequence[tuple[Cut, Cut]]) -> None:
        device, specs = decoder.embedding_VD.device, list({run.spec for run in decoder.sizes.runs})
        hidden = decoder.sizes.hidden
        self.decoder, self.tokens = decoder, tokens

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        weights = [each.weight for layer in decoder.layers for each in layer.projections]
        look_ahead(decoder.layers)
        self.scratch = new(max(weight.scratch_bytes(tokens) for weight in weights), dtype=torch.uint8)
        self.residual_TD = new(tokens, hidden)

        def operand(width: int) -> torch.Tensor:
            # Flat, because each GEMM reads in an order of its own. Room beyond T belongs to no token: its
            # products are not written.
            padded = max(tokens, *(weight.padded_tokens(tokens) for weight in weights))
            return torch.zeros(padded * width, dtype=decoder.dtype, device=device)

        mixed = max(s.mixer.products(hidden)[-1].inputs for s in specs)
        inner = max(s.mlp.inner for s in specs)
        self.u, self.mixed, self.h = operand(hidden), operand(mixed), operand(inner)
        self.u_TD = self.u[: tokens * hidden].view(tokens, hidden)
        columns = triton.cdiv(hidden, residual_norm.block_d(tokens))
        self.squares_PT, self._no_squares_PT = new(columns, tokens), new(0, tokens)
        kinds, pools = kinds_of(decoder.sizes), KVGeometry.of(decoder.sizes, 2).pools
        q = new(tokens * max(k.heads * k.head_size for k in kinds), dtype=decoder.dtype)
        cut_kinds = [(kind, cut) for way in cuts for kind, cut in zip(kinds, way, strict=True)]
        most = max(sum(c.splits for c in cut) * tokens * k.heads * k.head_size for k, cut in cut_kinds)
        out = new(most, dtype=attention.parts_dtype(tokens, decoder.dtype))
        gates = [k.heads * k.head_size for k in kinds if k.gated]
        gate = new(tokens * max(gates)) if gates else None

        def of_kind(number: int, kind: Kind, cut: tuple[Cut, Cut]) -> Attending:
            shape = (sum(each.splits for each in cut), tokens, kind.heads)
            heads = (tokens, kind.heads, kind.head_size)
            whole = (*shape, kind.head_size)
            return Attending(
                number, pools.index(kind.window), *cut, q[: math.prod(heads)].view(heads),
                None if gate is None or not kind.gated else gate[: math.prod(heads)].view(heads),
                out[: math.prod(whole)].view(whole), new(*shape).fill_(-torch.inf),
            )  # fmt: skip

        self._ways = [
            [of_kind(i, *each) for i, each in enumerate(zip(kinds, way, strict=True))] for way in cuts
        ]
        self.cut_as(0)
        self._slots = [new(tokens, dtype=torch.int32) for _ in pools]
        self._pages = [None if pool == "state" else PAGE for pool in pools]
        self._delta_nets = _delta_nets(decoder, tokens)
        self._mixtures = _mixtures(decoder, tokens)
        self._mixture_numbers = list(accumulate((s.experts > 0 for s in decoder.sizes.specs), initial=0))
        # Indexed by layer and not by description, because hashing one takes longer than a launch.
        sums = _lora_sums(decoder, tokens)
        mixers = [layer.spec.mixer for layer in decoder.layers]
        self._kinds = [kinds.index(Kind.of(each)) if isinstance(each, Attention) else -1 for each in mixers]
        self._states = pools.index("state") if "state" in pools else -1
        self._sums = [sums[layer.spec] for layer in decoder.layers]
        self._summed = new(tokens * max(sum(of) for s in specs for of in ((), *s.summed.values())))
        self._one_L = torch.ones(3, device=device)

    def cut_as(self, way: int) -> None:
        """Select the way to attend by its index in ``cuts``."""
        self._attending = self._ways[way]

    def forget_attention(self) -> None:
        """Reset the log-sum-exp of all splits to -inf, for tokens with a half that no item covers."""
        for each in self._attending:
            each.lse_ZTH.fill_(-torch.inf)

    def _multiply(self, x: torch.Tensor, projection: Projection, xa: LoraSum) -> Product:
        used = self._padded(projection) * projection.weight.shape[1]  # the operand may be of wider layers
        return projection.weight.multiply(x[: used or None], self.tokens, self.scratch, xa)

    def _padded(self, projection: Projection) -> int:
        """Return how many tokens the operand of this weight has room for, 0 if it is [T, K]."""
        return projection.weight.padded_tokens(self.tokens)

    def _squares(self, norm: str) -> torch.Tensor:
        """Return the sums of squares for the norm of this name; an empty tensor without a norm."""
        return self.squares_PT if norm else self._no_squares_PT

    def _sum(
        self, product: Product, projection: Projection, xa: LoraSum, outputs: tuple[int, ...], norm: str
    ) -> tuple[Product, torch.Tensor]:
        """Finish a product: return it with LoRA, 1/rms and bias, and its sums of squares per column block."""
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
        for tables_GB, slot_T, page in zip(inputs.tables, self._slots, self._pages, strict=True):
            rope_kv.find_slots(inputs.limit_2T, inputs.table_T, tables_GB, slot_T, page)
        residual_norm.residual_norm(
            self.residual_TD, first.before_mixer_D, self.u, self.squares_PT,
            padded_tokens=self._padded(first.projections[0]),
            embedding=(decoder.embedding_VD, inputs.token_T), gain=decoder.embedding_scale,
            a=_a(first.projections[0], self._sums[0].into_mixer),
        )  # fmt: skip
        for i, layer in enumerate(decoder.layers):
            sums, held = self._sums[i], cache.layers[i]
            if isinstance(layer.mixer, DeltaNetWeights):
                self._delta_net(layer.spec, layer.mixer, sums, held, inputs)
            else:
                kind = self._attending[self._kinds[i]]
                self._attention(layer.spec, layer.mixer, sums, kind, held, inputs)
            self._add_mixed(layer, self._sums[i])
            self._mlp(i, cache)
        return self.u_TD

    def _delta_net(
        self,
        spec: LayerSpec,
        mixer: DeltaNetWeights,
        sums: Sums,
        held: tuple[torch.Tensor, ...],
        inputs: Inputs,
    ) -> None:
        """Run a delta net, from the first norm's output to the mixer's."""
        nets, norm = self._delta_nets, spec.around.before_mixer
        assert nets is not None
        product, b = self._multiply(self.u, mixer.qkvz, sums.into_mixer), _b(mixer.qkvz, sums.into_mixer)
        given = product, self._squares(norm), mixer, b, held
        if inputs.runs is None:
            nets.step(*given, inputs.position_T, self._slots[self._states])
        else:
            nets.run(*given, inputs.runs, self.decoder.dtype)
        nets.normalised(mixer, self.mixed, self._padded(mixer.out), _a(mixer.out, sums.from_mixer))

    def _attention(
        self,
        spec: LayerSpec,
        mixer: AttentionWeights,
        sums: Sums,
        kind: Attending,
        held: tuple[torch.Tensor, ...],
        inputs: Inputs,
    ) -> None:
        """Run attention, from the first norm's output to the mixer's."""
        assert isinstance(spec.mixer, Attention)
        decoder, (k, v) = self.decoder, held[:2]
        tables_GB, (item_4, order) = inputs.tables[kind.pool], inputs.items[kind.number]
        product = self._multiply(self.u, mixer.qkv, sums.into_mixer)
        heads, norm = mixer.heads, spec.around.before_mixer
        b, bias_N = _b(mixer.qkv, sums.into_mixer), mixer.qkv.bias_N
        if outputs := spec.summed.get("qkv"):
            product, squares_PT = self._sum(product, mixer.qkv, sums.into_mixer, outputs, norm)
            heads, norm, b, bias_N = replace(heads, squares_PT=squares_PT), "", NO_B, None
        rope_kv.rope_kv(
            product.out_STN, product.scale_L, self._squares(norm), mixer.cos_MP, mixer.sin_MP,
            inputs.position_T, self._slots[kind.pool], kind.q_THE, k, v, gate_THE=kind.gate_THE,
            width=spec.hidden, eps=decoder.eps, heads=heads, partials_G=product.partials_G, bias_N=bias_N,
            b=b,
        )  # fmt: skip
        attention.attend(
            kind.q_THE, k, v, tables_GB, item_4, order, inputs.limit_2T, kind.out_ZTHE, kind.lse_ZTH,
            prompts=kind.prompts, own=kind.own, scale=spec.mixer.scale, window=spec.mixer.window,
        )  # fmt: skip
        attention.combine_splits(
            kind.out_ZTHE, kind.lse_ZTH, self.mixed, padded_tokens=self._padded(mixer.o),
            sink_H=mixer.sink_H, gate_THE=kind.gate_THE, a=_a(mixer.o, sums.from_mixer),
        )  # fmt: skip

    def _add_mixed(self, layer: Layer, sums: Sums) -> None:
        """Add the mixer's output projection to the residual stream, and apply the second norm."""
        last, mlp = layer.mixer.projections[1], layer.mlp
        name = "out" if isinstance(layer.mixer, DeltaNetWeights) else "o"
        of_all = mlp.shared if isinstance(mlp, RoutedWeights) else mlp
        if isinstance(mlp, RoutedWeights) and of_all is None:
            assert self._mixtures is not None
            padded, a = 0, self._mixtures.logits(mlp)
        else:
            assert of_all is not None
            padded, a = self._padded(of_all.gate_up), _a(of_all.gate_up, sums.gate_up)
        self._add(
            layer, name, last, self.mixed, sums.from_mixer, layer.behind_mixer_D, None,
            layer.before_mlp_D, padded, a,
        )  # fmt: skip

    def _mlp(self, i: int, cache: KVCache) -> None:
        """Run the MLP, from the second norm's output to that of the next layer's first norm or final norm."""
        decoder, layer = self.decoder, self.decoder.layers[i]
        if i + 1 < len(decoder.layers):
            following = decoder.layers[i + 1]
            into_mixer, before_D = following.projections[0], following.before_mixer_D
            padded, a = self._padded(into_mixer), _a(into_mixer, self._sums[i + 1].into_mixer)
        else:
            before_D, padded, a = decoder.final_norm_D, 0, NO_A
        if isinstance(layer.mlp, RoutedWeights):
            assert self._mixtures is not None
            norm = layer.spec.around.before_mlp
            pool, kept_BPMC = cache.geometry.pool_of_choices, cache.kept_choices
            kept = None
            if pool is not None and kept_BPMC is not None:
                kept = Kept(self._slots[pool], kept_BPMC, self._mixture_numbers[i])
            sums, shared, product, b = self._sums[i], layer.mlp.shared, None, NO_B
            order = 0 if shared is None else self._padded(shared.gate_up)
            u = self.u if order else self.u_TD
            if shared is not None:
                self._act(layer, shared, sums)
                product, b = self._multiply(self.h, shared.down, sums.down), _b(shared.down, sums.down)
            chosen = self._mixtures(layer.mlp, u, self._squares(norm), kept, order, sums.gate_up)
            residual_norm.residual_norm(
                self.residual_TD, before_D, self.u, self.squares_PT, padded_tokens=padded, chosen=chosen,
                gemm_STN=None if product is None else product.out_STN,
                partials_G=None if product is None else product.partials_G,
                scale_1=None if product is None else product.scale_L,
                gain=layer.spec.gain, scalar_1=layer.scalar_1, b=b, a=a,
            )  # fmt: skip
            return
        self._act(layer, layer.mlp, self._sums[i])
        self._add(
            layer, "down", layer.mlp.down, self.h, self._sums[i].down, layer.behind_mlp_D, layer.scalar_1,
            before_D, padded, a,
        )  # fmt: skip

    def _act(self, layer: Layer, mlp: MLPWeights, sums: Sums) -> None:
        """Run gate, up and activation, from the second norm's output to the down projection's input."""
        decoder, spec, norm = self.decoder, layer.spec, layer.spec.around.before_mlp
        product, b = self._multiply(self.u, mlp.gate_up, sums.gate_up), _b(mlp.gate_up, sums.gate_up)
        if outputs := spec.summed.get("gate_up"):
            product, _ = self._sum(product, mlp.gate_up, sums.gate_up, outputs, norm)
            norm, b = "", NO_B
        act_mul.act_mul(
            product.out_STN, product.scale_L, self._squares(norm), self.h,
            intermediate=spec.mlp.inner, width=spec.hidden, eps=decoder.eps,
            gelu=spec.mlp.activation == "gelu_tanh", fused=spec.mlp.fused,
            padded_tokens=self._padded(mlp.down), partials_G=product.partials_G, b=b,
            a=_a(mlp.down, sums.down),
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
        """Add the product of a part's last projection to the residual stream, and make the next input."""
        product, b, behind = self._multiply(x, projection, xa), _b(projection, xa), None
        if outputs := layer.spec.summed.get(name):
            product, squares_PT = self._sum(product, projection, xa, outputs, "")
            b, behind = NO_B, None if behind_D is None else (behind_D, squares_PT)
        residual_norm.residual_norm(
            self.residual_TD, before_D, self.u, self.squares_PT, padded_tokens=padded_tokens,
            gemm_STN=product.out_STN, partials_G=product.partials_G, scale_1=product.scale_L,
            behind=behind, eps=self.decoder.eps, gain=layer.spec.gain, scalar_1=scalar_1, b=b, a=a,
        )  # fmt: skip


def _lora_sums(decoder: Decoder, tokens: int) -> dict[LayerSpec, Sums]:
    """Return buffers for the sums x A^T of a pass over ``tokens`` tokens, by description of a layer.

    All layers of a description share them, and its first layer gives the ranks for all. Buffers of products
    without an adapter are empty. The parts of a sum are needed only from the kernel that makes x to the next
    product, so the parts of all products share one buffer.
    """
    shapes: dict[LayerSpec, list[tuple[int, int, int]]] = {}
    device = decoder.embedding_VD.device
    for layer in decoder.layers:
        if (spec := layer.spec) not in shapes:
            columns = triton.cdiv(spec.hidden, residual_norm.block_d(tokens))
            ranks = [0 if each.lora is None else len(each.lora.a_RK) for each in layer.projections]
            ranks += [0] * (4 - len(ranks))  # experts have no adapter
            runs = act_mul.programs(spec.mlp.inner, tokens, ranks[-1], device)
            made_by = columns, _heads_of_output(spec), columns, runs
            shapes[spec] = [(parts, tokens, count) for parts, count in zip(made_by, ranks, strict=True)]
    most = max(math.prod(shape) for each in shapes.values() for shape in each)
    parts = torch.empty(most, dtype=torch.float32, device=device)

    def of(shape: tuple[int, int, int]) -> LoraSum:
        if not shape[2]:
            return NO_SUM
        return LoraSum(parts[: math.prod(shape)].view(shape), parts.new_empty(shape[1:]))

    return {spec: Sums(*map(of, each)) for spec, each in shapes.items()}


def _heads_of_output(spec: LayerSpec) -> int:
    """Return the number of heads that a mixer's last product reads, each written by its own program."""
    return spec.mixer.heads if isinstance(spec.mixer, Attention) else spec.mixer.value_heads


def _delta_nets(decoder: Decoder, tokens: int) -> DeltaNets | None:
    """Return the buffers of a model's delta nets; None if it has none."""
    specs = {spec.mixer: spec for spec in (run.spec for run in decoder.sizes.runs)}
    found = {mixer: spec for mixer, spec in specs.items() if isinstance(mixer, DeltaNet)}
    if not found:
        return None
    ((mixer, spec),) = found.items()
    return DeltaNets(mixer, spec.hidden, tokens, decoder.eps, decoder.embedding_VD.device)


def _mixtures(decoder: Decoder, tokens: int) -> Mixtures | None:
    """Return the buffers of a model's mixtures; None if it has none."""
    mlp = decoder.sizes.mixture
    if mlp is None:
        return None
    layers = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, RoutedWeights)]
    return Mixtures(mlp, layers, tokens, decoder.eps, decoder.embedding_VD)


def _a(projection: Projection, xa: LoraSum) -> LoraA:
    """Return the arguments of the kernel that computes x A^T for a product; `NO_A` without an adapter."""
    return NO_A if projection.lora is None else LoraA(projection.lora.a_RK, xa)


def _b(projection: Projection, xa: LoraSum) -> LoraB:
    """Return the arguments of the kernel that adds (x A^T) B^T to a product; `NO_B` without an adapter."""
    return NO_B if projection.lora is None else LoraB(xa, projection.lora.b_NR)
