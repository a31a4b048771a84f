"""LoRA matrices of S runs, as slices of one tensor, and the optimizer that moves them.

All matrices of a run lie behind one another in a row of one FP32 tensor [S, E]. Clipping, AdamW and the
search for what is not finite are a few operations on whole rows then, with a learning rate per row, instead
of some for each of a model's hundreds of matrices. What the forward pass multiplies with are views of it.

Legend: S runs, E elements of a run's adapter, R rank, K inputs, N outputs; J linears of a product that
share an input, whose A lie below one another.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn

from qerl.run_folder import ADAPTER_FILE
from qerl.seeding import derive_seed


class Adapted(NamedTuple):
    """The adapters of one product: its linears' A [S, J R, K], and the B [S, N, R] of each."""

    a: torch.Tensor
    b: list[torch.Tensor]


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


class Adapters:
    """The adapters of S runs.

    Args:
        places: Every product, in the order of the model's modules.
        rank: R; the update of a weight is B A, scaled by 1.
        seeds: One per run, as a recipe's `seed`.
        device: Where they lie.
        dtype: Of the activations that they are multiplied with.

    Attributes:
        values_SE: The matrices, fp32.
        cast_SE: The same in `dtype`, as of the last `refresh`; where that is fp32, themselves.
        gradients_SE: Their gradients, fp32.
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
        self.values_SE = torch.stack([_fresh(self.places, rank, seed) for seed in seeds]).to(device)
        self.cast_SE = self.values_SE.to(dtype)
        self.gradients_SE = torch.zeros_like(self.values_SE)
        self._cast_gradients_SE = torch.zeros_like(self.cast_SE)
        self._leaves: dict[tuple[int, int], list[Adapted]] = {}

    def views(self, storage_SE: torch.Tensor) -> list[Adapted]:
        """The matrices of each product within a tensor laid out as `values_SE`, of any number of runs."""
        runs, start, found = len(storage_SE), 0, []
        for place in self.places:
            shapes = [(self.rank * len(place.outputs), place.inputs)]
            shapes += [(outputs, self.rank) for outputs in place.outputs]
            matrices = []
            for rows, columns in shapes:
                stop = start + rows * columns
                matrices.append(storage_SE[:, start:stop].unflatten(1, (rows, columns)))
                start = stop
            found.append(Adapted(matrices[0], matrices[1:]))
        assert start == storage_SE.shape[1] and runs == len(storage_SE)
        return found

    @property
    def do_nothing(self) -> bool:
        """Whether every B is zero, as in fresh adapters; then the policy of each run is the base's."""
        return not any(bool(b.any()) for adapted in self.views(self.values_SE) for b in adapted.b)

    def refresh(self) -> None:
        """Bring `cast_SE`, which the forward pass reads, to where the values are."""
        if self.cast_SE is not self.values_SE:
            self.cast_SE.copy_(self.values_SE)

    @contextmanager
    def holding(self, values_SE: torch.Tensor) -> Iterator[None]:
        """Have other values for as long as the context lasts, `cast_SE` from the next `refresh` on."""
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
        """Add what a backward pass through the `leaves` of these runs has left to `gradients_SE`."""
        self.gradients_SE[runs] += self._cast_gradients_SE[runs]
        self._cast_gradients_SE[runs].zero_()

    def leaves(self, runs: slice) -> list[Adapted]:
        """The matrices of some runs as leaves of autograd, in the dtype of activations; see `collect`."""
        key = runs.start, runs.stop
        if key not in self._leaves:
            values, gradients = self.views(self.cast_SE[runs]), self.views(self._cast_gradients_SE[runs])
            self._leaves[key] = [
                Adapted(_leaf(value.a, slot.a), [_leaf(*pair) for pair in zip(value.b, slot.b, strict=True)])
                for value, slot in zip(values, gradients, strict=True)
            ]
        return self._leaves[key]

    def save(self, run: int, folder: str | Path, base: str) -> None:
        """Write a run's adapter as PEFT does.

        Args:
            base: Name or path of the base model, which PEFT's config mentions.
        """
        folder = Path(folder)
        tensors = {name: value.cpu().contiguous() for name, value in self._named(run).items()}
        targets = list(dict.fromkeys(name.rpartition(".")[2] for p in self.places for name in p.names))
        config = LoraConfig(
            r=self.rank, lora_alpha=self.rank, lora_dropout=0.0, target_modules=targets,
            task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(folder))
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})

    def _named(self, run: int) -> dict[str, torch.Tensor]:
        """The matrices of a run, views of `values_SE`, by PEFT's names."""
        found = {}
        views = self.views(self.values_SE[run : run + 1])
        for place, adapted in zip(self.places, views, strict=True):
            for name, a, b in zip(place.names, adapted.a[0].chunk(len(place.names)), adapted.b, strict=True):
                found[f"base_model.model.{name}.lora_A.weight"] = a
                found[f"base_model.model.{name}.lora_B.weight"] = b[0]
        return found


def _leaf(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    leaf = value.detach().requires_grad_()
    leaf.grad = gradient
    return leaf


class AdamW:
    """`torch.optim.AdamW` without weight decay, after `torch.nn.utils.clip_grad_norm_`, both row by row.

    Args:
        adapters: What it moves.
        beta2, eps: As of `torch.optim.AdamW`; beta1 is 0.9.
        max_norm: Largest norm of a run's gradient.

    Attributes:
        mean_SE, square_SE: Running means of the gradient and of its square.
        steps: Steps done.
    """

    def __init__(self, adapters: Adapters, beta2: float, max_norm: float, eps: float = 1e-8) -> None:
        self._adapters, self._max_norm = adapters, max_norm
        self._beta1, self._beta2, self._eps = 0.9, beta2, eps
        self.mean_SE = torch.zeros_like(adapters.values_SE)
        self.square_SE = torch.zeros_like(adapters.values_SE)
        self.steps = 0

    @torch.no_grad()
    def step(self, rates_S: torch.Tensor, alive_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the runs that are alive and have a finite gradient.

        Args:
            rates_S: Learning rates.
            alive_S: False for runs that are to stay where they are, whatever their gradient.

        Returns:
            Norms of the gradients before clipping, and which runs are alive; [S] each.
        """
        gradients_SE, self.steps = self._adapters.gradients_SE, self.steps + 1
        norms_S = torch.linalg.vector_norm(gradients_SE, dim=1)
        alive_S = alive_S & norms_S.isfinite()
        scale_S = (self._max_norm / (norms_S + 1e-6)).clamp(max=1.0)
        gradients_SE.mul_(scale_S[:, None]).masked_fill_(~alive_S[:, None], 0.0)
        self.mean_SE.lerp_(gradients_SE, 1 - self._beta1)
        self.square_SE.mul_(self._beta2).addcmul_(gradients_SE, gradients_SE, value=1 - self._beta2)
        correction1, correction2 = 1 - self._beta1**self.steps, 1 - self._beta2**self.steps
        moves_SE = self.square_SE.sqrt().div_(correction2**0.5).add_(self._eps)
        torch.div(self.mean_SE, moves_SE, out=moves_SE)
        moves_SE.mul_((rates_S * alive_S / correction1)[:, None])
        self._adapters.values_SE.sub_(moves_SE)
        gradients_SE.zero_()
        return norms_S, alive_S
