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
class Layer:
    """One decoder layer; ``lora_*`` is None without an adapter."""

    input_norm_D: torch.Tensor
    qkv: GemmWeight
    bias_N: torch.Tensor | None
    qk_norm_2E: torch.Tensor | None
    o: GemmWeight
    post_norm_D: torch.Tensor
    gate_up: GemmWeight
    down: GemmWeight
    lora_qkv: Lora | None = None
    lora_o: Lora | None = None
    lora_gate_up: Lora | None = None
    lora_down: Lora | None = None


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
    products = [
        product
        for layer in layers
        for product in (
            (layer.qkv, layer.lora_qkv),
            (layer.o, layer.lora_o),
            (layer.gate_up, layer.lora_gate_up),
            (layer.down, layer.lora_down),
        )
    ]
    for (weight, lora), (following, its_lora) in pairwise(products):
        if isinstance(weight, NVFP4Stack):
            weight.ahead = Ahead(
                None if lora is None else lora.b_NR,
                None if its_lora is None else its_lora.a_RK,
                following.tiles if isinstance(following, NVFP4Stack) else None,
            )
