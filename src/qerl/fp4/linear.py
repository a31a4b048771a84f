"""Linear layers whose frozen weight stays in four bits.

The weight lives in buffers named as on disk (``weight_packed``, ``weight_scale``, ``weight_global_scale``)
and is dequantised for each product, in forward and again in backward. What autograd keeps for backward are
the packed bytes, which exist anyway, and no dense copy; the price is dequantising twice. The gradient with
respect to the input is exact for the dequantised weight, because that very matrix is multiplied with. The
packed weight itself has no gradient: training goes through LoRA on top.

There is no ``weight`` attribute, so code that would silently work on the bytes, or make a dense copy, fails
instead. PEFT asks quantised layers for ``qweight`` to learn the device, and that is given.

Casting a model (``.to(torch.bfloat16)``, ``.half()``) changes the bias but neither scales nor codes: they are
the weight's content, not its precision. Moving it to another device moves everything.

Shapes: B batch, T tokens, N outputs, K inputs, G = K / block size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qerl.fp4.convert import from_nvfp4
from qerl.fp4.format import MXFP4, NVFP4, BlockFormat, PackedWeight, dequantize
from qerl.fp4.workspace import workspace


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W [N, K] in a four-bit block format; one subclass per format.

    Made with uninitialised buffers, to be filled from a checkpoint, or by :meth:`from_packed`.

    Args:
        in_features: K, a multiple of the format's block size.
        out_features: N.
        bias: Whether there is a bias [N].
        device: Of all tensors.
        dtype: Of the bias.
    """

    format: ClassVar[BlockFormat]
    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_global_scale: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        n, k, g = out_features, in_features, in_features // self.format.block_size
        self.register_buffer("weight_packed", torch.empty(n, k // 2, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.empty(n, g, dtype=self.format.scale_dtype, device=device))
        has_global_scale = self.format.has_global_scale
        global_scale = torch.empty(1, dtype=torch.float32, device=device) if has_global_scale else None
        self.register_buffer("weight_global_scale", global_scale)
        self.bias = nn.Parameter(torch.empty(n, device=device, dtype=dtype)) if bias else None
        self._unpacked_depth = 0  # how many `unpacked` blocks are open around this layer
        self._dense_NK: torch.Tensor | None = None  # kept while one is open

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: nn.Parameter | None = None) -> "PackedLinear":
        """Layer around a packed weight of this class's format; nothing is copied."""
        n, k = packed.shape
        layer = cls(k, n, device="meta")
        layer.weight_packed = packed.codes
        layer.weight_scale = packed.scales
        layer.weight_global_scale = packed.global_scale
        layer.bias = bias
        return layer

    @property
    def packed(self) -> PackedWeight:
        """The weight as the format module knows it; a copy where the paged engine has reordered it.

        Raises:
            QeRLError: Shapes or dtypes of the buffers do not fit together.
        """
        if self.weight_packed.ndim == 2:
            return PackedWeight(self.weight_packed, self.weight_scale, self.weight_global_scale, self.format)
        from qerl.kernels.weights.packed_gemm import Blob, from_blob

        groups, tiles = self.weight_packed.shape[:2]
        blob = Blob(self.weight_packed, self.weight_scale.view(torch.uint8), (groups * 64, tiles * 64))
        codes, scales = (part[: self.out_features] for part in from_blob(blob))
        packed = PackedWeight(codes, scales.view(torch.float8_e4m3fn), self.weight_global_scale, NVFP4)
        return packed if self.format is NVFP4 else from_nvfp4(packed)

    @property
    def qweight(self) -> torch.Tensor:
        """The codes, uint8 [N, K/2]: PEFT takes the device of an adapter from here."""
        return self.weight_packed

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [N, K], exact in FP32 and then cast once. A new tensor, unless an `unpacked` block keeps it."""
        if not self._unpacked_depth:
            return self._dense(dtype)
        if self._dense_NK is None or self._dense_NK.dtype != dtype:
            with torch.inference_mode(False):  # it may serve a training step later in the same block
                self._dense_NK = self._dense(dtype)
        return self._dense_NK

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        buffers = self.weight_packed, self.weight_scale, self.weight_global_scale
        return _dense(*buffers, self.format, self.out_features, dtype)

    def forward(self, x_BTK: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the dtype of ``x``, or of autocast where it is on."""
        device_type = x_BTK.device.type
        if torch.is_autocast_enabled(device_type):
            x_BTK = x_BTK.to(torch.get_autocast_dtype(device_type))
        bias = None if self.bias is None else self.bias.to(x_BTK.dtype)
        if self._unpacked_depth:
            return F.linear(x_BTK, self.dequantized_weight(x_BTK.dtype), bias)
        buffers = self.weight_packed, self.weight_scale, self.weight_global_scale
        return _PackedProduct.apply(x_BTK, bias, self.format, self.out_features, *buffers)

    def write_dense(self, out_NK: torch.Tensor) -> None:
        """Writes W into ``out``, whose rows need not be next to each other."""
        if self.weight_packed.ndim == 4:
            from qerl.kernels.weights.dequantize import dequantize_into  # needs Triton

            assert self.weight_global_scale is not None
            dequantize_into(self.weight_packed, self.weight_scale, self.weight_global_scale, out_NK)
        else:
            out_NK.copy_(dequantize(self.packed, out_NK.dtype))

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedLinear":
        # nn.Module casts whatever is floating point. Shown as bytes, scales are moved but not cast.
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


class NVFP4Linear(PackedLinear):
    """Blocks of 16, E4M3 scales, one FP32 scale for the matrix."""

    format = NVFP4


class MXFP4Linear(PackedLinear):
    """Blocks of 32, power-of-two scales."""

    format = MXFP4


LINEAR_CLASSES: dict[str, type[PackedLinear]] = {cls.format.name: cls for cls in (NVFP4Linear, MXFP4Linear)}
"""Layer class by the name of its format."""


class _PackedProduct(torch.autograd.Function):
    """``x W^T + b`` that saves the packed W for backward, and dequantises it there again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTK: torch.Tensor,
        bias_N: torch.Tensor | None,
        format: BlockFormat,
        rows: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.format, ctx.rows = format, rows
        ctx.save_for_backward(codes, scales, global_scale)
        weight_NK = _transient(codes, scales, global_scale, format, rows, x_BTK)
        return F.linear(x_BTK, weight_NK, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx_BTK = dbias_N = None
        if ctx.needs_input_grad[0]:
            codes, scales, global_scale = ctx.saved_tensors
            dx_BTK = dy_BTN @ _transient(codes, scales, global_scale, ctx.format, ctx.rows, dy_BTN)
        if ctx.needs_input_grad[1]:
            dbias_N = dy_BTN.flatten(0, -2).sum(0)
        return dx_BTK, dbias_N, None, None, None, None, None


def _dense(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    format: BlockFormat,
    rows: int,
    dtype: torch.dtype,
    place: Callable[[tuple[int, int]], torch.Tensor] | None = None,
) -> torch.Tensor:
    """W [N, K]. The paged engine reorders a weight into tiles of 64 x 64 for its kernels, its only copy.

    ``place`` makes the tensor that a reordered weight is written to, by default a new one.
    """
    if codes.ndim == 4:
        from qerl.kernels.weights.dequantize import dequantize_into  # needs Triton

        assert global_scale is not None
        shape = rows, codes.shape[1] * 64
        out_NK = place(shape) if place else torch.empty(shape, dtype=dtype, device=codes.device)
        dequantize_into(codes, scales, global_scale, out_NK)
        return out_NK
    return dequantize(PackedWeight(codes, scales, global_scale, format), dtype)


def _transient(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    format: BlockFormat,
    rows: int,
    like: torch.Tensor,
) -> torch.Tensor:
    """W [N, K] for one product; on the GPU in the shared workspace."""
    place = partial(workspace, like=like)
    return _dense(codes, scales, global_scale, format, rows, like.dtype, place)


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Within this block, every packed layer of the model keeps its dequantised weight once it has been used.

    A trade of memory for time, for devices without a four-bit product: there, each forward pass dequantises
    every weight, which costs a decode step of 64 rows a third of its time (SmolLM2-135M without head, FP32,
    one CPU core: 480 ms packed, 340 ms unpacked, 350 ms as a dense model). The dense weights take as much
    memory as an unquantised model in the activations' dtype, so an engine on a GPU, where the packed bytes
    are the point, does not use this. Results are bit-identical.

    Blocks may be nested; the weights are dropped when the outermost ends, also by an exception.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        layer._unpacked_depth += 1
    try:
        yield
    finally:
        for layer in layers:
            layer._unpacked_depth -= 1
            if not layer._unpacked_depth:
                layer._dense_NK = None
