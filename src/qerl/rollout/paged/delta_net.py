"""The middle of a delta net in a forward pass: from the product in front of it to the operand of that behind.

A decode step computes one token of each sequence in place, in three small kernels that read the product as it
was left (`qerl.kernels.decode.delta_net`). A pass of prefill computes many tokens of a few sequences: it adds
the product up, gathers what the convolution sees, runs the rule by chunks (`qerl.kernels.delta_rule`), and
keeps of each sequence the state behind its last token and the last inputs of the convolution.

Both take decay and beta from the product's x A^T, where the two narrow linears behind them are computed.

Shapes: T tokens of a pass, L of them that are not padding, N sequences, C channels of the convolution, W its
taps, U key heads, V value heads, K and E their sizes, M = V E.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import softplus

from qerl.families.layer import DeltaNet
from qerl.kernels.decode.delta_net import delta_inputs, delta_step, gated_norm, states_now
from qerl.kernels.decode.launch import LoraA, LoraB
from qerl.kernels.decode.sum_product import block_of, sum_product
from qerl.kernels.delta_rule import chunked_delta_rule, short_conv
from qerl.kernels.tensors import upload
from qerl.kernels.weights.product import Product
from qerl.rollout.paged.weights import DeltaNetWeights


@dataclass(frozen=True)
class Runs:
    """The sequences of a pass of prefill, each with neighbouring tokens of its own.

    Attributes:
        offsets: Where the tokens of each begin in the pass, and L.
        blocks_N: int64, where the state of each is kept.
        position_N: int64, the position of the first token of each; 0 for one that begins without a state.
        taps_LW: int64, what the convolution sees at each token: index into the W inputs kept of each
            sequence, in order, and the tokens of the pass behind them; -1 for nothing.
        kept_3J: int64, last inputs to keep: sequence's block, place there, token of the pass.
    """

    offsets: list[int]
    blocks_N: torch.Tensor
    position_N: torch.Tensor
    taps_LW: torch.Tensor
    kept_3J: torch.Tensor

    @classmethod
    def of(
        cls, blocks: list[int], positions: list[int], lengths: list[int], taps: int, device: torch.device
    ) -> "Runs":
        """Runs of so many tokens each, from these positions on.

        Args:
            blocks: Where the state of each is kept.
            positions: Of the first token of each; 0 for one that begins without a state.
            lengths: Tokens of each.
            taps: W.
            device: Where the tensors are.
        """
        ends = np.cumsum([0, *lengths])
        back_W = np.arange(taps - 1, -1, -1)
        seen, kept = [], []
        for number, (block, first, length) in enumerate(zip(blocks, positions, lengths, strict=True)):
            own_LW = np.arange(length)[:, None] - back_W
            position_LW = first + own_LW
            in_pass_LW = len(blocks) * taps + ends[number] + own_LW
            before_LW = number * taps + position_LW % taps
            seen.append(np.where(position_LW < 0, -1, np.where(own_LW >= 0, in_pass_LW, before_LW)))
            last = np.arange(max(0, length - taps), length)
            kept.append(np.stack([np.full_like(last, block), (first + last) % taps, ends[number] + last]))
        arrays = np.asarray(blocks), np.asarray(positions), np.concatenate(seen), np.hstack(kept)
        return cls(ends.tolist(), *(upload(torch.from_numpy(array), device) for array in arrays))


class DeltaNets:
    """Buffers for T tokens that all delta nets of a model use in turn.

    Args:
        mixer: The description that all of them have.
        hidden: Width of the residual stream.
        tokens: T.
        eps: What RMSNorms add to the mean square.
        device: Of the buffers.
    """

    def __init__(self, mixer: DeltaNet, hidden: int, tokens: int, eps: float, device: torch.device) -> None:
        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        self._mixer, self._hidden, self._eps = mixer, hidden, eps
        self._heads_TC, self._z_TM = new(tokens, mixer.channels), new(tokens, mixer.values)
        self._gates_2TV = new(2, tokens, mixer.value_heads)
        self._out_TVE = new(tokens, mixer.value_heads, mixer.value_size)

    def step(
        self,
        product: Product,
        squares_PT: torch.Tensor,
        weights: DeltaNetWeights,
        b: LoraB,
        held: tuple[torch.Tensor, ...],
        position_T: torch.Tensor,
        block_T: torch.Tensor,
    ) -> None:
        """Take the sequence of each token one token on.

        Args:
            product: Of the linears in front.
            squares_PT: Partial sums of squares of its input.
            weights: Of the layer.
            b: The product's LoRA.
            held: What the layer keeps of sequences, `States.arrays`.
            position_T: int32.
            block_T: int32, the block of each token's sequence; -1 for a token that goes nowhere.
        """
        states, inputs, recent, fades = held
        delta_inputs(
            product.out_STN, product.scale_L, squares_PT, weights.taps_WC, weights.rates_V,
            weights.offsets_V, position_T, block_T, inputs, self._heads_TC, self._z_TM, self._gates_2TV,
            key_heads=self._mixer.key_heads, width=self._hidden, eps=self._eps, b=b,
            partials_G=product.partials_G,
        )  # fmt: skip
        delta_step(self._heads_TC, self._gates_2TV, states, recent, fades, position_T, block_T, self._out_TVE)

    def run(
        self,
        product: Product,
        squares_PT: torch.Tensor,
        weights: DeltaNetWeights,
        b: LoraB,
        held: tuple[torch.Tensor, ...],
        runs: Runs,
        dtype: torch.dtype,
    ) -> None:
        """Take the sequences of a pass of prefill on by their tokens.

        Args:
            product, squares_PT, weights, b, held: As in `step`.
            runs: The sequences.
            dtype: Of activations.
        """
        mixer, (states, inputs, recent, fades), tokens = self._mixer, held, runs.offsets[-1]
        outputs = mixer.channels, mixer.values
        y_TN = product.out_STN.new_empty(len(self._z_TM), sum(outputs), dtype=torch.float32)
        y_squares_PT = y_TN.new_empty(sum(outputs) // block_of(outputs), len(y_TN))
        sum_product(
            product, squares_PT, y_TN, y_squares_PT, outputs=outputs, width=self._hidden, eps=self._eps, b=b
        )
        x_TC, z_TM = y_TN.split(outputs, dim=1)
        self._z_TM.copy_(z_TM)
        x_LC = x_TC[:tokens]
        seen = torch.cat([inputs[runs.blocks_N].flatten(0, 1), x_LC]).to(dtype)
        q, k, v = short_conv(seen, weights.taps_WC.T, runs.taps_LW).split(
            [mixer.key_heads * mixer.key_size] * 2 + [mixer.values], dim=1
        )
        at_N = runs.blocks_N
        states_NVKE = states_now(states[at_N], recent[at_N], fades[at_N], runs.position_N)
        states_NVKE[runs.position_N == 0] = 0.0
        assert b.xa.sum_TR is not None, "its gates come with x A^T"
        b_LV, a_LV = b.xa.sum_TR[:tokens, -2 * mixer.value_heads :].chunk(2, dim=1)
        rms_L1 = (squares_PT[:, :tokens].sum(0)[:, None] / self._hidden + self._eps).rsqrt()
        out_LVE, states_NVKE = chunked_delta_rule(
            q.unflatten(1, (mixer.key_heads, mixer.key_size)),
            k.unflatten(1, (mixer.key_heads, mixer.key_size)),
            v.unflatten(1, (mixer.value_heads, mixer.value_size)),
            weights.rates_V * softplus(a_LV * rms_L1 + weights.offsets_V),
            (b_LV * rms_L1).sigmoid(), runs.offsets, states_NVKE,
        )  # fmt: skip
        self._out_TVE[:tokens] = out_LVE
        states[runs.blocks_N] = states_NVKE.to(states.dtype)
        recent[runs.blocks_N] = 0.0  # the state holds all tokens
        fades[runs.blocks_N] = 0.0
        block_J, place_J, token_J = runs.kept_3J
        inputs[block_J, place_J] = x_LC[token_J].to(inputs.dtype)

    def normalised(self, weights: DeltaNetWeights, y: torch.Tensor, padded_tokens: int, a: LoraA) -> None:
        """Write the operand of the product behind, from what `step` or `run` left.

        Args:
            weights: Of the layer.
            y: Written, in the order of ``packed_gemm`` or [T, M].
            padded_tokens: Tokens that ``y`` has room for in that order; 0 for [T, M].
            a: LoRA of that product.
        """
        gated_norm(
            self._out_TVE, self._z_TM, weights.norm_E, y, eps=self._eps, padded_tokens=padded_tokens, a=a
        )
