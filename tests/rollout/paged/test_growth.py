"""Memory of a paged session to which sequences come later: what it takes at once, and what it keeps.

Cache and books are the engine's own; the machine says scripted texts.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.limits import BlockDemand
from tests.support.limited_pages import BLOCK_BYTES, POSITIONS, made


def play(session, joins=()):
    """Decode to the end; before each round but the first the next of the joins starts, (prompt, samples,
    limit). Gives the tokens of each sequence."""
    found, joins = {}, list(joins)
    while session.busy or joins:
        for ended in session.next(one_round=True) if session.busy else ():
            found[ended.index] = len(ended.completion.token_ids)
            session.finish(ended.index)
        if joins:
            prompt, samples, limit = joins.pop(0)
            session.start([[5] * prompt], samples, [SamplingParams(limit)] * samples)
    return found


PARAMS = SamplingParams(max_tokens=POSITIONS)
JOINS = [(40, 1, 200), (300, 2, 150), (7, 1, 256), (512, 4, 40), (100, 3, 130)]
"""With the eight of `test_joins_keep...`, 19 sequences of up to 512 and 256 tokens."""


def test_joins_keep_what_was_captured_and_computed():
    """A few at a time, with longer prompts and limits than those before, for which the first took room."""
    engine = made()
    with engine.session(PARAMS, growing=True) as session:
        session.start([[5] * 400], 20, [SamplingParams(180)] * 20)
        play(session)
        before = engine.parts.cache.layers
        session.start([[5] * 400], 8, [SamplingParams(180)] * 8)
        found = play(session, JOINS)
        assert session.prefilled_tokens == 2 * 400 + sum(prompt for prompt, _, _ in JOINS)
    assert engine.parts.cache.layers is before
    assert engine.parts.graphs.forgotten == 1
    limits = [180] * 8 + [limit for _, samples, limit in JOINS for _ in range(samples)]
    assert [found[index] for index in sorted(found)] == limits


def test_rows_are_taken_some_at_a_time():
    engine = made()
    with engine.session(PARAMS, growing=True) as session:
        session.start([[5] * 300], 1, [SamplingParams(200)])
        play(session, [(300, 1, 200)] * 30)
    # For 1, 2, 4, 8, 12, 16, 24 and 32 rows; 200 tokens are 29 rounds.
    assert engine.parts.graphs.forgotten <= 8


@pytest.mark.slow
def test_what_has_ended_takes_no_room():
    for growing in (False, True):
        engine = made()
        with engine.session(PARAMS, growing=growing) as session:
            session.start([[5] * 300], 4, [SamplingParams(200)] * 4)
            play(session)
            blocks = engine.parts.cache.blocks
            for _ in range(30):
                session.start([[5] * 300], 4, [SamplingParams(200)] * 4)
                play(session)
        assert engine.parts.cache.blocks == blocks
        assert engine.parts.graphs.forgotten == 1


def test_a_session_that_does_not_grow_takes_what_the_plan_counts():
    engine = made()
    with engine.session(PARAMS) as session:
        session.start([[5] * 300, [5] * 9], 3, [SamplingParams(200)] * 6)
    assert engine.parts.cache.blocks == BlockDemand(300, 200, 3).blocks(6) == (6 * 4 + 3 * 5,)
    engine = made()
    with engine.session(PARAMS, growing=True) as session:
        session.start([[5] * 300, [5] * 9], 3, [SamplingParams(200)] * 6)
    assert engine.parts.cache.blocks == BlockDemand(512, 256, 1).blocks(8) == (8 * 4 + 9 * 8,)


@pytest.mark.parametrize("blocks", [9, 10, 60])
def test_room_ahead_is_taken_as_far_as_memory_goes(blocks):
    """One sequence needs 5 + 4 blocks and, with room ahead, 8 + 8 + 4; nine hold it as it is."""
    engine = made(blocks)
    with engine.session(PARAMS, growing=True) as session:
        session.start([[5] * 300], 1, [SamplingParams(200)])
        assert engine.parts.cache.blocks == (min(blocks, 2 * 8 + 4),)
        assert play(session, [(300, 5, 200)]) == dict.fromkeys(range(6), 200)
    assert engine.parts.graphs.forgotten == (2 if blocks == 60 else 1)  # all there is is kept
    engine = made(8)
    with engine.session(PARAMS, growing=True) as session, pytest.raises(QeRLError, match="one sequence"):
        session.start([[5] * 300], 1, [SamplingParams(200)])


@pytest.mark.parametrize("machine", [{"blocks": 9}, {"share": 9}])
def test_a_join_that_does_not_fit_leaves_the_others_as_they_are(machine):
    """One of 5 + 4 blocks runs and one waits for them; what is refused needs 5 + 5."""
    engine = made(**machine)
    with engine.session(PARAMS, growing=True) as session:
        session.start([[5] * 300, [6] * 300], 1, [SamplingParams(200)] * 2)
        session.next(one_round=True)
        scheduler, cache = session._scheduler, engine.parts.cache
        keys, step, manager = cache.layers, session._step, scheduler.memory
        (running,), (waiting,) = scheduler.running.values(), scheduler.waiting
        held = list(running.blocks[0])
        assert held and step is not None and cache.blocks == (9,)
        for _ in range(2):
            with pytest.raises(QeRLError, match="one sequence needs"):
                session.start([[5] * 300], 8, [SamplingParams(300)] * 8)
        assert cache.layers is keys and session._step is step and scheduler.memory is manager
        assert running.blocks[0] == held and running.row is not None and list(scheduler.waiting) == [waiting]
        assert play(session) == {0: 200, 1: 200}
        assert session.prefilled_tokens == 600
        session.start([[5] * 300], 8, [SamplingParams(200)] * 8)
        assert play(session) == dict.fromkeys(range(2, 10), 200)
    assert engine.parts.graphs.forgotten == 1


def test_sequences_that_lost_their_cache_draw_nothing_until_there_is_another():
    """They had 12 blocks; of the 24 that a join was promised, others took all but 3 before it had them."""
    engine = made(24)
    promised, taken = engine.parts.budget, True
    engine.parts = replace(
        engine.parts, budget=lambda freed: promised(freed) if freed or not taken else 3 * BLOCK_BYTES
    )
    with engine.session(PARAMS, growing=True) as session:
        taken = False
        session.start([[5] * 200], 1, [SamplingParams(190)])
        session.start([[6] * 200], 1, [SamplingParams(190)])
        session.next(one_round=True)
        taken = True
        with pytest.raises(QeRLError, match="one sequence needs"):
            session.start([[5] * 850], 1, [SamplingParams(290)])
        assert engine.parts.cache.blocks == (0,)
        for _ in range(2):
            with pytest.raises(QeRLError, match="None of the 2 waiting sequences fits"):
                session.next()
        taken = False
        session.start([[7] * 200], 1, [SamplingParams(190)])
        assert play(session) == dict.fromkeys(range(3), 190)
        assert session.prefilled_tokens == 2 * 200 + 2 * (200 + 7) + 200


def test_the_memory_of_the_cache_that_is_replaced_counts_as_free():
    """12 blocks of 24 are held, and one sequence needs 19."""
    engine = made(24)
    with engine.session(PARAMS, growing=True) as session:
        session.start([[5] * 200], 1, [SamplingParams(190)])
        assert engine.parts.cache.blocks == (2 * 4 + 4,)
        session.next(one_round=True)
        assert play(session, [(850, 1, 290)]) == {0: 190, 1: 290}
    assert engine.parts.cache.blocks == (24,)


def test_a_long_prompt_and_a_long_limit_of_two_sequences_are_not_added():
    """5 + 4 and 1 + 5 blocks fit nine, each alone; 5 + 5, which neither needs, would not."""
    for prompts in ((300, 40), (40, 300)):
        engine = made(9)
        limits = {300: 200, 40: 300}
        with engine.session(PARAMS, growing=True) as session:
            session.start([[5] * prompts[0]], 1, [SamplingParams(limits[prompts[0]])])
            found = play(session, [(prompts[1], 1, limits[prompts[1]])])
            assert found == {index: limits[prompt] for index, prompt in enumerate(prompts)}


def test_lengths_ahead_are_no_longer_than_the_model():
    assert BlockDemand(300, 200, 8).ahead(4096) == BlockDemand(512, 256, 1)
    assert BlockDemand(512, 1, 8).ahead(4096) == BlockDemand(512, 1, 1)
    assert BlockDemand(700, 513, 8).ahead(1000) == BlockDemand(1000, 1000, 1)


def test_room_for_the_longest_prompt_to_come_is_taken_as_the_plan_counts_it():
    """Groups of an open call: two of eight go on side by side, those that follow have longer prompts."""
    engine = made()
    with engine.session(PARAMS, growing=True, longest_prompt=400) as session:
        session.start([[5] * 40, [6] * 40], 8, [SamplingParams(180)] * 16)
        assert engine.parts.cache.blocks == BlockDemand(400, 180, 8).blocks(16)
        layers, ended = engine.parts.cache.layers, 0
        for _ in range(5):
            while ended < 8:
                for turn in session.next():
                    session.finish(turn.index)
                    ended += 1
            ended -= 8
            session.start([[7] * 400], 8, [SamplingParams(180)] * 8)
        play(session)
    assert engine.parts.cache.layers is layers and engine.parts.graphs.forgotten == 1
