"""Pages that are found by what they hold: a token sees what was said, by its policy, in whichever session."""

import random

import pytest

from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.blocks import BlockManager, KnownPages, memory_of
from qerl.rollout.paged.scheduler import Scheduler
from qerl.rollout.session import new_sequences
from tests.rollout.paged.test_turns import BLOCK, Machine, play


class Conversing(Machine):
    """A machine with sessions of several policies, one after the other on one cache, whose prompts are
    whatever was said before and more."""

    def __init__(self, blocks, rows, seed, **pace):
        self.known, self.policy, self.of_policy = KnownPages(), None, {}
        super().__init__(blocks, rows, seed, **pace)
        self.rows, self.blocks, self.texts = rows, blocks, [[]]
        self.asked = 0

    def memory(self, blocks):
        return memory_of([blocks], (None,), BLOCK, self.pass_tokens, self.known, self.policy)

    def copy(self, block, source):
        for kept in (self.slots, self.of_policy):
            kept.update({(0, block, i): kept[0, source, i] for i in range(BLOCK) if (0, source, i) in kept})

    def write(self, blocks, place, value):
        super().write(blocks, place, value)
        self.of_policy[0, blocks[0][place // BLOCK], place % BLOCK] = self.policy

    def see(self, own, shared, before, place):
        tables = [(shared, before), (own, place + 1)]
        seen = [(table[0][i // BLOCK], i % BLOCK) for table, tokens in tables for i in range(tokens)]
        assert {self.of_policy[0, block, i] for block, i in seen} == {self.policy}
        return super().see(own, shared, before, place)

    def check(self):
        """Whoever writes to a block holds it alone; nobody holds a free one; all others are free."""
        scheduler = self.scheduler
        sequences = [*scheduler.running.values(), *scheduler.waiting, *scheduler.idle.values()]
        holding = [sequence for sequence in sequences if sequence.blocks]
        prompts = {sequence.prompt.number: sequence.prompt for sequence in holding}
        tables = [each.blocks[0] for each in (*holding, *prompts.values())]
        held = {block for table in tables for block in table}
        for sequence in holding:
            written = sequence.blocks[0][sequence.own_tokens // BLOCK :]
            assert sum(block in table for block in written for table in tables) == len(written)
        assert len(held) + scheduler.memory.free == scheduler.memory.count
        assert held.isdisjoint(scheduler.memory._unused) and held.isdisjoint(scheduler.memory._free)

    def session(self, policy):
        """One session: some prompts, each with some samples, whose turns others answer."""
        self.policy, rng = policy, self.rng
        self.scheduler = Scheduler(self.memory(self.blocks), self.rows, self.scheduler.pace)
        prompts = []
        for _ in range(rng.randint(1, 4)):
            said = rng.choice(self.texts)
            said = said[: rng.randint(0, len(said))] if rng.random() < 0.3 else said
            prompts.append([*said[:40], *[rng.randrange(3) for _ in range(rng.randint(1, 9))]])
        samples = rng.randint(1, 3)
        params = [SamplingParams(rng.randint(1, 14)) for _ in range(len(prompts) * samples)]
        aligned_to = 1 if policy is None else BLOCK
        sequences = new_sequences(prompts, params, aligned_to=aligned_to)
        self.asked += sum(map(len, prompts))
        self.scheduler.add(sequences)
        play(self, sequences)
        self.texts += [each.prompt.token_ids + each.token_ids for each in sequences]


def test_what_is_seen_is_what_was_said_in_random_sessions():
    preempted = found = 0
    for seed in range(150):
        rng = random.Random(seed)
        machine = Conversing(
            rng.choice([18, 30, 90]), rng.choice([1, 3, 8]), seed, round_steps=rng.choice([1, 3, 7])
        )
        for _ in range(6):
            machine.session(rng.choice(["one", "one", "other", None]))
        preempted += machine.preempted
        found += machine.prefilled < machine.asked
    assert preempted > 10 and found > 10


def test_what_is_copied_and_what_is_found_is_not_computed():
    machine = Conversing(30, 8, 0, round_steps=2)
    machine.policy = "one"
    for expected in (10, 2):  # a prompt's last page begins with its ninth token
        machine.scheduler = Scheduler(machine.memory(30), 8, machine.scheduler.pace)
        sequences = new_sequences([TEXT], [SamplingParams(3)] * 3, aligned_to=BLOCK)
        machine.scheduler.add(sequences)
        before = machine.prefilled
        play(machine, sequences, 1)
        assert machine.prefilled - before == expected


def manager(count=9, known=None, policy="it"):
    return BlockManager(count, BLOCK, known=KnownPages() if known is None else known, policy=policy)


def entered(memory, text, max_tokens=8):
    """A sequence with this prompt, as when it has a row."""
    (sequence,) = new_sequences([text], [SamplingParams(max_tokens)], aligned_to=BLOCK)
    missing = memory.prompt_missing(sequence) + memory.missing(sequence, 1)
    free = memory.free
    assert memory.copy(sequence)
    memory.reserve(sequence, 1)
    assert free - memory.free == missing
    return sequence


def ended(memory, sequence, token_ids):
    """Let it have drawn these."""
    sequence.token_ids, sequence.generated = token_ids, len(token_ids)
    memory.reserve(sequence, 1)
    sequence.cached = sequence.own_tokens
    memory.learn(sequence)


TEXT = list(range(10))


def test_a_prompt_takes_what_it_begins_with_from_those_who_hold_it_or_did():
    memory = manager()
    first = entered(memory, TEXT)
    assert first.prompt.found == 0 and len(first.prompt.blocks[0]) == 3
    assert memory.copies(first) == {first.blocks[0][0]: first.prompt.blocks[0][2]}
    ended(memory, first, [90, 91, 92])
    second = entered(memory, [*TEXT, 90, 91, 5, 6])
    assert second.prompt.found == 12 and second.prompt.blocks[0][:3] == [
        *first.prompt.blocks[0][:2],
        first.blocks[0][0],
    ]
    memory.give_up(first)
    memory.give_up(second)
    assert memory.free == memory.count
    third = entered(memory, [*TEXT[:8], 70])
    assert third.prompt.found == 8 and third.prompt.tail == 0 and not memory.copies(third)


def test_pages_are_known_over_sessions_of_a_policy_and_to_it_alone():
    known = KnownPages()
    memory = manager(known=known)
    memory.give_up(entered(memory, TEXT))
    assert entered(manager(known=known, policy="another"), TEXT).prompt.found == 0
    assert entered(manager(known=known), TEXT).prompt.found == 8
    assert entered(manager(known=known, policy=None), TEXT).prompt.found == 0
    known.forget()
    assert entered(manager(known=known), TEXT).prompt.found == 0


def test_the_longest_unused_are_taken_first_and_of_a_text_its_end():
    memory = manager(9)
    texts = [[first, *TEXT[1:9]] for first in (50, 60, 70)]  # of two pages each
    for text in texts:
        memory.give_up(entered(memory, text, 1))
    memory.give_up(entered(memory, texts[0], 1))
    later = manager(9, memory._known)
    later.release(later.take(6))  # three were never known

    def found():
        return [entered(manager(9, memory._known), text, 1).prompt.found for text in texts]

    assert found() == [8, 0, 4]


def test_after_logits_that_are_not_finite_own_pages_are_not_known():
    memory = manager()
    sequence = entered(memory, TEXT)
    sequence.finish_reason = "error"
    ended(memory, sequence, [90, 91, 92])
    assert entered(memory, [*TEXT, 90, 91, 5]).prompt.found == 8


def test_a_sequence_that_fills_the_cache_with_its_tail_is_refused():
    memory = manager(5)
    for limit, fits in ((5, True), (7, True), (8, False)):
        (sequence,) = new_sequences([TEXT], [SamplingParams(limit)], aligned_to=BLOCK)
        if fits:
            memory.check(sequence.prompt, limit)
        else:
            with pytest.raises(QeRLError, match="needs 6 cache blocks"):
                memory.check(sequence.prompt, limit)
