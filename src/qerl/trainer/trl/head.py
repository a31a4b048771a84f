"""This project's output head, of `qerl.update.head`, in the place of TRL's. Tied to trl 1.16.

TRL puts a head on the policy that gives log-probabilities and entropies of labels, and calls a function of
autograd by a name of its module. Inside the block that name is ours: logits stay FP32, which TRL rounds to
the dtype of the policy, and where it can be done two products are computed instead of three.

Around that function, TRL selects the positions that have a label, which waits for the GPU to say how many. In
a joined row all positions have one (`update.forward.scored_only`), so inside the block every position is
scored, as TRL does on devices without Triton.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from trl.trainer import utils as trl_utils

from qerl.update.head import Transform, logps_and_entropies


@contextlib.contextmanager
def all_positions_scored(entropy_has_gradient: bool) -> Iterator[None]:
    """Inside the block TRL's head takes every position for one with a label, and computes with this one.

    Args:
        entropy_has_gradient: Whether the loss has a term of entropies.
    """
    before = trl_utils._use_triton, trl_utils._ChunkedLogProbFunction
    trl_utils._use_triton = lambda _: False  # it decides there whether positions are selected
    trl_utils._ChunkedLogProbFunction = _Head(entropy_has_gradient)
    try:
        yield
    finally:
        trl_utils._use_triton, trl_utils._ChunkedLogProbFunction = before


class _Head:
    """Stands for TRL's function of autograd."""

    def __init__(self, entropy_has_gradient: bool) -> None:
        self._entropy_has_gradient = entropy_has_gradient

    def apply(
        self,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        transform = Transform(logit_scale, softcap, temperature)
        dtype = _product_dtype(hidden_SD)
        logps_S, entropy_S = logps_and_entropies(
            hidden_SD, weight_VD, bias_V, target_S, transform, dtype, self._entropy_has_gradient
        )
        found: dict[str, Any] = {"entropy": entropy_S}
        return logps_S, *(found[name] if name in outputs else None for name in _OPTIONAL)


_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's head may be asked for besides log-probabilities; GRPO asks for the first alone."""


def _product_dtype(hidden_SD: torch.Tensor) -> torch.dtype:
    """The dtype in which TRL's head multiplies."""
    kind = hidden_SD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_SD.dtype
