"""Detection of shared prefixes among sequences of tokens.

A packed row (`qerl.update.packed_row`) computes the shared prefix of a group once. In GRPO the groups are
known and the prefix is the prompt; if the samples of a prompt come as separate sequences, it has to be found.
In lexicographic order, sequences with the longest common prefixes are neighbours; joined from the longest
prefix downwards they form a tree, in which a node is a prefix and the sequences under it. A row has one level
of sharing, so a node either shares its prefix among its groups, which then lose their longer prefixes, or
leaves them apart; each group takes the larger saving (`_merged`).

Given up: prefixes of prefixes (a system prompt, in it a question, in it samples), which a row with one level
computes once per group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Grouping:
    """Groups of sequences with one shared prefix each.

    Attributes:
        group_B: Index of each sequence's group.
        shared_B: Length of its group's prefix, 0 without one; shorter than any sequence of the group.
    """

    group_B: list[int]
    shared_B: list[int]


@dataclass(frozen=True)
class _Group:
    members: list[int]
    shared: int

    @property
    def saved(self) -> int:
        """Tokens that need not be computed again."""
        return self.shared * (len(self.members) - 1)


def shared_prefixes(sequences: Sequence[torch.Tensor]) -> Grouping:
    """Find the groups that save the most tokens.

    Args:
        sequences: Token ids, [T] each with T at least 1.
    """
    lists = [sequence.tolist() for sequence in sequences]
    order = sorted(range(len(lists)), key=lists.__getitem__)
    common = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    group_B, shared_B = [0] * len(lists), [0] * len(lists)
    for index, group in enumerate(_divided([[_Group([at], 0)] for at in order], common)):
        for at in group.members:
            group_B[at], shared_B[at] = index, group.shared
    return Grouping(group_B, shared_B)


def _common(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the length of two sequences' common prefix, which leaves each at least one token of its own."""
    shorter = min(len(a), len(b)) - 1
    differs = (a[:shorter] != b[:shorter]).nonzero()
    return int(differs[0]) if len(differs) else shorter


def _divided(nodes: list[list[_Group]], common: list[int]) -> list[_Group]:
    """Return groups of all sequences; neighbours are joined along the tree of prefixes, the longest first.

    Args:
        nodes: Lists of groups with a common prefix, in lexicographic order.
        common: Number of tokens that each node shares with the next one.
    """
    for shared in sorted(set(common) - {0}, reverse=True):
        runs, kept = [[nodes[0]]], []
        for node, tokens in zip(nodes[1:], common, strict=True):
            if tokens == shared:
                runs[-1].append(node)
            else:
                runs.append([node])
                kept.append(tokens)
        nodes = [_merged([group for node in run for group in node], shared) for run in runs]
        common = kept
    return [group for node in nodes for group in node]


def _merged(groups: list[_Group], shared: int) -> list[_Group]:
    """Merge groups that all begin with the same ``shared`` tokens, where that saves more."""
    if len(groups) == 1:
        return groups
    gaining = [group for group in groups if len(group.members) * shared > group.saved]
    one = _Group([at for group in gaining for at in group.members], shared)
    if not gaining or one.saved <= sum(group.saved for group in gaining):
        return groups
    return [one, *(group for group in groups if len(group.members) * shared <= group.saved)]
