"""The norm weights with which each token of a rollout or a loss is computed.

Noise per step, per sample, in decoding only or for a share of each group: each case is a table of weights
and, for each sample, the entry for its prompt and the entry for its own tokens. Samples with the same entry
for the prompt share the prompt.

Legend: N norms that noise acts on, S runs, V variants of their weights, R samples of a run, D hidden width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from qerl.kernels.tensors import upload


@dataclass(frozen=True)
class Norms:
    """Weights of the norms, and the variants of each sample.

    Attributes:
        weights_NSVD: The variants, fp32.
        of_prompt_R: Variant with which the prompt of each sample is computed.
        of_own_R: Variant with which its own tokens are computed; both are the same in all runs.
    """

    weights_NSVD: torch.Tensor
    of_prompt_R: Sequence[int]
    of_own_R: Sequence[int]

    @classmethod
    def same(cls, weights_NSD: torch.Tensor, samples: int) -> "Norms":
        """One set of weights per run, for all of its tokens."""
        return cls(weights_NSD[:, :, None], [0] * samples, [0] * samples)

    def of_runs(self, runs: slice) -> "Norms":
        """The same for some runs."""
        return Norms(self.weights_NSVD[:, runs], self.of_prompt_R, self.of_own_R)

    def of_samples(self, samples: slice) -> "Norms":
        """The same for some samples of each run."""
        return Norms(self.weights_NSVD, self.of_prompt_R[samples], self.of_own_R[samples])

    def sharing(self, group: int) -> int:
        """How many samples one computation of a prompt can serve: a divisor of the size of a group."""
        runs = [
            len(list(same))
            for start in range(0, len(self.of_prompt_R), group)
            for _, same in groupby(self.of_prompt_R[start : start + group])
        ]
        return math.gcd(*runs)

    def weight(self, variants: Sequence[int], repeats: Sequence[int]) -> Callable[[int], torch.Tensor]:
        """Weights by norm for a stream of tokens, [S, 1, D] where all tokens have the same, else [S, T, D].

        Args:
            variants: Variant of each segment of the stream.
            repeats: Tokens of each segment.
        """
        if len(set(variants)) == 1:
            only_NSD = self.weights_NSVD[:, :, variants[0]].contiguous()
            return lambda norm: only_NSD[norm, :, None]
        of_each_T = torch.tensor(variants).repeat_interleave(torch.tensor(repeats))
        index_T = upload(of_each_T, self.weights_NSVD.device)
        return lambda norm: self.weights_NSVD[norm].index_select(1, index_T)
