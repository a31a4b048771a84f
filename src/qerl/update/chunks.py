"""A microbatch with more tokens than one forward pass may hold is computed in chunks.

Activations grow with the tokens of the joined row (`qerl.update.joined_row`), not with its samples:
eight short answers may take less memory than one long one. So the limit is a number of tokens. The samples
of a microbatch are spread over as few chunks as hold them, balanced: the longest first, each to the chunk
that it leaves the lightest (longest processing time first, Graham 1969). A chunk computes a prompt once for
all of its samples of that group; groups are divided as far as more chunks would be needed otherwise, no
further.

Each chunk is run forward and backward before the next begins, so that one at a time is in memory, and nothing
is computed twice: a token's gradient needs its own log-probability, its sample's, and normalisers known
beforehand, but never what the model says of other samples. The loss still sees the whole microbatch: computed
samples as numbers, the chunk's with their graph, those to come as zeros, which get no gradient. At the last
chunk all are there, so that this loss is the one to report and its metrics are those of the undivided batch.

One option of TRL breaks this independence: `top_entropy_quantile` compares the tokens of a whole microbatch,
which then runs forward once more, without a graph, ahead of the chunks. GradCache (Gao et al., arXiv
2101.06983) does that for every loss.

Legend: B samples, C padded completion length.
"""

import contextlib
from collections.abc import Callable
from functools import reduce
from typing import TypeVar

import torch

from qerl.kernels.device import upload
from qerl.update.padded import Lengths

T = TypeVar("T")

Outputs = tuple[torch.Tensor, ...]
"""Tensors [B, C] of a forward pass, zero outside of its samples."""


def split_rows(rows: list[int], lengths: Lengths, max_tokens: int | None) -> list[list[int]]:
    """Samples spread over the fewest chunks found, the longest chunk first, so that memory runs out early.

    Args:
        rows: Samples to compute, in order.
        lengths: Of all samples of the batch.
        max_tokens: Largest number of tokens in a chunk; a sample that has more is a chunk of its own. None
            is no limit.

    Returns:
        At least one chunk, each in the order of `rows`.
    """
    if max_tokens is None or lengths.tokens(rows) <= max_tokens:
        return [rows]
    alone = [[row] for row in rows if lengths.tokens([row]) > max_tokens]
    rest = [row for row in rows if lengths.tokens([row]) <= max_tokens]
    chunks = alone + (_balanced(rest, lengths, max_tokens) if rest else [])
    return sorted(chunks, key=lengths.tokens, reverse=True)


def _balanced(rows: list[int], lengths: Lengths, max_tokens: int) -> list[list[int]]:
    """The smallest number of chunks that works, and for it the largest parts of groups that stay together."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(lengths.group_B[row], []).append(row)
    together = [max(map(len, groups.values()))]
    while together[-1] > 1:
        together.append(-(-together[-1] // 2))
    halves = sum(lengths.own_B[row] > max_tokens / 2 for row in rows)  # no two of these fit together
    count = max(-(-lengths.tokens(rows) // max_tokens), halves)
    while True:
        for size in together:
            units = [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]
            chunks = _spread(units, lengths, count)
            if all(lengths.tokens(chunk) <= max_tokens for chunk in chunks):
                return [sorted(chunk) for chunk in chunks if chunk]
        count += 1


def _spread(units: list[list[int]], lengths: Lengths, count: int) -> list[list[int]]:
    """Units of samples with one prompt, the longest first, each in the chunk that is lightest with it."""
    chunks: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for unit in sorted(units, key=lengths.tokens, reverse=True):
        group, whole, shared = lengths.group_B[unit[0]], lengths.tokens(unit), lengths.shared_B[unit[0]]
        after = [
            tokens[at] + whole - shared * any(lengths.group_B[row] == group for row in chunk)
            for at, chunk in enumerate(chunks)
        ]
        lightest = after.index(min(after))
        tokens[lightest] = after[lightest]
        chunks[lightest] += unit
    return chunks


def loss_in_chunks(
    forward: Callable[[list[int]], Outputs],
    chunks: list[list[int]],
    loss: Callable[[Outputs, list[int]], tuple[torch.Tensor, T]],
    backward: Callable[[torch.Tensor], None],
    apart: Callable[[], contextlib.AbstractContextManager[object]],
    look_ahead: bool,
) -> tuple[torch.Tensor, T]:
    """The loss of a microbatch; gradients of all chunks but the last are added, the last keeps its graph.

    Args:
        forward: Computes the outputs of a chunk.
        chunks: Samples, each in one chunk; at least one chunk. A single one is run as it is.
        loss: Computes the loss from outputs and the samples that have any; those of all others are zero. What
            it reports beside the loss is returned with that of the last chunk.
        backward: Adds the gradients of a loss to those that are there.
        apart: Surrounds forward, loss and backward of a chunk that is not the last.
        look_ahead: Whether the loss of a sample depends on the outputs of others.

    Returns:
        A scalar with the value of the undivided loss, for which backward is still to be called; and what the
        undivided loss reports.
    """
    rows = [row for chunk in chunks for row in chunk]
    values, done = None, 0
    if look_ahead and len(chunks) > 1:
        with apart():
            values = without_graph(forward, chunks)
    for chunk in chunks[:-1]:
        done += len(chunk)
        with apart():
            outputs = _with_known(values, forward(chunk), chunk)
            backward(loss(outputs, rows if look_ahead else rows[:done])[0])
        values = tuple(output.detach() for output in outputs)
        del outputs  # the next chunk begins without what is left of this one's graph
    return loss(_with_known(values, forward(chunks[-1]), chunks[-1]), rows)


def without_graph(forward: Callable[[list[int]], Outputs], chunks: list[list[int]]) -> Outputs:
    """Outputs of all chunks together; one chunk at a time is in memory."""
    with torch.no_grad():
        return reduce(lambda known, new: tuple(map(torch.add, known, new)), map(forward, chunks))


def _with_known(values: Outputs | None, outputs: Outputs, chunk: list[int]) -> Outputs:
    """Outputs of a chunk's samples, known values of all others."""
    if values is None:
        return outputs
    is_new_B1 = torch.zeros(len(outputs[0]), 1, dtype=torch.bool)
    is_new_B1[chunk] = True
    is_new_B1 = upload(is_new_B1, outputs[0].device)
    return tuple(torch.where(is_new_B1, *pair) for pair in zip(outputs, values, strict=True))
