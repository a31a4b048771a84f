"""Sessions of the paged engine in Triton's interpreter: several turns draw what one turn would have drawn."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import KVGeometry, Pages
from qerl.rollout.paged.scheduler import Pace, Scheduler
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.stops import StopTokens
from tests.support.machine import Eager
from tests.support.sessions import check_against, play

pytestmark = pytest.mark.slow

PROMPTS = [[5, 7, 11], [9]]
BLOCK_BYTES = KVGeometry((None,), (Pages(0, 2, 16, 4),) * 1).bytes((1,))


def paged(model, blocks=12, **settings):
    """The engine on a machine without a GPU whose cache has so many blocks at most."""
    pace = Pace(round_steps=2, spare_rounds=0, prefill_tokens=(8, 72))
    return PagedEngine(model, 0, machine=Eager(blocks * BLOCK_BYTES), pace=pace, **settings)


@pytest.fixture
def model(tiny_model):
    return tiny_model("qwen3", vocab_size=61, num_hidden_layers=1)


class Forgetful(Scheduler):
    """A scheduler that gives up the blocks of every sequence whose turn has ended."""

    def advance(self, *counts):
        super().advance(*counts)
        while self.reclaim():
            pass


@pytest.mark.parametrize("kept", [True, False])
def test_turns_draw_what_one_turn_would_have_drawn(model, monkeypatch, kept):
    """Of two sequences in one row, the second begins while others write to the first. The first one's turns
    end at a stop token, the second one's at a stop that the host finds, behind which its round drew more."""
    if not kept:
        monkeypatch.setattr("qerl.rollout.paged.session.Scheduler", Forgetful)
    whole = PortableEngine(model, 0).generate(PROMPTS, 1, SamplingParams(max_tokens=8, seed=5)).completions
    params = SamplingParams(max_tokens=8, seed=5, stop_token_ids=(whole[0].token_ids[1],))
    with paged(model, max_sequences=1).session(params) as session:
        session.start(PROMPTS, 1, [params, replace(params, stops=(StopTokens([whole[1].token_ids[2]]),))])
        found = play(session, whole, 3)
        assert not session._scheduler.idle
        assert session._scheduler.memory.free == session._scheduler.memory.count
    check_against(found, whole)
    assert [turns for *_, turns in found.values()] == [2, 2]
    # The prompts, and for each what was written and the token before it; or all but the last token.
    assert session.prefilled_tokens == (4 + 2 * 3 if kept else 4 + 4 + 5 + 6)


def test_a_last_round_has_no_more_steps_than_tokens_are_left(model, monkeypatch):
    steps, decode = [], DecodeStep.decode
    monkeypatch.setattr(DecodeStep, "decode", lambda self, count: (steps.append(count), decode(self, count)))
    lengths = [SamplingParams(max_tokens=length, seed=5) for length in (2, 5)]
    with paged(model).session(lengths[0]) as session:
        session.start(PROMPTS, 1, lengths)
        while session.busy:
            session.next_finished()
    assert steps == [2, 2, 1]


def test_a_longer_prompt_comes_while_others_run(model):
    """The cache is replaced by one that holds it, and what lay in the old one is computed again. Its sequence
    has a seed of its own, with which it draws what it would draw alone."""
    prompts = [[9], [4, *range(60), 7, 11, 13, 17]]  # the second fills two blocks
    whole = [
        PortableEngine(model, 0).generate([prompt], 1, SamplingParams(max_tokens=5, seed=seed)).completions[0]
        for prompt, seed in zip(prompts, (5, 9), strict=True)
    ]
    params = SamplingParams(max_tokens=5, seed=5, stop_token_ids=(whole[0].token_ids[0],))
    with paged(model).session(params) as session:
        session.start(prompts[:1], 1)
        assert session.next()[0].completion.token_ids == whole[0].token_ids[:1]
        session.go_on(0, whole[0].token_ids[1:2])
        session.start(prompts[1:], 1, seeds=[9])
        drawn = {}
        while session.busy:
            drawn |= {ended.index: ended.completion for ended in session.next()}
    assert drawn[0].token_ids == whole[0].token_ids[2:]
    assert drawn[0].logprobs == pytest.approx(whole[0].logprobs[2:], abs=1e-5)
    assert drawn[1].token_ids == whole[1].token_ids[: len(drawn[1].token_ids)]


def test_a_refused_join_changes_nothing_for_those_that_run_and_wait(model):
    """One holds both blocks of the cache and another waits for them; what comes late needs three."""
    whole = PortableEngine(model, 0).generate(PROMPTS, 1, SamplingParams(max_tokens=6, seed=5)).completions
    drawn = {}
    with paged(model, blocks=2).session(SamplingParams(max_tokens=6, seed=5), growing=True) as session:
        session.start(PROMPTS, 1)
        session.next(one_round=True)
        assert [each.index for each in session._scheduler.waiting] == [1]
        with pytest.raises(QeRLError, match="one sequence needs"):
            session.start([[*range(60), *range(10)]], 1)
        while session.busy:
            for ended in session.next():
                drawn[ended.index] = ended.completion
                session.finish(ended.index)
        assert session.prefilled_tokens == 3 + 1  # nothing was computed again
    for index, completion in enumerate(whole):
        assert drawn[index].token_ids == completion.token_ids
        assert drawn[index].logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_what_comes_late_joins_after_a_round(model):
    """Before anything has ended, and both draw what they would draw alone."""
    engine = PortableEngine(model, 0)
    whole = [
        engine.generate([prompt], 1, SamplingParams(max_tokens=most), seeds=[seed]).completions[0]
        for prompt, most, seed in zip(PROMPTS, (6, 2), (5, 9), strict=True)
    ]
    found = []
    with paged(model).session(SamplingParams(max_tokens=6), growing=True) as session:
        session.start(PROMPTS[:1], 1, seeds=[5])
        assert session.next(one_round=True) == [] and session.busy
        session.start(PROMPTS[1:], 1, [SamplingParams(max_tokens=2)], seeds=[9])
        while session.busy:
            found += session.next()
    assert [ended.index for ended in found] == [1, 0]
    for ended in found:
        assert ended.completion.token_ids == whole[ended.index].token_ids
        assert ended.completion.logprobs == pytest.approx(whole[ended.index].logprobs, abs=1e-5)


MIXED = [
    {}, {"temperature": 0.0}, {"temperature": 0.6, "max_tokens": 3}, {"top_k": 3}, {"top_p": 0.5, "seed": 8},
    {"temperature": 1.4, "min_p": 0.3}, {"top_k": 9, "top_p": 0.8},
    {"stop_token_ids": tuple(range(0, 61, 2))},
]  # fmt: skip


def test_each_of_a_mixed_batch_draws_what_it_draws_among_its_like(model):
    """In rows that are refilled and steps that change their size, with the same log-probabilities; and
    sessions of other settings replace no step."""
    mixed = [SamplingParams(**{"max_tokens": 5, "seed": 5} | kind) for kind in MIXED]
    prompts = [PROMPTS[place % 2] for place in range(len(mixed))]

    def drawn(engine, session_params, own=None):
        with engine.session(session_params) as session:
            session.start(prompts, 1, own)
            found = {}
            while session.busy:
                for ended in session.next():
                    found[ended.index] = ended.completion
                    session.finish(ended.index)
        return found

    engine, portable = paged(model, max_sequences=5), PortableEngine(model, 0, 5)
    for found in (drawn(engine, mixed[0], mixed), drawn(portable, mixed[0], mixed)):
        for place, params in enumerate(mixed):
            own = drawn(portable, params)[place]
            assert found[place].token_ids == own.token_ids
            assert found[place].finish_reason == own.finish_reason
            assert found[place].logprobs == pytest.approx(own.logprobs, abs=1e-5)
            assert found[place].entropies == pytest.approx(own.entropies, abs=1e-5)
    steps = dict(engine.graphs.steps)
    for place, params in list(enumerate(mixed))[1::3]:  # greedy, by share and by stop tokens
        assert drawn(engine, params)[place].token_ids == found[place].token_ids
    assert engine.graphs.steps.items() >= steps.items()
