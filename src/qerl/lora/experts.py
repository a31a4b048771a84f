"""Adapters on experts that are separate linears, and protection from PEFT's merging.

For a mixture, PEFT rewrites an adapter's config and matrices to those of transformers' merged experts, based
only on the model's type. If the experts are separate linears (`qerl.families.experts`), nothing is merged:
both PEFT functions are patched to change nothing. The adapter is saved with a pair of matrices per linear,
`mlp.experts.3.gate_proj.lora_A.weight`. Around transformers' own model PEFT merges those if all layers are
mixtures (Qwen3-MoE, OLMoE). If other linears have the same last names (a dense layer, shared experts), PEFT
silently mistakes their adapters for those of experts; so a warning is logged here.

Experts may have an adapter each, or all experts of a layer the same one (`share`): each matrix is then one
parameter of all experts, so it is optimised once and costs as much as an adapter of one MLP. It is saved
under the name of each expert, as other loaders expect. Kernels that multiply all experts of a layer at once
use the matrices of all (`ExpertLora`).

Shapes: E experts, G experts or 1 where they share an adapter, R rank, K inputs, N outputs of a linear.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import transformers_weight_conversion as theirs
from torch import nn

from qerl.errors import QeRLError
from qerl.families.experts import Experts, experts_of
from qerl.families.layer import RoutedMLP
from qerl.lora.kinds import active_adapter, why_not
from qerl.ranks import is_first_process

LINEARS = tuple(name for places in RoutedMLP.PLACES.values() for name in places)
"""Names of an expert's linears."""

logger = logging.getLogger(__name__)

_convert_config = theirs.convert_peft_config_for_transformers
_convert_matrices = theirs.convert_peft_adapter_state_dict_for_transformers


def _config_unless_separate(peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    if not any(experts_of(model)):
        _convert_config(peft_config, model, *args, **kwargs)


def _matrices_unless_separate(
    model: nn.Module, peft_config: Any, adapter_state_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    if any(experts_of(model)):
        return adapter_state_dict
    return _convert_matrices(model, peft_config, adapter_state_dict, *args, **kwargs)


def leave_separate_experts() -> None:
    """Patch PEFT in this process to merge adapters of experts only if the experts are merged."""
    theirs.convert_peft_config_for_transformers = _config_unless_separate
    theirs.convert_peft_adapter_state_dict_for_transformers = _matrices_unless_separate


def warn_of_merging(model: PeftModel) -> None:
    """Warn if PEFT, around transformers' own model, may mistake another linear's adapter for an expert's."""
    experts = {f"{name}.": module for name, module in experts_of(model)}
    routed = {
        name.split(".")[1] for module in experts.values() for name, _ in module.named_modules() if "." in name
    }
    beside = next(
        (
            name
            for name, module in model.named_modules()
            if isinstance(module, BaseTunerLayer)
            and name.rpartition(".")[2] in routed
            and not name.startswith(tuple(experts))
        ),
        None,
    )
    if beside is not None and is_first_process():
        logger.warning(
            "Load this adapter with qerl.load_adapter: on transformers' own model, PEFT may apply the "
            "adapter of %s to an expert.",
            beside.removeprefix("base_model.model."),
        )


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The active adapters of one linear, such as ``up_proj``, of all experts of a layer.

    Attributes:
        all_a: G matrices A [R, K], fp32.
        all_b: G matrices B [N, R], fp32.
        scaling: Factor of B A x.
    """

    all_a: list[torch.Tensor]
    all_b: list[torch.Tensor]
    scaling: float

    @classmethod
    def of(cls, experts: Experts, name: str) -> "ExpertLora | None":
        """Return the adapters of the linears of this name, or None if they have no active adapter.

        :func:`why_not_together` must be None for the experts.
        """
        layers = _layers(experts, name)
        if not isinstance(layers[0], BaseTunerLayer) or (active := active_adapter(layers[0])) is None:
            return None
        if _is_shared(layers, active):
            layers = layers[:1]
        return cls(
            [_matrix(layer, "lora_A", active) for layer in layers],
            [_matrix(layer, "lora_B", active) for layer in layers],
            layers[0].scaling[active],
        )

    @property
    def rank(self) -> int:
        """Rank R of the adapters."""
        return len(self.all_a[0])


def held_rank(experts: Experts, name: str) -> tuple[int, int]:
    """Return G and the largest R of the adapters on the linears of this name, active or not, or (0, 0)."""
    layers = _layers(experts, name)
    if not isinstance(layers[0], BaseTunerLayer):
        return 0, 0
    held = [adapter for adapter in layers[0].lora_A if adapter in layers[0].r]
    groups = 1 if all(_is_shared(layers, adapter) for adapter in held) else len(layers)
    return groups, max((layers[0].r[adapter] for adapter in held), default=0)


def why_not_together(experts: Experts) -> str | None:
    """Return why the adapters of a layer's experts cannot be computed together, as the end of a sentence.

    None if they can, or if there are none. Called before every use, so it compares experts cheaply and calls
    `qerl.lora.kinds.why_not` for one of them.
    """
    for name in LINEARS:
        layers = _layers(experts, name)
        if len({_state(layer) for layer in layers}) > 1:
            return f"the adapters of {name} differ in kind, rank or scaling from expert to expert"
        if isinstance(layers[0], BaseTunerLayer) and (reason := why_not(layers[0])):
            return f"an expert's {name} {reason}"
    return None


def _layers(experts: Experts, name: str) -> list[LoraLinear]:
    return [cast(LoraLinear, expert._modules[name]) for expert in experts]


def _matrix(layer: nn.Module, of: str, adapter: str) -> torch.Tensor:
    """Return A or B of an adapter, bypassing attribute access of modules, which takes a microsecond each."""
    matrices = cast(nn.Module, layer._modules[of])
    return cast(torch.Tensor, cast(nn.Module, matrices._modules[adapter])._parameters["weight"])


def _state(layer: nn.Module) -> tuple[Any, ...]:
    """Return everything that determines what an adapted layer computes, except its matrices."""
    own = layer.__dict__
    if not isinstance(layer, BaseTunerLayer) or "lora_variant" not in own:
        return (type(layer),)
    active = own["_active_adapter"]
    names = (active,) if isinstance(active, str) else tuple(active)
    matrices = cast(nn.Module, layer._modules["lora_A"])._modules
    dropout = cast(nn.Module, layer._modules["lora_dropout"])._modules
    of_each = (
        (
            *(name, name in matrices, own["r"].get(name), own["scaling"].get(name)),
            *(own["lora_bias"].get(name), name in own["lora_variant"]),
            getattr(dropout.get(name), "p", 0.0),
        )
        for name in names
    )
    return type(layer), own["_disable_adapters"], tuple(own["merged_adapters"]), own["training"], *of_each


def _is_shared(layers: Sequence[LoraLinear], name: str) -> bool:
    return _matrix(layers[0], "lora_A", name) is _matrix(layers[-1], "lora_A", name)


def is_shared(model: nn.Module, name: str) -> bool:
    """Return True if the experts of any layer share their adapter of this name."""
    return any(_is_shared(layers, name) for layers in _adapted(model, name))


@torch.no_grad()
def share(model: nn.Module, name: str = "default", strict: bool = True) -> None:
    """Make all experts of a layer use the adapter parameters of its first expert.

    Args:
        model: A model with an adapter of that name; a model without adapted experts is left unchanged.
        name: Name of the adapter.
        strict: Whether to raise if adapters of a layer differ; otherwise that layer is left unchanged.

    Raises:
        QeRLError: The experts of a layer have different adapters.
    """
    for layers in _adapted(model, name):
        if _differ(layers, name):
            if strict:
                raise QeRLError(
                    "The experts of a layer have different adapters and cannot share one; set lora_experts: "
                    "each."
                )
            continue
        for matrices in ("lora_A", "lora_B"):
            first = _matrix(layers[0], matrices, name)
            for layer in layers[1:]:
                cast(Any, layer._modules[matrices])[name].weight = first


def state_of(model: PeftModel) -> dict[str, Any] | None:
    """Return the state dict with which to save a model that has shared adapters; None if none is shared.

    Adapters are in CPU memory, where PEFT copies a shared one for each expert. None leaves the state to PEFT.
    """
    if not any(is_shared(model, name) for name in model.peft_config):
        return None
    state, host = dict(model.state_dict()), dict[int, torch.Tensor]()
    for name, value in state.items():
        if ".lora_" in name:
            if value.data_ptr() not in host:
                host[value.data_ptr()] = value.cpu()
            state[name] = host[value.data_ptr()]
    return state


def _adapted(model: nn.Module, name: str) -> Iterator[list[LoraLinear]]:
    """Yield, per layer and linear, the linears of all experts, if any has an adapter of that name."""
    for _, experts in experts_of(model):
        for linear in LINEARS:
            layers = _layers(experts, linear)
            if any(_holds(layer, name) for layer in layers):
                yield layers


def _holds(layer: nn.Module, name: str) -> bool:
    return isinstance(layer, BaseTunerLayer) and name in cast(Any, layer).lora_A


def _differ(layers: Sequence[LoraLinear], name: str) -> bool:
    """Return True if adapters differ; where all B are zero, A may differ."""
    if not all(_holds(layer, name) for layer in layers):
        return True
    if len({(layer.r[name], layer.scaling[name]) for layer in layers}) > 1:
        return True
    first_a, first_b = (_matrix(layers[0], each, name) for each in ("lora_A", "lora_B"))
    others = layers[1:]
    if not all(torch.equal(_matrix(layer, "lora_B", name), first_b) for layer in others):
        return True
    return bool(first_b.any()) and not all(
        torch.equal(_matrix(layer, "lora_A", name), first_a) for layer in others
    )
