"""One LoRA adapter in stacked bf16 buffers that the kernels read, and checks of which adapters fit them.

The buffers keep their addresses while the adapter's layers and its padded rank stay the same, so captured
graphs see the weights that every call copies. The buffers are zeroed first, so that nothing of a larger
adapter remains beside a smaller one.

Kernels apply one adapter to the linears in a decoder layer's description. Other changes that PEFT may have
made to a model are found by walking all its modules, so that no unforeseen one is ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import experts_of
from qerl.families.layer import DeltaNet, LayerSpec, Product, RoutedMLP
from qerl.families.sizes import Sizes
from qerl.kernels.decode.expert_lora import ExpertLoraMatrices
from qerl.kernels.limits import MAX_RANK, pad_rank
from qerl.lora.experts import LINEARS, ExpertLora, held_rank, why_not_together
from qerl.lora.kinds import active_adapter, why_not
from qerl.rollout.paged.weights import Decoder, Lora, RoutedWeights

_WHOLE = ("embed_tokens", "lm_head")
"""Modules that may be trained as a whole beside an adapter; norms may too."""


def why_not_with_adapters(base: PreTrainedModel) -> str | None:
    """Return why the engine would not compute what this model and its present adapters do, or None."""
    sizes = Sizes.of(base.config.get_text_config(decoder=True))
    linears = tuple(f".{target}" for target in sizes.targets)
    mixtures = dict(experts_of(base))  # with thousands of layers, which are checked together
    for name, module in base.named_modules(memo=set(mixtures.values())):
        last = name.split(".")[-1]
        if isinstance(module, BaseTunerLayer):
            if reason := why_not(module):
                return f"{name} {reason}"
            if not name.endswith(linears) and active_adapter(module) is not None:
                return f"{name} carries an adapter, which is supported only on linears of decoder layers"
        elif isinstance(module, AuxiliaryTrainingWrapper):
            whole = isinstance(module, ModulesToSaveWrapper) and (last in _WHOLE or last.endswith("norm"))
            if not whole:
                return f"{name} is trained beside the adapter ({type(module).__name__})"
    for name, mixture in mixtures.items():
        if reason := why_not_together(mixture):
            return f"of {name}, {reason}"
    if (rank := highest_rank(base)) > MAX_RANK:
        return f"its adapter has rank {rank}, and the kernels take {MAX_RANK} at most"
    return None


def highest_rank(base: nn.Module) -> int:
    """Return the largest rank of the model's LoRA adapters, active or not; 0 without any."""
    mixtures = dict(experts_of(base))
    of_experts = (held_rank(each, name)[1] for each in mixtures.values() for name in LINEARS)
    others = (_rank(module) for _, module in base.named_modules(memo=set(mixtures.values())))
    return max((*of_experts, *others), default=0)


def inner(module: nn.Module) -> nn.Module:
    """Return the linear layer below an adapter, or the layer itself."""
    return module.base_layer if isinstance(module, BaseTunerLayer) else module


def linears_of(layer: nn.Module, product: Product) -> list[nn.Module]:
    """Return the linear layers, adapted or not, of one product of a decoder layer."""
    return [layer.get_submodule(linear.place) for linear in product.linears]


def gates_of(layer: nn.Module, spec: LayerSpec, product: Product) -> list[nn.Module]:
    """Return the narrow linears that read a product's input and are computed with its x A^T."""
    places: tuple[str, ...] = ()
    if isinstance(spec.mixer, DeltaNet) and product.name == "qkvz":
        places = DeltaNet.GATES
    if isinstance(spec.mlp, RoutedMLP) and product.name == "gate_up":
        places = spec.mlp.router, spec.mlp.SHARED_GATE
    return [inner(layer.get_submodule(place)) for place in places]


@dataclass
class _Place:
    """A linear's place in a product's buffers: the index of its A, and the first row of its B."""

    module: nn.Module
    index: int
    row: int


class _Stacks:
    """The adapters of a layer's experts, and the buffers that a mixture reads them from.

    Args:
        experts: Experts for which `why_not_together` finds nothing.
        weights: Weights of the mixture.
        spec: The layer's description.
    """

    def __init__(self, experts: Any, weights: RoutedWeights, spec: LayerSpec) -> None:
        self._experts, self._weights, self._products = experts, weights, spec.expert_products
        self.shapes = [self._shape(product) for product in self._products]

    def _shape(self, product: Product) -> tuple[int, ...] | None:
        """Return G, L, R, K and N of a product's buffers, also for an inactive adapter; None without one."""
        held = [held_rank(self._experts, linear.place) for linear in product.linears]
        groups, rank = max(groups for groups, _ in held), max(rank for _, rank in held)
        if not groups:
            return None
        return groups, len(held), pad_rank(rank), product.inputs, product.outputs // len(held)

    def make(self, dtype: torch.dtype) -> None:
        """Allocate the buffers, and hand them to the mixture."""
        like: Any = {"dtype": dtype, "device": self._weights.router_ED.device}
        self._weights.gate_up_lora, self._weights.down_lora = (
            None
            if shape is None
            else ExpertLoraMatrices(
                torch.zeros(shape[:4], **like),
                torch.zeros(shape[0], shape[1], shape[4], shape[2], **like),
            )
            for shape in self.shapes
        )

    def copy(self) -> None:
        """Copy the weights that training may have changed."""
        for product, lora in zip(
            self._products, (self._weights.gate_up_lora, self._weights.down_lora), strict=True
        ):
            if lora is None:
                continue
            lora.a_GLRK.zero_()
            lora.b_GLNR.zero_()
            for number, linear in enumerate(product.linears):
                if (each := ExpertLora.of(self._experts, linear.place)) is not None:
                    lora.a_GLRK[:, number, : each.rank].copy_(torch.stack(each.all_a))
                    scaled_GNR = torch.stack(each.all_b) * each.scaling
                    lora.b_GLNR[:, number, :, : each.rank].copy_(scaled_GNR)


@dataclass
class Adapter:
    """LoRA buffers of a whole model, and the modules whose weights are copied to them.

    Args:
        base: The transformers model.
        layers: Its decoder layers.
        dtype: Dtype of the buffers.

    Attributes:
        rank: Padded rank, the same everywhere but in experts; 0 without adapters.
    """

    base: nn.Module
    layers: list[nn.Module]
    dtype: torch.dtype
    rank: int = 0
    _parts: list[nn.Module] = field(default_factory=list)
    _places: list[tuple[torch.Tensor, torch.Tensor, list[_Place]]] = field(default_factory=list)
    _gates: list[tuple[torch.Tensor, nn.Module]] = field(default_factory=list)
    _experts: list["_Stacks"] = field(default_factory=list)

    def bind(self, decoder: Decoder) -> bool:
        """Allocate the buffers and hand them to the decoder, unless the present ones still fit.

        Returns:
            Whether there are new buffers, so that steps captured before can no longer be replayed.
        """
        bound = [
            (projection, linears_of(layer, product), gates_of(layer, read.spec, product))
            for layer, read in zip(self.layers, decoder.layers, strict=True)
            for product, projection in zip(read.spec.products, read.projections, strict=True)
        ]
        parts = [linear for _, linears, _ in bound for linear in linears]
        same = len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True))
        highest, renewed = max(map(_rank, parts)), self._bind_experts(decoder)
        rank = pad_rank(highest) if highest else 0
        if same and rank == self.rank:
            return renewed
        self.rank, self._parts, self._places, self._gates = rank, parts, [], []
        for projection, linears, gates in bound:
            projection.lora = self._buffers(linears, gates)
        return True

    def _bind_experts(self, decoder: Decoder) -> bool:
        """Do as `bind` for the experts of mixtures, whose buffers have a rank of their own."""
        found = [
            _Stacks(layer.get_submodule(read.spec.mlp.EXPERTS), read.mlp, read.spec)
            for layer, read in zip(self.layers, decoder.layers, strict=True)
            if isinstance(read.spec.mlp, RoutedMLP) and isinstance(read.mlp, RoutedWeights)
        ]
        if [each.shapes for each in found] == [each.shapes for each in self._experts]:
            return False
        self._experts = found
        for each in found:
            each.make(self.dtype)
        return True

    def copy(self) -> None:
        """Copy weights that training may have changed: A, and B scaled by alpha / r (or alpha / sqrt r)."""
        for a_RK, b_NR, places in self._places:
            a_RK.zero_()
            b_NR.zero_()
            for place in places:
                self._copy(a_RK, b_NR, place)
        for rows_VK, gate in self._gates:
            rows_VK.copy_(cast(torch.Tensor, gate.weight))
        for stacks in self._experts:
            stacks.copy()

    def _copy(self, stacked_RK: torch.Tensor, stacked_NR: torch.Tensor, place: _Place) -> None:
        module = cast(Any, place.module)
        if (name := active_adapter(module)) is None:
            return
        a_RK, b_NR = module.lora_A[name].weight, module.lora_B[name].weight
        rank, top = len(a_RK), place.index * self.rank
        stacked_RK[top : top + rank].copy_(a_RK)
        stacked_NR[place.row : place.row + len(b_NR), :rank].copy_(b_NR * module.scaling[name])

    def _buffers(self, parts: list[nn.Module], gates: list[nn.Module]) -> Lora | None:
        if not (self.rank or gates):
            return None
        linears = [cast(Any, inner(part)) for part in parts]
        device = next(tensors(linears[0])).device
        width, rows = linears[0].in_features, [linear.out_features for linear in linears]
        stacked, narrow = self.rank * len(parts), [len(cast(Any, gate).weight) for gate in gates]
        count = -(-(stacked + sum(narrow)) // 8) * 8  # kernels add eight sums at a time
        a_RK = torch.zeros(count, width, dtype=self.dtype, device=device)
        rows_of_gates = a_RK[stacked : stacked + sum(narrow)].split(narrow) if gates else ()
        self._gates += zip(rows_of_gates, gates, strict=True)
        if not self.rank:
            return Lora(a_RK, None)
        b_NR = torch.zeros(sum(rows), self.rank, dtype=self.dtype, device=device)
        places = [_Place(p, i, sum(rows[:i])) for i, p in enumerate(parts) if isinstance(p, BaseTunerLayer)]
        self._places.append((a_RK, b_NR, places))
        return Lora(a_RK, b_NR)


def check_adapter(base: PreTrainedModel) -> None:
    """Raise QeRLError if `why_not_with_adapters` now returns a reason, after the engine was made."""
    if reason := why_not_with_adapters(base):
        raise QeRLError(
            f"The paged engine can no longer run this model: {reason}. Make a new engine, which will be the "
            "portable one."
        )


def tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def _rank(module: nn.Module) -> int:
    ranks = getattr(module, "r", None)
    known = isinstance(module, BaseTunerLayer) and isinstance(ranks, dict) and hasattr(module, "lora_A")
    return max(cast(dict[str, int], ranks).values(), default=0) if known else 0
