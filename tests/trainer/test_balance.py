"""Groups change places between processes so that each has as much to compute, and nothing else changes."""

import math
import statistics
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.lengths import draw_lengths
from qerl.trainer import balance
from qerl.trainer.balance import balanced, dealt, moves, owners
from qerl.update.packed_row import Sample

SIZE = 2


def loads(tokens_RG, owner_RG):
    found = [0] * len(tokens_RG)
    for tokens, owner in zip(tokens_RG, owner_RG, strict=True):
        for cost, to in zip(tokens, owner, strict=True):
            found[to] += cost
    return found


def waits(load):
    """How much longer the slowest process computes than all would if they shared evenly."""
    return max(load) / statistics.mean(load) - 1


@pytest.mark.parametrize(("ranks", "before", "after"), [(2, 0.033, 0.0016), (8, 0.075, 0.0027)])
def test_real_lengths_leave_nobody_waiting(ranks, before, after):
    """50 steps, 128 samples of each process, groups of 8, prompts of 256 tokens; docs/dev/log.md has it."""
    lengths = iter(draw_lengths("lognormal:400", 50 * ranks * 128, 1024))
    steps = [
        [[256 + sum(next(lengths) for _ in range(8)) for _ in range(16)] for _ in range(ranks)]
        for _ in range(50)
    ]
    drawn = statistics.mean(waits([sum(tokens) for tokens in step]) for step in steps)
    dealt = statistics.mean(waits(loads(step, owners(step))) for step in steps)
    assert (drawn, dealt) == (pytest.approx(before, abs=5e-4), pytest.approx(after, abs=5e-5))


def test_processes_have_as_many_groups_as_before_and_places_are_those_left():
    tokens_RG = [[9, 0, 0, 5], [1, 1, 8, 7], [0, 0, 0, 0]]
    owner_RG = owners(tokens_RG)
    assert sorted(to for owner in owner_RG for to in owner) == [0] * 4 + [1] * 4 + [2] * 4
    assert max(loads(tokens_RG, owner_RG)) == 12
    found = moves(owner_RG)
    assert {(move.source, move.group) for move in found} == {(move.target, move.place) for move in found}
    assert len({(move.target, move.place) for move in found}) == len(found) > 0
    assert all(move.source != move.target for move in found)


def test_groups_alike_stay_where_they_are():
    assert moves(owners([[3, 3], [3, 3]])) == moves(owners([[0, 0], [0, 0]])) == []


class Meeting:
    """Accelerate's part in threads, each a process."""

    def __init__(self, processes):
        self.barrier, self.given = threading.Barrier(processes, timeout=10), [None] * processes
        self.rank = threading.local()

    def meet(self, value):
        self.given[self.rank.number] = value
        self.barrier.wait()
        every = list(self.given)
        self.barrier.wait()
        return every

    process_index = property(lambda self: self.rank.number)
    device = torch.device("cpu")

    def gather(self, own):
        return torch.cat(self.meet(own))

    def gather_object(self, own):
        return [each for rank in self.meet(own) for each in rank]


def samples_of(rank, lengths):
    """Samples whose tokens name their process and place; their advantages know it too."""
    found = []
    for place, length in enumerate(lengths):
        prompt = 100 * (rank + 1) + place * SIZE
        for name in range(prompt, prompt + SIZE):
            logprobs, nan = [-float(name)] * length, [math.nan] * length
            tokens = [prompt] * (3 + rank), [name] * length
            scored = {"rewards": [1.0, math.nan], "advantage": float(name)}
            found.append(Sample(*tokens, logprobs, nan, group=50 + place * SIZE, **scored))
    return found


def in_threads(monkeypatch, processes, deal):
    """What `deal(rank, accelerator)` gives each process."""
    meeting, found = Meeting(processes), [None] * processes
    monkeypatch.setattr(balance, "gather_object", meeting.gather_object)

    def process(rank):
        meeting.rank.number = rank
        try:
            found[rank] = deal(rank, meeting)
        except Exception as error:
            meeting.barrier.abort()  # nobody waits for who has died
            found[rank] = error

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [each for each in found if isinstance(each, Exception)]
    assert not failed, failed
    return found


def balanced_in_threads(monkeypatch, lengths):
    """The samples of each process, in steps of two groups each."""

    def deal(rank, accelerator):
        return balanced(samples_of(rank, lengths[rank]), lengths[rank], 2, SIZE, accelerator)

    return in_threads(monkeypatch, len(lengths), deal)


def names(samples):
    return [int(sample.advantage) for sample in samples]


def test_a_process_that_keeps_its_groups_meets_those_that_change_theirs(monkeypatch):
    found = balanced_in_threads(monkeypatch, [[9, 9], [1, 1], [5, 5]])
    assert [sorted(names(samples)) for samples in found] == [
        [100, 101, 202, 203], [102, 103, 200, 201], [300, 301, 302, 303],
    ]  # fmt: skip


def test_samples_arrive_whole_and_stay_in_their_step(monkeypatch):
    """Two steps of two groups each: the first process has the two long ones of the second step."""
    lengths = [[1, 2, 9, 9], [2, 1, 1, 1]]
    found = balanced_in_threads(monkeypatch, lengths)
    first, second = names(found[0]), names(found[1])
    assert [name // 100 - 1 for name in first[:4] + second[:4]] == [0] * 4 + [1] * 4, "as they were"
    assert sorted(first[4:] + second[4:]) == [*range(104, 108), *range(204, 208)]
    for samples in found:
        assert sum(len(sample.tokens) for sample in samples[4:]) == SIZE * (9 + 1)
        assert [sample.group for sample in samples] == [50, 50, 52, 52, 54, 54, 56, 56], "of their new places"
        for sample in samples:
            name = int(sample.advantage)
            rank, place = name // 100 - 1, name % 100 // SIZE
            (given,) = (
                each for each in samples_of(rank, lengths[rank]) if each.advantage == sample.advantage
            )
            assert repr(replace(sample, group=given.group)) == repr(given)
            assert len(sample.tokens) == lengths[rank][place]


def test_a_group_that_takes_another_place_has_no_group_in_common_with_its_neighbours(monkeypatch):
    """In a packed row two groups of one number would have one prompt."""
    found = balanced_in_threads(monkeypatch, [[9, 5], [1, 2]])
    assert [names(samples) for samples in found] == [[100, 101, 200, 201], [102, 103, 202, 203]]
    assert [[sample.group for sample in samples] for samples in found] == [[50, 50, 52, 52]] * 2


@pytest.mark.parametrize(
    ("sizes", "computed", "moved"),
    [
        ((8, 1, 1), [0, 1, 2, 3, 4, 5, 6, 7], True),
        ((8, 1, 1), [], False),  # nothing of them is computed
        ((SIZE, 4, 1), [0, 1, 2, 3, 4, 5, 6, 7], False),  # a step has one group
        ((3, 2, 2), [0, 1, 2, 3, 4, 5, 6, 7], False),  # steps cut groups
    ],
)
def test_what_is_dealt_follows_from_the_settings_and_what_is_computed(monkeypatch, sizes, computed, moved):
    """The first process has long groups behind short ones; a step may take all of them, or one."""
    microbatch, generations, accumulation = sizes
    args = SimpleNamespace(
        num_generations=SIZE, steps_per_generation=generations, gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=microbatch,
    )  # fmt: skip
    lengths = [[1, 1, 9, 9], [1, 1, 1, 1]]

    def deal(rank, accelerator):
        return dealt(samples_of(rank, lengths[rank]), computed, args, accelerator)

    found = in_threads(monkeypatch, 2, deal)
    stayed = [names(samples) == names(samples_of(rank, lengths[rank])) for rank, samples in enumerate(found)]
    assert stayed == [not moved] * 2
    if moved:
        shares = [sum(len(sample.tokens) for sample in samples) for samples in found]
        assert abs(shares[0] - shares[1]) <= SIZE
