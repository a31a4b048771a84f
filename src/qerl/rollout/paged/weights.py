"""The decoder's weights as the decode step reads them.

Built once over a loaded model. Packed weights are moved, not copied: afterwards the trained layers read the
same tensors. LoRA matrices are copied into stacked bf16 buffers before each rollout (megabytes), RMSNorm
weights into fp32 buffers that may carry noise; both are written in place, so captured graphs stay valid.

Shapes: D hidden, N out-features, K in-features, I intermediate, R padded rank, E head size, H query heads, V
vocabulary, M positions, P pairs of rotated numbers; of a delta net C channels of the convolution, W its taps,
V value heads, E their size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from qerl.families.layer import Attention, LayerSpec
from qerl.families.sizes import Sizes
from qerl.kernels.decode.expert_lora import ExpertLoraMatrices
from qerl.kernels.decode.rope_kv import Heads
from qerl.kernels.weights.experts import ExpertWeights
from qerl.kernels.weights.nvfp4 import NVFP4Stack
from qerl.kernels.weights.packed_gemm import Ahead
from qerl.kernels.weights.product import GemmWeight


@dataclass
class Lora:
    """LoRA of one GEMM, bf16: A and B of all its linears stacked, B scaled by alpha / r.

    Attributes:
        a_RK: All A, and below them optional rows of other narrow linears of the same input, which have no B.
        b_NR: All B; None without an adapter, in which case `a_RK` has only rows of such narrow linears.
    """

    a_RK: torch.Tensor
    b_NR: torch.Tensor | None


@dataclass
class Projection:
    """One GEMM of a layer: the stacked linears of a product (`qerl.families.layer`), and their adapter.

    Attributes:
        lora: None without an adapter.
        bias_N: Biases of all its linears; None if they have none.
    """

    weight: GemmWeight
    lora: Lora | None = None
    bias_N: torch.Tensor | None = None


@dataclass
class AttentionWeights:
    """Weights of a `qerl.families.layer.Attention`.

    Attributes:
        heads: Operations on heads between product and attention.
        cos_MP, sin_MP: fp32, of the positions; a single zero without rotary embedding.
        sink_H: fp32; None without sinks.
    """

    qkv: Projection
    o: Projection
    heads: Heads
    cos_MP: torch.Tensor
    sin_MP: torch.Tensor
    sink_H: torch.Tensor | None = None

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Its GEMMs, in the order of the description's products."""
        return self.qkv, self.o


@dataclass
class DeltaNetWeights:
    """Weights of a `qerl.families.layer.DeltaNet`.

    Attributes:
        qkvz: Below LoRA's rows, its A has the rows of both gate linears, b and then a, so their products with
            the input come with x A^T.
        taps_WC: Taps of the convolution, fp32; the last row is that of the present token.
        rates_V: fp32, factors of softplus(a + offset) in the logarithm of the decay.
        offsets_V: fp32, the offsets in it.
        norm_E: Weight of the norm of each value head's output, fp32.
    """

    qkvz: Projection
    out: Projection
    taps_WC: torch.Tensor
    rates_V: torch.Tensor
    offsets_V: torch.Tensor
    norm_E: torch.Tensor

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Its GEMMs, in the order of the description's products."""
        return self.qkvz, self.out


@dataclass
class MLPWeights:
    """Weights of a `qerl.families.layer.GatedMLP`."""

    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Its GEMMs, in the order of the description's products."""
        return self.gate_up, self.down


@dataclass
class RoutedWeights:
    """Weights of a `qerl.families.layer.RoutedMLP`.

    Attributes:
        router_ED: In the activations' dtype; frozen.
        shared: Weights of the MLP that all tokens go through; below its adapter's A, gate_up has the rows of
            the router and of the shared MLP's gate. None without such an MLP.
        router_bias_E: fp32; None without biases.
        gate_up_bias_EN: fp32; None without biases.
        down_bias_ED: fp32, divided by the scale of each expert's result; None without biases.
        gate_up_lora, down_lora: Adapters of the experts themselves; None without.
    """

    router_ED: torch.Tensor
    gate_up: ExpertWeights
    down: ExpertWeights
    shared: MLPWeights | None = None
    router_bias_E: torch.Tensor | None = None
    gate_up_bias_EN: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    gate_up_lora: ExpertLoraMatrices | None = None
    down_lora: ExpertLoraMatrices | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The GEMMs that are computed for every token."""
        return () if self.shared is None else self.shared.projections


@dataclass
class Layer:
    """One decoder layer, with the weights of the norms around its two parts.

    Attributes:
        before_mixer_D, before_mlp_D: fp32, factors of each part's normed input; ones without a norm.
        behind_mixer_D, behind_mlp_D: fp32, factors of each part's normed output; None without a norm.
        scalar_1: fp32, multiplies the layer's result; None without.
    """

    spec: LayerSpec
    before_mixer_D: torch.Tensor
    mixer: AttentionWeights | DeltaNetWeights
    before_mlp_D: torch.Tensor
    mlp: MLPWeights | RoutedWeights
    behind_mixer_D: torch.Tensor | None = None
    behind_mlp_D: torch.Tensor | None = None
    scalar_1: torch.Tensor | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All GEMMs for every token, in the order of the description's products."""
        return *self.mixer.projections, *self.mlp.projections


class Kind(NamedTuple):
    """Layers whose attention has the same shape, and so the same buffers and work items.

    Attributes:
        window: Number of tokens that a token attends to; None for all.
        gated: True if each head's output has a gate.
    """

    window: int | None
    heads: int
    kv_heads: int
    head_size: int
    gated: bool = False

    @classmethod
    def of(cls, mixer: Attention) -> "Kind":
        """Return the kind of a layer with this mixer."""
        return cls(mixer.window, mixer.heads, mixer.kv_heads, mixer.head_size, mixer.gated)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


def kinds_of(sizes: Sizes) -> tuple[Kind, ...]:
    """Return the distinct kinds of a model's attention layers."""
    mixers = [run.spec.mixer for run in sizes.runs]
    return tuple(dict.fromkeys(Kind.of(mixer) for mixer in mixers if isinstance(mixer, Attention)))


@dataclass
class Decoder:
    """Weights of a whole model.

    Attributes:
        embedding_VD, head_VD: bf16, the same tensor when tied.
        embedding_scale: Factor of the embeddings.
        sizes: Sizes of the model, from its config.
        eps: What RMSNorm adds to the mean square.
    """

    embedding_VD: torch.Tensor
    layers: list[Layer]
    final_norm_D: torch.Tensor
    head_VD: torch.Tensor
    sizes: Sizes
    eps: float
    embedding_scale: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations, and by default of keys and values: bf16 on a GPU, fp32 in the interpreter."""
        return self.embedding_VD.dtype


def look_ahead(layers: Sequence[Layer]) -> None:
    """Tell each NVFP4 weight what the kernels after its product read, which some GPUs prefetch."""
    projections = [projection for layer in layers for projection in layer.projections]
    for each, following in pairwise(projections):
        if isinstance(each.weight, NVFP4Stack):
            each.weight.ahead = Ahead(
                None if each.lora is None else each.lora.b_NR,
                None if following.lora is None else following.lora.a_RK,
                following.weight.tiles if isinstance(following.weight, NVFP4Stack) else None,
            )
