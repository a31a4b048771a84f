"""Switch of a model to the kernels of the update, for modules whose formulas the kernels compute."""

from typing import Literal

import torch
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import experts_of
from qerl.fp4.linear import PackedLinear
from qerl.kernels.cards import card_of, why_no_fp8
from qerl.update.attention import use_branch_attention
from qerl.update.delta_net import read_sequences
from qerl.update.path import UpdatePath, find_path, why_unfit


def use_kernels(model: PreTrainedModel) -> UpdatePath:
    """Switch a model to the kernels for packed rows, and return which parts of it run on them.

    Layers that carry a state are made to read the sequences of a row on any device.

    Args:
        model: The transformers model on its training device, adapters included; a layer that gets its adapter
            later keeps its old code.
    """
    read_sequences(model)
    unfit = why_unfit(model)
    why_dense_masks = unfit or use_branch_attention(model)
    if not unfit:
        from qerl.update.fused import fuse  # needs Triton

        fuse(model)
    return find_path(model, why_dense_masks)


def use_backward_dtype(model: PreTrainedModel, dtype: Literal["auto", "fp8"]) -> int:
    """Choose the dtype, 16 bits or FP8, of the products that compute input gradients of packed layers.

    Experts are left out: their products are grouped, in 16 bits.

    Args:
        model: The transformers model on its training device; for FP8 the paged engine must have laid out its
            weights.
        dtype: `backward_dtype` of the settings.

    Returns:
        Number of layers with FP8.

    Raises:
        QeRLError: The GPU has no FP8, the model is not bfloat16, nothing or only experts are packed, or a
            packed layer still has its layout on disk.
    """
    of_experts = {layer for _, experts in experts_of(model) for layer in experts.modules()}
    layers = [m for m in model.modules() if isinstance(m, PackedLinear) and m not in of_experts]
    if dtype == "fp8":
        check_fp8_gradients(model.device)
        if model.dtype != torch.bfloat16:
            raise _no_fp8(f"it needs bfloat16 and the model is {str(model.dtype).removeprefix('torch.')}")
        if not layers:
            raise _no_fp8("no linear layer outside of experts is in nvfp4 or mxfp4")
        if not all(layer.storage.in_tiles for layer in layers):
            raise _no_fp8("it needs weights that the paged engine samples from")
    for layer in layers:
        layer.fp8_gradients = dtype == "fp8"
    return len(layers) if dtype == "fp8" else 0


def check_fp8_gradients(device: torch.device) -> None:
    """Raise if a device has no FP8 products for gradients.

    Raises:
        QeRLError: The device is no CUDA GPU, or has no such products.
    """
    if device.type != "cuda":
        raise _no_fp8("the model is not on a CUDA device")
    if reason := why_no_fp8(card_of(device)):
        raise _no_fp8(reason)


def _no_fp8(reason: str) -> QeRLError:
    return QeRLError(f"backward_dtype: fp8 is not available here: {reason}; set backward_dtype: auto.")
