"""A model whose RMSNorms and SwiGLU blocks train through one kernel each.

transformers writes both as chains of elementwise operations, each a pass over memory, and in the MLP with
several tensors of tokens x intermediate size that live at once. The kernels are in qerl.kernels.elementwise.

Only frozen norms are taken over, which is every LoRA run: a trained norm needs a gradient for its weight and
stays as it is. Modules are given a new `forward`; nothing else about them changes, and what is not 16-bit on
a GPU is computed as before.
"""

import types
from typing import Any, cast

import torch
from torch import nn

from qerl.kernels.elementwise import rms_norm, swiglu


def fuse(model: nn.Module) -> None:
    """Let the model's RMSNorms and SwiGLU blocks use the kernels for 16-bit tensors on a GPU."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(_norm_forward, module)
        elif type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation") and all(
            hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")
        ):
            module.forward = types.MethodType(_mlp_forward, module)


def _norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.weight.requires_grad or not _takes(x):
        return cast(torch.Tensor, type(self).forward(self, x))
    return rms_norm(x, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not _takes(x):
        return cast(torch.Tensor, type(self).forward(self, x))
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def _takes(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
