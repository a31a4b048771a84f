"""The experts of a mixture in the update: grouped products with weights that are dequantised in chunks.

Computed one by one, each expert takes a dequantisation and a product for each of its linears, and again in
the backward pass: with 128 experts a layer makes a thousand launches of little work. Here the pairs of token
and expert are sorted by expert, and a chunk of some experts is dequantised into the workspace and multiplied
by one `torch.nn.functional.grouped_mm`, which is given the end of each expert's pairs. The backward pass
dequantises weights again; the frozen matrices have no gradient, so no input of a product is kept, only each
pair's outputs of the first and the last product.

If the paged engine has put a layer's experts into one piece of memory (`qerl.rollout.paged.binding`), a chunk
is dequantised by one kernel, else linear by linear.

Adapters of experts (`qerl.lora.experts`) are grouped products with the matrices of all experts, or plain ones
if the experts share an adapter. Their result is added to a product before its factor is applied, so x A^T is
divided by that factor. If gate or up is adapted, the layer's input is kept, too; the rest is recomputed.

Given up: products straight from four bits. If all experts have tokens, each weight is read once per pass and
its 16-bit copy written and read, which takes a tenth of the time of the products themselves.

Shapes: T tokens, C experts per token, S = T C pairs in the order of their experts, E experts, e experts of a
chunk, L linears of a product, N outputs, K inputs, D hidden, I intermediate size; R rank, padded to a
multiple of 8, and G experts or 1 where they share an adapter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl.families.experts import Experts
from qerl.families.layer import Clamp, RoutedMLP
from qerl.fp4.format import NVFP4
from qerl.fp4.linear import PackedLinear
from qerl.fp4.storage import PackedTiles
from qerl.kernels.limits import EXPERTS_BYTES
from qerl.kernels.update.experts import add_pairs, add_pairs_backward, gate_pairs, gate_pairs_backward
from qerl.kernels.weights.tiles import Tiles
from qerl.kernels.workspace import workspace
from qerl.lora.experts import LINEARS, ExpertLora


@dataclass(frozen=True, eq=False)
class Stack:
    """One linear of all experts, or gate and up of all, in the order of the experts.

    Attributes:
        linears: Linears of all experts, those of one expert next to each other.
        shape: (N, K) of an expert.
        factor_EL: fp32, what the outputs of each linear are multiplied by.
        tiles: [E N, K], if the linears lie in one piece of memory; else None.
        scale_1: fp32, a power of two by which `dense` divides the tiles' values.
    """

    linears: list[Any]
    shape: tuple[int, int]
    factor_EL: torch.Tensor
    tiles: Tiles | None
    scale_1: torch.Tensor

    @classmethod
    def of(cls, experts: Experts, names: tuple[str, ...]) -> "Stack":
        """Stack these linears of experts, which `qerl.update.path.why_not_grouped` must allow."""
        linears: list[Any] = [_base(expert, name) for expert in experts for name in names]
        device, tiles = _weight(linears[0]).device, _tiles(linears)
        scale_1 = torch.ones(1, device=device)
        if tiles is not None:
            scale_L = torch.cat([linear.weight_global_scale for linear in linears])
            scale_1 = scale_L.log2().mean().round().exp2()[None]
            factor_L = scale_1 / scale_L
        else:
            factor_L = torch.tensor([_exact(linear)[1] for linear in linears], device=device)
        rows = sum(linear.out_features for linear in linears[: len(names)])
        shape = rows, linears[0].in_features
        return cls(linears, shape, factor_L.view(len(experts), -1), tiles, scale_1)

    @property
    def bias_EN(self) -> torch.Tensor | None:
        """Biases in the dtype of the linears' own; None without biases."""
        if self.linears[0].bias is None:
            return None
        return torch.cat([linear.bias.detach() for linear in self.linears]).view(len(self.factor_EL), -1)

    def dense(self, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        """Dequantise the weights [e, N, K] of the experts from ``first`` to before ``last``, without factors,
        into the workspace."""
        (rows, width), count = self.shape, self.factor_EL.shape[1]
        dense_NK = workspace(((last - first) * rows, width), like)
        if self.tiles is not None:
            part = self.tiles.part(first * rows, len(dense_NK))
            PackedTiles(part, self.scale_1, NVFP4).write_dense(dense_NK)
        else:
            linears = self.linears[first * count : last * count]
            parts = dense_NK.split([linear.out_features for linear in linears])
            for linear, part_NK in zip(linears, parts, strict=True):
                _exact(linear)[0](part_NK)
        return dense_NK.view(last - first, rows, width)


def _exact(linear: Any) -> tuple[Callable[[torch.Tensor], Any], float]:
    """Return a function that writes a linear's weight exactly into a 16-bit matrix, and the factor that it
    leaves out."""
    if not isinstance(linear, PackedLinear):
        return lambda out_NK: out_NK.copy_(linear.weight.detach()), 1.0
    weight, factor = linear.exact()
    return weight.write_dense, factor


def _tiles(linears: list[Any]) -> Tiles | None:
    """Return the joint tiles of linears that are adjacent in one piece of memory; None for others."""
    if not all(isinstance(linear, PackedLinear) and linear.storage.in_tiles for linear in linears):
        return None
    parts = [linear.storage.tiles for linear in linears]
    if not (_follow([part.codes for part in parts]) and _follow([part.scales for part in parts])):
        return None
    groups = sum(len(part.codes) for part in parts)
    codes, scales = (
        first.as_strided((groups, *first.shape[1:]), first.stride())
        for first in (parts[0].codes, parts[0].scales)
    )
    return Tiles(codes, scales)


def _follow(parts: list[torch.Tensor]) -> bool:
    """Return True if tensors are adjacent, in order, in one piece of memory."""
    ends = [part.data_ptr() + part.nbytes for part in parts[:-1]]
    same = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    return same and ends == [part.data_ptr() for part in parts[1:]]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of token and expert of a batch, sorted by expert.

    Attributes:
        token_S: int64, each pair's token.
        expert_S: int32, each pair's expert.
        place_TC: int32, indices of each token's pairs.
        expert_TC: int32, experts of each token.
        end_E: int32, end of each expert's pairs.
        ends: `end_E` on the host, with a zero in front.
    """

    token_S: torch.Tensor
    expert_S: torch.Tensor
    place_TC: torch.Tensor
    expert_TC: torch.Tensor
    end_E: torch.Tensor
    ends: list[int]

    @classmethod
    def of(cls, expert_TC: torch.Tensor, experts: int) -> "Pairs":
        """Return the pairs of tokens and their experts, of a layer with `experts` experts."""
        chosen_P = expert_TC.flatten()
        expert_S, order_S = chosen_P.sort(stable=True)
        place_P = torch.empty_like(order_S, dtype=torch.int32)
        place_P[order_S] = torch.arange(len(order_S), dtype=torch.int32, device=order_S.device)
        end_E = torch.searchsorted(
            expert_S, torch.arange(experts, device=expert_S.device), right=True, out_int32=True
        )
        return cls(
            order_S // expert_TC.shape[1], expert_S.int(), place_P.view_as(expert_TC), expert_TC.int(),
            end_E, [0, *end_E.tolist()],
        )  # fmt: skip


def _multiply(x_SK: torch.Tensor, stack: Stack, pairs: Pairs, transposed: bool) -> torch.Tensor:
    """Multiply each pair by its expert's weight, x W^T or, if transposed, x W; without factors."""
    rows, width = stack.shape
    each = rows * width * x_SK.element_size()
    count, experts = max(1, EXPERTS_BYTES // each), len(pairs.end_E)
    out = x_SK.new_empty(len(x_SK), width if transposed else rows)
    for first in range(0, experts, count):
        last = min(first + count, experts)
        begin, end = pairs.ends[first], pairs.ends[last]
        if begin == end:
            continue
        dense_eNK = stack.dense(first, last, x_SK)
        weight = dense_eNK if transposed else dense_eNK.transpose(1, 2)
        offsets = pairs.end_E[first:last] - begin
        out[begin:end] = functional.grouped_mm(x_SK[begin:end], weight, offs=offsets)
    return out


Matrices = tuple[torch.Tensor, torch.Tensor]
"""A [G, R, K] and B [G, N, R], times alpha / r, of one linear of all experts, fp32."""


def _matrices(lora: ExpertLora) -> Matrices:
    more = -lora.rank % 8  # padding for grouped products
    a_GRK, b_GNR = torch.stack(lora.all_a), torch.stack(lora.all_b) * lora.scaling
    return functional.pad(a_GRK, (0, 0, 0, more)), functional.pad(b_GNR, (0, more))


def _by_expert(x_SK: torch.Tensor, w_GKN: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Multiply each pair by its expert's matrix."""
    w_GKN = w_GKN.to(x_SK.dtype)
    return x_SK @ w_GKN[0] if len(w_GKN) == 1 else functional.grouped_mm(x_SK, w_GKN, offs=pairs.end_E)


def _outer(dy_SN: torch.Tensor, x_SK: torch.Tensor, groups: int, pairs: Pairs) -> torch.Tensor:
    """Return the sum [G, N, K] of outer products over the pairs of each expert, or of all experts."""
    if groups == 1:
        return (dy_SN.T @ x_SK)[None]
    return functional.grouped_mm(dy_SN.T, x_SK, offs=pairs.end_E)


def _linears(y_SN: torch.Tensor, stack: Stack, pairs: Pairs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each linear of a stack a view of its outputs, and its factor for each pair [S, 1]."""
    factor_SL = stack.factor_EL[pairs.expert_S]
    return list(zip(y_SN.chunk(factor_SL.shape[1], 1), factor_SL.split(1, 1), strict=True))


def _add_lora(
    y_SN: torch.Tensor, x_SK: torch.Tensor, loras: Sequence[ExpertLora | None], stack: Stack, pairs: Pairs
) -> None:
    """Add B A x, divided by the factor, to the outputs of a stack's linears."""
    for lora, (part_SN, factor_S1) in zip(loras, _linears(y_SN, stack, pairs), strict=True):
        if lora is not None:
            a_GRK, b_GNR = _matrices(lora)
            xa_SR = _by_expert(x_SK, a_GRK.mT, pairs).div_(factor_S1)
            part_SN += _by_expert(xa_SR, b_GNR.mT, pairs)


def _lora_backward(
    dy_SN: torch.Tensor,
    dx_SK: torch.Tensor,
    x_SK: torch.Tensor,
    loras: Sequence[ExpertLora | None],
    stack: Stack,
    pairs: Pairs,
) -> list[torch.Tensor]:
    """Return the gradients of `_parameters`; the gradient of the input is added to ``dx_SK``."""
    found: list[torch.Tensor] = []
    for lora, (part_SN, factor_S1) in zip(loras, _linears(dy_SN, stack, pairs), strict=True):
        if lora is None:
            continue
        a_GRK, b_GNR = _matrices(lora)
        xa_SR = _by_expert(x_SK, a_GRK.mT, pairs).div_(factor_S1)
        dxa_SR = _by_expert(part_SN, b_GNR, pairs).div_(factor_S1)
        dx_SK += _by_expert(dxa_SR, a_GRK, pairs)
        da_GRK = _outer(dxa_SR, x_SK, len(a_GRK), pairs)[:, : lora.rank].to(a_GRK.dtype)
        db_GNR = _outer(part_SN, xa_SR, len(b_GNR), pairs)[..., : lora.rank].to(b_GNR.dtype)
        found += *da_GRK.unbind(), *(db_GNR * lora.scaling).unbind()
    return found


def _parameters(loras: Sequence[ExpertLora | None]) -> list[torch.Tensor]:
    """All A and then all B of each linear's adapters."""
    return [matrix for lora in loras if lora for matrix in (*lora.all_a, *lora.all_b)]


class _Mixture(torch.autograd.Function):
    """The weighted sum of each token's experts, with gradients for input, weights and adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_TC: torch.Tensor,
        expert_TC: torch.Tensor,
        gate_up: Stack,
        down: Stack,
        clamp: Clamp | None,
        loras: tuple[ExpertLora | None, ...],
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        pairs = Pairs.of(expert_TC, len(gate_up.factor_EL))
        *of_gate_up, of_down = loras
        x_SD = x_TD[pairs.token_S]
        y_SN = _multiply(x_SD, gate_up, pairs, False)
        _add_lora(y_SN, x_SD, of_gate_up, gate_up, pairs)
        del x_SD
        h_SI = gate_pairs(y_SN, gate_up.factor_EL, gate_up.bias_EN, pairs.expert_S, clamp)
        z_SD = _multiply(h_SI, down, pairs, False)
        _add_lora(z_SD, h_SI, [of_down], down, pairs)
        # The adapters' parameters are saved so that autograd checks that they have not changed in place.
        ctx.save_for_backward(y_SN, z_SD, weight_TC, x_TD if any(of_gate_up) else None, *parameters)
        ctx.pairs, ctx.stacks, ctx.clamp, ctx.loras = pairs, (gate_up, down), clamp, loras
        return add_pairs(
            z_SD, pairs.place_TC, weight_TC.contiguous(), pairs.expert_TC, down.factor_EL[:, 0], down.bias_EN
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y_SN, z_SD, weight_TC, x_TD, *_ = ctx.saved_tensors
        *of_gate_up, of_down = ctx.loras
        pairs, (gate_up, down) = ctx.pairs, ctx.stacks
        dz_SD, dweight_TC = add_pairs_backward(
            dout_TD.contiguous(), z_SD, pairs.place_TC, weight_TC.contiguous(), pairs.expert_TC,
            down.factor_EL[:, 0], down.bias_EN,
        )  # fmt: skip
        gate = gate_up.factor_EL, gate_up.bias_EN, pairs.expert_S, ctx.clamp
        dh_SI = _multiply(dz_SD, down, pairs, True)
        of_down_matrices: list[torch.Tensor] = []
        if of_down is not None:
            of_down_matrices = _lora_backward(dz_SD, dh_SI, gate_pairs(y_SN, *gate), [of_down], down, pairs)
        del dz_SD
        dy_SN = gate_pairs_backward(dh_SI, y_SN, *gate)
        del dh_SI
        dx_SD = _multiply(dy_SN, gate_up, pairs, True)
        found: list[torch.Tensor] = []
        if x_TD is not None:
            found = _lora_backward(dy_SN, dx_SD, x_TD[pairs.token_S], of_gate_up, gate_up, pairs)
        dx_TD = add_pairs(dx_SD, pairs.place_TC)
        return dx_TD, dweight_TC.to(weight_TC.dtype), *[None] * 5, *found, *of_down_matrices


def grouped_forward(
    experts: Experts, x_TD: torch.Tensor, expert_TC: torch.Tensor, weight_TC: torch.Tensor
) -> torch.Tensor:
    """Compute `Experts.forward` by grouped products.

    Args:
        experts: Experts of a layer for which `qerl.update.path.why_not_grouped` returns None.
        x_TD: Input.
        expert_TC: Index of the experts of each token.
        weight_TC: Factor of each expert's result.
    """
    clamp = getattr(experts[0].gated, "clamp", None)
    loras = tuple(ExpertLora.of(experts, name) for name in LINEARS)
    out_TD = _Mixture.apply(
        x_TD.contiguous(), weight_TC, expert_TC, *_stacks(experts), clamp, loras, *_parameters(loras)
    )
    return cast(torch.Tensor, out_TD)


_held: WeakKeyDictionary[Experts, tuple[list[int], tuple[Stack, Stack]]] = WeakKeyDictionary()


def _stacks(experts: Experts) -> tuple[Stack, Stack]:
    """Return the stacks of gate and up, and of down; they are cached while the experts' memory stays."""
    place = [_weight(_base(expert, name)).data_ptr() for expert in experts for name in LINEARS]
    if experts not in _held or _held[experts][0] != place:
        gate_up, down = (Stack.of(experts, names) for names in RoutedMLP.PLACES.values())
        _held[experts] = place, (gate_up, down)
    return _held[experts][1]


def _base(expert: nn.Module, name: str) -> Any:
    """An expert's linear, below its adapter if it has one."""
    linear: Any = expert._modules[name]
    return linear.get_base_layer() if isinstance(linear, BaseTunerLayer) else linear


def _weight(linear: Any) -> torch.Tensor:
    """The tensor that holds a linear's weight, packed or not."""
    return cast(torch.Tensor, linear.weight_packed if isinstance(linear, PackedLinear) else linear.weight)
