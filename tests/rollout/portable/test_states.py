"""The portable engine with layers that carry a state: a tiny Qwen3.5, three of whose four layers do."""

import pytest
import torch

from qerl.rollout.portable import runner
from qerl.rollout.portable.engine import KEPT_BYTES, PortableEngine
from tests.support.families import DELTA_NETS, tiny
from tests.support.paged import score
from tests.support.portable import PAD, PROMPTS, sampled
from tests.support.sessions import check_against

STOPS = tuple(range(0, 128, 9))
BOUND = 1e-4
"""Nats that sums in another order move a token by: 2e-5 in this model from chunks to single tokens."""

BEGINNING = list(range(20, 60))
STATE = 3 * (4 * 16 * 32 + (2 * 2 * 16 + 4 * 32) * 4) * 4
"""Bytes of a row's states: in three layers those of four heads and four inputs of 192 channels, in FP32."""


@pytest.fixture
def model():
    return tiny(DELTA_NETS)


@pytest.mark.parametrize("beginning", [[], BEGINNING], ids=["", "alike"])
def test_greedy_equals_generate(model, beginning):
    prompts = [beginning + prompt for prompt in PROMPTS]
    found = PortableEngine(model, PAD, 3).generate(prompts, 1, sampled(max_tokens=30, temperature=0))
    for prompt, completion in zip(prompts, found.completions, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=PAD)
        assert completion.token_ids == wanted[0, len(prompt) :].tolist()


def test_log_probabilities_are_those_of_the_whole_text(model):
    """Whatever is beside it, to whichever side it is padded, and wherever rows move as others end."""
    found = PortableEngine(model, PAD).generate(
        PROMPTS, 3, sampled(max_tokens=40, stop_token_ids=STOPS, temperature=0.8)
    )
    assert len({len(completion.token_ids) for completion in found.completions}) > 4
    for number, completion in enumerate(found.completions):
        exact = score(model, PROMPTS[number // 3], completion.token_ids, 0.8)
        assert completion.logprobs == pytest.approx(exact.tolist(), abs=BOUND)


def uneven(session, whole):
    """Play a session in which others write one to four tokens after each turn, those it would have drawn."""
    found = {}
    while session.busy:
        for ended in session.next():
            tokens, logprobs, turns = found.get(ended.index, ([], [], 0))
            tokens, logprobs = tokens + ended.completion.token_ids, logprobs + ended.completion.logprobs
            rest = whole[ended.index].token_ids[len(tokens) :][: 1 + (ended.index + turns) % 4]
            if ended.completion.finish_reason == "stop" and session.room(ended.index) > len(rest):
                session.go_on(ended.index, rest)
                tokens, logprobs = tokens + rest, logprobs + [None] * len(rest)
            else:
                session.finish(ended.index)
            found[ended.index] = tokens, logprobs, turns + 1
    return found


@pytest.mark.parametrize(
    ("rows", "kept_bytes", "growing"),
    [
        (64, KEPT_BYTES, False),
        (64, KEPT_BYTES, True),
        (3, KEPT_BYTES, False),
        (64, 0, False),
        (64, 3 * STATE, False),
    ],
)
def test_turns_draw_what_one_turn_would_have_drawn(model, monkeypatch, rows, kept_bytes, growing):
    whole = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled(max_tokens=40)).completions
    resumed = []
    resume = runner.Runner.resume
    monkeypatch.setattr(
        runner.Runner,
        "resume",
        lambda self, texts, kept, room: resumed.append(len(texts)) or resume(self, texts, kept, room),
    )
    engine = PortableEngine(model, PAD, rows, kept_bytes)
    settings = sampled(max_tokens=40, stop_token_ids=STOPS)
    with engine.session(settings, growing=growing) as session:
        session.start(PROMPTS, 2)
        found = uneven(session, whole)
    check_against(found, whole, bound=BOUND)
    assert max(turns for *_, turns in found.values()) > 2
    assert bool(resumed) == (kept_bytes > 0)
    assert kept_bytes < KEPT_BYTES or rows < 64 or max(resumed) > 1


def test_only_what_others_wrote_is_computed_where_states_were_kept(model):
    with PortableEngine(model, PAD).session(sampled(stop_token_ids=tuple(range(128)))) as session:
        session.start(PROMPTS, 1)
        for ended in session.next():
            session.go_on(ended.index, [7] * (1 + ended.index % 2))
        session.next()
        written = sum(1 + number % 2 for number in range(len(PROMPTS)))
        assert session.prefilled_tokens == sum(map(len, PROMPTS)) + written + len(PROMPTS)
