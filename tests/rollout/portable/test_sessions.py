"""Sessions of the portable engine: a trajectory of several turns is one completion that was paused."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from qerl.errors import QeRLError
from qerl.rollout.engine import Completion
from qerl.rollout.portable.engine import KEPT_BYTES, PortableEngine
from qerl.rollout.session import whole_completions
from tests.support.paged import score
from tests.support.portable import PAD, PROMPTS, sampled
from tests.support.sessions import check_against, play
from tests.support.trainer import ScriptedEngine

STOPS = tuple(range(0, 128, 9))


KEYS_OF_A_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token's keys and values in a tiny model: two kinds, layers and heads of 16 numbers in FP32."""


@contextmanager
def started(model, prompts=PROMPTS, samples=2, limits=None, rows=64, kept_bytes=KEPT_BYTES, **settings):
    own = limits and [sampled(**settings | {"max_tokens": limit}) for limit in limits]
    with PortableEngine(model, PAD, rows, kept_bytes).session(sampled(**settings)) as session:
        session.start(prompts, samples, own)
        yield session


@pytest.mark.parametrize(
    ("family", "rows", "kept_bytes"),
    [
        ("llama", 64, KEPT_BYTES),
        ("llama", 3, KEPT_BYTES),
        ("llama", 64, 0),
        ("llama", 64, 60 * KEYS_OF_A_TOKEN),
        ("mistral", 64, KEPT_BYTES),
    ],
)
@pytest.mark.parametrize("written", [0, 5])
def test_turns_draw_what_one_turn_would_have_drawn(tiny_model, family, rows, kept_bytes, written):
    config = {"sliding_window": 6} if family == "mistral" else {}
    model = tiny_model(family, **config)
    whole = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled(max_tokens=40)).completions
    settings = {"max_tokens": 40, "stop_token_ids": STOPS}
    with started(model, rows=rows, kept_bytes=kept_bytes, **settings) as session:
        found = play(session, whole, written)
    check_against(found, whole)
    assert max(turns for *_, turns in found.values()) > 2


def test_only_what_others_wrote_is_computed_where_keys_were_kept(tiny_model):
    model = tiny_model("llama")
    every = tuple(range(128))  # every turn is one token
    prompts = sum(map(len, PROMPTS))
    computed = []
    for kept_bytes in (KEPT_BYTES, 0):
        with started(model, samples=1, stop_token_ids=every, kept_bytes=kept_bytes) as session:
            for ended in session.next():
                session.go_on(ended.index, [7] * (1 + ended.index % 2))
            session.next()
            computed.append(session.prefilled_tokens - prompts)
    # Each computes the token that was drawn as well, which no decode step has read.
    written = sum(1 + index % 2 for index in range(len(PROMPTS)))
    assert computed == [written + len(PROMPTS), prompts + written + len(PROMPTS)]


def test_keys_are_kept_no_longer_than_a_sequence_may_need_them(tiny_model):
    with started(tiny_model("llama"), stop_token_ids=STOPS, max_tokens=40) as session:
        while session.busy:
            for ended in session.next():
                if session.room(ended.index) > 3 and ended.index % 2:
                    session.go_on(ended.index, [7, 7])
                else:
                    session.finish(ended.index)
        assert session.next() == []
        assert not session._kept and not session._uniforms and session._runner is None


def test_others_decode_while_a_sequence_waits(tiny_model):
    """A turn that has ended costs the others no step, and rows are free for those that go on."""
    model, shapes = tiny_model("llama"), []
    model.register_forward_pre_hook(
        lambda _model, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with started(model, PROMPTS, 1, stop_token_ids=STOPS, max_tokens=40) as session:
        first = session.next()
        assert 0 < len(first) < len(PROMPTS)
        session.next()
        running = shapes[-1][0]
        for ended in first:
            session.go_on(ended.index, [7])
        session.next()
        assert running == len(PROMPTS) - len(first)
        assert (len(first), 2) in shapes  # the token that was drawn and the one that was written


def test_a_turn_depends_neither_on_company_nor_on_the_order_of_answers(tiny_model):
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled(max_tokens=30)).completions
    settings = {"max_tokens": 30, "stop_token_ids": STOPS}
    with started(model, PROMPTS[:1], **settings) as session:
        alone = play(session, whole, 2)
    with started(model, **settings) as session:
        backwards = play(session, whole, 2, order=lambda ended: ended[::-1])
    check_against(backwards, whole)
    for index, (tokens, *_) in alone.items():
        assert tokens == backwards[index][0]


def test_prompts_that_come_later_are_numbered_on(tiny_model):
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled()).completions
    with started(model, PROMPTS[:2]) as session:
        first = session.next()
        assert session.start(PROMPTS[2:], 2) == [4, 5, 6, 7, 8, 9]
        while session.busy:
            first += session.next()
    assert sorted(ended.index for ended in first) == list(range(10))
    assert all(ended.completion.token_ids == whole[ended.index].token_ids for ended in first)


def test_a_seed_of_its_own_draws_what_it_would_draw_alone(tiny_model):
    """Whatever else is in the session, in whichever order it came, and among how many samples of a prompt."""
    model = tiny_model("llama")
    engine = PortableEngine(model, PAD)
    alone = [
        engine.generate([prompt], 1, sampled(seed=seed)).completions[0].token_ids
        for prompt, seed in ((PROMPTS[0], 3), (PROMPTS[0], 4), (PROMPTS[1], 4), (PROMPTS[1], 5))
    ]
    with started(model, PROMPTS[2:], 2, seed=3) as session:
        first = session.start(PROMPTS[:2], 2, seeds=[3, 4, 4, 5])[0]
        found = {}
        while session.busy:
            found |= {ended.index: ended.completion.token_ids for ended in session.next()}
        assert [found[first + place] for place in range(4)] == alone
        with pytest.raises(QeRLError, match="There are 1 seeds for 4 sequences"):
            session.start(PROMPTS[:2], 2, seeds=[3])


def test_each_of_a_mixed_batch_draws_what_it_draws_among_its_like(tiny_model):
    """Log-probabilities are those at the sequence's temperature before its filters, greedy ones at 1."""
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.6, "max_tokens": 3}, {"top_k": 3}, {"min_p": 0.2}]
    kinds += [{"top_p": 0.5, "seed": 8}, {"temperature": 1.4, "top_k": 9, "top_p": 0.8}]
    kinds += [{"stop_token_ids": STOPS}, {"temperature": 0.6, "stop_token_ids": STOPS[1:2]}, {}]
    mixed, model = [sampled(**kind) for kind in kinds], tiny_model("llama")
    for rows in (64, 3):
        found = whole_completions(PortableEngine(model, PAD, rows).session(mixed[0]), PROMPTS, 2, mixed)
        for place, params in enumerate(mixed):
            own = PortableEngine(model, PAD, rows).generate(PROMPTS, 2, params).completions[place]
            one = found.completions[place]
            assert (one.token_ids, one.finish_reason) == (own.token_ids, own.finish_reason)
            assert one.logprobs == pytest.approx(own.logprobs, abs=1e-5)
            assert one.entropies == pytest.approx(own.entropies, abs=1e-5)
            exact = score(model, PROMPTS[place // 2], one.token_ids, params.temperature or 1.0)
            assert one.logprobs == pytest.approx(exact.tolist(), abs=1e-4)


def test_a_sequence_ends_at_its_own_limit_and_at_the_models_last_position(tiny_model):
    model = tiny_model("llama", max_position_embeddings=16)
    with started(model, [[1] * 10, [1] * 10, [1] * 16, [1] * 18], 1, [3, 99, 5, 5]) as session:
        assert [session.room(index) for index in range(4)] == [3, 6, 0, 0]
        ended = []
        while session.busy:
            ended += session.next()
        assert {e.index: len(e.completion.token_ids) for e in ended} == {0: 3, 1: 6, 2: 0, 3: 0}
        assert {e.completion.finish_reason for e in ended} == {"length"}
        assert [session.room(index) for index in range(4)] == [0, 0, 0, 0]


def test_written_tokens_count_towards_the_limit(tiny_model):
    model = tiny_model("llama")
    first = PortableEngine(model, PAD).generate(PROMPTS[:1], 1, sampled()).completions[0].token_ids[0]
    with started(model, PROMPTS[:1], 1, max_tokens=8, stop_token_ids=(first,)) as session:
        assert session.next()[0].completion.token_ids == [first]
        assert session.room(0) == 7
        with pytest.raises(QeRLError, match="room for 7 tokens, and 7 appended tokens leave no room to draw"):
            session.go_on(0, [5] * 7)
        session.go_on(0, [5] * 6)
        assert session.room(0) == 1
        assert len(session.next()[0].completion.token_ids) == 1
        assert session.room(0) == 0


def test_only_a_sequence_between_turns_can_go_on_or_finish(tiny_model):
    with started(tiny_model("llama"), PROMPTS[:1], 1, max_tokens=4) as session:
        with pytest.raises(QeRLError, match="The turn of sequence 0 has not ended"):
            session.go_on(0, [])
        with pytest.raises(QeRLError, match="The turn of sequence 0 has not ended"):
            session.finish(0)
        session.next()
        assert session.next() == []
        session.finish(0)
        for ask in (lambda: session.go_on(0, []), lambda: session.finish(0), lambda: session.room(0)):
            with pytest.raises(QeRLError, match="Sequence 0 was finished"):
                ask()
        with pytest.raises(QeRLError, match="Sequence 1 was not started"):
            session.finish(1)


def test_nothing_is_kept_of_what_was_finished(tiny_model):
    """A session may go on for as long as its server; later sequences are numbered and drawn as before."""
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled()).completions
    with started(model, PROMPTS[:2]) as session:
        held = [weakref.ref(sequence) for sequence in session._sequences.values()]
        for each in range(2):
            found = {}
            while session.busy:
                for ended in session.next():
                    found[ended.index] = ended.completion.token_ids
                    session.finish(ended.index)
            session.next()
            gc.collect()
            assert not session._sequences and not any(reference() for reference in held)
            if not each:
                first = found
                indices = session.start(PROMPTS[2:], 2)
                assert indices == list(range(4, 10))
        assert [(first | found)[index] for index in range(10)] == [each.token_ids for each in whole]


def test_a_turn_without_finite_logits_ends_its_sequence_and_no_other(tiny_model):
    model = tiny_model("llama")
    stops = tuple(range(1, 128))  # every turn is one token
    with started(model, PROMPTS[:2], 1, stop_token_ids=stops) as session:
        assert all(e.completion.finish_reason == "stop" for e in session.next())
        with torch.no_grad():
            model.model.embed_tokens.weight[77] = float("nan")  # in prompt 1 as well: its keys are known
        session.go_on(0, [77])
        bad = session.next()
        assert bad[0].completion == Completion([PAD], [0.0], [0.0], "error")
        assert session.room(0) == 0
        session.finish(0)


def test_samples_of_a_group_end_at_limits_of_their_own(tiny_model):
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled(max_tokens=12)).completions
    limits = [1 + (5 * i) % 12 for i in range(len(whole))]
    for rows in (64, 3):
        engine = PortableEngine(model, PAD, rows)
        own = [sampled(max_tokens=limit) for limit in limits]
        cut = whole_completions(engine.session(sampled(max_tokens=12)), PROMPTS, 2, own)
        for short, long, limit in zip(cut.completions, whole, limits, strict=True):
            assert (short.token_ids, short.finish_reason) == (long.token_ids[:limit], "length")


def test_bad_prompts_are_refused(tiny_model):
    with PortableEngine(tiny_model("llama"), PAD).session(sampled()) as session:
        with pytest.raises(QeRLError, match="no prompt"):
            session.start([], 1)
        with pytest.raises(QeRLError, match="Prompt 1 is empty"):
            session.start([[1], []], 1)
        with pytest.raises(QeRLError, match="There are 2 sampling parameters for 4 sequences"):
            session.start([[1], [2]], 2, [sampled()] * 2)
        assert not session.busy


def test_scripted_turns_are_reproducible():
    def turns():
        with ScriptedEngine(50, stop=1).session(sampled(max_tokens=40)) as session:
            session.start([[1], [2, 3]], 2)
            ended = session.next()
            for each in ended:
                if session.room(each.index) > 2:
                    session.go_on(each.index, [7, 7])
            return ended + session.next()

    assert turns() == turns()
