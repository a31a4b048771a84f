"""A linear layer and its LoRA on a GPU as one node of autograd: ``y = x W^T + b + (x A^T) (s B)^T``.

PEFT computes the adapter in FP32 beside the layer: it casts the activations up, adds in FP32 and casts down,
some eight passes over tensors of tokens x width, which at long contexts costs as much as the layer's own
product. Here both are 16-bit products with FP32 accumulation, with A and s B rounded to the activations'
dtype, as in the rollout engine: the policy that trains rounds like the policy that samples. A and B stay FP32
where the optimizer sees them, and so do their gradients.

Adding a low-rank product to y costs a pass over y, a memory-bound eighth of the product's time. Where y is
wider than x it rides along instead: x gets R more columns, x A^T, W gets R more columns, s B, and one product
does both. Backward does the same with dy and A where dx is the wider one.

The dense W is written into a workspace shared by all layers, for this one product: nothing dequantised is
kept for backward, which writes it again. Kept are x and x A^T.

Shapes: B batch, T tokens, N outputs, K inputs, R rank.
"""

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qerl.nvfp4.linear import PackedLinear
from qerl.workspace import workspace


def fused_forward(module: LoraLinear, x_BTK: torch.Tensor) -> torch.Tensor | None:
    """The layer's output [B, T, N], or None where it must be computed by PEFT.

    That is: not 16-bit on CUDA, no adapter or several, a variant of LoRA, or dropout.
    """
    names = [name for name in module.active_adapters if name in module.lora_A]
    base = cast(nn.Module, module.get_base_layer())
    if (
        not x_BTK.is_cuda
        or x_BTK.dtype not in (torch.bfloat16, torch.float16)
        or module.disable_adapters
        or module.merged
        or len(names) != 1
        or names[0] in module.lora_variant
        or module.lora_bias[names[0]]
        or (module.training and getattr(module.lora_dropout[names[0]], "p", 0.0) > 0)
        or not (isinstance(base, PackedLinear) or type(base) is nn.Linear)
    ):
        return None
    a_RK, b_NR = module.lora_A[names[0]].weight, module.lora_B[names[0]].weight
    return _LoraProduct.apply(x_BTK, a_RK, b_NR, module.scaling[names[0]], base)


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTK: torch.Tensor,
        a_RK: torch.Tensor,
        b_NR: torch.Tensor,
        scaling: float,
        base: PackedLinear | nn.Linear,
    ) -> torch.Tensor:
        x_TK = x_BTK.reshape(-1, x_BTK.shape[-1])
        a16_RK, b16_NR = a_RK.to(x_TK.dtype), (b_NR * scaling).to(x_TK.dtype)
        bias = None if base.bias is None else base.bias.to(x_TK.dtype)
        (tokens, k), (n, r) = x_TK.shape, b_NR.shape
        if n > k and r % 8 == 0:
            both_TK = x_TK.new_empty(tokens, k + r)
            both_TK[:, :k] = x_TK
            torch.mm(x_TK, a16_RK.T, out=both_TK[:, k:])
            weight_NK = workspace((n, k + r), x_TK)
            _write_dense(base, weight_NK[:, :k])
            weight_NK[:, k:] = b16_NR
            y_TN = F.linear(both_TK, weight_NK, bias)
            low_TR = both_TK[:, k:].contiguous()
        else:
            low_TR = x_TK @ a16_RK.T
            y_TN = F.linear(x_TK, _dense(base, x_TK), bias).addmm_(low_TR, b16_NR.T)
        ctx.save_for_backward(x_TK, low_TR, a_RK, b_NR)
        ctx.scaling, ctx.base = scaling, base
        return y_TN.view(*x_BTK.shape[:-1], n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, low_TR, a_RK, b_NR = ctx.saved_tensors
        dy_TN = dy_BTN.reshape(-1, dy_BTN.shape[-1])
        a16_RK, b16_NR = a_RK.to(dy_TN.dtype), (b_NR * ctx.scaling).to(dy_TN.dtype)
        (tokens, n), (r, k) = dy_TN.shape, a_RK.shape
        db_NR = torch.mm(dy_TN.T, low_TR, out_dtype=torch.float32).mul_(ctx.scaling)
        dx_TK = None
        if ctx.needs_input_grad[0] and n < k and r % 8 == 0:
            both_TN = dy_TN.new_empty(tokens, n + r)
            both_TN[:, :n] = dy_TN
            dlow_TR = torch.mm(dy_TN, b16_NR, out=both_TN[:, n:])
            weight_NK = workspace((n + r, k), dy_TN)
            _write_dense(ctx.base, weight_NK[:n])
            weight_NK[n:] = a16_RK
            dx_TK = both_TN @ weight_NK
        else:
            dlow_TR = dy_TN @ b16_NR
            if ctx.needs_input_grad[0]:
                dx_TK = (dy_TN @ _dense(ctx.base, dy_TN)).addmm_(dlow_TR, a16_RK)
        da_RK = torch.mm(dlow_TR.T, x_TK, out_dtype=torch.float32)
        dx_BTK = None if dx_TK is None else dx_TK.view(*dy_BTN.shape[:-1], k)
        return dx_BTK, da_RK.to(a_RK.dtype), db_NR.to(b_NR.dtype), None, None


def _dense(base: PackedLinear | nn.Linear, like: torch.Tensor) -> torch.Tensor:
    """W [N, K] for one product."""
    if isinstance(base, PackedLinear):
        return base.transient_weight(like)
    return base.weight.to(like.dtype)


def _write_dense(base: PackedLinear | nn.Linear, out_NK: torch.Tensor) -> None:
    """Writes W into part of the workspace."""
    if isinstance(base, PackedLinear):
        base.write_dense(out_NK)
    else:
        out_NK.copy_(base.weight)
