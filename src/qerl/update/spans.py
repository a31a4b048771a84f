"""One forward pass for several microbatches of an optimizer step.

A microbatch is what one loss sees, and its size is the user's choice. How much a forward pass computes is
not: where samples turn out short, a pass over one microbatch is a few thousand tokens, for which every weight
is written densely anew and the GPU waits for the host to launch. So microbatches that follow one another
share a pass as long as it has no more tokens than it may have. Their losses come one after another, as they
would have: each gets its samples' outputs and leaves their gradients, and with those of the last one the pass
runs backward, once.

Weights do not move within an optimizer step, so outputs are those of separate passes but for rounding.

Legend: B samples of all microbatches, C completion columns.
"""

from collections.abc import Callable, Sequence
from itertools import count

import torch

from qerl.update.chunks import Outputs
from qerl.update.padded import Lengths


class Spans:
    """Shared forward passes of the microbatches of a step.

    Args:
        rows: Of each microbatch, the samples to compute, counted over all of them.
        samples: Of each microbatch; all have as many.
        lengths: Of all samples.
        forward: Computes samples of any of them: outputs [B, C], zero for all others. It gets the samples and
            the number of the last microbatch that shares the pass.
    """

    def __init__(
        self,
        rows: Sequence[list[int]],
        samples: int,
        lengths: Lengths,
        forward: Callable[[list[int], int], Outputs],
    ) -> None:
        self._rows, self._samples, self._lengths, self._forward = rows, samples, lengths, forward
        self._last = -1
        self._outputs: Outputs = ()
        self._leaves: Outputs = ()

    def outputs(self, number: int, max_tokens: int) -> Outputs | None:
        """Outputs of a microbatch, which have no graph but take gradients; microbatches come in order.

        Args:
            number: Of the microbatch.
            max_tokens: Largest number of tokens in a pass.

        Returns:
            None where it shares a pass with none after it, and is to be computed by itself.
        """
        if number > self._last:
            rows, last = list[int](), number - 1
            for later in count(number):
                if later == len(self._rows) or self._lengths.tokens(rows + self._rows[later]) > max_tokens:
                    break
                rows, last = rows + self._rows[later], later
            if last <= number or not rows:
                return None
            self._outputs, self._last = self._forward(rows, last), last
            self._leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in self._outputs)
        part = slice(number * self._samples, (number + 1) * self._samples)
        return tuple(leaf[part] for leaf in self._leaves)

    def end(self, number: int) -> None:
        """Backward of a pass, once the last loss of its microbatches has left its gradients."""
        if number != self._last or not self._outputs:
            return
        pairs = [
            (x, leaf.grad)
            for x, leaf in zip(self._outputs, self._leaves, strict=True)
            if leaf.grad is not None
        ]
        self._outputs = self._leaves = ()
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
