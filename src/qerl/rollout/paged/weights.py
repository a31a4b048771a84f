"""The decoder's weights as the decode step reads them.

Built once over a loaded model. Packed weights are moved, not copied: afterwards the layers that train read
the same tensors. LoRA matrices are copied into stacked bf16 buffers before each rollout (megabytes), RMSNorm
weights into fp32 buffers that may carry noise; both are written in place, so captured graphs stay valid.

Shapes: D hidden, N out-features, K in-features, I intermediate, R padded rank, E head size, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from qerl.families.layer import LayerSpec
from qerl.families.sizes import Sizes
from qerl.kernels.weights.nvfp4 import NVFP4Stack
from qerl.kernels.weights.packed_gemm import Ahead
from qerl.kernels.weights.product import GemmWeight


@dataclass
class Lora:
    """LoRA of one GEMM, bf16: A of all parts stacked, B on top of each other and scaled by alpha / r."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor


@dataclass
class Projection:
    """One GEMM of a layer: the stacked linears of a product (`qerl.families.layer`), and their adapter.

    Attributes:
        lora: None without an adapter.
    """

    weight: GemmWeight
    lora: Lora | None = None


@dataclass
class AttentionWeights:
    """What `qerl.families.layer.Attention` computes with.

    Attributes:
        bias_N: Of q, k and v together; None where they have none.
        qk_norm_2E: Weights of the norms of query and key heads; None where heads are not normalised.
    """

    qkv: Projection
    o: Projection
    bias_N: torch.Tensor | None = None
    qk_norm_2E: torch.Tensor | None = None


@dataclass
class SwiGLUWeights:
    """What `qerl.families.layer.SwiGLU` computes with."""

    gate_up: Projection
    down: Projection


@dataclass
class Layer:
    """One decoder layer, with the weights of the norms in front of its two parts."""

    spec: LayerSpec
    input_norm_D: torch.Tensor
    mixer: AttentionWeights
    post_norm_D: torch.Tensor
    mlp: SwiGLUWeights

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All GEMMs, in the order of the description's products."""
        return self.mixer.qkv, self.mixer.o, self.mlp.gate_up, self.mlp.down


@dataclass
class Decoder:
    """A whole model.

    Attributes:
        embedding_VD, head_VD: bf16, the same tensor when tied.
        cos_ME, sin_ME: fp32 [positions, E / 2].
        sizes: Of the model, by its config.
        eps: What RMSNorm adds to the mean square.
    """

    embedding_VD: torch.Tensor
    layers: list[Layer]
    final_norm_D: torch.Tensor
    head_VD: torch.Tensor
    cos_ME: torch.Tensor
    sin_ME: torch.Tensor
    sizes: Sizes
    eps: float

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values: bf16 on a GPU, fp32 in Triton's interpreter."""
        return self.embedding_VD.dtype


def look_ahead(layers: Sequence[Layer]) -> None:
    """Tells each weight in NVFP4 what the kernels after its product read in a forward pass."""
    projections = [projection for layer in layers for projection in layer.projections]
    for each, following in pairwise(projections):
        if isinstance(each.weight, NVFP4Stack):
            each.weight.ahead = Ahead(
                None if each.lora is None else each.lora.b_NR,
                None if following.lora is None else following.lora.a_RK,
                following.weight.tiles if isinstance(following.weight, NVFP4Stack) else None,
            )
