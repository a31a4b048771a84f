"""Chunks hold every sample once, stay within the budget, are few and even."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from qerl.update.chunks import split_rows
from qerl.update.packed_row import Lengths, pack_row
from tests.support.samples import samples_of


def lengths(*groups: tuple[int, list[int]]) -> Lengths:
    """Of groups given as (prompt tokens without the last, completion tokens of each sample)."""
    return Lengths(
        own_B=[n for _, own in groups for n in own],
        shared_B=[shared for shared, own in groups for _ in own],
        group_B=[group for group, (_, own) in enumerate(groups) for _ in own],
    )


def tokens(chunks: list[list[int]], of: Lengths) -> list[int]:
    return [of.tokens(chunk) for chunk in chunks]


def test_lengths_are_those_of_the_packed_row():
    draw = random.Random(0)
    prompts = [[draw.randrange(9) for _ in range(draw.randint(1, 6))] for _ in range(4)]
    prompts = [prompt for prompt in [*prompts, prompts[0]] for _ in range(3)]
    samples = samples_of(prompts, [[1] * draw.randint(1, 7) for _ in prompts])
    samples[4].masked = True  # of which its first token alone is computed
    for sample in samples[12:]:
        sample.group = 99  # the prompt of the first group as one of its own
    for rows in ([0], [1, 2], [0, 2, 3, 7, 8], [0, 4, 13], list(range(15))):
        row = pack_row(samples, rows, torch.device("cpu"))
        assert Lengths.of(samples).tokens(rows) == row.input_ids_1L.size(1)


def test_no_limit_or_enough_is_one_chunk():
    of = lengths((10, [5, 5]), (20, [1]))
    assert split_rows([0, 1, 2], of, None) == [[0, 1, 2]]
    assert split_rows([0, 1, 2], of, 41) == [[0, 1, 2]]
    assert split_rows([], of, 1) == [[]]


def test_groups_stay_whole_where_no_chunk_more_is_needed():
    of = lengths((100, [50] * 4), (100, [60] * 4), (100, [40] * 4), (100, [70] * 4))
    chunks = split_rows(list(range(16)), of, 650)
    assert sorted(chunks) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]


def test_a_group_is_divided_where_it_saves_a_chunk():
    of = lengths((10, [100] * 3), (10, [100] * 3), (10, [100] * 3))
    chunks = split_rows(list(range(9)), of, 520)
    assert len(chunks) == 2
    assert max(tokens(chunks, of)) <= 520


def test_a_long_tail_is_balanced():
    """One long answer among short ones: its chunk holds little else."""
    of = lengths((0, [900, 100, 100, 100]), (0, [100] * 4), (0, [100] * 4), (0, [100] * 3))
    assert tokens(split_rows(list(range(15)), of, 1300), of) == [1200, 1100]


def test_a_sample_beyond_the_budget_is_alone():
    of = lengths((10, [5, 500, 5]), (10, [5]))
    assert split_rows([0, 1, 2, 3], of, 40) == [[1], [0, 2, 3]]
    assert split_rows([0, 1, 2, 3], of, 1) == [[1], [0], [2], [3]]


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(seed):
    draw = random.Random(seed)
    groups = [(draw.randint(0, 40), [draw.randint(1, 100) for _ in range(4)]) for _ in range(6)]
    of = lengths(*groups)
    rows = sorted(draw.sample(range(24), 18))
    budget = draw.randint(60, 500)
    chunks = split_rows(rows, of, budget)
    assert sorted(itertools.chain(*chunks)) == rows
    assert all(chunk == sorted(chunk) for chunk in chunks)
    sizes = tokens(chunks, of)
    assert sizes == sorted(sizes, reverse=True)
    assert all(size <= budget or len(chunk) == 1 for size, chunk in zip(sizes, chunks, strict=True))
    alone = sum(of.tokens([row]) > budget for row in rows)
    assert len(chunks) - alone <= 1 + 2 * of.tokens(rows) // budget, "two chunks together exceed the budget"


@pytest.mark.parametrize("seed", range(10))
def test_at_most_one_chunk_more_than_the_fewest(seed):
    draw = random.Random(seed)
    of = lengths(*((draw.randint(0, 20), [draw.randint(1, 60) for _ in range(3)]) for _ in range(2)))
    budget = draw.randint(80, 160)
    fewest = min(len(chunks) for chunks in partitions(list(range(6))) if max(tokens(chunks, of)) <= budget)
    assert fewest <= len(split_rows(list(range(6)), of, budget)) <= fewest + 1


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put rows into chunks."""
    if not rows:
        yield []
        return
    for chunks in partitions(rows[1:]):
        yield [[rows[0]], *chunks]
        for at, chunk in enumerate(chunks):
            yield [*chunks[:at], [rows[0], *chunk], *chunks[at + 1 :]]


def test_many_samples():
    """512 that no group of fits: shared prompts that are computed again cost at most 5 %."""
    draw = random.Random(0)
    of = lengths(*((300, [draw.randint(1, 4000) for _ in range(16)]) for _ in range(32)))
    chunks = split_rows(list(range(512)), of, 16384)
    assert len(chunks) <= 1.05 * -(-of.tokens(list(range(512))) // 16384)
