"""Linear layers and their LoRA on a GPU as one autograd node: ``y = x W^T + b + (x A^T) (s B)^T``.

PEFT computes the adapter in FP32 beside the layer: it casts the activations up, adds in FP32 and casts down,
some eight passes over tensors of tokens x width, which at long contexts costs as much as the layer's own
product. Here both are 16-bit products with FP32 accumulation, with A and s B rounded to the activations'
dtype, as in the rollout engine: the trained policy rounds like the sampling policy. The parameters A and B
that the optimizer updates stay FP32, and so do their gradients.

Layers with the same input (q, k and v; gate and up) are treated as one layer, as in the rollout engine: their
W and their A are stacked by rows, and their B are block-diagonal. x is read once, and its gradient is one
product instead of a sum of several. The zeros beside the blocks cost less than that: R more columns per layer
of the group in products that are thousands wide.

Adding a low-rank product to y costs a pass over y, a memory-bound eighth of the product's time. If y is wider
than x, both are one product instead: x is extended by the R columns x A^T, and W by the R columns s B.
Backward does the same with dy and A if dx is wider than dy.

The dense W is written into a workspace shared by all layers, for this one product: nothing dequantised is
kept for backward, which dequantises again. Only x and x A^T are saved. A packed W is written divided by a
factor, so that it is exact (`qerl.fp4.linear`), and the product is multiplied by the factor before rounding;
A or s B in the same product is divided by it. Layers that share a global scale, as those of a fused product
do in checkpoints made for engines, have one factor; otherwise each W is rounded to the activations' dtype.

Layers with `PackedLinear.fp8_gradients` compute dy W in FP8. The adapter's part of dx and its own gradients
remain 16-bit products, so that part is added separately.

Shapes: B batch, T tokens, N outputs, K inputs, R rank; N and R of a whole group where layers are joined.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear, gradient_in_fp8, scaled_product
from qerl.fp4.storage import PackedWeight
from qerl.kernels.workspace import workspace
from qerl.lora.fused import OTHER_LAYER, dropout_reason
from qerl.lora.kinds import active_adapter, why_not


def is_16bit_cuda(x: torch.Tensor) -> bool:
    """Return True for 16-bit CUDA tensors, the only ones that the update's kernels accept."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


NO_ADAPTER = "no adapter is active"
"""The reason why a layer without an active adapter is not fused."""


def fused_forward(x_BTK: torch.Tensor, *modules: nn.Module) -> torch.Tensor | None:
    """Return the layers' concatenated outputs [B, T, N], or None if each layer must be called by itself.

    None if the input is not 16-bit on CUDA, if :func:`why_not_fused` gives a reason, or if one of several
    layers has a hook, which a fused product would bypass (`qerl.noise` finds its norms by such hooks).
    """
    if not is_16bit_cuda(x_BTK) or (len(modules) > 1 and any(_has_hooks(module) for module in modules)):
        return None
    if any(why_not_fused(module, module.training) for module in modules):
        return None
    layers = [(layer, cast(str, active_adapter(layer))) for layer in cast(tuple[LoraLinear, ...], modules)]
    return _LoraProduct.apply(
        x_BTK,
        [layer.get_base_layer() for layer, _ in layers],
        [layer.scaling[name] for layer, name in layers],
        *(layer.lora_A[name].weight for layer, name in layers),
        *(layer.lora_B[name].weight for layer, name in layers),
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def why_not_fused(layer: nn.Module, training: bool) -> str | None:
    """Return why a layer must be called by itself even on 16-bit CUDA tensors; None if it can be fused.

    Args:
        layer: A linear layer, with or without an adapter.
        training: Whether dropout is active.
    """
    if not isinstance(layer, LoraLinear):
        return OTHER_LAYER if isinstance(layer, BaseTunerLayer) else "a layer has no adapter"
    if reason := why_not(layer):
        return f"a layer {reason}"
    name, base = active_adapter(layer), layer.get_base_layer()
    if name is None:
        return NO_ADAPTER
    if training and (p := getattr(layer.lora_dropout[name], "p", 0.0)) > 0:
        return dropout_reason(p)
    if not (isinstance(base, PackedLinear) or type(base) is nn.Linear):
        return OTHER_LAYER
    if any(own is not None and own.requires_grad for own in base._parameters.values()):
        return "a weight or bias under an adapter trains"
    return None


class DenseLoraLinear(LoraLinear):
    """LoRA around a 16-bit or FP32 linear, ``base(x) + B A x * alpha / r``; a fused product on a GPU."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        fused = None if args or kwargs else fused_forward(x, self)
        return super().forward(x, *args, **kwargs) if fused is None else fused


class PackedLoraLinear(DenseLoraLinear):
    """LoRA around a `PackedLinear`, as in `DenseLoraLinear`."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        raise QeRLError(
            "Cannot merge into 4-bit weights: rounding would discard the adapter. Load the 16-bit base with "
            "PEFT and merge there."
        )


Base = PackedLinear | nn.Linear
Weight = PackedWeight | torch.Tensor


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTK: torch.Tensor, bases: list[Base], scalings: list[float], *matrices: torch.Tensor
    ) -> torch.Tensor:
        x_TK = x_BTK.reshape(-1, x_BTK.shape[-1])
        a_RK, b_NR = _adapter(matrices, scalings, x_TK.dtype)
        bias_N, (weights, factor) = _bias(bases, x_TK), _weights(bases)
        k, (n, r) = x_TK.shape[1], b_NR.shape
        xa_TR = x_TK @ a_RK.T
        if n > k and r % 8 == 0:
            both_TK = torch.cat((x_TK, xa_TR), dim=1)
            weight_NK = workspace((n, k + r), x_TK)
            _write_dense(weights, weight_NK[:, :k])
            torch.div(b_NR, factor, out=weight_NK[:, k:])
            y_TN = scaled_product(both_TK, weight_NK.T, factor, bias_N)
        else:
            y_TN = scaled_product(x_TK, _dense(weights, x_TK).T, factor, bias_N).addmm_(xa_TR, b_NR.T)
        ctx.save_for_backward(x_TK, xa_TR, *matrices)
        ctx.scalings, ctx.weights, ctx.factor, ctx.in_fp8 = scalings, weights, factor, _in_fp8(bases)
        return y_TN.view(*x_BTK.shape[:-1], n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, xa_TR, *matrices = ctx.saved_tensors
        dy_TN = dy_BTN.reshape(-1, dy_BTN.shape[-1])
        a_RK, b_NR = _adapter(matrices, ctx.scalings, dy_TN.dtype)
        n, (r, k) = dy_TN.shape[1], a_RK.shape
        dxa_TR = dy_TN @ b_NR
        db_NR = torch.mm(dy_TN.T, xa_TR, out_dtype=torch.float32)
        dx_TK = None
        if ctx.needs_input_grad[0] and ctx.in_fp8:
            dx_TK = gradient_in_fp8(dy_TN, ctx.in_fp8).addmm_(dxa_TR, a_RK)
        elif ctx.needs_input_grad[0] and n < k and r % 8 == 0:
            both_TN = torch.cat((dy_TN, dxa_TR), dim=1)
            weight_NK = workspace((n + r, k), dy_TN)
            _write_dense(ctx.weights, weight_NK[:n])
            torch.div(a_RK, ctx.factor, out=weight_NK[n:])
            dx_TK = scaled_product(both_TN, weight_NK, ctx.factor)
        elif ctx.needs_input_grad[0]:
            dx_TK = scaled_product(dy_TN, _dense(ctx.weights, dy_TN), ctx.factor).addmm_(dxa_TR, a_RK)
        da_RK = torch.mm(dxa_TR.T, x_TK, out_dtype=torch.float32)
        dx_BTK = None if dx_TK is None else dx_TK.view(*dy_BTN.shape[:-1], k)
        return dx_BTK, None, None, *_split_gradients(da_RK, db_NR, matrices, ctx.scalings)


def _adapter(
    matrices: Sequence[torch.Tensor], scalings: Sequence[float], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [R, K] and s B [N, R] of a group; ``matrices`` are all A, then all B of its layers."""
    all_a, all_b = matrices[: len(scalings)], matrices[len(scalings) :]
    if len(scalings) == 1:
        b_NR = torch.empty_like(all_b[0], dtype=dtype)
        return all_a[0].to(dtype), torch.mul(all_b[0], scalings[0], out=b_NR)
    a_RK = torch.cat(tuple(all_a)).to(dtype)
    b_NR = a_RK.new_zeros(sum(len(b) for b in all_b), len(a_RK))
    for block, b, scaling in zip(_blocks(b_NR, all_b), all_b, scalings, strict=True):
        torch.mul(b, scaling, out=block)
    return a_RK, b_NR


def _split_gradients(
    da_RK: torch.Tensor, db_NR: torch.Tensor, matrices: Sequence[torch.Tensor], scalings: Sequence[float]
) -> list[torch.Tensor]:
    """Return gradients of all A, then all B of a group's layers; those outside the blocks are dropped."""
    all_b = matrices[len(scalings) :]
    all_da = da_RK.split([b.shape[1] for b in all_b])
    all_db = [block * scaling for block, scaling in zip(_blocks(db_NR, all_b), scalings, strict=True)]
    return [d.to(like.dtype) for d, like in zip((*all_da, *all_db), matrices, strict=True)]


def _blocks(whole_NR: torch.Tensor, all_b: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each layer's block of a group's matrix: the rows of its outputs, the columns of its rank."""
    row = column = 0
    for b in all_b:
        n, r = b.shape
        yield whole_NR[row : row + n, column : column + r]
        row, column = row + n, column + r


def _bias(bases: Sequence[Base], like: torch.Tensor) -> torch.Tensor | None:
    """Return the biases [N] of a group, zero for layers without one; None if no layer has a bias."""
    if all(base.bias is None for base in bases):
        return None
    parts = [like.new_zeros(base.out_features) if base.bias is None else base.bias for base in bases]
    return torch.cat([part.to(like.dtype) for part in parts])


def _weights(bases: Sequence[Base]) -> tuple[list[Weight], float]:
    """Return the weights of a group divided by a common factor, and that factor (1 if there is none)."""
    if all(isinstance(base, PackedLinear) for base in bases):
        exact = [cast(PackedLinear, base).exact() for base in bases]
        factors = {factor for _, factor in exact}
        if len(factors) == 1:
            return [weight for weight, _ in exact], factors.pop()
    return [base.storage if isinstance(base, PackedLinear) else base.weight for base in bases], 1.0


def _in_fp8(bases: Sequence[Base]) -> list[PackedLinear]:
    """Return the layers of a group if all of them have FP8 gradients, otherwise an empty list."""
    told = [base for base in bases if isinstance(base, PackedLinear) and base.fp8_gradients]
    return told if len(told) == len(bases) else []


def _dense(weights: Sequence[Weight], like: torch.Tensor) -> torch.Tensor:
    """Return the dense W [N, K] of a group; a workspace is overwritten by the next product."""
    if len(weights) == 1 and isinstance(weights[0], torch.Tensor):
        return weights[0].to(like.dtype)
    rows = sum(weight.shape[0] for weight in weights)
    weight_NK = workspace((rows, weights[0].shape[1]), like)
    _write_dense(weights, weight_NK)
    return weight_NK


def _write_dense(weights: Sequence[Weight], out_NK: torch.Tensor) -> None:
    """Write the dense W of each layer into part of the workspace, stacked by rows."""
    for weight, rows in zip(weights, out_NK.split([weight.shape[0] for weight in weights]), strict=True):
        if isinstance(weight, torch.Tensor):
            rows.copy_(weight)
        else:
            weight.write_dense(rows)
