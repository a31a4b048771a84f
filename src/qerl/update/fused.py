"""A model whose norms, attention inputs and SwiGLU blocks train through few kernels.

transformers writes them as chains of elementwise operations, each a pass over memory, and in the MLP with
several tensors of tokens x intermediate size that live at once. The kernels are in `qerl.kernels.update`.
q, k and v, and gate and up, are one product with one adapter each (`qerl.lora.product`), where all of them
have an adapter; the rotary embedding takes q, k and v as that product leaves them.

A `PeftModel` that PEFT made itself has PEFT's layers, which compute the adapter beside the layer in FP32;
they become one product too.

Which modules the kernels serve, `qerl.update.path` says. Those are given a new `forward`; nothing
else about them changes, and what is not 16-bit on a GPU is computed as before.
"""

import types
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from qerl.kernels.update.rms_norm import rms_norm
from qerl.kernels.update.rotary import rotated_heads
from qerl.kernels.update.swiglu import swiglu
from qerl.lora.product import fused_forward, is_16bit_cuda
from qerl.noise.norms import takes_float32_weight
from qerl.update.attention import branch_attention
from qerl.update.path import attentions, mlps, norms, why_not_norm, why_not_rotary, why_not_swiglu


def fuse(model: nn.Module) -> None:
    """Let norms, attention, SwiGLU blocks and adapted layers use the kernels for 16-bit tensors on a GPU."""
    for norm, computes_rms_norm in norms(model):
        if not why_not_norm(norm, computes_rms_norm):
            norm.forward = types.MethodType(_norm_forward, norm)
            takes_float32_weight(norm)
    for attention in attentions(model):
        if not why_not_rotary(attention):
            attention.forward = types.MethodType(_attention_forward, attention)
    for mlp in mlps(model):
        if not why_not_swiglu(mlp):
            mlp.forward = types.MethodType(_mlp_forward, mlp)
    for layer in model.modules():
        if type(layer) is LoraLinear:  # our own are one product wherever they run
            layer.forward = types.MethodType(_lora_forward, layer)


def _norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.weight.requires_grad or not is_16bit_cuda(x):
        return cast(torch.Tensor, type(self).forward(self, x))
    return rms_norm(x, self.weight, self.variance_epsilon)


def _attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    qkv = None
    whole_heads = position_embeddings[0].shape[-1] == self.head_dim
    if whole_heads and kwargs.get("branches") is not None and kwargs.get("past_key_values") is None:
        qkv = fused_forward(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    if qkv is None:
        own = type(self).forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)
        return cast(tuple[torch.Tensor, torch.Tensor | None], own)
    heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
    q, k, v = (x.transpose(1, 2) for x in rotated_heads(qkv, *position_embeddings, heads, kv_heads))
    out, _ = branch_attention(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
    return self.o_proj(out.flatten(-2)), None


def _lora_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    fused = None if args or kwargs else fused_forward(x, self)
    return type(self).forward(self, x, *args, **kwargs) if fused is None else fused


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not is_16bit_cuda(x):
        return cast(torch.Tensor, type(self).forward(self, x))
    both = fused_forward(x, self.gate_proj, self.up_proj)
    product = swiglu(self.gate_proj(x), self.up_proj(x)) if both is None else swiglu(both)
    return self.down_proj(product)
