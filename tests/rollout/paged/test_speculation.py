"""Drafts of the paged engine in Triton's interpreter: what is drawn is what is drawn without them."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from qerl.kernels.decode.speculate import LONGEST_MATCH, propose
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged import decode
from qerl.rollout.paged.decode import DecodeGraphs
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import KVGeometry, Pages, rows_of_step
from qerl.rollout.paged.rows import Rows, learn
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.session import Prompt, Sequence
from qerl.rollout.stops import StopTokens
from tests.support.machine import Eager
from tests.support.sessions import check_against, play
from tests.support.speculation import drop_drafts

pytestmark = pytest.mark.slow

BLOCK_BYTES = KVGeometry((None,), (Pages(0, 2, 16, 4),) * 1).bytes((1,))
CYCLE = [5, 7, 11, 5, 7, 11, 5, 7]


def paged(model, drafted, blocks=12, small_rows=1):
    pace = Pace(round_steps=2, spare_rounds=0, small_rows=small_rows, prefill_tokens=(8, 72))
    machine = Eager(blocks * BLOCK_BYTES)
    return PagedEngine(model, 0, machine=machine, pace=pace, speculative_tokens=drafted)


@pytest.fixture
def model(tiny_model):
    return tiny_model("qwen3", vocab_size=61, num_hidden_layers=1)


def same(result, wanted):
    for a, b in zip(result.completions, wanted.completions, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.entropies == pytest.approx(b.entropies, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "samples", "settings"),
    [
        ([CYCLE], 1, {"temperature": 0}),
        ([CYCLE, [9]], 2, {"temperature": 0.7, "top_k": 3}),
        ([[3] * 70, CYCLE], 3, {"temperature": 0.7, "top_k": 3, "stop_token_ids": tuple(range(0, 61, 7))}),
    ],
)
def test_tokens_are_those_without_drafts(model, prompts, samples, settings):
    params = SamplingParams(max_tokens=12, seed=5, **settings)
    wanted = PortableEngine(model, 0).generate(prompts, samples, params)
    result = paged(model, 3).generate(prompts, samples, params)
    same(result, wanted)
    assert 0 < result.accepted_tokens < result.drafted_tokens


@pytest.fixture
def rows_alone(monkeypatch):
    """Products in kernels have the same bits in each row, which those of NumPy have on some CPUs only."""
    dot = InterpreterBuilder.create_dot

    def by_row(builder, a, b, d, *how):
        def row(of, i):
            return TensorHandle(of.data[i : i + 1], of.dtype)

        rows = [dot(builder, row(a, i), b, row(d, i), *how).data for i in range(len(a.data))]
        return TensorHandle(np.concatenate(rows), d.dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", by_row)


def test_drafts_change_no_bit_in_steps_of_one_size(model, step_sizes, monkeypatch, rows_alone):
    """A place has the same bits verified and as its row's first; a step becomes smaller earlier by drafts."""
    params = SamplingParams(max_tokens=10, seed=5, temperature=0.7, top_k=2)
    prompts, drawn = [CYCLE, [9, 9], [3] * 70], []
    for dropped in (False, True):
        with monkeypatch.context() as patch:
            if dropped:
                drop_drafts(patch, decode)
            drawn.append(paged(model, 3, small_rows=64).generate(prompts, 1, params))
    assert set(step_sizes) == {4}
    assert drawn[0].completions == drawn[1].completions
    assert drawn[0].accepted_tokens > 4 and drawn[1].accepted_tokens == 0


@pytest.mark.parametrize(
    ("small_rows", "drafted", "expected"),
    [
        (8, 0, [8]),
        (8, 1, [8, 4]),
        (8, 3, [8, 4, 2]),
        (8, 7, [8, 4, 2, 1]),
        (8, 15, [8, 4, 2, 1]),
        (64, 1, [8, 4]),
    ],
)
def test_steps_stay_as_large_as_so_many_tokens_that_hardly_take_longer(small_rows, drafted, expected):
    """But what has no drafts gives way to what has."""
    decoder = SimpleNamespace()
    graphs = DecodeGraphs(decoder, decoder, Eager(), small_rows, drafted)
    sizes = [8]
    for running in (6, 4, 3, 2, 1):
        sizes.append(rows_of_step(running, sizes[-1], graphs.small_rows))
    assert list(dict.fromkeys(sizes)) == expected


def test_without_drafts_a_step_is_what_it_was(model, monkeypatch):
    """No kernel of drafts runs, rows have no lanes, and what a pass reads is the rows' own state."""
    for name in ("propose", "settle", "learn"):
        monkeypatch.setattr(decode, name, lambda *args, **kwargs: pytest.fail("drafts are off"))
    engine = paged(model, 0)
    result = engine.generate([CYCLE], 2, SamplingParams(max_tokens=3))
    assert (result.drafted_tokens, result.accepted_tokens) == (0, 0)
    for step in engine.graphs.steps.values():
        rows = step.rows
        assert rows.lanes is None and step.forward.tokens == rows.count
        assert rows.inputs.token_T is rows.state.token_T and rows.inputs.limit_2T is rows.state.limit_2T


def test_turns_draw_what_one_turn_would_have_drawn(model):
    """Stop tokens, and a stop that the host finds in the middle of what a round drew."""
    whole = (
        PortableEngine(model, 0).generate([CYCLE, [9]], 1, SamplingParams(max_tokens=10, seed=5)).completions
    )
    params = SamplingParams(max_tokens=10, seed=5, stop_token_ids=(whole[0].token_ids[2],))
    with paged(model, 3).session(params) as session:
        own = replace(params, stops=(StopTokens([whole[1].token_ids[4]]),))
        session.start([CYCLE, [9]], 1, [params, own])
        found = play(session, whole, 2)
    check_against(found, whole)
    assert [turns for *_, turns in found.values()] == [2, 2]
    assert session.drafted_tokens > 0


@pytest.mark.parametrize("growing", [False, True])
def test_those_that_come_between_rounds_change_nothing(model, growing):
    """One has a prompt of more blocks than the cache was made for, and with the last there are so many that
    nothing is drafted for a while."""
    prompts = [CYCLE, [9], [3] * 70, [*CYCLE, 9], [9, 9]]
    settings = {"max_tokens": 12, "seed": 5, "temperature": 0.7, "top_k": 3}
    whole = PortableEngine(model, 0).generate(prompts, 1, SamplingParams(**settings)).completions
    engine, params = paged(model, 3), SamplingParams(stop_token_ids=(whole[0].token_ids[2],), **settings)
    with engine.session(params, growing=growing) as session:
        session.start(prompts[:1], 1)
        found = play(session, whole, 2, late=prompts[1:])
        assert 0 < session.accepted_tokens < session.drafted_tokens
    assert {step.rows.lanes is None for step in engine.graphs.steps.values()} == {False, True}
    check_against(found, whole, bound=1e-4)
    assert max(turns for *_, turns in found.values()) > 1


def test_a_round_has_blocks_for_every_draft_that_may_be_accepted(model):
    machine, pace = Eager(12 * BLOCK_BYTES), Pace(round_steps=20, spare_rounds=0, prefill_tokens=(8, 72))
    for drafted, blocks in ((0, 1), (3, 2)):
        engine = PagedEngine(model, 0, machine=machine, pace=pace, speculative_tokens=drafted)
        with engine.session(SamplingParams(max_tokens=100)) as session:
            session.start([[9]], 1)
            session._scheduler.next_round()
            assert len(session._scheduler.running[0].blocks[0]) == blocks


def test_a_row_is_told_what_its_siblings_drew_and_its_prompt():
    prompt, other = Prompt(0, [1, 2], finished=[[7, 8], [9]]), Prompt(1, [3], finished=[[6]])
    nine = SamplingParams(max_tokens=9)
    row = Sequence(0, prompt, 0, nine, 9)
    idle = Sequence(1, prompt, 1, nine, 9, token_ids=[4], stage="between turns")
    drawing = Sequence(2, prompt, 2, nine, 9, token_ids=[5])
    rows = Rows(2, 64, 1, 1, [4], torch.device("cpu"), drafted=1)
    learn(rows.lanes, {0: row, 1: Sequence(3, other, 0, nine, 9)}, [row, idle, drawing])
    found = [
        corpus[:known].tolist()
        for corpus, known in zip(rows.lanes.corpus_RC, rows.lanes.known_R.tolist(), strict=True)
    ]
    assert found == [[7, 8, -1, 9, -1, 4, -1, 1, 2], [6, -1, 3]]


def test_drafts_follow_the_longest_run_of_a_row_and_stop_at_its_end():
    """The kernel on random texts of few tokens, against a search by hand."""
    rng = random.Random(0)
    found = 0
    for _ in range(60):
        words, lanes = rng.choice([2, 4, 9]), rng.choice([2, 4])
        rows = Rows(2, 64, 1, 1, [4], torch.device("cpu"), drafted=lanes - 1)
        texts = []
        for row in range(2):
            corpus = [rng.randrange(-1, words) for _ in range(rng.randint(1, 12))]
            own = [rng.randrange(words) for _ in range(rng.randint(0, 12))]
            most = rng.randint(len(own) + 1, 26)
            rows.lanes.corpus_RC[row, : len(corpus)] = torch.tensor(corpus)
            rows.lanes.known_R[row] = len(corpus)
            rows.state.out_token_TM[row, : len(own)] = torch.tensor(own)
            rows.state.generated_T[row], rows.state.max_new_T[row] = len(own), most
            rows.state.done_T[row] = 0
            texts.append((corpus + own, most - len(own) - 1))
        propose(rows.state, rows.lanes)
        for row, (text, room) in enumerate(texts):
            expected = by_hand(text)[: min(lanes - 1, room)]
            count = int(rows.lanes.drafts_R[row])
            assert rows.lanes.draft_T.view(2, lanes)[row, 1 : 1 + count].tolist() == expected
            used = rows.lanes.tokens.done_T.view(2, lanes)[row].tolist()
            assert used == [0] * (count + 1) + [1] * (lanes - count - 1)
            found += count
    assert found > 60


def by_hand(text):
    """What followed the longest run of a text's last tokens, where it stood last."""
    for match in range(LONGEST_MATCH, 0, -1):
        run = text[-match:]
        if len(run) == match and -1 not in run:
            for end in range(len(text) - 1, match - 1, -1):
                if text[end - match : end] == run:
                    return text[end:]
    return []
