"""Adapters on experts that are linears of their own, kept from PEFT's merging.

For a mixture PEFT rewrites an adapter's config and matrices to those of transformers' merged experts, by the
model's type alone. Where the experts are linears of their own (`qerl.families.experts`), there is nothing to
be merged: both functions of PEFT then leave everything as it is. The adapter is saved with a pair of matrices
for each linear, `mlp.experts.3.gate_proj.lora_A.weight`. Around transformers' own model PEFT merges those if
all layers are mixtures (Qwen3-MoE, OLMoE). Where other linears have the same last names (a dense layer,
shared experts), it takes their adapters for those of experts without a word; so that is said here.

Experts may have an adapter each, or all of a layer the same one (`share`): its matrices are then one
parameter in the place of each expert's, so it is optimised once and costs what an adapter of one MLP costs,
and it is saved under the name of each expert, as loaders elsewhere look for it. Kernels that multiply all
experts of a layer at once ask for the matrices of all (`ExpertLora`).

Shapes: E experts, G experts or 1 where they share an adapter, R rank, K inputs, N outputs of a linear.
"""

import logging
from collections.abc import Sequence
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
    """Let PEFT, in this process, merge adapters of experts only where the experts are merged."""
    theirs.convert_peft_config_for_transformers = _config_unless_separate
    theirs.convert_peft_adapter_state_dict_for_transformers = _matrices_unless_separate


def warn_of_merging(model: PeftModel) -> None:
    """Say so where PEFT may take adapters beside the experts for theirs, around transformers' own model."""
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
            "Read this adapter with qerl.load_adapter: around transformers' own model PEFT may take that of "
            "%s for one of the experts.",
            beside.removeprefix("base_model.model."),
        )


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The active adapters of one linear of all experts of a layer.

    Attributes:
        all_a: G matrices A [R, K], fp32.
        all_b: G matrices B [N, R], fp32.
        scaling: What B A x is multiplied by.
    """

    all_a: list[torch.Tensor]
    all_b: list[torch.Tensor]
    scaling: float

    @classmethod
    def of(cls, experts: Experts, name: str) -> "ExpertLora | None":
        """That of the linears of this name, for which :func:`why_not_together` finds nothing; None where
        they have no active adapter."""
        layers = [cast(LoraLinear, expert._modules[name]) for expert in experts]
        if not isinstance(layers[0], BaseTunerLayer) or (active := active_adapter(layers[0])) is None:
            return None
        if _is_shared(layers, active):
            layers = layers[:1]
        return cls(
            [layer.lora_A[active].weight for layer in layers],
            [layer.lora_B[active].weight for layer in layers],
            layers[0].scaling[active],
        )

    @property
    def rank(self) -> int:
        """R."""
        return len(self.all_a[0])


def why_not_together(experts: Experts) -> str | None:
    """Why the adapters of a layer's experts are not computed together, as the end of a sentence; None where
    they are, and where there are none."""
    for name in LINEARS:
        found = set()
        for layer in (expert._modules[name] for expert in experts):
            active = None
            if isinstance(layer, BaseTunerLayer):
                if reason := why_not(layer):
                    return f"an expert's {name} {reason}"
                active = active_adapter(layer)
            lora = cast(LoraLinear, layer)
            found.add((active, lora.r[active], lora.scaling[active]) if active else None)
        if len(found) > 1:
            return f"the adapters of {name} differ in rank or scaling from expert to expert"
    return None


def _is_shared(layers: Sequence[LoraLinear], name: str) -> bool:
    first, last = layers[0].lora_A[name].weight, layers[-1].lora_A[name].weight
    return first is last


@torch.no_grad()
def share(model: nn.Module, name: str = "default") -> None:
    """Give all experts of a layer the adapter of its first one, as the same parameters.

    Args:
        model: With an adapter of that name; a model without adapted experts is left as it is.
        name: Of the adapter.

    Raises:
        QeRLError: The experts of a layer have learned different adapters.
    """
    for place, experts in experts_of(model):
        for linear in LINEARS:
            layers = [cast(Any, expert._modules[linear]) for expert in experts]
            if not isinstance(layers[0], BaseTunerLayer) or name not in cast(Any, layers[0]).lora_A:
                continue
            for matrices in ("lora_A", "lora_B"):
                first = getattr(layers[0], matrices)[name]
                for layer in layers[1:]:
                    own = getattr(layer, matrices)[name]
                    if matrices == "lora_B" and not torch.equal(own.weight, first.weight):
                        raise QeRLError(
                            f"The experts of {place} have adapters of their own in this checkpoint, so they "
                            "cannot share one; set lora_experts: each."
                        )
                    own.weight = first.weight
