"""The sums x A^T of a pass: one for each product of a decoder layer, used again by every layer.

The parts of a sum live from the kernel that makes x to the product after it, so those of all products lie in
one place.
"""

import math
from dataclasses import dataclass

import torch
import triton

from qerl.kernels.decode import residual_norm, silu_mul
from qerl.kernels.weights.product import NO_SUM, LoraSum
from qerl.rollout.paged.weights import Decoder, Lora


@dataclass(frozen=True)
class LoraSums:
    """Sums by product; those of products without an adapter are empty."""

    qkv: LoraSum
    o: LoraSum
    gate_up: LoraSum
    down: LoraSum

    @classmethod
    def of(cls, decoder: Decoder, tokens: int) -> "LoraSums":
        """Sums for a pass over ``tokens`` tokens of a model whose layers have the first one's adapters."""
        layer, sizes = decoder.layers[0], decoder.sizes
        columns = triton.cdiv(sizes.hidden, residual_norm.block_d(tokens))
        blocks = triton.cdiv(sizes.intermediate, silu_mul.BLOCK_I)
        made_by = {"qkv": columns, "o": sizes.heads, "gate_up": columns, "down": blocks}
        loras: dict[str, Lora | None] = {name: getattr(layer, f"lora_{name}") for name in made_by}
        shapes = {
            name: (made_by[name], tokens, lora.a_RK.shape[0])
            for name, lora in loras.items()
            if lora is not None
        }
        most = max((math.prod(shape) for shape in shapes.values()), default=0)
        parts = torch.empty(most, dtype=torch.float32, device=layer.input_norm_D.device)

        def of(shape: tuple[int, int, int]) -> LoraSum:
            return LoraSum(parts[: math.prod(shape)].view(shape), parts.new_empty(shape[1:]))

        return cls(**{name: of(shapes[name]) if name in shapes else NO_SUM for name in made_by})
