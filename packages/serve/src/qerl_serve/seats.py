"""Seats: adapter slots in which the matrices of many LoRA adapters take turns in one frozen base.

A seat is a PEFT adapter with a rank and a set of layers, but without weights of its own: its matrices are a
single zero, expanded. To use an adapter, its `nn.Parameter` objects are put into the seat of its shape and
taken out afterwards. So trained adapters, their snapshots, and adapters read from a folder all run in the
same way, gradients accumulate in the adapter's own parameters, switching copies nothing, and the memory of a
dropped adapter is free at once. Between uses the model computes what its base does.

The first seat has the largest rank that the server takes and all layers. It never holds an adapter, but the
paged engine sizes its buffers by it once, so no later adapter makes the engine capture its decode steps
again.

**alpha.** The Tinker API has no alpha. It is 32 for every rank: the LoRA update is scaled by 32 / rank, with
which the best learning rate hardly depends on the rank.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.families.supported import lora_targets
from qerl.lora.adapter import PEFT_PREFIX, adapt, add_adapter, stored_name, stored_targets
from qerl.update.recompute import accept_every_n_layers

ALPHA = 32
"""LoRA's alpha for every rank."""

Matrices = dict[str, nn.Parameter]
"""A and B of every adapted layer, in the order of the modules, by their names in PEFT's files."""

_FRESH = "fresh"


@dataclass(frozen=True)
class Shape:
    """Rank and layers of an adapter; adapters of one shape share a seat.

    Attributes:
        rank: r, at least 1.
        attn: True if the attention projections are adapted.
        mlp: True if the MLP projections are adapted.
    """

    rank: int
    attn: bool = True
    mlp: bool = True

    @property
    def seat(self) -> str:
        """PEFT's adapter name of the seat for this shape."""
        return f"rank{self.rank}" + "_attn" * self.attn + "_mlp" * self.mlp


class Seats:
    """A frozen base model with seats for adapters.

    Args:
        base: Any causal LM, packed or dense; frozen and wrapped in place.
        max_rank: The largest rank of an adapter.

    Attributes:
        model: The base with its seats, for the engine and the update.
        max_rank: The largest rank of an adapter.
        targets: Last names of the linears that can be adapted, by the `Shape` field that selects them.
        every_n_layers: At present every n-th layer is recomputed in the backward pass; 0 if none ever was, as
            on a CPU.
    """

    def __init__(self, base: PreTrainedModel, max_rank: int) -> None:
        self.targets = _targets(base)
        self.max_rank = max_rank
        self.every_n_layers = 0
        self.model: PeftModel = adapt(base, self._config(Shape(max_rank)))
        self._widest = self.model.active_adapter
        self._empty(self._widest)
        self.model.requires_grad_(False)
        accept_every_n_layers(self.model)

    @property
    def device(self) -> torch.device:
        """Device of the base."""
        return base_model(self.model).device

    def recompute_layers(self, every: int = 1) -> None:
        """Recompute every n-th layer in the backward pass from its input alone, as `qerl plan` assumes. The
        others keep their activations; with n above the number of layers all do."""
        base_model(self.model).gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        self.every_n_layers = every

    def recompute_every_layer(self) -> bool:
        """Recompute every layer from here on if :meth:`recompute_layers` left some out; return True in that
        case."""
        kept = self.every_n_layers > 1
        if kept:
            self.recompute_layers()
        return kept

    def fresh(self, shape: Shape, seed: int) -> Matrices:
        """Return the FP32 matrices of a new adapter on the base's device: those of
        `qerl.lora.adapter.add_lora` with this rank and seed, so B is zero.

        Raises:
            QeRLError: The rank is not from 1 to `max_rank`, no layers are adapted, or the model has none of
                the requested ones.
        """
        config = self._config(shape)
        add_adapter(self.model, _FRESH, config, seed)
        matrices = {name: linear.weight for name, linear in self._linears(_FRESH)}
        self.model.delete_adapter(_FRESH)
        for matrix in matrices.values():
            matrix.requires_grad_(True)
        return cast(Matrices, matrices)

    @contextmanager
    def used(self, shape: Shape, matrices: Matrices) -> Iterator[PeftModel]:
        """Activate an adapter inside the block; parameters that require gradients accumulate them.

        Args:
            shape: Shape of the adapter.
            matrices: Its parameters, on the base's device.
        """
        seat = shape.seat
        if seat not in self.model.peft_config:
            add_adapter(self.model, seat, self._config(shape), empty=True)
            self._empty(seat)
        for name, linear in self._linears(seat):
            linear.weight = matrices[name]
        asking = [matrix.requires_grad for matrix in matrices.values()]
        self.model.set_adapter(seat)
        for matrix, asks in zip(matrices.values(), asking, strict=True):
            matrix.requires_grad_(asks)  # PEFT sets requires_grad on the active adapter
        try:
            yield self.model
        finally:
            self._empty(seat)
            self.model.set_adapter(self._widest)
            self.model.requires_grad_(False)

    @contextmanager
    def unused(self) -> Iterator[PeftModel]:
        """Disable all adapters inside the block, so the model is its base."""
        with self.model.disable_adapter():
            yield self.model

    def config(self, shape: Shape) -> LoraConfig:
        """Return the config with which PEFT reads an adapter of this shape from a folder."""
        config = copy.copy(self._config(shape))
        base = base_model(self.model)
        config.base_model_name_or_path = base.name_or_path
        config.target_modules = stored_targets(config.target_modules or [], base)
        config.inference_mode = True
        return config

    def check(self, shape: Shape) -> None:
        """Raise if no adapter of this model can have a shape.

        Raises:
            QeRLError: As :meth:`fresh`.
        """
        self._config(shape)

    def _config(self, shape: Shape) -> LoraConfig:
        if not 1 <= shape.rank <= self.max_rank:
            raise QeRLError(
                f"The rank is {shape.rank}, and this server takes 1 to {self.max_rank}; ask for another, "
                "or start the server with a larger --max_rank."
            )
        names = [
            name for kind, names in self.targets.items() if getattr(shape, kind) for name in sorted(names)
        ]
        if not names:
            raise QeRLError(
                "No layers are left to adapt: set train_attn or train_mlp, as the output head is not trained."
            )
        return LoraConfig(
            r=shape.rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=names, task_type="CAUSAL_LM"
        )

    def _linears(self, seat: str) -> Iterator[tuple[str, nn.Linear]]:
        """Yield the linears that hold A and B of a seat, each with its name in an adapter file."""
        base = self.model.get_base_model()
        for name, module in base.named_modules():
            if isinstance(module, LoraLayer) and seat in module.lora_A:
                for kind in ("lora_A", "lora_B"):
                    own = f"{PEFT_PREFIX}{name}.{kind}.weight"
                    yield stored_name(own, base), getattr(module, kind)[seat]

    def _empty(self, seat: str) -> None:
        """Replace each matrix of a seat by a single zero, expanded."""
        for _, linear in self._linears(seat):
            zero = torch.zeros(1, 1, device=self.device)
            linear.weight = nn.Parameter(
                zero.expand(linear.out_features, linear.in_features), requires_grad=False
            )


def _targets(base: PreTrainedModel) -> dict[str, set[str]]:
    """Return the last names of the decoder's adaptable linears, by the `Shape` field that selects them."""
    wanted = set(lora_targets(base, None))
    places = [
        name.split(".") for name, _ in base.get_decoder().named_modules() if name.split(".")[-1] in wanted
    ]
    attention = {
        place[-1] for place in places if any("attn" in part or "attention" in part for part in place)
    }
    return {"attn": attention, "mlp": {place[-1] for place in places} - attention}
