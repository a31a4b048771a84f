"""LoRA matrices of S runs.

Legend: S runs, E elements of a run's adapter, R rank, T tokens of a run, K inputs, N outputs; J linears of a
product that share an input, whose A lie below one another.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lab.study.batched.trained import Frozen, Trained, Weights
from qerl.seeding import derive_seed


class Adapted(NamedTuple):
    """The adapters of one product: its linears' A [S, J R, K], and the B [S, N, R] of each."""

    a: torch.Tensor
    b: list[torch.Tensor]

    def __call__(self, frozen: Frozen, x_STK: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`Product`: the frozen weight meets the tokens of all runs in one product, the adapters
        in two batched ones."""
        y_STN = F.linear(x_STK.flatten(0, 1), frozen.weight_NK, frozen.bias_N).unflatten(0, x_STK.shape[:2])
        parts = list(y_STN.split(frozen.outputs, dim=-1))
        xa_STR = torch.bmm(x_STK, self.a.mT)
        each = xa_STR.chunk(len(parts), dim=-1)
        add = torch.baddbmm if torch.is_grad_enabled() else torch.Tensor.baddbmm_  # in place saves a copy
        return [add(part, xa, b.mT) for part, xa, b in zip(parts, each, self.b, strict=True)]


class Place(NamedTuple):
    """Where a product's adapters lie: names of its linears, inputs, and the outputs of each."""

    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]


@lru_cache(maxsize=64)
def _fresh(places: tuple[Place, ...], rank: int, seed: int) -> torch.Tensor:
    """A fresh adapter [E] as `qerl.lora.adapter.add_lora` makes it from the same seed: B is zero.

    PEFT draws A, and B, and A once more, layer by layer; the draws in between move the generator on.
    """
    parts: list[torch.Tensor] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derive_seed("lora", seed))
        for place in places:
            for outputs in place.outputs:
                a = nn.Linear(place.inputs, rank, bias=False)
                nn.Linear(rank, outputs, bias=False)
                nn.init.kaiming_uniform_(a.weight, a=5**0.5)
                parts.append(a.weight.flatten())
            parts += [torch.zeros(outputs * rank) for outputs in place.outputs]
    return torch.cat(parts)


class Adapters(Trained):
    """The adapters of S runs.

    Args:
        places: Every product, in the order of the model's modules.
        rank: R; the update of a weight is B A, scaled by 1.
        seeds: One per run, as a recipe's `seed`.
        device: Where they lie.
        dtype: Of the activations that they are multiplied with.
    """

    def __init__(
        self,
        places: Sequence[Place],
        rank: int,
        seeds: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.places, self.rank = tuple(places), rank
        fresh_SE = torch.stack([_fresh(self.places, rank, seed) for seed in seeds]).to(device)
        shapes = [
            shape
            for place in self.places
            for shape in (
                (rank * len(place.outputs), place.inputs),
                *((outputs, rank) for outputs in place.outputs),
            )
        ]
        super().__init__(fresh_SE, shapes, dtype)

    def arranged(self, tensors: Sequence[torch.Tensor]) -> Weights:
        """See :meth:`Trained.arranged`."""
        return Weights(self._by_product(tensors))

    def _by_product(self, tensors: Sequence[torch.Tensor]) -> list[Adapted]:
        rest = iter(tensors)
        return [Adapted(next(rest), [next(rest) for _ in place.outputs]) for place in self.places]

    @property
    def do_nothing(self) -> bool:
        """Whether every B is zero, as in fresh adapters."""
        every = self._by_product(self._tensors(self.values_SE))
        return not any(bool(b.any()) for adapted in every for b in adapted.b)

    def be_the_base(self) -> None:
        """Make all matrices zero."""
        self.values_SE.zero_()
