"""Scheduling of turns: what lies in the blocks is always what sequences have, kept or computed again."""

import random

import pytest

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.blocks import GONE, memory_of
from qerl.rollout.paged.limits import window_blocks
from qerl.rollout.paged.scheduler import Pace, Scheduler
from qerl.rollout.session import new_sequences
from tests.support.sequences import queued

BLOCK = 4


class Machine:
    """Plays the engine on a cache that holds tokens instead of their keys and values.

    Args:
        blocks: Of each pool.
        rows, seed, pace: As usual.
        windows: Of each pool; None for one whose layers see everything, "state" for one of states, each of
            which is the list of all tokens that it has read.
        pass_tokens: Tokens of a pass of prefill.
    """

    def __init__(self, blocks, rows, seed, windows=(None,), pass_tokens=5, **pace):
        self.rng, self.windows, self.pass_tokens = random.Random(seed), windows, pass_tokens
        self.scheduler = Scheduler(self.memory(blocks), rows, Pace(**({"spare_rounds": 0} | pace)))
        self.slots = {}
        self.prefilled = self.preempted = 0

    def memory(self, blocks):
        counts = [blocks] * len(self.windows) if isinstance(blocks, int) else blocks
        return memory_of(counts, self.windows, BLOCK, self.pass_tokens)

    def round(self):
        """One round; every sequence draws until its ``stop`` or ``max_tokens``; gives those that ended."""
        scheduler = self.scheduler
        planned = scheduler.next_round()
        assert scheduler.running, "a round in which nothing runs would never end"
        self.prefilled += planned.prefilled_tokens
        self.preempted += len(planned.preempted)
        spans = planned.prompt_spans()
        for span in spans:
            self.begin(span.blocks)
        self.prefill(spans)
        for block, source in planned.copies.items():
            self.copy(block, source)
        self.prefill(planned.own_spans())
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

    def copy(self, block, source):
        pool = self.windows.index("state")
        self.slots[pool, block] = [] if source is None else self.slots[pool, source].copy()

    def begin(self, blocks):
        """A prompt that enters has read nothing."""
        for pool, window in enumerate(self.windows):
            if window == "state":
                self.slots[pool, blocks[pool][0]] = []

    def prefill(self, spans):
        for span in spans:
            before = span.position - span.start  # tokens of its prompt
            for first in range(0, len(span.token_ids), self.pass_tokens):
                piece = span.token_ids[first : first + self.pass_tokens]
                for i, token in enumerate(piece, span.start + first):
                    self.write(span.blocks, i, (before + i, token))
                for i in range(span.start + first, span.start + first + len(piece)):
                    self.see(span.blocks, span.prompt_blocks, before, i)

    def write(self, blocks, place, value):
        for pool, window in enumerate(self.windows):
            if window == "state":
                self.slots[pool, blocks[pool][0]].append(value)
            else:
                self.slots[pool, blocks[pool][place // BLOCK], place % BLOCK] = value

    def see(self, own, shared, before, place):
        """What a token sees in each pool, which is what lies at the positions before it."""
        found = []
        for pool, window in enumerate(self.windows):
            if window == "state":
                seen = self.slots[pool, own[pool][0]]
                assert [position for position, _ in seen][: before + place + 1] == [
                    *range(before + place + 1)
                ]
                found.append([token for _, token in seen][: before + place + 1])
                continue
            first = 0 if window is None else max(0, before + place - window + 1)
            seen = [
                self.slots.get((pool, table[pool][i // BLOCK], i % BLOCK))
                for table, start, stop in ((shared, first, before), (own, max(0, first - before), place + 1))
                for i in range(start, stop)
            ]
            assert [position for position, _ in seen] == [*range(first, before + place + 1)]
            found.append([token for _, token in seen])
        return found

    def decode(self, sequence):
        """What a round's steps write and see."""
        prompt = sequence.prompt
        for _ in range(self.scheduler.pace.round_steps):
            place, before = prompt.tail + len(sequence.token_ids), prompt.shared_tokens
            self.write(sequence.blocks, place, (before + place, sequence.last_token))
            text = [*prompt.token_ids, *sequence.token_ids]
            for seen in self.see(sequence.blocks, prompt.blocks, before, place):
                assert seen == text[-len(seen) :]
            sequence.token_ids.append(self.rng.randrange(1 << 30))
            if sequence.room == 0 or len(sequence.token_ids) >= sequence.stop:
                return

    def check(self):
        """Nobody holds a block that is free or another's; all others are free."""
        scheduler = self.scheduler
        sequences = [*scheduler.running.values(), *scheduler.waiting, *scheduler.idle.values()]
        holding = [sequence for sequence in sequences if sequence.blocks]
        prompts = {sequence.prompt.number: sequence.prompt for sequence in holding}
        for pool, window in enumerate(self.windows):
            held = [set(each.blocks[pool]) - {GONE} for each in (*holding, *prompts.values())]
            used = [block for blocks in held for block in blocks]
            assert len(used) == len(set(used))
            counts = scheduler.memory.count, scheduler.memory.free
            count, free = (each if isinstance(each, int) else each[pool] for each in counts)
            assert len(used) + free == count
            if window is not None:
                assert all(
                    len(blocks) <= window_blocks(999, window, self.pass_tokens, BLOCK) for blocks in held
                )


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
                sequence.write([rng.randrange(1 << 30) for _ in range(rng.randint(0, sequence.room - 1))])
                sequence.stop = len(sequence.token_ids) + rng.randint(1, sequence.room)
                scheduler.resume(sequence)
            else:
                scheduler.finish(sequence)
        answers = [(late - 1, sequence) for late, sequence in answers if late > 0]
    assert not scheduler.idle
    assert scheduler.memory.free == scheduler.memory.count
    return turns


@pytest.mark.parametrize(
    "windows", [(None,), (3,), (None, 6), (9, None), ("state", None), (None, 6, "state")]
)
def test_random_turns_end_and_leave_no_block(windows):
    preempted = 0
    for seed in range(150):
        rng = random.Random(seed)
        steps = rng.choice([1, 3, 7])
        prompts = [
            [rng.randrange(1 << 30) for _ in range(rng.randint(1, 17))] for _ in range(rng.randint(1, 6))
        ]
        samples, passes = rng.randint(1, 5), rng.randint(steps, 9)
        limits = [rng.randint(1, 30) for _ in range(len(prompts) * samples)]
        longest = max(len(prompt) for prompt in prompts) - 1, max(limits)
        least = [sum(window_blocks(n, window, passes, BLOCK) for n in longest) for window in windows]
        blocks = least if seed % 3 else rng.randint(12, 40)
        machine = Machine(blocks, rng.choice([1, 3, 8]), seed, windows, passes, round_steps=steps)
        sequences = queued(machine.scheduler, prompts, limits)
        turns = play(machine, sequences)
        assert min(turns.values()) >= 1
        preempted += machine.preempted
    assert preempted > 10


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
    machine.scheduler.suspend(machine.memory(30))
    machine.slots.clear()
    first.write([0.1])
    first.stop = second.stop = 9
    machine.scheduler.resume(first)
    while machine.scheduler.busy:
        machine.round()
    assert len(first.token_ids) == len(second.token_ids) == 9


def test_a_sequence_without_room_is_never_queued():
    scheduler = Scheduler(memory_of([2], [None], BLOCK, 5), 2, Pace())
    none, some = sequences = new_sequences([[0] * 100, [0]], [SamplingParams(3)] * 2, positions=100)
    scheduler.add(sequences)
    assert list(scheduler.waiting) == [some]
    scheduler.finish(none)
    assert [none.index, some.index] == [0, 1] and some.prompt.number == 1
