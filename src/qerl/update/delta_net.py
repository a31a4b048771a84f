"""Gated delta nets on a packed row: each branch continues from the state after its prompt.

The code of such a layer treats a row as one sequence. Here its modules get another `forward` that, given the
sequences of the row (`packed_row.Sequences`), computes all prompts, each from a state of zeros, then all
branches, each from the state after its prompt and with the last tokens of the prompt in the taps of its
convolution. So a prompt's state is computed once, and the gradients of its copies add up. Without sequences
(a rollout, a padded batch) the module computes as before.

A module is recognised by the names of its parts, since class names go stale with each family.
`qerl.update.row_check` measures whether the parts compute what is assumed of them.

Linears run on the row in its own order. The convolution gathers its taps anyway, so it brings q, k and v into
the order of sequences at no cost; the output is brought back into the row's order. Gates are FP32.

Shapes: L tokens of the row, U key heads of size K, V value heads of size E, P prompts.
"""

import types
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from qerl.kernels.delta_rule import chunked_delta_rule, short_conv
from qerl.update.packed_row import PackedRow, Sequences

_MODULES = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"}
_PARAMETERS = {"A_log", "dt_bias"}


def delta_nets(model: nn.Module) -> Iterator[nn.Module]:
    """The gated delta nets of a model."""
    return (
        m for m in model.modules() if m._modules.keys() >= _MODULES and m._parameters.keys() >= _PARAMETERS
    )


def read_sequences(model: nn.Module) -> None:
    """Make the gated delta nets of a model accept `sequences=` in a forward pass."""
    for net in delta_nets(model):
        net.forward = types.MethodType(_forward, net)


def sequence_kwargs(model: nn.Module, row: PackedRow) -> dict[str, Any]:
    """Return forward arguments of a packed row for layers that carry a state; none without such layers."""
    net: Any = next(delta_nets(model), None)
    return {} if net is None else {"sequences": row.sequences(net.conv1d.kernel_size[0])}


def _forward(
    self: Any, hidden_states: torch.Tensor, *args: Any, sequences: Sequences | None = None, **kwargs: Any
) -> torch.Tensor:
    if sequences is None:
        return cast(torch.Tensor, type(self).forward(self, hidden_states, *args, **kwargs))
    qkv_LC = self.in_proj_qkv(hidden_states).squeeze(0)
    qkv_LC = short_conv(qkv_LC, self.conv1d.weight.squeeze(1), sequences.taps_LW)
    key_size, value_size = self.head_k_dim, len(self.norm.weight)
    values = len(self.A_log) * value_size
    keys = (qkv_LC.shape[1] - values) // 2
    q_LC, k_LC, v_LC = qkv_LC.split([keys, keys, values], dim=-1)
    order_L = sequences.taps_LW[:, -1]
    a_LV, b_LV = (
        gate(hidden_states).squeeze(0)[order_L].float() for gate in (self.in_proj_a, self.in_proj_b)
    )
    decay_LV = -self.A_log.float().exp() * functional.softplus(a_LV + self.dt_bias)
    inputs = (
        q_LC.unflatten(1, (-1, key_size)),
        k_LC.unflatten(1, (-1, key_size)),
        v_LC.unflatten(1, (-1, value_size)),
        decay_LV,
        b_LV.sigmoid(),
    )
    out_LVE = _in_sequences(inputs, sequences)[sequences.place_L]
    z_1LC = self.in_proj_z(hidden_states)
    gated = self.norm(out_LVE.flatten(0, 1), z_1LC.reshape(-1, value_size))
    return cast(torch.Tensor, self.out_proj(gated.view(z_1LC.shape)))


_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _in_sequences(inputs: _Inputs, sequences: Sequences) -> torch.Tensor:
    """Run the recurrence of q, k, v, decay and beta; inputs and outputs [L, V, E] are in sequence order."""
    shared = sequences.prompt_offsets[-1]
    if not shared:
        return chunked_delta_rule(*inputs, sequences.branch_offsets)[0]
    parts = zip(*(x.split([shared, len(x) - shared]) for x in inputs), strict=True)
    prompts, branches = (cast(_Inputs, part) for part in parts)
    prompts_LVE, final_PVKE = chunked_delta_rule(*prompts, sequences.prompt_offsets)
    states = torch.cat([final_PVKE, torch.zeros_like(final_PVKE[:1])])  # -1 is a branch without a prompt
    branches_LVE, _ = chunked_delta_rule(*branches, sequences.branch_offsets, states[sequences.prompt_B])
    return torch.cat([prompts_LVE, branches_LVE])
