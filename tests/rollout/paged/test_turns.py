"""Scheduling of turns: what lies in the blocks is always what sequences have, kept or computed again."""

import random

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.scheduler import Pace, Scheduler
from qerl.rollout.session import new_sequences
from tests.support.sequences import queued

BLOCK = 4


class Machine:
    """Plays the engine on a cache that holds tokens instead of their keys and values."""

    def __init__(self, blocks, rows, seed, **pace):
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(BlockManager(blocks, BLOCK), rows, Pace(**({"spare_rounds": 0} | pace)))
        self.slots = {}
        self.prefilled = self.preempted = 0

    def round(self):
        """One round; every sequence draws until its ``stop`` or ``max_tokens``; gives those that ended."""
        scheduler = self.scheduler
        planned = scheduler.next_round()
        assert scheduler.running, "a round in which nothing runs would never end"
        self.prefilled += planned.prefilled_tokens
        self.preempted += len(planned.preempted)
        for span in planned.spans():
            for i, token in enumerate(span.token_ids, span.start):
                self.slots[span.blocks[0][i // BLOCK], i % BLOCK] = token
        generated, ended = {}, []
        for row, sequence in scheduler.running.items():
            self.decode(sequence)
            generated[row] = len(sequence.token_ids)
            if sequence.room == 0 or len(sequence.token_ids) >= sequence.stop:
                ended.append(row)
        sequences = [scheduler.running[row] for row in ended]
        scheduler.advance(generated, ended)
        self.check()
        return sequences

    def decode(self, sequence):
        """What a round's steps write and see."""
        prompt = sequence.prompt
        for _ in range(self.scheduler.pace.round_steps):
            place = len(sequence.token_ids)
            self.slots[sequence.blocks[0][place // BLOCK], place % BLOCK] = sequence.last_token
            own = [self.slots.get((sequence.blocks[0][i // BLOCK], i % BLOCK)) for i in range(place + 1)]
            assert own == [prompt.token_ids[-1], *sequence.token_ids]
            shared = [
                self.slots.get((prompt.blocks[0][i // BLOCK], i % BLOCK)) for i in range(prompt.cached_tokens)
            ]
            assert shared == prompt.token_ids[:-1]
            sequence.token_ids.append(self.rng.random())
            if sequence.room == 0 or len(sequence.token_ids) >= sequence.stop:
                return

    def check(self):
        """Nobody holds a block that is free or another's; all others are free."""
        scheduler = self.scheduler
        sequences = [*scheduler.running.values(), *scheduler.waiting, *scheduler.idle.values()]
        holding = [sequence for sequence in sequences if sequence.blocks.get(0)]
        prompts = {sequence.prompt.number: sequence.prompt for sequence in holding}
        used = [block for each in (*holding, *prompts.values()) for block in each.blocks[0]]
        assert len(used) == len(set(used))
        assert len(used) + scheduler.memory.free == scheduler.memory.count


def play(machine, sequences, most_turns=6):
    """Random turns: tools answer after some rounds, in any order; gives the number of turns of each."""
    rng, scheduler = machine.rng, machine.scheduler
    turns, answers = dict.fromkeys(sequences, 0), []
    for sequence in sequences:
        sequence.stop = rng.randint(1, sequence.max_tokens)
    while scheduler.busy or answers:
        for sequence in machine.round() if scheduler.busy else []:
            turns[sequence] += 1
            answers.append((rng.randint(0, 5), sequence))
        for late, sequence in answers:
            if late > 0:
                continue
            if sequence.room > 1 and turns[sequence] < most_turns:
                sequence.write([rng.random() for _ in range(rng.randint(0, sequence.room - 1))])
                sequence.stop = len(sequence.token_ids) + rng.randint(1, sequence.room)
                scheduler.resume(sequence)
            else:
                scheduler.finish(sequence)
        answers = [(late - 1, sequence) for late, sequence in answers if late > 0]
    assert not scheduler.idle
    assert scheduler.memory.free == scheduler.memory.count
    return turns


def test_random_turns_end_and_leave_no_block():
    preempted = 0
    for seed in range(150):
        rng = random.Random(seed)
        machine = Machine(rng.randint(12, 40), rng.choice([1, 3, 8]), seed, round_steps=rng.choice([1, 3, 7]))
        prompts = [[rng.random() for _ in range(rng.randint(1, 17))] for _ in range(rng.randint(1, 6))]
        samples = rng.randint(1, 5)
        limits = [rng.randint(1, 30) for _ in range(len(prompts) * samples)]
        sequences = queued(machine.scheduler, prompts, limits)
        turns = play(machine, sequences)
        assert min(turns.values()) >= 1
        preempted += machine.preempted
    assert preempted > 30


def idle_pair(blocks):
    """Two sequences of one prompt, the first idle after four tokens, the second running."""
    machine = Machine(blocks, rows=2, seed=0, round_steps=4)
    first, second = queued(machine.scheduler, [[0.5] * 9], [24] * 2)
    first.stop, second.stop = 4, 99
    assert machine.round() == [first]
    return machine, first, second


def test_only_what_others_wrote_is_computed_where_blocks_are_kept():
    machine, first, _ = idle_pair(blocks=20)
    before = machine.prefilled
    first.write([0.1, 0.2, 0.3])
    first.stop = 12
    machine.scheduler.resume(first)
    machine.round()
    assert machine.prefilled - before == 3


def test_idle_sequences_lose_their_blocks_before_any_that_runs():
    machine, first, second = idle_pair(
        blocks=8
    )  # two are the prompt's, two each one's own; the second takes six
    while second.row is not None and first.blocks:
        machine.round()
    assert not machine.preempted and not first.blocks and second.blocks
    first.write([0.1])
    first.stop = 6
    machine.scheduler.resume(first)
    before = machine.prefilled
    while first in machine.scheduler.waiting or first.row is not None:
        machine.round()
    assert machine.prefilled - before == 9 + 5  # the prompt, which nobody held, and its own
    assert len(first.token_ids) == 6


def test_a_sequence_that_goes_on_enters_before_those_that_have_not_begun():
    machine = Machine(100, rows=1, seed=0, round_steps=4)
    first, second, third = queued(machine.scheduler, [[0.5]], [24] * 3)
    first.stop, second.stop, third.stop = 4, 4, 4
    machine.round()
    machine.round()
    first.write([0.1])
    machine.scheduler.resume(first)
    assert list(machine.scheduler.waiting) == [first, third]


def test_another_cache_is_filled_anew():
    machine, first, second = idle_pair(blocks=20)
    machine.scheduler.suspend(BlockManager(30, BLOCK))
    machine.slots.clear()
    first.write([0.1])
    first.stop = second.stop = 9
    machine.scheduler.resume(first)
    while machine.scheduler.busy:
        machine.round()
    assert len(first.token_ids) == len(second.token_ids) == 9


def test_a_sequence_without_room_is_never_queued():
    scheduler = Scheduler(BlockManager(2, BLOCK), 2, Pace())
    none, some = sequences = new_sequences([[0] * 100, [0]], [SamplingParams(3)] * 2, positions=100)
    scheduler.add(sequences)
    assert list(scheduler.waiting) == [some]
    scheduler.finish(none)
    assert [none.index, some.index] == [0, 1] and some.prompt.number == 1
