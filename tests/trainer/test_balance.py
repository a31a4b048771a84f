"""Groups change places between processes so that each has as much to compute, and nothing else changes."""

import statistics
import threading

import pytest
import torch
from qerl.trainer.batch import GROUP_KEY

from bench.lengths import draw_lengths
from qerl.trainer import balance
from qerl.trainer.balance import balanced, moves, owners

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


def batch_of(rank, lengths, prompt_width):
    """Samples whose tokens name their process and place; widths differ between processes."""
    count = len(lengths) * SIZE
    own = torch.tensor([length for length in lengths for _ in range(SIZE)])
    mask = (torch.arange(int(own.max())) < own[:, None]).long()
    names = 100 * (rank + 1) + torch.arange(count)
    prompts = (names // SIZE * SIZE)[:, None].repeat(1, prompt_width)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": names[:, None] * mask,
        "completion_mask": mask,
        "sampling_per_token_logps": -names[:, None] * mask.float(),
        "advantages": names.float(),
        GROUP_KEY: torch.arange(count) // SIZE,
        "num_items_in_batch": torch.tensor(77),
    }


def balanced_in_threads(monkeypatch, lengths):
    """The batch of each process, in steps of two groups each."""
    meeting, found = Meeting(len(lengths)), [None] * len(lengths)
    monkeypatch.setattr(balance, "gather_object", meeting.gather_object)

    def process(rank):
        meeting.rank.number = rank
        batch = batch_of(rank, lengths[rank], prompt_width=3 + rank)
        try:
            found[rank] = balanced(batch, lengths[rank], span=2, size=SIZE, pad=0, accelerator=meeting)
        except Exception as error:
            meeting.barrier.abort()  # nobody waits for who has died
            found[rank] = error

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(lengths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [each for each in found if isinstance(each, Exception)]
    assert not failed, failed
    return found


def test_a_process_that_keeps_its_groups_meets_those_that_change_theirs(monkeypatch):
    found = balanced_in_threads(monkeypatch, [[9, 9], [1, 1], [5, 5]])
    names = [sorted(batch["advantages"].long().tolist()) for batch in found]
    assert names == [[100, 101, 202, 203], [102, 103, 200, 201], [300, 301, 302, 303]]


def test_samples_arrive_whole_and_stay_in_their_step(monkeypatch):
    """Two steps of two groups each: the first process has the two long ones of the second step."""
    lengths = [[1, 2, 9, 9], [2, 1, 1, 1]]
    found = balanced_in_threads(monkeypatch, lengths)
    names = [batch["advantages"].long().tolist() for batch in found]
    assert [name // 100 - 1 for name in names[0][:4] + names[1][:4]] == [0] * 4 + [1] * 4, "as they were"
    assert sorted(names[0][4:] + names[1][4:]) == [*range(104, 108), *range(204, 208)]
    for batch in found:
        assert batch["completion_mask"][4:].sum() == SIZE * (9 + 1)
        assert batch[GROUP_KEY].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert batch["num_items_in_batch"] == 77
        for row, name in enumerate(batch["advantages"].long().tolist()):
            rank, place = name // 100 - 1, name % 100 // SIZE
            mask = batch["completion_mask"][row].bool()
            assert mask.sum() == lengths[rank][place]
            assert batch["completion_ids"][row][mask].unique().tolist() == [name]
            assert batch["sampling_per_token_logps"][row][mask].unique().tolist() == [-name]
            assert batch["prompt_mask"][row].sum() == 3 + rank
            assert batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].unique() == name // SIZE * SIZE
