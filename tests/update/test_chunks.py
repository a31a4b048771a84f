"""Chunks hold every sample once, stay within the budget, are few and even, and one at a time is in memory."""

import contextlib
import itertools
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from qerl.trainer.batch import padded_rollout
from qerl.update.padded import Lengths

from qerl.update.chunks import loss_in_chunks, split_rows
from qerl.update.joined_row import join


def lengths(*groups: tuple[int, list[int]]) -> Lengths:
    """Of groups given as (prompt tokens without the last, completion tokens of each sample)."""
    return Lengths(
        own_B=[n for _, own in groups for n in own],
        shared_B=[shared for shared, own in groups for _ in own],
        group_B=[group for group, (_, own) in enumerate(groups) for _ in own],
    )


def tokens(chunks: list[list[int]], of: Lengths) -> list[int]:
    return [of.tokens(chunk) for chunk in chunks]


def test_lengths_are_those_of_the_joined_row():
    draw = random.Random(0)
    prompts = [[draw.randrange(9) for _ in range(draw.randint(1, 6))] for _ in range(4)]
    prompts = [prompt for prompt in [*prompts, prompts[0]] for _ in range(3)]
    completions = [[1] * draw.randint(1, 7) for _ in prompts]
    P, C = max(map(len, prompts)), max(map(len, completions))
    ids = torch.tensor(
        [[0] * (P - len(p)) + p + c + [0] * (C - len(c)) for p, c in zip(prompts, completions, strict=True)]
    )
    mask = torch.tensor(
        [
            [0] * (P - len(p)) + [1] * len(p) + [1] * len(c) + [0] * (C - len(c))
            for p, c in zip(prompts, completions, strict=True)
        ]
    )
    padded = padded_rollout(ids, mask, C, group_size=3)
    for rows in ([0], [1, 2], [0, 2, 3, 7, 8], list(range(15))):
        assert padded.lengths.tokens(rows) == join(padded, rows).input_ids_1L.size(1)


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


def run(chunks: list[list[int]], coupled: bool) -> tuple[float, torch.Tensor, int, int]:
    """Loss, gradient, most activations alive at a time and forward passes of samples, for a made-up model."""
    weight = torch.linspace(0.5, 1.5, 3, dtype=torch.double, requires_grad=True)
    alive = peak = passes = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def forward(rows: list[int]) -> tuple[torch.Tensor]:
        nonlocal alive, peak, passes
        out = torch.zeros(8, 3, dtype=torch.double)
        for row in rows:
            activation = weight * (row + 1)
            alive, passes = alive + 1, passes + 1
            peak = max(peak, alive)
            weakref.finalize(activation, gone)
            values = (activation * activation).sin()  # its backward needs the activation
            out = out.index_put((torch.tensor([row]),), values[None])
        return (out,)

    def loss(outputs: tuple[torch.Tensor], rows: list[int]) -> tuple[torch.Tensor, int]:
        seen = outputs[0].detach()[rows]
        assert (seen != 0).all()
        mean = seen.mean() if coupled else 0.7
        return ((outputs[0] - mean) ** 2 / 24).sum(), len(rows)

    total, reported = loss_in_chunks(
        forward, chunks, loss, torch.Tensor.backward, contextlib.nullcontext, look_ahead=coupled
    )
    total.backward()
    assert reported == 8, "what the undivided loss reports"
    return total.item(), weight.grad, peak, passes


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_chunks_add_up_one_at_a_time(coupled, size):
    loss, gradient, peak, passes = run([list(range(8))], coupled)
    assert (peak, passes) == (8, 8)
    chunks = [list(range(start, min(start + size, 8))) for start in range(0, 8, size)]
    cut_loss, cut_gradient, cut_peak, cut_passes = run(chunks, coupled)
    assert cut_loss == pytest.approx(loss, rel=1e-14)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-13, atol=0)
    assert cut_peak == size
    assert cut_passes == (16 if coupled else 8)
