"""Shared beginnings are found again, and the groups save as many tokens as any division would."""

import random
from collections.abc import Iterator

import torch

from qerl.update.prefixes import Grouping, shared_prefixes


def tokens(sequences: list[list[int]], grouping: Grouping) -> int:
    """Tokens of a packed row, once the grouping was seen to be one."""
    prefixes: dict[int, list[int]] = {}
    total = 0
    for sequence, group, n in zip(sequences, grouping.group_B, grouping.shared_B, strict=True):
        assert n < len(sequence), "each sequence has a token of its own"
        if group not in prefixes:
            total += n
        assert prefixes.setdefault(group, sequence[:n]) == sequence[:n]
        total += len(sequence) - n
    return total


def divisions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in divisions(items[1:]):
        for at, group in enumerate(rest):
            yield [*rest[:at], [items[0], *group], *rest[at + 1 :]]
        yield [[items[0]], *rest]


def fewest(sequences: list[list[int]]) -> int:
    def cost(group: list[int]) -> int:
        members = [sequences[at] for at in group]
        shared = 0
        while shared < min(map(len, members)) - 1 and len({m[shared] for m in members}) == 1:
            shared += 1
        return sum(map(len, members)) - shared * (len(members) - 1)

    return min(sum(map(cost, division)) for division in divisions(list(range(len(sequences)))))


def test_samples_of_two_prompts_are_two_groups_in_any_order():
    first, second = [5, 6, 7, 8], [5, 6, 9, 9, 9]
    sequences = [[*first, 1, 2], [*second, 3], [*first, 4], [*second, 3, 3], first]
    grouping = shared_prefixes([torch.tensor(s) for s in sequences])
    assert grouping.shared_B == [3, 5, 3, 5, 3], "a sequence that is a prompt keeps its last token"
    assert [grouping.group_B[i] == grouping.group_B[0] for i in range(5)] == [True, False, True, False, True]


def test_equal_sequences_keep_a_token_each():
    grouping = shared_prefixes([torch.tensor([4, 4, 4])] * 3 + [torch.tensor([4])])
    assert grouping.shared_B == [2, 2, 2, 0]


def test_no_division_saves_more():
    draw = random.Random(0)
    for _ in range(150):
        sequences = [draw.choices([0, 1], k=draw.randint(1, 6)) for _ in range(draw.randint(1, 6))]
        grouping = shared_prefixes([torch.tensor(sequence) for sequence in sequences])
        assert tokens(sequences, grouping) == fewest(sequences), sequences
