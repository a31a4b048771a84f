"""LoRA matrices of S runs.

Legend: S runs, E elements of a run's adapter, R rank, T tokens of a run, K inputs, N outputs; J linears of a
product that share an input, whose A lie below one another.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lab.study.batched.trained import Frozen, Trained, Weights
from qerl.seeding import derive_seed


class Adapted(NamedTuple):
    """The adapters of one product: its linears' A [S, J R, K], and the B [S, N, R] of each."""

    a: torch.Tensor
    b: list[torch.Tensor]

    def __call__(self, frozen: Frozen, x_STK: torch.Tensor) -> torch.Tensor:
        """See :class:`Product`."""
        return cast(torch.Tensor, _AdaptedProduct.apply(x_STK, frozen, self.a, *self.b))


class _AdaptedProduct(torch.autograd.Function):
    """Multiplies the tokens of all runs by the frozen weight in one product and adds the adapters' batched
    products in place, in backward too."""

    @staticmethod
    def forward(
        ctx: Any, x_STK: torch.Tensor, frozen: Frozen, a_SRK: torch.Tensor, *b: torch.Tensor
    ) -> torch.Tensor:
        y_STN = F.linear(x_STK, frozen.weight_NK, frozen.bias_N)
        xa_STR = torch.bmm(x_STK, a_SRK.mT)
        parts = zip(y_STN.split(frozen.outputs, dim=-1), xa_STR.chunk(len(b), dim=-1), b, strict=True)
        for y, xa, b_SNR in parts:
            y.baddbmm_(xa, b_SNR.mT)
        ctx.save_for_backward(x_STK, xa_STR, a_SRK, *b)
        ctx.frozen = frozen
        return y_STN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_STN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_STK, xa_STR, a_SRK, *b = ctx.saved_tensors
        dxa_STR, db = torch.empty_like(xa_STR), []
        each = (
            dy_STN.split(ctx.frozen.outputs, dim=-1),
            *(x.chunk(len(b), dim=-1) for x in (xa_STR, dxa_STR)),
        )
        for dy, xa, dxa, b_SNR in zip(*each, b, strict=True):
            torch.bmm(dy, b_SNR, out=dxa)
            db.append(torch.bmm(dy.mT, xa))
        dx_STK = None
        if ctx.needs_input_grad[0]:
            dx_STK = (dy_STN @ ctx.frozen.weight_NK).baddbmm_(dxa_STR, a_SRK)
        return dx_STK, None, torch.bmm(dxa_STR.mT, x_STK), *db


class Place(NamedTuple):
    """The linears of an adapted product: their names, inputs, and the outputs of each."""

    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]


@lru_cache(maxsize=64)
def _fresh(places: tuple[Place, ...], rank: int, seed: int) -> torch.Tensor:
    """A fresh adapter [E] as `qerl.lora.adapter.add_lora` makes it from the same seed: B is zero.

    PEFT draws A, then B, then A again, layer by layer; the unused draws are made here too, as they advance
    the generator.
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
        device: Device of the matrices.
        dtype: Dtype of the activations that they are multiplied with.
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
