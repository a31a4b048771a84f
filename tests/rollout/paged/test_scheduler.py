"""Block manager and scheduler of the paged engine: no block leaks, nobody starves, nothing shared is lost."""

import random
import subprocess
import sys

import pytest

from qerl.errors import QeRLError
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.scheduler import Pace, Scheduler
from tests.support.sequences import queued


def run(scheduler, lengths, check=None):
    """Drives the scheduler as the engine does; returns rounds and preemptions."""
    rounds = preempted = 0
    while scheduler.busy:
        planned = scheduler.next_round()
        preempted += len(planned.preempted)
        rounds += 1
        assert scheduler.running, "a round in which nothing runs would never end"
        if check:
            check(scheduler)
        generated, finished = {}, []
        for row, sample in scheduler.running.items():
            count = min(sample.generated + scheduler.pace.round_steps, lengths[sample])
            generated[row] = count
            if count == lengths[sample]:
                finished.append(row)
        ended = [scheduler.running[row] for row in finished]
        scheduler.advance(generated, finished)
        for sample in ended:
            scheduler.finish(sample)
    return rounds, preempted


def consistent(scheduler):
    """Own blocks are disjoint, prompts' blocks are held once a reader, and held plus free is everything."""
    own, prompts = [], {}
    for row, sample in scheduler.running.items():
        assert sample.row == row
        own += sample.blocks[0]
        assert len(sample.blocks[0]) * scheduler.memory.block_tokens >= sample.own_tokens_after(
            scheduler.pace.round_steps
        )
        prompts[id(sample.prompt)] = sample.prompt
    shared = [block for prompt in prompts.values() for block in prompt.blocks[0]]
    used = own + shared
    assert len(used) == len(set(used))
    assert len(used) + scheduler.memory.free == scheduler.memory.count


def test_the_scheduler_needs_no_torch():
    code = "import sys, qerl.rollout.paged.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_no_block_leaks_after_20_000_random_requests():
    rng = random.Random(0)
    blocks = BlockManager(60, 8)
    requests = preempted = 0
    while requests < 20_000:
        scheduler = Scheduler(
            blocks, rows=rng.choice([1, 4, 16]), pace=Pace(round_steps=rng.choice([1, 4, 16]))
        )
        prompts = [[0] * rng.randint(1, 60) for _ in range(rng.randint(1, 200))]
        samples, most = rng.randint(1, 16), rng.randint(1, 100)
        added = queued(scheduler, prompts, [most] * (len(prompts) * samples))
        requests += len(added)
        lengths = {sample: rng.randint(1, most) for sample in added}
        preempted += run(scheduler, lengths, consistent if requests < 5_000 else None)[1]
        assert blocks.free == blocks.count
    assert preempted > 200


def test_a_group_prefills_its_prompt_once_and_shares_its_blocks():
    blocks = BlockManager(100, 8)
    scheduler = Scheduler(blocks, rows=8, pace=Pace(round_steps=4))
    queued(scheduler, [[0] * 17], [10] * 8)
    planned = scheduler.next_round()
    assert len(planned.prompts) == 1
    assert len(planned.admitted) == 8
    assert 100 - blocks.free == 2 + 8  # 16 cached prompt tokens; one own block each


def test_a_prompt_of_one_token_needs_no_prompt_block():
    scheduler = Scheduler(BlockManager(4, 8), rows=2, pace=Pace(round_steps=4))
    added = queued(scheduler, [[5]], [3] * 2)
    planned = scheduler.next_round()
    assert planned.prompts[0].blocks[0] == []
    assert [len(s.blocks[0]) for s in added] == [1, 1]


def test_the_last_admitted_is_preempted_and_comes_back_with_its_tokens():
    blocks = BlockManager(4, 8)
    scheduler = Scheduler(blocks, rows=2, pace=Pace(round_steps=7, spare_rounds=0))
    first, second = queued(scheduler, [[0]], [32] * 2)
    scheduler.next_round()
    scheduler.advance({0: 7, 1: 7}, [])
    scheduler.next_round()
    scheduler.advance({0: 14, 1: 14}, [])
    planned = scheduler.next_round()
    assert planned.preempted == {1: second}
    assert second.generated == 14
    assert first.row == 0
    scheduler.advance({0: 21}, [0])
    scheduler.finish(first)
    assert scheduler.next_round().admitted == [second]


def test_a_finished_row_is_refilled_at_once():
    scheduler = Scheduler(BlockManager(100, 8), rows=2, pace=Pace(round_steps=4))
    added = queued(scheduler, [[0, 0]], [8] * 3)
    scheduler.next_round()
    scheduler.advance({0: 2, 1: 4}, [0])
    assert scheduler.next_round().admitted == [added[2]]
    assert added[2].row == 0


def test_room_that_is_left_free_spares_prefilling_again():
    """Tokens of preempted sequences that are computed again, with and without room at admission."""

    def recomputed(spare):
        rng = random.Random(0)
        scheduler = Scheduler(BlockManager(800, 64), rows=128, pace=Pace(round_steps=16, spare_rounds=spare))
        added = queued(scheduler, [[0] * 200] * 32, [2048] * 256)
        lengths = {sample: min(2048, 20 + int(rng.expovariate(1 / 700))) for sample in added}
        tokens = 0

        def count(scheduler):
            nonlocal tokens
            # Whoever has tokens and has just been given blocks computes them again.
            entered = {id(s) for s in scheduler.running.values()} - running
            tokens += sum(s.generated for s in scheduler.running.values() if id(s) in entered)
            running.clear()
            running.update(id(s) for s in scheduler.running.values())

        running = set()
        rounds, _ = run(scheduler, lengths, count)
        return tokens, rounds

    (with_room, rounds), (without, before) = recomputed(Pace().spare_rounds), recomputed(0)
    print(f"prefilled again: {without} tokens in {before} rounds, with room {with_room} in {rounds}")
    assert with_room < without / 2
    assert rounds < 1.1 * before


@pytest.mark.parametrize("most", [1, 64, 128, 300])
def test_a_cache_with_room_for_every_row_fills_every_row(most):
    """Room is left free for what those that run may still need, and not beyond their last token."""
    rows = 16
    scheduler = Scheduler(BlockManager(rows * -(-most // 64), 64), rows, pace=Pace(round_steps=16))
    lengths = {
        sample: 1 + 37 * i % most for i, sample in enumerate(queued(scheduler, [[0]], [most] * (5 * rows)))
    }

    def full(scheduler):
        assert len(scheduler.running) == rows or not scheduler.waiting

    assert run(scheduler, lengths, full)[1] == 0


def test_running_sequences_are_moved_into_the_first_rows():
    scheduler = Scheduler(BlockManager(100, 4), rows=6, pace=Pace(round_steps=2))
    samples = queued(scheduler, [[1, 2, 3]], [8] * 6)
    scheduler.next_round()
    scheduler.advance(dict.fromkeys(range(6), 2), ended=[0, 2, 4])
    assert scheduler.compact(3) == {1: 1, 3: 0, 5: 2}
    assert {row: sample.index for row, sample in scheduler.running.items()} == {1: 1, 0: 3, 2: 5}
    assert [samples[i].row for i in (1, 3, 5)] == [1, 0, 2]


def test_a_prompt_that_never_fits_is_refused():
    scheduler = Scheduler(BlockManager(4, 8), rows=2, pace=Pace(round_steps=4))
    with pytest.raises(QeRLError, match="Prompt 1 has 30 tokens"):
        queued(scheduler, [[0] * 5, [0] * 30], [16, 16])


def test_misuse_of_blocks_is_an_error():
    blocks = BlockManager(2, 8)
    taken = blocks.take(2)
    with pytest.raises(QeRLError, match="are free"):
        blocks.take(1)
    blocks.release(taken)
    with pytest.raises(QeRLError, match="more often"):
        blocks.release(taken[:1])
    with pytest.raises(QeRLError, match="cannot be shared"):
        blocks.share(taken[:1])


def test_a_state_is_a_block_of_each_sequence_and_begins_as_a_copy_of_its_prompts():
    """With five blocks for two prompts and three of their samples, three run whatever their lengths."""
    memory = BlockManager(5, 8, held="state")
    scheduler = Scheduler(memory, rows=6, pace=Pace(round_steps=4, spare_rounds=0))
    samples = queued(scheduler, [[1, 2, 3], [4]], [10, 20, 300, 40] * 2)
    planned = scheduler.next_round()
    assert len(scheduler.running) == 4 and planned.prompts == [samples[0].prompt]
    (of_prompt,) = samples[0].prompt.blocks[0]
    assert planned.copies == {sample.blocks[0][0]: of_prompt for sample in samples[:4]}
    rounds, preempted = run(scheduler, {sample: sample.max_tokens for sample in samples})
    assert rounds > 70 and not preempted
    assert memory.free == 5 and not scheduler.present


def test_a_prompt_of_one_token_leaves_no_state():
    scheduler = Scheduler(BlockManager(5, 8, held="state"), rows=2, pace=Pace(round_steps=4))
    samples = queued(scheduler, [[4]], [10, 10])
    assert scheduler.next_round().copies == {sample.blocks[0][0]: None for sample in samples}


@pytest.mark.parametrize("held", [None, "state"])
def test_a_sequence_of_which_more_was_computed_than_it_has_keeps_pages_and_no_state(held):
    memory = BlockManager(9, 8, held=held)
    scheduler = Scheduler(memory, rows=2, pace=Pace(round_steps=4))
    cut, whole = queued(scheduler, [[1, 2, 3]], [10, 10])
    scheduler.next_round()
    scheduler.advance({cut.row: 2, whole.row: 4}, [cut.row, whole.row], [cut.row])
    assert memory.held(whole) and whole.cached == 4
    assert bool(memory.held(cut)) == (held is None) and cut.cached == (2 if held is None else 0)
    cut.token_ids, whole.token_ids = [5, 6], [5, 6, 7, 8]
    scheduler.resume(cut)
    scheduler.resume(whole)
    planned = scheduler.next_round()
    assert planned.admitted == [cut, whole]
    assert planned.copies == ({} if held is None else {cut.blocks[0][0]: cut.prompt.blocks[0][0]})
