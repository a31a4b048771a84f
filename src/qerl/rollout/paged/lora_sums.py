"""The sums x A^T of a pass: one for each product of a decoder layer, used again by every layer.

The parts of a sum live from the kernel that makes x to the product after it, so those of all products lie in
one place.
"""

import math

import torch
import triton

from qerl.kernels.decode import residual_norm, silu_mul
from qerl.kernels.weights.product import NO_SUM, LoraSum
from qerl.rollout.paged.weights import Decoder


def lora_sums(decoder: Decoder, tokens: int) -> dict[str, LoraSum]:
    """Sums for a pass over ``tokens`` tokens, by product; those of products without an adapter are empty.

    All layers have the first one's description and adapters.
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
