"""Linear layers whose frozen weight stays in four bits.

The weight lives in buffers named as on disk (``weight_packed``, ``weight_scale``, ``weight_global_scale``);
the layer's `storage` knows their layout. It is dequantised for each product, in forward and again in
backward. Backward needs only the packed bytes, which exist anyway, and no dense copy; the price is
dequantising twice. The gradient with respect to the input is exact for the dequantised weight, because it is
computed with that very matrix. The packed weight itself has no gradient: training goes through LoRA on top.

There is no ``weight`` attribute, so code that would silently work on the bytes, or make a dense copy, fails
instead. PEFT reads the device of a quantised layer from ``qweight``, which is provided.

Casting a model (``.to(torch.bfloat16)``, ``.half()``) changes the bias but neither scales nor codes: they are
the weight's content, not its precision. Moving it to another device moves everything.

A code times its block scale has at most 6 significant bits, so 16 bits hold it exactly; after division by a
global scale they do not. On a GPU, products in 16 bits therefore multiply with codes times block scales over
a power of two, and the rest of the global scale is a factor of the product before it is rounded
(:meth:`PackedLinear.exact`). The paged engine does the same, so its weight is identical.

With `fp8_gradients`, the gradient of a layer's input, and nothing else, is a product in FP8: dy is rounded to
E4M3 with one scale per token, and W as well, whose four significant bits in place of six round some codes of
some blocks (:func:`gradient_in_fp8`). The forward pass, and so the policy, stays the same.

Shapes: B batch, T tokens, N outputs, K inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qerl.fp4.format import BlockFormat, PackedRows
from qerl.fp4.storage import PackedTiles, PackedWeight
from qerl.kernels.workspace import workspace


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W [N, K] in a four-bit block format.

    The layer is made with uninitialised buffers, to be filled from a checkpoint, or by :meth:`of`.

    Args:
        in_features: K, a multiple of the format's block size.
        out_features: N.
        format: Format of the weight, in which the layer is saved.
        bias: True if there is a bias [N].
        device: Device of all tensors.
        dtype: Dtype of the bias.

    Attributes:
        fp8_gradients: Whether the gradient of the input is a product in FP8; the weight is in tiles then.
    """

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: BlockFormat,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = in_features, out_features, format
        n, k, g = out_features, in_features, in_features // format.block_size
        self.register_buffer("weight_packed", torch.empty(n, k // 2, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.empty(n, g, dtype=format.scale_dtype, device=device))
        global_scale = torch.empty(1, dtype=torch.float32, device=device) if format.has_global_scale else None
        self.register_buffer("weight_global_scale", global_scale)
        self.bias = nn.Parameter(torch.empty(n, device=device, dtype=dtype)) if bias else None
        self._storage_type: type[PackedWeight] = PackedRows
        self.fp8_gradients = False
        self._global: tuple[torch.Tensor, int | None, float, torch.Tensor] | None = None  # see `_scales`
        self._blocks_open = 0  # how many `dense_weights_kept` blocks are open around this layer
        self._dense_NK: torch.Tensor | None = None  # kept while one is open

    @classmethod
    def of(cls, weight: PackedWeight, bias: nn.Parameter | None = None) -> "PackedLinear":
        """Wrap a packed weight in a layer, without a copy."""
        n, k = weight.shape
        layer = cls(k, n, weight.format, device="meta")
        layer.use(weight)
        layer.bias = bias
        return layer

    @property
    def storage(self) -> PackedWeight:
        """The weight: the layer's buffers and the order of their bytes.

        Raises:
            QeRLError: Shapes or dtypes of the buffers do not fit together.
        """
        tensors = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        return self._storage_type.of_tensors(tensors, self.format)

    def exact(self) -> tuple[PackedWeight, float]:
        """Return the weight divided by a factor from 1/2 to 1, so that 16 bits hold it exactly, and the
        factor."""
        if self.weight_global_scale is None:
            return self.storage, 1.0
        scale, power = self._scales(self.weight_global_scale)
        tensors = self.storage.tensors() | {"weight_global_scale": power}
        return self._storage_type.of_tensors(tensors, self.format), 1 / (2 * math.frexp(scale)[0])

    def tiles(self) -> tuple[PackedTiles, float]:
        """The weight in tiles, and the global scale that divides it."""
        weight = self.storage
        assert isinstance(weight, PackedTiles), "only weights in tiles are told to have gradients in FP8"
        return weight, self._scales(weight.global_scale)[0]

    def _scales(self, own: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The global scale, and the largest power of two up to it as a tensor on the scale's device.

        The scale is read from its device on the first call, and again after it was replaced.
        """
        version = None if own.is_inference() else own._version
        if self._global is None or self._global[0] is not own or self._global[1] != version:
            scale = float(own)
            with torch.inference_mode(False):  # a rollout may call first, and training then reads it
                power = torch.full_like(own, math.ldexp(1.0, math.frexp(scale)[1] - 1))
            self._global = own, version, scale, power
        return self._global[2:]

    def use(self, weight: PackedWeight) -> None:
        """Replace the buffers by those of ``weight``, the same matrix in any layout or place."""
        tensors = weight.tensors()
        self._storage_type = type(weight)
        self.weight_packed = tensors["weight_packed"]
        self.weight_scale = tensors["weight_scale"]
        self.weight_global_scale = tensors.get("weight_global_scale")

    @property
    def qweight(self) -> torch.Tensor:
        """The codes, uint8: PEFT takes the device of an adapter from here."""
        return self.weight_packed

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [N, K], exact in FP32 and then cast once: in new memory, unless `dense_weights_kept` keeps it."""
        if self._dense_NK is not None and self._dense_NK.dtype == dtype:
            return self._dense_NK
        with torch.inference_mode(False):  # a kept one may serve a training step later in the same block
            dense_NK = torch.empty(
                self.out_features, self.in_features, dtype=dtype, device=self.weight_packed.device
            )
            self.storage.write_dense(dense_NK)
        if self._blocks_open:
            self._dense_NK = dense_NK
        return dense_NK

    def forward(self, x_BTK: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the dtype of ``x``, or of autocast where it is on."""
        device_type = x_BTK.device.type
        if torch.is_autocast_enabled(device_type):
            x_BTK = x_BTK.to(torch.get_autocast_dtype(device_type))
        bias = None if self.bias is None else self.bias.to(x_BTK.dtype)
        if self._blocks_open:
            return F.linear(x_BTK, self.dense(x_BTK.dtype), bias)
        rounds = x_BTK.is_cuda and x_BTK.dtype != torch.float32
        weight, factor = self.exact() if rounds else (self.storage, 1.0)
        return _PackedProduct.apply(x_BTK, bias, weight, factor, self if self.fp8_gradients else None)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        size = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{self.format.name}, {size}, bias={bias}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedLinear":
        # nn.Module casts floating-point buffers. Viewed as bytes, scales are moved but not cast.
        self._dense_NK = None
        dtypes = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        for name in dtypes:
            self._buffers[name] = getattr(self, name).view(torch.uint8)
        try:
            super()._apply(fn, recurse)
        finally:
            for name, dtype in dtypes.items():
                self._buffers[name] = getattr(self, name).view(dtype)
        return self


def scaled_product(
    x_TK: torch.Tensor, w_KN: torch.Tensor, factor: float, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """``factor x w + b`` [T, N] in the dtype of ``x``, rounded once."""
    if bias_N is not None:
        return torch.addmm(bias_N, x_TK, w_KN, alpha=factor)
    if factor == 1:
        return x_TK @ w_KN
    return torch.addmm(x_TK.new_empty(1), x_TK, w_KN, beta=0, alpha=factor)


_TO_E4M3 = 8.0
"""Power of two by which the largest code times block scale, 6 x 448, is divided to fit E4M3."""


def gradient_in_fp8(dy_TN: torch.Tensor, layers: Sequence[PackedLinear]) -> torch.Tensor:
    """``dy W`` [T, K] as a product of E4M3 numbers summed in FP32.

    dy is rounded with one scale per token, which multiplies the sum. W is written for this product, as codes
    times block scales over a power of two, transposed because FP8 tensor cores read along N; the sum is
    divided by the global scale. Layers of a group whose global scales differ are brought to the smallest one
    before rounding.

    Args:
        dy_TN: Gradients of the outputs of the layers, side by side.
        layers: Layers with weights in tiles and the same inputs.
    """
    from qerl.kernels.update.fp8 import quantize_rows  # needs Triton

    q_TN, scale_T1 = quantize_rows(dy_TN.contiguous())
    weights = [layer.tiles() for layer in layers]
    smallest = min(scale for _, scale in weights)
    k = layers[0].in_features
    weight_KN = workspace((k, dy_TN.shape[1]), q_TN)
    parts = weight_KN.split([layer.out_features for layer in layers], dim=1)
    for (weight, scale), part in zip(weights, parts, strict=True):
        weight.write_transposed_e4m3(smallest / scale / _TO_E4M3, part)
    return torch._scaled_mm(
        q_TN, weight_KN.T, scale_a=scale_T1, scale_b=scale_T1.new_full((1, k), _TO_E4M3 / smallest),
        out_dtype=dy_TN.dtype,
    )  # fmt: skip


class _PackedProduct(torch.autograd.Function):
    """``factor x W^T + b``, which keeps the packed W and dequantises it again in backward. If a layer is
    given as ``in_fp8``, the gradient of x is a product in FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTK: torch.Tensor,
        bias_N: torch.Tensor | None,
        weight: PackedWeight,
        factor: float,
        in_fp8: PackedLinear | None,
    ) -> torch.Tensor:
        # Not saved with `save_for_backward`, whose hooks would copy bytes that stay where they are anyway.
        ctx.weight, ctx.factor, ctx.in_fp8 = weight, factor, in_fp8
        x_TK = x_BTK.reshape(-1, x_BTK.shape[-1])
        y_TN = scaled_product(x_TK, _in_workspace(weight, x_BTK).T, factor, bias_N)
        return y_TN.view(*x_BTK.shape[:-1], y_TN.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx_BTK = dbias_N = None
        dy_TN = dy_BTN.reshape(-1, dy_BTN.shape[-1])
        if ctx.needs_input_grad[0]:
            if ctx.in_fp8 is not None:
                dx_TK = gradient_in_fp8(dy_TN, [ctx.in_fp8])
            else:
                dx_TK = scaled_product(dy_TN, _in_workspace(ctx.weight, dy_BTN), ctx.factor)
            dx_BTK = dx_TK.view(*dy_BTN.shape[:-1], dx_TK.shape[-1])
        if ctx.needs_input_grad[1]:
            dbias_N = dy_TN.sum(0)
        return dx_BTK, dbias_N, None, None, None


def _in_workspace(weight: PackedWeight, like: torch.Tensor) -> torch.Tensor:
    """W [N, K] in the dtype of ``like``, for one product."""
    dense_NK = workspace(weight.shape, like)
    weight.write_dense(dense_NK)
    return dense_NK


@contextmanager
def dense_weights_kept(model: nn.Module) -> Iterator[None]:
    """Keep the dequantised weight of every packed layer of the model after its first use within this block.

    A trade of memory for time, for devices without a four-bit product: there, each forward pass dequantises
    every weight, which costs a decode step of 64 rows a third of its time (SmolLM2-135M without head, FP32,
    one CPU core: 480 ms packed, 340 ms unpacked, 350 ms as a dense model). The dense weights take as much
    memory as an unquantised model in the activations' dtype, so an engine on a GPU, where the packed bytes
    are the point, does not use this. Results are bit-identical.

    Blocks may be nested; the weights are dropped when the outermost ends, also by an exception.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        layer._blocks_open += 1
    try:
        yield
    finally:
        for layer in layers:
            layer._blocks_open -= 1
            if not layer._blocks_open:
                layer._dense_NK = None
