"""A delta net in a forward pass, from its first product to the operand of its second.

A decode step computes one token of each sequence in place, in three small kernels that read the unfinished
product (`qerl.kernels.decode.delta_net`). A prefill pass computes many tokens of a few sequences: it finishes
the product, gathers the inputs of the convolution, runs the delta rule by chunks (`qerl.kernels.delta_rule`),
and keeps for each sequence the state after its last token and the last inputs of the convolution.

Both take decay and beta from the product's x A^T, which contains the results of two narrow gate linears.

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
    """The sequences of a prefill pass, each with a run of consecutive tokens.

    Attributes:
        offsets: Index of each sequence's first token in the pass, and L at the end.
        blocks_N: int64, the block of each sequence's state.
        position_N: int64, position of each sequence's first token; 0 for one that begins without a state.
        taps_LW: int64, inputs of the convolution at each token, as indices into the W kept inputs of all
            sequences, in order, followed by the tokens of the pass; -1 for no input.
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
        """Return the runs of sequences with these first positions and lengths.

        Args:
            blocks: Block of each sequence's state.
            positions: Position of each sequence's first token; 0 for one that begins without a state.
            lengths: Number of tokens of each sequence.
            taps: W.
            device: Device of the tensors.
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
        mixer: Their common description.
        hidden: Width of the residual stream.
        tokens: T.
        eps: Constant that RMSNorms add to the mean square.
        device: Device of the buffers.
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
        """Advance each sequence by one token, for a decode step.

        Args:
            product: The layer's first product, unfinished.
            squares_PT: Partial sums of squares of its input.
            weights: Weights of the layer.
            b: The product's LoRA.
            held: Tensors that the layer keeps of sequences, see `States.arrays`.
            position_T: int32, position of each token.
            block_T: int32, the block of each token's sequence; -1 for a token that is not stored.
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
        """Advance the sequences of a prefill pass by their tokens.

        Args:
            product, squares_PT, weights, b, held: As in `step`.
            runs: The sequences.
            dtype: Dtype of activations.
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
        """Write the operand of the layer's second product, the gated norm of the output of `step` or `run`.

        Args:
            weights: Weights of the layer.
            y: The operand to write, in the order of ``packed_gemm`` or [T, M].
            padded_tokens: Tokens that ``y`` has room for in that order; 0 for [T, M].
            a: LoRA of the second product.
        """
        gated_norm(
            self._out_TVE, self._z_TM, weights.norm_E, y, eps=self._eps, padded_tokens=padded_tokens, a=a
        )
