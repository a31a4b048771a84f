"""A microbatch with more tokens than one forward pass may hold is computed in pieces.

Activations grow with the tokens of the packed row (`qerl.trainer.update.packing`), not with its samples:
eight short answers may take less memory than one long one. So the limit is a number of tokens. The samples
of a microbatch are spread over as few pieces as hold them, balanced: the longest first, each to the piece
that it leaves the lightest (longest processing time first, Graham 1969). A piece computes a prompt once for
all of its samples of that group; groups are divided as far as more pieces would be needed otherwise, no
further.

Each piece is run forward and backward before the next begins, so that one at a time is in memory, and nothing
is computed twice: a token's gradient needs its own log-probability, its sample's, and normalisers known
beforehand, but never what the model says of other samples. The loss still sees the whole microbatch: computed
samples as numbers, the piece's with their graph, those to come as zeros, which get no gradient. At the last
piece all are there, so that this loss is the one to report and its metrics are those of the undivided batch.

One option of TRL breaks this independence: `top_entropy_quantile` compares the tokens of a whole microbatch,
which then runs forward once more, without a graph, ahead of the pieces. GradCache (Gao et al., arXiv
2101.06983) does that for every loss.

Legend: B samples, P padded prompt length, C padded completion length.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

Outputs = tuple[torch.Tensor, ...]
"""Tensors [B, C] of a forward pass, zero outside of its samples."""


@dataclass(frozen=True)
class Lengths:
    """Tokens that samples add to a packed row.

    Attributes:
        own_B: Of each sample: the completion.
        shared_B: Of its prompt, once for all its samples: all but the last token.
        group_B: Which prompt it has.
    """

    own_B: list[int]
    shared_B: list[int]
    group_B: list[int]

    @classmethod
    def of(
        cls, prompt_ids_BP: torch.Tensor, prompt_mask_BP: torch.Tensor, completion_mask_BC: torch.Tensor
    ) -> "Lengths":
        """Of a padded batch; neighbours with the same prompt are a group."""
        masked_BP = torch.where(prompt_mask_BP.bool(), prompt_ids_BP, -1)
        changes = (masked_BP[1:] != masked_BP[:-1]).any(dim=1)
        return cls(
            own_B=completion_mask_BC.sum(dim=1).tolist(),
            shared_B=(prompt_mask_BP.sum(dim=1) - 1).tolist(),
            group_B=[0, *changes.cumsum(0).tolist()],
        )

    def tokens(self, rows: Sequence[int]) -> int:
        """Of the packed row that holds these samples."""
        shared = {self.group_B[row]: self.shared_B[row] for row in rows}
        return sum(self.own_B[row] for row in rows) + sum(shared.values())


def cut(rows: list[int], lengths: Lengths, budget: int | None) -> list[list[int]]:
    """Samples spread over the fewest pieces found, the longest piece first, so that memory runs out early.

    Args:
        rows: Samples to compute, in order.
        lengths: Of all samples of the batch.
        budget: Most tokens of a piece. A sample that has more is a piece of its own; None is no limit.

    Returns:
        At least one piece, each in the order of `rows`, so that a group's samples stand side by side.
    """
    if budget is None or lengths.tokens(rows) <= budget:
        return [rows]
    alone = [[row] for row in rows if lengths.tokens([row]) > budget]
    rest = [row for row in rows if lengths.tokens([row]) <= budget]
    pieces = alone + (_balanced(rest, lengths, budget) if rest else [])
    return sorted(pieces, key=lengths.tokens, reverse=True)


def _balanced(rows: list[int], lengths: Lengths, budget: int) -> list[list[int]]:
    """The smallest number of pieces that works, and for it the largest parts of groups that stay together."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(lengths.group_B[row], []).append(row)
    together = [max(map(len, groups.values()))]
    while together[-1] > 1:
        together.append(-(-together[-1] // 2))
    halves = sum(lengths.own_B[row] > budget / 2 for row in rows)  # no two of these fit together
    count = max(-(-lengths.tokens(rows) // budget), halves)
    while True:
        for size in together:
            units = [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]
            pieces = _spread(units, lengths, count)
            if all(lengths.tokens(piece) <= budget for piece in pieces):
                return [sorted(piece) for piece in pieces if piece]
        count += 1


def _spread(units: list[list[int]], lengths: Lengths, count: int) -> list[list[int]]:
    """Units of samples with one prompt, the longest first, each into the piece that is lightest with it."""
    pieces: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for unit in sorted(units, key=lengths.tokens, reverse=True):
        group, whole, shared = lengths.group_B[unit[0]], lengths.tokens(unit), lengths.shared_B[unit[0]]
        after = [
            tokens[at] + whole - shared * any(lengths.group_B[row] == group for row in piece)
            for at, piece in enumerate(pieces)
        ]
        lightest = after.index(min(after))
        tokens[lightest] = after[lightest]
        pieces[lightest] += unit
    return pieces


def loss_in_pieces(
    forward: Callable[[list[int]], Outputs],
    pieces: list[list[int]],
    loss: Callable[[Outputs, list[int]], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    apart: Callable[[], contextlib.AbstractContextManager[object]],
    look_ahead: bool,
) -> torch.Tensor:
    """Loss of a microbatch, whose gradients are there for all pieces but the last; that one keeps its graph.

    Args:
        forward: Outputs of a piece.
        pieces: Samples, each in one piece; at least one piece. A single one is run as it is.
        loss: Of outputs of the samples given; those of all others are zero.
        backward: Adds the gradients of a loss to those that are there.
        apart: Surrounds forward, loss and backward of a piece that is not the last.
        look_ahead: Whether the loss of a sample depends on the outputs of others.

    Returns:
        A scalar with the value of the undivided loss, for which backward is still to be called.
    """
    rows = [row for piece in pieces for row in piece]
    values, done = None, 0
    if look_ahead and len(pieces) > 1:
        with apart():
            values = without_graph(forward, pieces)
    for piece in pieces[:-1]:
        done += len(piece)
        with apart():
            outputs = _merged(values, forward(piece), piece)
            backward(loss(outputs, rows if look_ahead else rows[:done]))
        values = tuple(output.detach() for output in outputs)
        del outputs  # the next piece begins without what is left of this one's graph
    return loss(_merged(values, forward(pieces[-1]), pieces[-1]), rows)


def without_graph(forward: Callable[[list[int]], Outputs], pieces: list[list[int]]) -> Outputs:
    """Outputs of all pieces together; one at a time is in memory."""
    with torch.no_grad():
        return reduce(lambda known, new: tuple(map(torch.add, known, new)), map(forward, pieces))


def _merged(values: Outputs | None, outputs: Outputs, piece: list[int]) -> Outputs:
    """Outputs of a piece's samples, known values of all others."""
    if values is None:
        return outputs
    is_new_B1 = torch.zeros(len(outputs[0]), 1, dtype=torch.bool, device=outputs[0].device)
    is_new_B1[piece] = True
    return tuple(torch.where(is_new_B1, *pair) for pair in zip(outputs, values, strict=True))
