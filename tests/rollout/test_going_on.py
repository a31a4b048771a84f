"""Sessions that are entered again, and sequences that begin with what an earlier session drew of them."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import Begun, SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.rows import Rows
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.stops import StopTokens
from tests.support.machine import Forgetful, Forgotten
from tests.support.models import move_adapter

PROMPTS = [[5, 7, 11], [9, 4]]
SAMPLES = 2
PARAMS = SamplingParams(max_tokens=9, seed=5)
ENGINES = ["portable", pytest.param("paged", marks=pytest.mark.slow)]


@pytest.fixture
def make(tiny_model):
    def build(kind):
        torch.manual_seed(0)
        model = tiny_model("qwen3", vocab_size=61, num_hidden_layers=1)
        model = move_adapter(add_lora(model, rank=4, alpha=8, dropout=0.0)).eval()
        if kind == "portable":
            return PortableEngine(model, 0)
        pace = Pace(round_steps=2, spare_rounds=0, prefill_tokens=(8, 72))
        return PagedEngine(model, 0, 4, machine=Forgetful(), pace=pace)

    return build


def drawn(session, found=None):
    found = {} if found is None else found
    while session.busy:
        found |= {turn.index: turn.completion for turn in session.next_finished()}
    return found


def whole(engine):
    with engine.session(PARAMS) as session:
        session.start(PROMPTS, SAMPLES)
        return drawn(session)


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for index, completion in found.items():
        assert completion.token_ids == expected[index].token_ids
        assert completion.finish_reason == expected[index].finish_reason
        assert completion.logprobs == pytest.approx(expected[index].logprobs, abs=1e-5)
        assert completion.entropies == pytest.approx(expected[index].entropies, abs=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_session_that_is_entered_again_goes_on_with_its_keys(make, kind):
    engine = make(kind)
    expected = whole(engine)
    with engine.session(PARAMS) as session:
        indices = session.start(PROMPTS, SAMPLES)
        session.next(one_round=True)
        session.next(one_round=True)
    lengths = [session.length(index) for index in indices]
    assert all(0 < length < 9 for length in lengths)
    engine.pause()
    computed = session.prefilled_tokens
    with engine.session(PARAMS, going_on=session) as entered:
        assert entered is session
        found = drawn(session)
    assert session.prefilled_tokens == computed, "nothing is computed again"
    same(found, expected)


@pytest.mark.parametrize("kind", ENGINES)
def test_what_is_left_is_what_another_session_begins_with(make, kind):
    """One sequence has ended, and comes first as it ended; the others go on."""
    engine = make(kind)
    expected = whole(engine)
    stop = expected[1].token_ids[2]
    ends = {i: e.token_ids.index(stop) + 1 for i, e in expected.items() if stop in e.token_ids}
    params = SamplingParams(max_tokens=9, seed=5, stops=(StopTokens([stop]),))
    with engine.session(params) as session:
        session.start(PROMPTS, SAMPLES)
        found = {}
        while not found:
            found = {turn.index: turn.completion for turn in session.next_finished(one_round=True)}
        assert 1 in found
    left = session.leave()
    assert sorted(left) == sorted(set(range(4)) - set(found))
    for index, begun in left.items():
        assert begun.token_ids == expected[index].token_ids[: len(begun.token_ids)]
        assert begun.finish_reason is None and len(begun.token_ids) > 0
    ended = {i: Begun(c.token_ids, c.logprobs, c.entropies, c.finish_reason) for i, c in found.items()}
    begun = [(left | ended)[index] for index in range(4)]
    with engine.session(params) as session:
        indices = session.start(PROMPTS, SAMPLES, begun=begun)
        assert [session.length(index) for index in indices] == [len(each.token_ids) for each in begun]
        first = session.next()
        assert {turn.index for turn in first} == set(found)
        again = {turn.index: turn.completion for turn in first}
        assert {i: c.token_ids for i, c in again.items()} == {i: c.token_ids for i, c in found.items()}
        for turn in first:
            session.finish(turn.index)
        again = drawn(session, again)
    for index, completion in again.items():
        assert completion.token_ids == expected[index].token_ids[: ends.get(index, 9)]
        assert completion.logprobs == pytest.approx(expected[index].logprobs[: ends.get(index, 9)], abs=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_session_that_nobody_asked_is_left_with_what_it_was_begun_with(make, kind):
    engine = make(kind)
    begun = [Begun([3, 4], [-1.0, -2.0], [1.0, 1.0]), Begun([5], [-3.0], [1.0], "stop")]
    with engine.session(PARAMS) as session:
        session.start([[7, 8], [9]], 1, begun=begun)
    assert session.leave() == dict(enumerate(begun))
    with engine.session(PARAMS) as session, pytest.raises(QeRLError, match="3 beginnings for 2 sequences"):
        session.start([[7, 8], [9]], 1, begun=[*begun, begun[0]])


@pytest.mark.parametrize("kind", ENGINES)
def test_keys_that_were_given_up_are_computed_again(make, kind):
    engine = make(kind)
    expected = whole(engine)
    for lose in (engine.release, widen(engine)) if kind == "paged" else (engine.release,):
        with engine.session(PARAMS) as session:
            session.start(PROMPTS, SAMPLES)
            session.next(one_round=True)
        computed = session.prefilled_tokens
        lose()
        with engine.session(PARAMS, going_on=session):
            found = drawn(session)
        assert session.prefilled_tokens > computed
        same(found, expected)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("every", [1, 2])
def test_a_release_between_rounds_changes_nothing(make, kind, every):
    """Of sequences that begin, draw, and are written to between turns; some have to wait for a row."""
    engine = make(kind)
    if kind == "portable":
        engine._max_sequences = 3
    params = SamplingParams(max_tokens=9, seed=5, stop_token_ids=tuple(range(0, 61, 5)))

    def play(every):
        found, others, rounds = [], [[]] * 2, 0  # others write for two rounds
        with engine.session(params, growing=True) as session:
            session.start(PROMPTS, SAMPLES)
        while session.busy or any(others):
            with engine.session(params, going_on=session):
                ended = session.next(one_round=True)
                found += [(turn.index, turn.completion) for turn in ended]
                others.append([turn.index for turn in ended])
                for index in others.pop(0):
                    if session.room(index) > 2:
                        session.go_on(index, [7, 8])
                    else:
                        session.finish(index)
            rounds += 1
            if every and rounds % every == 0:
                engine.release()
                if kind == "portable":
                    assert session._runner is None and not session._kept and not session._wave.rows
        return sorted(found, key=lambda turn: turn[0]), session.prefilled_tokens

    (expected, few), (found, many) = play(0), play(every)
    assert many > few and len(found) > 6
    for (index, turn), (other, without) in zip(found, expected, strict=True):
        assert index == other and turn.token_ids == without.token_ids
        assert turn.finish_reason == without.finish_reason
        assert turn.logprobs == pytest.approx(without.logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_release_while_all_wait_for_others_changes_nothing(make, kind):
    engine = make(kind)
    ends = SamplingParams(max_tokens=9, seed=5, stop_token_ids=tuple(range(0, 61, 2)))

    def play(release):
        with engine.session(ends) as session:
            indices = session.start(PROMPTS, SAMPLES)
            while session.busy:
                session.next()
        if release:
            engine.release()
        with engine.session(ends, going_on=session):
            for index in indices:
                if session.room(index) > 2:
                    session.go_on(index, [7, 8])
            # Where it is gone a GPU would stop with an illegal address; the interpreter writes on.
            assert kind == "portable" or not engine.cache.given_up
            return drawn(session)

    expected = play(release=False)
    assert len(expected) > 1
    same(play(release=True), expected)


def test_those_that_ran_run_again_before_those_that_wait(make):
    engine = make("portable")
    engine._max_sequences = 2
    with engine.session(PARAMS, growing=True) as session:
        session.start(PROMPTS, SAMPLES)
        session.next(one_round=True)
    ran = [index for index in range(4) if session.length(index)]
    engine.release()
    with engine.session(PARAMS, going_on=session):
        session.next(one_round=True)
        assert [session.length(index) for index in ran] == [2, 2]
        assert sum(session.length(index) for index in range(4)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_cache_whose_memory_others_hold_is_made_anew_and_smaller(make, monkeypatch, share):
    """Or, if not even one sequence fits, that is said."""
    engine = make("paged")
    expected = whole(engine)
    with engine.session(PARAMS) as session:
        session.start(PROMPTS, SAMPLES)
        session.next(one_round=True)
    blocks, held = engine.cache.blocks, engine.cache.held_bytes
    engine.release()

    def refuse(memory):
        raise QeRLError("Keys and values need more.")

    monkeypatch.setattr(Forgotten, "take_back", refuse)
    monkeypatch.setattr(Forgetful, "cache_bytes", lambda machine, model, freed=0: int(share * held))
    opened = engine.session(PARAMS, going_on=session)
    if share < 0.1:
        with pytest.raises(QeRLError, match="one sequence needs"), opened:
            pass
        return
    with opened:
        found = drawn(session)
    same(found, expected)
    assert engine.cache.blocks < blocks


def widen(engine):
    """Loading an adapter of a higher rank replaces the buffers that captured steps read."""

    def load():
        engine.model.add_adapter(
            "wider", type(engine.model.peft_config["default"])(r=20, target_modules=["q_proj"])
        )

    return load


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("by", ["another", "leave", "reset", "error", "other engine"])
def test_a_session_that_is_over_is_not_entered_and_says_what_it_has(make, kind, by):
    engine = make(kind)
    if by == "reset" and kind == "portable":
        pytest.skip("a reset leaves its session as it is")
    expected = whole(engine)
    try:
        with engine.session(PARAMS) as session:
            session.start(PROMPTS, SAMPLES)
            session.next(one_round=True)
            if by == "error":
                raise KeyError
    except KeyError:
        pass
    assert session.over == (by == "error")
    if by == "another":
        engine.generate([[3, 1, 4]], 4, PARAMS)
    elif by in ("leave", "reset"):
        getattr(session if by == "leave" else engine, by)()
    other = make(kind) if by == "other engine" else engine
    with pytest.raises(QeRLError, match=r"This session is over, .* what its method leave returns"):
        other.session(PARAMS, going_on=session).__enter__()
    if by != "error":
        for index, begun in session.leave().items():
            assert begun.token_ids and session.length(index) == len(begun.token_ids)
            assert begun.token_ids == expected[index].token_ids[: len(begun.token_ids)]


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_keeps_no_session_and_no_step_of_one(make, kind):
    engine = make(kind)
    with engine.session(PARAMS) as session:
        session.start(PROMPTS, SAMPLES)
        session.next(one_round=True)
    kept = [weakref.ref(session)]
    if kind == "paged":
        kept.append(weakref.ref(session._step))
    del session
    engine.reset()
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


@pytest.mark.slow
def test_an_engine_that_is_reset_has_what_a_new_one_has(make):
    engine = make("paged")
    expected = whole(engine)
    taken = engine.cache.blocks
    engine.generate([[1] * 3], 4, SamplingParams(max_tokens=70, seed=1, stop_token_ids=(*range(20),)))
    assert engine.cache.blocks > taken
    engine.reset()
    assert not any(engine.cache.blocks) and not engine.graphs.steps and not engine.graphs.serves(1, 1)
    same(whole(engine), expected)
    assert engine.cache.blocks == taken


@pytest.mark.parametrize("kind", ENGINES)
def test_others_have_their_time_in_each_round(make, kind):
    engine, rounds, calls = make(kind), [], []
    expected = whole(engine)
    with engine.session(PARAMS) as session:
        session.start(PROMPTS, SAMPLES)
        found = {}
        while session.busy:
            for turn in session.next(one_round=True, meanwhile=lambda: calls.append(len(rounds))):
                found[turn.index] = turn.completion
                session.finish(turn.index)
            rounds.append(found)
        assert session.next(meanwhile=lambda: calls.append(-1)) == []
    assert len(rounds) > 3 and calls == [*range(len(rounds))]
    same(found, expected)


@pytest.mark.slow
def test_others_have_it_once_the_steps_were_given_to_the_device(make, monkeypatch):
    order = []

    def noting(owner, name):
        plain = getattr(owner, name)

        def note(*args):
            order.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, note)

    noting(DecodeStep, "decode")
    noting(Rows, "read")
    with make("paged").session(PARAMS) as session:
        session.start(PROMPTS, SAMPLES)
        session.next(one_round=True, meanwhile=lambda: order.append("others"))
    assert order == ["decode", "others", "read"]
