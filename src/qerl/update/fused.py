"""Fused kernels for the norms, attention inputs and SwiGLU blocks of a model in training.

transformers writes them as chains of elementwise operations, each a pass over memory, and in the MLP with
several live tensors of tokens x intermediate size. The kernels are in `qerl.kernels.update`. q, k and v with
their adapters are one product, and so are gate and up (`qerl.lora.product`), if all of them have an adapter;
the rotary kernel reads q, k and v directly from that product.

A `PeftModel` that PEFT made itself has PEFT's layers, which compute the adapter beside the layer in FP32;
they become one product too.

`qerl.update.path` says which modules the kernels serve. These modules get a new `forward`; nothing else about
them changes, and inputs that are not 16-bit on a GPU are computed as before.
"""

import types
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from qerl.families.experts import Experts, experts_of
from qerl.kernels.update.gated_norm import gated_norm
from qerl.kernels.update.rms_norm import rms_norm
from qerl.kernels.update.rotary import rotated_heads
from qerl.kernels.update.swiglu import swiglu
from qerl.lora.product import fused_forward, is_16bit_cuda
from qerl.noise.norms import takes_float32_weight
from qerl.update import path
from qerl.update.attention import branch_attention
from qerl.update.experts import grouped_forward


def fuse(model: nn.Module) -> None:
    """Let norms, attention, SwiGLU blocks and adapted layers use the kernels for 16-bit tensors on a GPU."""
    for norm, formula in path.norms(model):
        if not formula and (eps := path.eps_of_gated(norm)) is not None:
            norm.forward = types.MethodType(partial(_gated_norm_forward, eps=eps), norm)
        if formula and not path.why_not_norm(norm, formula):
            norm.forward = types.MethodType(partial(_norm_forward, formula=formula), norm)
            takes_float32_weight(norm)
    for attention in path.attentions(model):
        if isinstance(settings := path.turned_heads(attention), dict):
            attention.forward = types.MethodType(partial(_attention_forward, settings=settings), attention)
    for _, experts in experts_of(model):
        cast(Any, experts).forward = types.MethodType(_experts_forward, experts)
    for mlp in path.mlps(model):
        if gate := path.gate_of(mlp):
            mlp.forward = types.MethodType(partial(_mlp_forward, gelu=gate == "gelu"), mlp)
    for layer in model.modules():
        if type(layer) is LoraLinear:  # the project's own subclasses are one product already
            layer.forward = types.MethodType(_lora_forward, layer)


def _norm_forward(self: Any, x: torch.Tensor, formula: path.RMSNorm) -> torch.Tensor:
    if self.weight.requires_grad or not is_16bit_cuda(x):
        return cast(torch.Tensor, type(self).forward(self, x))
    return rms_norm(x, self.weight, *formula)


def _gated_norm_forward(self: Any, x: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    if self.weight.requires_grad or not is_16bit_cuda(x):
        return cast(torch.Tensor, type(self).forward(self, x, gate))
    return gated_norm(x, gate, self.weight, eps)


def _attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    attention_mask: torch.Tensor | None,
    settings: dict[str, Any],
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    qkv, whole = None, position_embeddings and position_embeddings[0].shape[-1] == self.head_dim
    if whole and kwargs.get("branches") is not None:
        qkv = fused_forward(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    if qkv is None or position_embeddings is None:
        own = type(self).forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)
        return cast(tuple[torch.Tensor, torch.Tensor | None], own)
    heads, kv_heads = (linear.out_features // self.head_dim for linear in (self.q_proj, self.k_proj))
    q, k, v = (x.transpose(1, 2) for x in rotated_heads(qkv, *position_embeddings, heads, kv_heads))
    out, _ = branch_attention(self, q, k, v, attention_mask, **(kwargs | settings))
    return self.o_proj(out.flatten(-2)), None


def _lora_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    fused = None if args or kwargs else fused_forward(x, self)
    return type(self).forward(self, x, *args, **kwargs) if fused is None else fused


def _experts_forward(
    self: Experts, x_TD: torch.Tensor, expert_TC: torch.Tensor, weight_TC: torch.Tensor
) -> torch.Tensor:
    # With few pairs most experts have none, and a chunk would be dequantised for one of them. And experts may
    # have been given adapters since.
    many = expert_TC.numel() >= len(self)
    if many and is_16bit_cuda(x_TD) and path.why_not_grouped(self) is None:
        return grouped_forward(self, x_TD, expert_TC, weight_TC)
    return type(self).forward(self, x_TD, expert_TC, weight_TC)


def _mlp_forward(self: Any, x: torch.Tensor, gelu: bool) -> torch.Tensor:
    if not is_16bit_cuda(x):
        return cast(torch.Tensor, type(self).forward(self, x))
    joined = getattr(self, path.JOINED, None)
    both = joined(x) if joined else fused_forward(x, self.gate_proj, self.up_proj)
    product = swiglu(self.gate_proj(x), self.up_proj(x), gelu) if both is None else swiglu(both, None, gelu)
    return self.down_proj(product)
