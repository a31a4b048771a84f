"""The dense weight of a linear layer, whatever its format."""

import torch
from torch import nn

from qerl.fp4.linear import PackedLinear


def dense_weight(linear: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of a packed, NF4 or dense linear; of a dense one perhaps the parameter itself."""
    if isinstance(linear, PackedLinear):
        return linear.dense(dtype)
    weight = linear.get_parameter("weight")
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach().to(dtype)
    from bitsandbytes.functional import dequantize_4bit  # an optional package, which has made this weight

    return dequantize_4bit(weight.data, state).to(dtype)
