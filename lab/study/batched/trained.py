"""The trained parameters of S runs, each run a row of one tensor, and the optimizer that updates them.

All parameters of a run lie one after the other in a row of one FP32 tensor [S, E]. So clipping, AdamW and the
check for values that are not finite are a few operations on whole rows, with a learning rate per row, instead
of some for each of a model's hundreds of matrices. The forward pass multiplies with views of this tensor, or
of its copy in 16 bits. Rows hold either LoRA matrices (`lab.study.batched.adapters`) or all weights of the
model (`lab.study.batched.full`).

Legend: S runs, E numbers that a run trains, K inputs, N outputs, T tokens of a run, V vocabulary, D hidden
width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Frozen:
    """The frozen weight [N, K] of a product, its bias [N] or None, and how many outputs each linear has."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    outputs: tuple[int, ...]


class Product(Protocol):
    """Weights of some runs for linears that share an input."""

    def __call__(self, frozen: Frozen, x_STK: torch.Tensor) -> torch.Tensor:
        """Outputs of the product's linears for x, side by side, [S, T, N]."""


class Whole(NamedTuple):
    """Weights of some runs except linears: embedding and head [S, V, D], the N norms before linears and the
    last one, and for each layer those of queries and keys [S, W], if it has them."""

    embedding_SVD: torch.Tensor
    head_SVD: torch.Tensor
    norms_SND: torch.Tensor
    final_SD: torch.Tensor
    head_norms: list[tuple[torch.Tensor, torch.Tensor] | None]


@dataclass(frozen=True)
class Weights:
    """Weights of some runs as the forward pass reads them.

    Attributes:
        products: One entry per product, in the order of the model's modules.
        whole: The rest of the model; None where that is the base's.
    """

    products: Sequence[Product]
    whole: Whole | None = None


class Trained(ABC):
    """Trained parameters of S runs.

    Args:
        values_SE: Initial values, fp32.
        shapes: Shapes of a run's tensors, in their order in its row.
        dtype: Dtype of the activations that they are multiplied with.

    Attributes:
        values_SE: The parameters, fp32.
        cast_SE: The same in `dtype`, as of the last `refresh`; if that is fp32, the same tensor.
        gradients_SE: Their gradients, fp32.
    """

    def __init__(
        self, values_SE: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self.values_SE = values_SE
        self.cast_SE = values_SE.to(dtype)
        self.gradients_SE = torch.zeros_like(self.values_SE)
        self._cast_gradients_SE = torch.zeros_like(self.cast_SE)
        self._shapes = list(shapes)
        self._leaves: dict[tuple[int, int], Weights] = {}

    @abstractmethod
    def arranged(self, tensors: Sequence[torch.Tensor]) -> Weights:
        """Arrange tensors [S, ...] with the shapes of a row for the forward pass; no new tensor is made."""

    @property
    @abstractmethod
    def do_nothing(self) -> bool:
        """Whether the policy of each run is the base's."""

    @abstractmethod
    def be_the_base(self) -> None:
        """Make the policy of each run the base's."""

    def views(self, storage_SE: torch.Tensor) -> Weights:
        """Views into a tensor laid out as `values_SE`, for any number of runs."""
        return self.arranged(self._tensors(storage_SE))

    def _tensors(self, storage_SE: torch.Tensor) -> list[torch.Tensor]:
        parts = storage_SE.split([prod(shape) for shape in self._shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def refresh(self) -> None:
        """Copy the parameters to `cast_SE`, which the forward pass reads."""
        if self.cast_SE is not self.values_SE:
            self.cast_SE.copy_(self.values_SE)

    @contextmanager
    def holding(self, values_SE: torch.Tensor) -> Iterator[None]:
        """Hold other values inside the block, in `cast_SE` from the next `refresh` on."""
        if values_SE is self.values_SE:
            yield
            return
        own_SE = self.values_SE.clone()
        self.values_SE.copy_(values_SE)
        try:
            yield
        finally:
            self.values_SE.copy_(own_SE)
            self.refresh()

    def collect(self, runs: slice) -> None:
        """Add the gradients that a backward pass has left in the `leaves` of these runs to `gradients_SE`."""
        self.gradients_SE[runs] += self._cast_gradients_SE[runs]
        self._cast_gradients_SE[runs].zero_()

    def leaves(self, runs: slice) -> Weights:
        """Parameters of some runs as leaves of autograd, in the dtype of activations; see `collect`."""
        key = runs.start, runs.stop
        if key not in self._leaves:
            values, slots = self._tensors(self.cast_SE[runs]), self._tensors(self._cast_gradients_SE[runs])
            self._leaves[key] = self.arranged(list(map(_leaf, values, slots)))
        return self._leaves[key]


def _leaf(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    leaf = value.detach().requires_grad_()
    leaf.grad = gradient
    return leaf


_BETA1, _BETA2, _EPS, _MAX_NORM = 0.9, 0.99, 1e-8, 1.0
"""Betas and eps of AdamW in all studies, and the norm to which a run's gradient is clipped."""


class AdamW:
    """`torch.optim.AdamW` without weight decay, after `torch.nn.utils.clip_grad_norm_`, both row by row.

    Args:
        trained: The parameters to update.

    Attributes:
        mean_SE, square_SE: Running means of the gradient and of its square.
        steps: Steps done.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.mean_SE = torch.zeros_like(trained.values_SE)
        self.square_SE = torch.zeros_like(trained.values_SE)
        self.steps = 0

    @torch.no_grad()
    def step(self, rates_S: torch.Tensor, alive_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the runs that are alive and have a finite gradient.

        Args:
            rates_S: Learning rates.
            alive_S: False for runs that are to stay where they are, whatever their gradient.

        Returns:
            Norms of the gradients before clipping, and which runs are alive; [S] each.
        """
        gradients_SE, self.steps = self._trained.gradients_SE, self.steps + 1
        norms_S = torch.linalg.vector_norm(gradients_SE, dim=1)
        alive_S = alive_S & norms_S.isfinite()
        scale_S = (_MAX_NORM / (norms_S + 1e-6)).clamp(max=1.0)
        gradients_SE.mul_(scale_S[:, None]).masked_fill_(~alive_S[:, None], 0.0)
        self.mean_SE.lerp_(gradients_SE, 1 - _BETA1)
        self.square_SE.mul_(_BETA2).addcmul_(gradients_SE, gradients_SE, value=1 - _BETA2)
        correction1, correction2 = 1 - _BETA1**self.steps, 1 - _BETA2**self.steps
        moves_SE = self.square_SE.sqrt().div_(correction2**0.5).add_(_EPS)
        torch.div(self.mean_SE, moves_SE, out=moves_SE)
        moves_SE.mul_((rates_S * alive_S / correction1)[:, None])
        self._trained.values_SE.sub_(moves_SE)
        gradients_SE.zero_()
        return norms_S, alive_S
