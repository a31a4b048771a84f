"""Samples of a batch joined into one row, the prompt of a group once.

A padded GRPO batch runs every prompt once per sample. Here the samples that share a prompt share its forward
and backward: the row holds the prompt without its last token, then for each sample a branch that starts with
that last token and continues with the completion,

    prompt[:-1] | prompt[-1] c1 .. c(n-1) | prompt[-1] c1' .. c(m-1)' | next prompt[:-1] | ...

so that every position of a branch predicts exactly one completion token and nothing is computed for padding.
A branch attends to its prompt and to itself; positions count from the start of the sample, so rotary
embeddings see what they would see in a row of its own. Gradients through the shared prompt add up over its
branches, which is what the padded batch computes sample by sample.

The row says which tokens attend to which in two forms. `Branches` lists the stretches of the row for a kernel
that computes only what is seen (`qerl.update.attention`); `mask_function` answers for any two tokens,
from which a model's own dense masks are made (`qerl.update.masks`), at a cost of L^2 whatever they
mask.

A layer with a recurrent state would need a third form: where in the row a state starts, and the position
whose state each branch continues. The stretches hold both.

Legend: B samples, C padded completion length, L tokens of the row, S positions of L that predict something,
N stretches and one, M keys of all stretches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from qerl.kernels.device import upload
from qerl.update.padded import PaddedBatch

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' form of a mask: by index of batch, head, query and key, whether the query sees the key."""

IGNORE = -100
"""Label of positions that predict nothing, as in transformers."""


@dataclass(frozen=True)
class Branches:
    """The row as stretches of queries, each with the stretch of keys it sees: causal, aligned at their ends.

    A shared prompt sees itself, a branch sees its prompt and then itself. `keys_M` writes that out: the keys
    of all stretches one after the other, a prompt's once for itself and once more for each of its branches.

    Attributes:
        query_offsets_N: int32, where the queries of each stretch begin in the row, and L.
        key_offsets_N: int32, where its keys begin in `keys_M`, and M.
        longest_query, longest_key: Tokens of the longest stretch.
        keys_M: Position in the row of each key.
        own_L: Index into `keys_M` of each position's key in its own stretch.
        copies: For each shared prompt, its position in the row and the index [branches, tokens] into `keys_M`
            of the copies that its branches read.
    """

    query_offsets_N: torch.Tensor
    key_offsets_N: torch.Tensor
    longest_query: int
    longest_key: int
    keys_M: torch.Tensor
    own_L: torch.Tensor
    copies: list[tuple[slice, torch.Tensor]]


@dataclass(frozen=True)
class JoinedRow:
    """One row that holds many samples. Tensors are int64 on the batch's device.

    Attributes:
        input_ids_1L: Tokens.
        position_ids_1L: Position of each token in its own sample.
        labels_1L: Completion token predicted at each position, `IGNORE` on prompts.
        sample_L: Row of the padded batch that each position belongs to, -1 on prompts.
        column_L: Completion column that each position predicts.
        group_L: Index of the prompt that a position belongs to, counted within the row.
        branch_L: Index of its branch of that prompt, 0 for the prompt itself.
        scored_S: Positions that predict something.
        stretches: (group, branch, tokens) of the row's parts in order.
    """

    input_ids_1L: torch.Tensor
    position_ids_1L: torch.Tensor
    labels_1L: torch.Tensor
    sample_L: torch.Tensor
    column_L: torch.Tensor
    group_L: torch.Tensor
    branch_L: torch.Tensor
    scored_S: torch.Tensor
    stretches: list[tuple[int, int, int]]

    def mask_function(self, of_sample: MaskFunction) -> MaskFunction:
        """The mask of the row.

        Args:
            of_sample: The mask of a sample by itself, by position: causal, within a window, in blocks.

        Returns:
            The same by index into the row: a token sees what `of_sample` lets it see of its own branch and of
            the prompt that the branch continues.
        """
        position_L = self.position_ids_1L[0]

        def of_row(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            same_prompt = self.group_L[query] == self.group_L[key]
            key_branch = self.branch_L[key]
            own_or_prompt = (self.branch_L[query] == key_branch) | (key_branch == 0)
            return same_prompt & own_or_prompt & of_sample(batch, head, position_L[query], position_L[key])

        return of_row

    @cached_property
    def branches(self) -> Branches:
        """The mask of the row for causal attention, as stretches."""
        queries, keys = [0], [0]
        gathered: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        prompts: dict[int, slice] = {}
        copies: dict[int, list[int]] = {}
        for group, branch, tokens in self.stretches:
            start = queries[-1]
            at = keys[-1]
            if branch == 0:
                prompts[group] = slice(start, start + tokens)
            elif group in prompts:
                shared = prompts[group]
                gathered.append(torch.arange(shared.start, shared.stop))
                copies.setdefault(group, []).append(at)
                at += shared.stop - shared.start
            gathered.append(torch.arange(start, start + tokens))
            own.append(torch.arange(at, at + tokens))
            queries.append(start + tokens)
            keys.append(at + tokens)
        device = self.group_L.device
        width = {group: torch.arange(part.stop - part.start) for group, part in prompts.items()}
        return Branches(
            query_offsets_N=upload(torch.tensor(queries, dtype=torch.int32), device),
            key_offsets_N=upload(torch.tensor(keys, dtype=torch.int32), device),
            longest_query=max(b - a for a, b in pairwise(queries)),
            longest_key=max(b - a for a, b in pairwise(keys)),
            keys_M=upload(torch.cat(gathered), device),
            own_L=upload(torch.cat(own), device),
            copies=[
                (prompts[group], upload(torch.tensor(starts)[:, None] + width[group], device))
                for group, starts in copies.items()
            ],
        )

    def scatter(self, values_S: torch.Tensor, batch: int, columns: int) -> torch.Tensor:
        """Values of the S positions that predict something, in the layout [B, C]; zero elsewhere."""
        index_S = (self.sample_L * columns + self.column_L)[self.scored_S]
        flat = values_S.new_zeros(batch * columns)
        return flat.index_put((index_S,), values_S).view(batch, columns)


def join(batch: PaddedBatch, rows: list[int], device: torch.device | None = None) -> JoinedRow:
    """The given samples of a batch as one row.

    Args:
        batch: The samples. Where they are on the CPU, nothing waits for the device.
        rows: Samples to include, at least one. Groups follow one another in the order of their first sample.
        device: Of the row; the batch's if None.
    """
    builder, device = RowBuilder(), device or batch.prompt_ids_BP.device
    prompts, completions = batch.prompt_ids_BP.cpu(), batch.completion_ids_BC.cpu()
    in_prompts, in_completions = batch.prompt_mask_BP.cpu().bool(), batch.completion_mask_BC.cpu().bool()
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(batch.lengths.group_B[row], []).append(row)
    for members in groups.values():
        prompt = prompts[members[0]][in_prompts[members[0]]]
        builder.begin_group(prompt[:-1])
        for row in members:
            completion = completions[row][in_completions[row]]
            builder.add_branch(row, torch.cat([prompt[-1:], completion[:-1]]), completion)
    return builder.finish(device)


class RowBuilder:
    """Grows a joined row sample by sample, on the CPU: on a GPU each sample would be waited for."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []  # [7, tokens], in the order of JoinedRow's fields
        self._stretches: list[tuple[int, int, int]] = []
        self._shared, self._group, self._branch = 0, -1, 0
        self._length = 0

    def begin_group(self, shared: torch.Tensor) -> slice:
        """Begin a group with the tokens that its branches share, none at all if need be.

        Returns:
            Where in the row they stand.
        """
        self._shared, self._group, self._branch = len(shared), self._group + 1, 0
        return self._extend(shared, 0, torch.full_like(shared, IGNORE), -1)

    def add_branch(self, sample: int, tokens: torch.Tensor, labels: torch.Tensor) -> slice:
        """Add a sample of the group that was begun last.

        Args:
            sample: Its row of the batch.
            tokens: Those that follow the shared ones, at least one.
            labels: What each of them predicts.

        Returns:
            Where in the row they stand.
        """
        self._branch += 1
        return self._extend(tokens, self._shared, labels, sample)

    def _extend(self, tokens: torch.Tensor, position: int, labels: torch.Tensor, sample: int) -> slice:
        start, n = self._length, len(tokens)
        self._length += n
        if n:
            self._stretches.append((self._group, self._branch, n))
            column = torch.arange(n)
            where = (torch.full((n,), x) for x in (sample, self._group, self._branch))
            sample_n, group_n, branch_n = where
            parts = [tokens, position + column, labels, sample_n, column, group_n, branch_n]
            self._parts.append(torch.stack(parts))
        return slice(start, self._length)

    def finish(self, device: torch.device) -> JoinedRow:
        """The row, on a device."""
        on_host = torch.cat(self._parts, dim=1)
        scored_S = upload((on_host[3] >= 0).nonzero()[:, 0], device)
        tokens, positions, labels, *where = upload(on_host, device)
        sample, column, group, branch = where
        rows = tokens[None], positions[None], labels[None]
        return JoinedRow(*rows, sample, column, group, branch, scored_S, self._stretches)
