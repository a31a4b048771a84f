"""The sums x A^T of a pass: one for each product of a decoder layer, used again by every layer.

They lie side by side, so that one fill clears them all.
"""

import math
from dataclasses import dataclass

import torch

from qerl.kernels.decode.launch import LoraSum
from qerl.rollout.paged.weights import Layer


@dataclass(frozen=True)
class LoraSums:
    """Sums by product; those of products without an adapter are empty.

    Attributes:
        all_sums: int64, the memory of all of them.
        qkv, o, gate_up, down: Each [copies, tokens, ranks].
    """

    all_sums: torch.Tensor
    qkv: LoraSum
    o: LoraSum
    gate_up: LoraSum
    down: LoraSum

    @classmethod
    def of(cls, layer: Layer, tokens: int) -> "LoraSums":
        """Sums of zero for a pass over ``tokens`` tokens of a model with this layer's adapters.

        The copies follow from how many programs add to a sum and how many read it: with many tokens the
        programs meet less often, and reading the copies costs more.
        """
        copies = (2, 1, 1, 2) if tokens <= 32 else (1, 1, 1, 1)
        loras = (layer.lora_qkv, layer.lora_o, layer.lora_gate_up, layer.lora_down)
        shapes = [
            (count, tokens, 0 if lora is None else lora.a_RK.shape[0])
            for count, lora in zip(copies, loras, strict=True)
        ]
        sizes = [math.prod(shape) for shape in shapes]
        device = layer.input_norm_D.device
        all_sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        views = zip(all_sums.split(sizes), shapes, strict=True)
        return cls(all_sums, *(LoraSum(flat.view(shape) if flat.numel() else None) for flat, shape in views))

    def clear(self) -> None:
        """Zero what a pass that was cut off between two launches has left."""
        self.all_sums.zero_()
