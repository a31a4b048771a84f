"""Drafts of the portable engine: what is drawn is what is drawn without them, in fewer passes.

Where models are random, drafts of the engine's own are seldom right. So most tests hand it drafts of what it
would have drawn, some of their tokens replaced.
"""

import random

import pytest
import torch

from qerl.models.load import load_model, load_tokenizer
from qerl.models.smollm2 import HUB_ID
from qerl.noise.draw import AdaptiveNoise
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.drafts import FEW_ROWS, LONGEST_MATCH, Drafts, Text, draft
from qerl.rollout.portable import engine as portable_engine
from qerl.rollout.portable.engine import KEPT_BYTES, PortableEngine
from qerl.rollout.portable.runner import Runner
from qerl.rollout.session import Prompt, Sequence
from qerl.rollout.stops import StopStrings
from tests.support.portable import PAD, PROMPTS, sampled
from tests.support.sessions import check_against, play

NINE = sampled(max_tokens=9)
CONFIGS = [
    ("llama", {}),
    ("qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
    ("mistral", {"sliding_window": 6}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("llama", {"attn_implementation": "eager"}),
]


class TestDrafts:
    def by_hand(self, texts, length, least):
        """The draft, by looking through everything."""
        for match in range(min(LONGEST_MATCH, len(texts[0])), least - 1, -1):
            for text in texts:
                for end in range(len(text) - 1, match - 1, -1):
                    if text[end - match : end] == texts[0][-match:]:
                        return text[end : end + length]
        return []

    def test_a_draft_follows_the_longest_run_where_it_stood_last(self):
        rng = random.Random(0)
        found = 0
        for _ in range(300):
            words = rng.choice([2, 5, 30])
            tokens = [[rng.randrange(words) for _ in range(24)] for _ in range(3)]
            known = [sorted(rng.sample(range(1, 25), 3)) for _ in tokens]
            texts = [Text(each[: counts[0]]) for each, counts in zip(tokens, known, strict=True)]
            for text, each, counts in zip(texts, tokens, known, strict=True):
                text.extend(each[counts[0] : counts[1]])
                text.extend(each[counts[1] : counts[2]])
            length, least = rng.randint(1, 7), rng.randint(1, 4)
            until = [each[: counts[2]] for each, counts in zip(tokens, known, strict=True)]
            expected = self.by_hand(until, length, least)
            assert draft(texts[0], texts[1:], length, least) == expected
            found += bool(expected)
        assert 100 < found < 300

    def test_siblings_are_looked_through_and_other_prompts_are_not(self):
        one, other = Prompt(0, [1, 2]), Prompt(1, [1, 2])
        row, ended = Sequence(0, one, 0, NINE, 9), Sequence(1, one, 1, NINE, 9, token_ids=[7, 8, 9])
        strange = Sequence(2, other, 0, NINE, 9, token_ids=[7, 5, 5])
        session, drafts = [row, ended, strange], Drafts(2)
        assert drafts.of([row], session) == [[7, 8]]
        row.token_ids.append(7)
        assert drafts.of([row], session) == [[8, 9]]
        ended.token_ids += [7, 4]
        assert drafts.of([row, strange], session) == [[8, 9], [5]]  # three tokens agree there
        row.max_tokens = 2
        assert drafts.of([row], session) == [[]]

    def test_those_that_were_finished_are_looked_through_as_long_as_their_prompt_is_there(self):
        prompt, other = Prompt(0, [1, 2]), Prompt(1, [1, 2])
        row, strange, drafts = Sequence(0, prompt, 0, NINE, 9), Sequence(1, other, 0, NINE, 9), Drafts(3)
        for tokens, expected in ([7, 8, 9], [7, 8, 9]), ([6, 5], [7, 8, 9]), ([2, 4], [4]):
            prompt.finished.append(tokens)
            row.token_ids = [] if tokens[0] != 2 else [6, 1, 2, 2]
            assert drafts.of([row, strange], [row, strange]) == [expected, []]


class Told:
    """Drafts of what would have been drawn, a third of their tokens replaced.

    Args:
        whole: What each sequence would have drawn, by its index.
    """

    def __init__(self, whole):
        self._whole, self._rng = whole, random.Random(0)

    def __call__(self, length):
        self._length = length
        return self

    def of(self, rows, _session):
        return [self._of(row) for row in rows]

    def _of(self, row):
        most = self._rng.randint(0, min(self._length, row.room - 1))
        coming = self._whole[row.index].token_ids[len(row.token_ids) :][:most]
        return [token if self._rng.random() < 0.67 else self._rng.randrange(128) for token in coming]


@pytest.fixture
def told(monkeypatch):
    """``told(completions)``: drafts are made of these from now on."""
    return lambda whole: monkeypatch.setattr(portable_engine, "Drafts", Told(whole))


def same(found, expected, bound=1e-4):
    """The same tokens and ends, and log-probabilities within what another order of additions changes."""
    for a, b in zip(found.completions, expected.completions, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=bound)
        assert a.entropies == pytest.approx(b.entropies, abs=bound)


@pytest.mark.parametrize(("family", "config"), CONFIGS)
@pytest.mark.parametrize(("drafted", "samples", "rows"), [(1, 1, 64), (3, 2, 64), (7, 4, 3)])
def test_tokens_are_those_without_drafts(tiny_model, told, family, config, drafted, samples, rows):
    model, params = (
        tiny_model(family, **config),
        sampled(max_tokens=40, stop_token_ids=tuple(range(0, 128, 29))),
    )
    plain = PortableEngine(model, PAD, rows).generate(PROMPTS[:3], samples, params)
    assert (plain.drafted_tokens, plain.accepted_tokens) == (0, 0)
    told(plain.completions)
    engine = PortableEngine(model, PAD, rows, speculative_tokens=drafted)
    result = engine.generate(PROMPTS[:3], samples, params)
    same(result, plain)
    assert 5 < result.accepted_tokens < result.drafted_tokens


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1}])
def test_in_fp64_log_probabilities_are_the_same_to_the_last_bit(tiny_model, told, settings):
    """Where rounding is finer than the FP32 in which tokens are drawn, nothing at all is left."""
    model, params = tiny_model("llama").double(), sampled(max_tokens=60, **settings)
    plain = PortableEngine(model, PAD).generate(PROMPTS, 1, params)
    told(plain.completions)
    result = PortableEngine(model, PAD, 2, speculative_tokens=3).generate(PROMPTS, 1, params)
    assert result.completions == plain.completions
    assert result.accepted_tokens > 50


def test_every_pass_gives_a_token_and_those_accepted(tiny_model, told, monkeypatch):
    passes = []
    step, verify = Runner.step, Runner.verify
    monkeypatch.setattr(Runner, "step", lambda self, tokens: passes.append(1) or step(self, tokens))
    monkeypatch.setattr(
        Runner, "verify", lambda self, tokens: passes.append(tokens.shape[1]) or verify(self, tokens)
    )
    engine = PortableEngine(tiny_model("llama"), PAD, speculative_tokens=3)
    told(
        PortableEngine(tiny_model("llama"), PAD).generate(PROMPTS[:1], 1, sampled(max_tokens=60)).completions
    )
    passes.clear()
    result = engine.generate(PROMPTS[:1], 1, sampled(max_tokens=60))
    assert len(passes) + result.accepted_tokens == 59  # prefill gives one
    assert len(passes) < 45 and max(passes) == 4
    passes.clear()
    many = engine.generate(PROMPTS[:1], FEW_ROWS + 1, sampled())
    assert many.drafted_tokens == 0 and passes == [1] * 11


def test_noise_changes_both_alike(tiny_model, told):
    model, params = tiny_model("llama"), sampled(max_tokens=40)
    noise = AdaptiveNoise(model, NoiseSchedule(0.3, 0.3, stages=2, total_steps=2), seed=5).offsets(1)
    plain = PortableEngine(model, PAD).generate(PROMPTS[:2], 2, params, noise)
    clean = PortableEngine(model, PAD).generate(PROMPTS[:2], 2, params)
    told(plain.completions)
    result = PortableEngine(model, PAD, speculative_tokens=3).generate(PROMPTS[:2], 2, params, noise)
    same(result, plain)
    assert result.accepted_tokens > 30
    assert [c.token_ids for c in clean.completions] != [c.token_ids for c in result.completions]


@pytest.mark.parametrize(("rows", "kept_bytes"), [(64, KEPT_BYTES), (3, KEPT_BYTES), (4, 0)])
@pytest.mark.parametrize("written", [0, 5])
def test_turns_draw_what_one_turn_would_have_drawn(tiny_model, told, rows, kept_bytes, written):
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS[:3], 2, sampled(max_tokens=60)).completions
    told(whole)
    engine = PortableEngine(model, PAD, rows, kept_bytes, speculative_tokens=3)
    params = sampled(max_tokens=60, stop_token_ids=tuple(range(0, 128, 17)))
    with engine.session(params) as session:
        session.start(PROMPTS[:3], 2)
        found = play(session, whole, written)
        assert session.accepted_tokens > 4
    check_against(found, whole)
    assert max(turns for *_, turns in found.values()) > 2


@pytest.mark.parametrize(("rows", "kept_bytes"), [(64, KEPT_BYTES), (3, KEPT_BYTES), (4, 0)])
@pytest.mark.parametrize("written", [0, 5])
@pytest.mark.parametrize("growing", [False, True])
def test_those_that_come_between_rounds_change_nothing(tiny_model, told, rows, kept_bytes, written, growing):
    """They come, and others go on, while drafts are accepted."""
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS[:FEW_ROWS], 1, sampled(max_tokens=60)).completions
    told(whole)
    engine = PortableEngine(model, PAD, rows, kept_bytes, speculative_tokens=3)
    params = sampled(max_tokens=60, stop_token_ids=tuple(range(0, 128, 17)))
    with engine.session(params, growing=growing) as session:
        session.start(PROMPTS[:1], 1)
        found = play(session, whole, written, late=PROMPTS[1:FEW_ROWS])
        assert session.accepted_tokens > 10
    check_against(found, whole)


def test_whoever_comes_between_rounds_draws_in_the_next(tiny_model, told):
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS[:2], 1, sampled(max_tokens=60)).completions
    told(whole)
    engine = PortableEngine(model, PAD, speculative_tokens=3)
    with engine.session(sampled(max_tokens=60), growing=True) as session:
        session.start(PROMPTS[:1], 1)
        while not session.accepted_tokens:
            assert session.next(one_round=True) == []
        session.start(PROMPTS[1:2], 1)
        before = session.room(0)
        assert session.next(one_round=True) == []
        assert (session.room(0), session.room(1)) == (before - 1, 59)
        accepted = session.accepted_tokens
        ended = []
        while session.busy:
            ended += session.next()
        assert session.accepted_tokens > accepted
    for each in ended:
        assert each.completion.token_ids == whole[each.index].token_ids


@pytest.mark.parametrize("drafted", [0, 3])
def test_the_text_of_a_finished_sequence_stays_for_its_siblings_if_they_draft(tiny_model, drafted):
    with PortableEngine(tiny_model("llama"), PAD, speculative_tokens=drafted).session(sampled()) as session:
        session.start(PROMPTS[:1], 2, [sampled(max_tokens=3), sampled(max_tokens=9)])
        ended = session.next()
        assert [each.index for each in ended] == [0]
        session.finish(0)
        kept = [ended[0].completion.token_ids] if drafted else []
        assert session._unfinished(1).prompt.finished == kept


def test_own_limits_and_seeds_hold(tiny_model):
    found = []
    for drafted in (0, 3):
        engine = PortableEngine(tiny_model("llama"), PAD, speculative_tokens=drafted)
        own = [sampled(max_tokens=most, temperature=0.6, top_k=4) for most in (1, 30, 17)]
        with engine.session(sampled()) as session:
            session.start(PROMPTS[:3], 1, own, seeds=[5, 6, 7])
            ended = {}
            while session.busy:
                for each in session.next():
                    ended[each.index] = each.completion.token_ids
                    session.finish(each.index)
        found.append(ended)
    assert found[0] == found[1]
    assert [len(found[1][i]) for i in range(3)] == [1, 30, 17]


def test_logits_that_are_not_finite_end_a_row_behind_its_accepted_tokens(tiny_model, told, monkeypatch):
    model, params = tiny_model("llama"), sampled(max_tokens=40)
    whole = PortableEngine(model, PAD).generate(PROMPTS[:3], 1, params)
    told(whole.completions)
    verify, calls = Runner.verify, []

    def broken(self, tokens_BT):
        logits_BTV = verify(self, tokens_BT)
        calls.append(tokens_BT)
        if len(calls) > 6:
            logits_BTV[0, 1:] = torch.nan
        return logits_BTV

    monkeypatch.setattr(Runner, "verify", broken)
    result = PortableEngine(model, PAD, speculative_tokens=3).generate(PROMPTS[:3], 1, params)
    assert "error" in {each.finish_reason for each in result.completions}
    for each, without in zip(result.completions, whole.completions, strict=True):
        assert each.token_ids == without.token_ids[: len(each.token_ids)]
        assert (each.finish_reason == "error") == (len(each.token_ids) < 40)


@pytest.mark.slow
def test_real_completions_of_groups_end_at_the_same_texts(capsys):
    """With top_p: a number that falls among tokens of 1e-7 draws another one after any rounding."""
    model: torch.nn.Module = load_model(HUB_ID, "bf16", dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(HUB_ID)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
            "input_ids"
        ]
        for text in (
            "Count from 1 to 30 in digits.",
            "Write the words yes no twenty times, and nothing else.",
        )
    ]
    stops = (StopStrings(tokenizer, ["12"]),)
    params = sampled(
        max_tokens=40, top_p=0.9, temperature=0.7, stop_token_ids=(tokenizer.eos_token_id,), stops=stops
    )
    plain = PortableEngine(model, 0).generate(prompts, 2, params)
    result = PortableEngine(model, 0, speculative_tokens=3).generate(prompts, 2, params)
    same(result, plain)
    with capsys.disabled():
        print(
            f"\nSmolLM2: {result.accepted_tokens} of {result.drafted_tokens} drafted tokens accepted, "
            f"{result.generated_tokens} drawn"
        )
    assert result.accepted_tokens > 5
    assert "stop" in {completion.finish_reason for completion in result.completions}
