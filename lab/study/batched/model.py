"""The forward pass of a decoder with S adapters on one base, or with S copies of all weights.

A token stream is [S, T, D], the tokens of a run one after the other, whichever prompt or sample they are of.
The output of a linear depends on what is trained (`lab.study.batched.trained`). Norms compute in FP32 and
round once, clean or noisy (`qerl.noise` says why), so both use the same code with other weights. In 16 bits
on a GPU norms, rotary embedding and SwiGLU are the kernels of the trainer's update; elsewhere torch computes
them. The caller decides which token attends to which: `layers` passes queries, keys and values to a function
and continues with its result.

Legend: S runs, T tokens of a run, D hidden width, K inputs, N outputs, H query heads, G key heads, W width
of a head, V vocabulary, L positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, cast

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from lab.study.batched.adapters import Adapters, Place
from lab.study.batched.full import FullWeights, Rest
from lab.study.batched.trained import Frozen, Trained, Weights
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.families.table import FAMILIES
from qerl.fp4.linear import PackedLinear
from qerl.kernels.tensors import product as unrounded
from qerl.lora.product import is_16bit_cuda
from qerl.seeding import derive_seed

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer, queries [S, T, H, W], keys [S, T, G, W], values [S, T, G, W])` -> [S, T, H W]."""

NormWeight = Callable[[int], torch.Tensor]
"""Weight of a norm by its number among those that noise acts on: fp32, broadcastable to [S, T, D]."""

_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # kinds whose angles do not depend on the length


class Head(NamedTuple):
    """The last norm [D] and the output head [V, D]."""

    final: torch.Tensor
    weight: torch.Tensor


class BatchedModel:
    """A decoder of Llama's kind with an adapter, or weights of its own, per run.

    Args:
        base: A causal LM with packed, NF4 or dense linears, without an adapter. It is read once and not
            changed; embedding, head and norms are shared with it.
        runs: S.
        lora_r: Rank of the adapters, which are on every linear of the decoder; not used if runs have weights
            of their own.
        seeds: One per run; the seed decides the run's A.
        frozen_noise: Relative error (root mean square) of Gaussian noise that is added to each linear weight,
            the same for all runs.
        tuning: Whether runs train adapters or all weights.

    Attributes:
        trained: Trained parameters of the runs.
        sharing: Number of query heads that share a key head.
        norm_names: Norms that noise acts on, by their names in `base`: the two of each layer, in order.
        norm_weights_ND: Their clean weights, fp32.

    Raises:
        QeRLError: This forward pass does not support the model.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        runs: int,
        lora_r: int,
        seeds: Sequence[int],
        frozen_noise: float = 0.0,
        tuning: Literal["lora", "full"] = "lora",
    ) -> None:
        _check(base)
        config = base.config
        self.sizes = Sizes.from_config(config.to_dict())
        self.sharing = config.num_attention_heads // self.sizes.attention.kv_heads
        self.runs, self.dtype, self.device = runs, base.dtype, base.device
        self._eps = config.rms_norm_eps
        decoder = base.get_decoder()
        self._embedding_VD = decoder.embed_tokens.weight.detach()
        self._padding = decoder.embed_tokens.padding_idx
        self._head_VD = base.get_output_embeddings().weight.detach()
        self._rotary = decoder.rotary_emb
        self._final_D = decoder.norm.weight.detach().float()
        self._products: list[list[Frozen]] = []
        self._head_norms: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        places, norms = [], []
        self.norm_names: list[str] = []
        for index, layer in enumerate(decoder.layers):
            prefix = f"model.layers.{index}."
            groups = [[each.place for each in p.linears] for p in self.sizes.spec.products]
            linears = [[layer.get_submodule(place) for place in group] for group in groups]
            self._products.append([_frozen(group, base.dtype) for group in linears])
            for group, product in zip(groups, self._products[-1], strict=True):
                names = tuple(prefix + place for place in group)
                places.append(Place(names, product.weight_NK.shape[1], product.outputs))
            attention = layer.self_attn
            self._head_norms.append(
                (attention.q_norm.weight.detach().float(), attention.k_norm.weight.detach().float())
                if self.sizes.attention.qk_norm
                else None
            )
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.norm_names.append(prefix + name)
                norms.append(layer.get_submodule(name).weight.detach().float())
        self.norm_weights_ND = torch.stack(norms)
        if frozen_noise:
            self._add_noise(frozen_noise)
        self.trained: Trained
        if tuning == "full":
            tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
            head_VD = None if tied else self._head_VD
            rest = Rest(self._embedding_VD, head_VD, self.norm_weights_ND, self._final_D, self._head_norms)
            products = [product for layer in self._products for product in layer]
            self.trained = FullWeights(products, rest, runs, self.dtype)
        else:
            self.trained = Adapters(places, lora_r, seeds, self.device, self.dtype)

    @torch.no_grad()
    def _add_noise(self, relative_error: float) -> None:
        """Add Gaussian noise to each linear weight, scaled to this share of the weight's root mean square."""
        for layer, products in enumerate(self._products):
            for index, product in enumerate(products):
                draw = torch.Generator(self.device).manual_seed(derive_seed("frozen noise", layer, index))
                for rows_NK in product.weight_NK.split(product.outputs):
                    wide_NK = rows_NK.float()
                    noise_NK = torch.empty_like(wide_NK).normal_(generator=draw)
                    scale = relative_error * wide_NK.square().mean().sqrt()
                    rows_NK.copy_(wide_NK + scale * noise_NK)

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Give each run the base's policy inside the block."""
        values_SE = self.trained.values_SE
        kept_SE = values_SE.clone()
        self.trained.be_the_base()
        try:
            yield
        finally:
            values_SE.copy_(kept_SE)

    def angles(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [L, W] of the rotary embedding, in the dtype of activations."""
        at_1L = torch.arange(positions, device=self.device)[None]
        cosine_1LW, sine_1LW = self._rotary(self._embedding_VD, at_1L)
        return cosine_1LW[0], sine_1LW[0]

    def embed(self, ids_ST: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Embed tokens of some runs, [S, T, D]."""
        if weights.whole is None:
            return F.embedding(ids_ST, self._embedding_VD)
        runs_S1 = torch.arange(len(ids_ST), device=ids_ST.device)[:, None]
        x_STD = weights.whole.embedding_SVD[runs_S1, ids_ST]
        if self._padding is None:
            return x_STD
        # As in transformers, the embedding of the pad token gets no gradient, even where it is a real token.
        return torch.where((ids_ST == self._padding)[..., None], x_STD.detach(), x_STD)

    def layers(
        self,
        x_STD: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        weights: Weights,
        norm_weight: NormWeight,
    ) -> torch.Tensor:
        """Run all decoder layers, without the final norm.

        Args:
            x_STD: Embedded tokens; S may be some of the runs.
            angles: Cosines and sines of the tokens' positions, [S, T, W] each.
            attend: Attention.
            weights: Trained weights of these runs.
            norm_weight: Weights of the norms before linears, for runs that have none of their own.
        """
        whole = weights.whole
        head_norms = self._head_norms if whole is None else [_by_run(norms) for norms in whole.head_norms]
        if whole is not None:
            norms_NS1D = whole.norms_SND[:, :, None].unbind(1)
            norm_weight = lambda norm: norms_NS1D[norm]  # noqa: E731
        for index, products in enumerate(self._products):
            (qkv, output, gate_up, down), own = products, weights.products[4 * index : 4 * index + 4]
            h_STD = self.norm(x_STD, norm_weight(2 * index))
            attended = attend(index, *self._heads(own[0](qkv, h_STD), angles, head_norms[index]))
            x_STD = x_STD + own[1](output, attended)
            h_STD = self.norm(x_STD, norm_weight(2 * index + 1))
            x_STD = x_STD + own[3](down, swiglu(own[2](gate_up, h_STD)))
        return x_STD

    def _heads(
        self,
        qkv_STN: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values; queries and keys are normalized, if the model does that, and rotated."""
        groups, size = self.sizes.attention.kv_heads, self.sizes.attention.head_size
        heads = groups * self.sharing
        if norms is None and is_16bit_cuda(qkv_STN):
            from qerl.kernels.update.rotary import rotated_heads

            return rotated_heads(qkv_STN, *angles, heads, groups)
        q, k, v = qkv_STN.unflatten(-1, (-1, size)).split([heads, groups, groups], dim=2)
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        return _turned(q, *angles), _turned(k, *angles), v

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * weight over the last axis, in fp32 and rounded once to the dtype of x.

        Except for the last axis, the weight has the axes of x up to some axis, and axes of size 1 from there
        on.
        """
        if is_16bit_cuda(x) and not weight.requires_grad:
            from qerl.kernels.update.rms_norm import rms_norm

            return rms_norm(x, weight, self._eps, rounds_unit=False)
        return (F.rms_norm(x.float(), x.shape[-1:], None, self._eps) * weight).to(x.dtype)

    def heads(self, weights: Weights) -> list[Head]:
        """One head per run, or a single one if the runs share it."""
        if weights.whole is None:
            return [Head(self._final_D, self._head_VD)]
        return list(map(Head, weights.whole.final_SD.unbind(), weights.whole.head_SVD.unbind()))

    def logits(self, x_STD: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Logits [S, T, V] of the last layer's output, fp32 and unrounded; without gradient."""
        logits_STV = torch.empty(*x_STD.shape[:2], self.sizes.vocabulary, device=x_STD.device)
        heads = self.heads(weights)
        parts = (each.chunk(len(heads)) for each in (x_STD, logits_STV))
        for head, x, out in zip(heads, *parts, strict=True):
            unrounded(self.norm(x, head.final).flatten(0, 1), head.weight.T, out=out.flatten(0, 1))
        return logits_STV


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; gate and up are the halves of the last axis."""
    if is_16bit_cuda(gate_up):
        from qerl.kernels.update.swiglu import swiglu as fused

        return fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _by_run(norms: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Reshape norms [S, W] of queries and keys to broadcast to heads [S, T, H, W]."""
    return None if norms is None else (norms[0][:, None, None], norms[1][:, None, None])


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Heads [S, T, H, W] rotated by the angles of their positions."""
    left, right = x.chunk(2, dim=-1)
    return x * cosine[:, :, None] + torch.cat([-right, left], dim=-1) * sine[:, :, None]


def dense_weight(linear: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of a packed, NF4 or dense linear; for a dense one possibly the parameter itself."""
    if isinstance(linear, PackedLinear):
        return linear.dense(dtype)
    weight = linear.get_parameter("weight")
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach().to(dtype)
    from bitsandbytes.functional import dequantize_4bit  # an optional package, which has made this weight

    return dequantize_4bit(weight.data, state).to(dtype)


def _frozen(linears: Sequence[torch.nn.Module], dtype: torch.dtype) -> Frozen:
    """Join linears that share an input into one dense product."""
    weight_NK = torch.cat([dense_weight(linear, dtype) for linear in linears])
    biases = [
        linear.get_parameter("bias").detach().to(dtype) for linear in linears if linear.bias is not None
    ]
    outputs = tuple(cast(int, linear.out_features) for linear in linears)
    return Frozen(weight_NK, torch.cat(biases) if biases else None, outputs)


_KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def _check(base: PreTrainedModel) -> None:
    config = base.config
    kind = str(getattr(config, "model_type", None))
    name, why = type(base).__name__, None
    if kind not in _KNOWN or not hasattr(base.get_decoder(), "layers"):
        why = f"is of the family {kind} (supported: {', '.join(_KNOWN)})"
    elif any(getattr(run.spec.mixer, "window", None) for run in FAMILIES[kind].sizes(config).runs):
        why = "attends to a sliding window"
    elif config.hidden_act != "silu":
        why = f"has the activation {config.hidden_act}"
    elif (rope := (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")) not in _ROPE:
        why = f"has rotary angles ({rope}) that depend on a sequence's length"
    if why is not None:
        raise QeRLError(f"Runs cannot be batched on this {name}, which {why}; train them one by one.")
