"""Checks of the policy that a trainer is given: its update on packed rows must be possible and right.

The policy's class and config are checked before anything is built around it; properties that have to be
measured are checked once it is in place.
"""

import logging
import re
from contextlib import nullcontext

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import dense_weights_kept
from qerl.noise.norms import find_noise_norms
from qerl.rollout.engine import RolloutEngine, check_model
from qerl.settings.config import QeRLConfig
from qerl.update.head import score
from qerl.update.kernels import use_kernels
from qerl.update.path import UpdatePath
from qerl.update.row_check import check_packed_row

logger = logging.getLogger(__name__)

_ROUTER = re.compile(r"\.(?:gate|router)\.")
"""Found in the names of a mixture of experts' router parameters."""


def check_policy(model: nn.Module, args: QeRLConfig, engine: RolloutEngine | None) -> None:
    """Raise if a policy cannot be trained on packed rows, or the engine samples from another model.

    Raises:
        QeRLError: The model is no decoder-only transformer, has a prompt-learning adapter or one on its
            output head, would train with a router loss, or is not the engine's.
    """
    check_model(model)
    base = base_model(model)
    config, coef = base.config.get_text_config(), args.router_aux_loss_coef
    if coef is None:
        learns = any(p.requires_grad and _ROUTER.search(name) for name, p in model.named_parameters())
        coef = getattr(config, "router_aux_loss_coef", 0.0) if learns else 0.0
    if coef and hasattr(config, "output_router_logits"):
        raise QeRLError("A mixture of experts trains without its router loss: pass router_aux_loss_coef=0.")
    if isinstance(base.get_output_embeddings(), BaseTunerLayer):
        raise QeRLError(
            "The output head has an adapter, which the computation of log-probabilities ignores; leave the "
            "head out of lora_target_modules."
        )
    if engine is not None and engine.model is not None and base_model(engine.model) is not base:
        raise QeRLError(
            f"The engine samples from another {type(base_model(engine.model)).__name__} object than the "
            f"{type(base).__name__} that trains; make the engine from the model that you pass to the trainer."
        )


def ready_for_rows(model: nn.Module, args: QeRLConfig) -> UpdatePath:
    """Install the policy's kernels for packed rows, and check by measurement that its log-probabilities are
    right.

    Args:
        model: The policy where it trains, PEFT-wrapped or not.
        args: Settings of the run.

    Returns:
        The parts of its updates that run on those kernels.

    Raises:
        QeRLError: A packed row gives other log-probabilities than the samples in it, or noise finds no norm.
    """
    base = base_model(model)
    prompt, completion = args.max_prompt_length, args.max_completion_length
    longest = prompt + completion if prompt and completion else None
    path = use_kernels(base)
    with dense_weights_kept(model) if base.device.type == "cpu" else nullcontext():
        if args.noise:
            find_noise_norms(model)  # raises if there are none
        check_packed_row(
            model,
            lambda row: score(model, base, row, path.by_segment, args.temperature)[0],
            args.temperature,
            longest,
        )
    if path.is_slow and args.process_index == 0:
        logger.warning(path.sentence())
    return path
