"""A mixture of experts in a forward pass, from the norm before it to the terms of the residual stream.

The norm's kernel computes the router's logits beside its output, as it computes x A^T of adapters. Then each
expert's tokens are grouped into items of a few tokens, and the experts multiply as many items as there are
(`qerl.kernels.decode.route`). The host never waits for the GPU, so a captured decode step serves any choice
of experts.

Shapes: T tokens, E experts, C chosen per token, S places of all items, D hidden, I intermediate.
"""

from collections.abc import Sequence

import torch
import triton

from qerl.families.layer import RoutedMLP
from qerl.kernels.decode import residual_norm
from qerl.kernels.decode.expert_lora import ExpertLoraMatrices, add_expert_lora
from qerl.kernels.decode.launch import LoraA
from qerl.kernels.decode.residual_norm import Chosen
from qerl.kernels.decode.route import Items, Kept, act_items, arrange, route, spread
from qerl.kernels.limits import item_size, parts_of
from qerl.kernels.weights.experts import ExpertWeights
from qerl.kernels.weights.product import NO_SUM, LoraSum
from qerl.rollout.paged.weights import RoutedWeights


class Mixtures:
    """Buffers for T tokens that all mixtures of a model use in turn.

    Args:
        mlp: Their common description.
        layers: The weights of all of them.
        tokens: T.
        eps: Constant that RMSNorm adds to the mean square.
        like: A tensor of the activations' dtype and device.
    """

    def __init__(
        self, mlp: RoutedMLP, layers: Sequence[RoutedWeights], tokens: int, eps: float, like: torch.Tensor
    ) -> None:
        weights = layers[0]
        hidden, device = weights.gate_up.shape[1], like.device
        self._mlp, self._eps, self._hidden = mlp, eps, hidden
        size = item_size(tokens, mlp.experts, mlp.chosen, weights.gate_up.sizes)
        self._items = Items.empty(tokens, mlp.experts, mlp.chosen, size, device)
        self._expert_TC = torch.zeros(tokens, mlp.chosen, dtype=torch.int32, device=device)
        self._weight_TC = torch.zeros(tokens, mlp.chosen, device=device)
        places = len(self._items.token_S)
        # Empty places keep old values, which reach no result.
        self._x = torch.zeros(places * hidden, dtype=like.dtype, device=device)
        self._h = torch.zeros(places * mlp.intermediate, dtype=like.dtype, device=device)
        self._y = torch.empty(places * max(hidden, 2 * mlp.intermediate), device=device)
        columns = triton.cdiv(hidden, residual_norm.block_d(tokens))
        self._xa = torch.empty(_room(layers, places), device=device)
        self._shared_T = torch.zeros(tokens, device=device) if mlp.shared else None
        self._logits = LoraSum(torch.empty(columns, tokens, mlp.experts, device=device))

    def logits(self, weights: RoutedWeights) -> LoraA:
        """Return the router's product, which the norm's kernel computes if the layer has no shared MLP."""
        return LoraA(weights.router_ED, self._logits)

    def __call__(
        self,
        weights: RoutedWeights,
        u: torch.Tensor,
        squares_PT: torch.Tensor,
        kept: Kept | None = None,
        padded: int = 0,
        xa: LoraSum = NO_SUM,
    ) -> Chosen:
        """Compute the results of all chosen experts.

        Args:
            weights: Weights of this layer.
            u: Output of the norm, without its 1/rms.
            squares_PT: Partial sums of squares, from which 1/rms is computed.
            kept: Where to keep the experts of each token; None if they are not kept.
            padded: Tokens that ``u`` has room for in the order of ``packed_gemm``; 0 for [T, D].
            xa: The sum x A^T of a shared MLP's first product, which contains the router's logits.
        """
        mlp, items, parts_PTR, first = self._mlp, self._items, self._logits.parts_PTR, 0
        if weights.shared is not None:
            assert xa.sum_TR is not None, "the router's logits come with x A^T of the shared MLP"
            lora = weights.shared.gate_up.lora
            parts_PTR = xa.sum_TR[None]
            first = 0 if lora is None or lora.b_NR is None else 2 * lora.b_NR.shape[1]
        assert parts_PTR is not None
        route(
            parts_PTR, squares_PT, self._expert_TC, self._weight_TC, experts=mlp.experts, first=first,
            shared_T=self._shared_T, normalized=mlp.normalized, width=self._hidden, eps=self._eps,
            bias_E=weights.router_bias_E, kept=kept,
        )  # fmt: skip
        arrange(self._expert_TC, self._weight_TC, weights.down.scale_EL, items)
        spread(u, self._hidden, items, self._x, weights.gate_up.in_order, padded)
        gate_up_SN = self._out(2 * mlp.intermediate)
        self._multiply(self._x, weights.gate_up, weights.gate_up_lora, gate_up_SN)
        act_items(
            gate_up_SN, weights.gate_up.scale_EL, squares_PT, items, self._h,
            in_order=weights.down.in_order, width=self._hidden, eps=self._eps,
            bias_EN=weights.gate_up_bias_EN, clamp=mlp.clamp,
        )  # fmt: skip
        out_SD = self._out(self._hidden)
        self._multiply(self._h, weights.down, weights.down_lora, out_SD)
        return Chosen(
            out_SD, items.place_TC, items.factor_TC, self._expert_TC, weights.down_bias_ED, self._shared_T
        )

    def _multiply(
        self, x: torch.Tensor, weights: ExpertWeights, lora: ExpertLoraMatrices | None, out_SN: torch.Tensor
    ) -> None:
        weights.multiply(x, self._items, out_SN)
        if lora is not None:
            add_expert_lora(x, lora, weights.scale_EL, self._items, self._xa, out_SN, weights.in_order)

    def _out(self, width: int) -> torch.Tensor:
        """Return the output buffer for a product; the previous product there is no longer needed."""
        places = len(self._items.token_S)
        return self._y[: places * width].view(places, width)


def _room(layers: Sequence[RoutedWeights], places: int) -> int:
    """Return the elements of x A^T of the experts' adapters, for the largest product of any layer."""
    loras = [lora for weights in layers for lora in (weights.gate_up_lora, weights.down_lora) if lora]
    shapes = [lora.a_GLRK.shape for lora in loras]
    return max((parts_of(places, k) * linears * places * r for _, linears, r, k in shapes), default=0)
