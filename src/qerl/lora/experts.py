"""Adapters on experts that are linears of their own, kept from PEFT's merging.

For a mixture PEFT rewrites an adapter's config and matrices to those of transformers' merged experts, by the
model's type alone. Where the experts are linears of their own (`qerl.families.experts`), there is nothing to
be merged: both functions of PEFT then leave everything as it is. The adapter is saved with a pair of matrices
for each linear, `mlp.experts.3.gate_proj.lora_A.weight`. Around transformers' own model PEFT merges those if
all layers are mixtures (Qwen3-MoE, OLMoE). Where other linears have the same last names (a dense layer,
shared experts), it takes their adapters for those of experts without a word; so that is said here.
"""

import logging
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import transformers_weight_conversion as theirs
from torch import nn

from qerl.families.experts import experts_of
from qerl.ranks import is_first_process

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
