"""All weights of the model, one copy for each of S runs: the parameters of full tuning.

The weights are linears with their biases, norms, embedding and head; tied embedding and head are one tensor.
They start as the base's 16-bit values, are stored and updated in FP32, and are cast to the dtype of
activations for forward and backward passes, as in mixed precision. Matrix products are batched over the S
runs.

On a GPU a run needs 20 bytes per parameter (values, gradients and two means of AdamW in FP32, values and
gradients in 16 bits) and 4 more during AdamW's step: 52 GB for 16 runs of a model with 135M parameters. A
checkpoint of a batch has 12 bytes per parameter.

Legend: S runs, E numbers of a model, T tokens of a run, K inputs, N outputs, V vocabulary, D hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lab.study.batched.trained import Frozen, Trained, Weights, Whole


@dataclass(frozen=True)
class Own:
    """Weights [S, N, K] of a product's linears, and their biases [S, N] or None."""

    weight_SNK: torch.Tensor
    bias_SN: torch.Tensor | None

    def __call__(self, frozen: Frozen, x_STK: torch.Tensor) -> torch.Tensor:
        """See :class:`Product`; the frozen weight, from which the runs started, is not used."""
        weight_SKN = self.weight_SNK.mT
        if self.bias_SN is None:
            return torch.bmm(x_STK, weight_SKN)
        return torch.baddbmm(self.bias_SN[:, None], x_STK, weight_SKN)


@dataclass(frozen=True)
class Rest:
    """The weights of a base other than its linears, fp32 or 16 bits.

    Attributes:
        embedding_VD: The embedding.
        head_VD: The head; None where it is the embedding.
        norms_ND: Norms before linears, in order.
        final_D: The last norm.
        head_norms: Norms of queries and keys of each layer, or None.
    """

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor | None
    norms_ND: torch.Tensor
    final_D: torch.Tensor
    head_norms: Sequence[tuple[torch.Tensor, torch.Tensor] | None]


class FullWeights(Trained):
    """The weights of S runs.

    Args:
        products: Products of the base, in the order of its modules.
        rest: The other weights of the base.
        runs: S.
        dtype: Dtype of activations.
    """

    def __init__(self, products: Sequence[Frozen], rest: Rest, runs: int, dtype: torch.dtype) -> None:
        tensors = [rest.embedding_VD, *([] if rest.head_VD is None else [rest.head_VD])]
        tensors += [rest.norms_ND, rest.final_D]
        tensors += [norm for pair in rest.head_norms if pair is not None for norm in pair]
        for product in products:
            tensors += [product.weight_NK, *([] if product.bias_N is None else [product.bias_N])]
        self._tied, self._qk_norm = rest.head_VD is None, [pair is not None for pair in rest.head_norms]
        self._biased = [product.bias_N is not None for product in products]
        self._base_E = torch.cat([tensor.flatten().float() for tensor in tensors])
        super().__init__(self._base_E.repeat(runs, 1), [tuple(t.shape) for t in tensors], dtype)

    def arranged(self, tensors: Sequence[torch.Tensor]) -> Weights:
        """See :meth:`Trained.arranged`."""
        rest = iter(tensors)
        embedding_SVD = next(rest)
        head_SVD = embedding_SVD if self._tied else next(rest)
        norms_SND, final_SD = next(rest), next(rest)
        head_norms = [(next(rest), next(rest)) if there else None for there in self._qk_norm]
        products = [Own(next(rest), next(rest) if there else None) for there in self._biased]
        return Weights(products, Whole(embedding_SVD, head_SVD, norms_SND, final_SD, head_norms))

    @property
    def do_nothing(self) -> bool:
        """Whether all runs have the base's weights."""
        return all(torch.equal(own_E, self._base_E) for own_E in self.values_SE)

    def be_the_base(self) -> None:
        """Reset all runs to the base's weights."""
        self.values_SE.copy_(self._base_E)
