"""A model put on the kernels of the update, as far as they compute what it computes."""

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
    """Give a model its kernels for packed rows, and say which parts of it run on them.

    Layers that carry a state learn to read the sequences of a row wherever the model is.

    Args:
        model: The transformers model where it trains, adapters included; a layer that is given its adapter
            later keeps the code that it came with.
    """
    read_sequences(model)
    unfit = why_unfit(model)
    why_dense_masks = unfit or use_branch_attention(model)
    if not unfit:
        from qerl.update.fused import fuse  # needs Triton

        fuse(model)
    return find_path(model, why_dense_masks)


def use_backward_dtype(model: PreTrainedModel, dtype: Literal["auto", "fp8"]) -> int:
    """Choose the products by which gradients pass through the packed layers of a model: in 16 bits, or in
    FP8.

    Experts are left out: their products are grouped, in 16 bits.

    Args:
        model: The transformers model where it trains, for FP8 laid out by the paged engine.
        dtype: As in the settings.

    Returns:
        Number of layers with FP8.

    Raises:
        QeRLError: The GPU has no FP8, the model is not bfloat16, nothing or only experts are packed, or a
            packed layer lies as on disk.
    """
    of_experts = {layer for _, experts in experts_of(model) for layer in experts.modules()}
    layers = [m for m in model.modules() if isinstance(m, PackedLinear) and m not in of_experts]
    if dtype == "fp8":
        check_fp8_gradients(model.device)
        if model.dtype != torch.bfloat16:
            raise _no_fp8(f"it needs bfloat16 and the model is {str(model.dtype).removeprefix('torch.')}")
        if not layers:
            raise _no_fp8("no linear beside experts is in nvfp4 or mxfp4")
        if not all(layer.storage.in_tiles for layer in layers):
            raise _no_fp8("it needs weights that the paged engine samples from")
    for layer in layers:
        layer.fp8_gradients = dtype == "fp8"
    return len(layers) if dtype == "fp8" else 0


def check_fp8_gradients(device: torch.device) -> None:
    """Refuse gradients in FP8 on a device that has no such products.

    Raises:
        QeRLError: It has none.
    """
    if device.type != "cuda":
        raise _no_fp8("the model is not on a CUDA device")
    if reason := why_no_fp8(card_of(device)):
        raise _no_fp8(reason)


def _no_fp8(reason: str) -> QeRLError:
    return QeRLError(f"backward_dtype: fp8 cannot be had here: {reason}; set backward_dtype: auto.")
