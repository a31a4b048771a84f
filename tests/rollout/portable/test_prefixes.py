"""What finished sequences have computed, kept for those that begin alike: the same samples with less work."""

import random

import pytest
import torch

from qerl.rollout.portable import prefixes as portable_prefixes
from qerl.rollout.portable.engine import KEPT_BYTES, PortableEngine
from qerl.rollout.portable.prefixes import Prefixes
from qerl.rollout.portable.runner import Kept, Runner
from tests.support.families import DELTA_NETS, tiny
from tests.support.portable import PAD, sampled

MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
    "windows": ("mistral", {"sliding_window": 6}),
    "eager": ("llama", {"attn_implementation": "eager"}),
}
KEYS_OF_A_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token's keys and values in a tiny model: two kinds, layers and heads of 16 numbers in FP32."""
HEAD = list(range(2, 72))


@pytest.fixture(autouse=True)
def short_prefixes_are_worth_it(monkeypatch):
    monkeypatch.setattr(portable_prefixes, "WORTH_SHARING", 3)


class Conversations:
    """Conversations whose turns are requests with all that was said, on an engine with several sessions.

    Which request comes when, what others write, and where a conversation is begun anew from an earlier turn
    follows from the seed alone, so the same conversations can be had once more.
    """

    def __init__(self, engine, seed, policy, turns=12):
        self._engine, self._random, self._policy = engine, random.Random(seed), policy
        self._turns, self.found, self.computed = turns, [], 0

    def play(self):
        chance = self._random
        texts = [[*HEAD[: chance.randrange(1, 70)], chance.randrange(72, 128)] for _ in range(4)]
        for turn in range(self._turns):
            asked = [texts[chance.randrange(len(texts))] for _ in range(chance.randrange(1, 5))]
            samples = chance.choice([1, 1, 3])
            params = sampled(max_tokens=chance.randrange(1, 9), seed=turn, temperature=chance.choice([0, 1]))
            growing = chance.random() < 0.7
            with self._engine.session(params, growing=growing, policy=self._policy) as session:
                session.start(asked, samples)
                if growing:  # some come later, which may begin with what has ended by then
                    session.next(one_round=True)
                    session.start(asked[:1], samples)
                ended = {}
                while session.busy:
                    for each in session.next():
                        ended[each.index] = each.completion
                        session.finish(each.index)
                self.computed += session.prefilled_tokens
            self.found.append([ended[index] for index in sorted(ended)])
            for number, text in enumerate(asked):
                written = [chance.randrange(128) for _ in range(chance.randrange(4))]
                texts.append(text + ended[number * samples].token_ids + written)
        return self


def same(found, expected, bound=1e-5):
    for some, others in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=bound)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", MODELS)
def test_samples_are_those_without(tiny_model, family, seed):
    name, config = MODELS[family]
    model = tiny_model(name, **config)
    without = Conversations(PortableEngine(model, PAD), seed, None).play()
    for rows, kept_bytes in ((64, KEPT_BYTES), (3, KEPT_BYTES), (64, 300 * KEYS_OF_A_TOKEN)):
        found = Conversations(PortableEngine(model, PAD, rows, kept_bytes), seed, "it").play()
        same(found.found, without.found)
        if rows == 64 and kept_bytes == KEPT_BYTES:
            assert found.computed < without.computed / 2


@pytest.mark.parametrize("seed", range(3))
def test_samples_of_a_model_with_states_are_those_without(seed):
    model = tiny(DELTA_NETS)
    without = Conversations(PortableEngine(model, PAD), seed, None).play()
    found = Conversations(PortableEngine(model, PAD), seed, "it").play()
    same(found.found, without.found, 1e-4)
    assert found.computed < without.computed


def sample(engine, prompts, policy="it", samples=1, **settings):
    """Tokens that were computed otherwise than as they were drawn, and the texts that came of it."""
    with engine.session(sampled(**settings), policy=policy) as session:
        session.start(prompts, samples)
        ended = {}
        while session.busy:
            ended |= {each.index: each.completion.token_ids for each in session.next_finished()}
    return session.prefilled_tokens, [prompts[index // samples] + ended[index] for index in range(len(ended))]


def test_only_what_is_new_is_computed_and_once_for_all_samples(tiny_model):
    engine = PortableEngine(tiny_model("llama"), PAD)
    first, (text,) = sample(engine, [HEAD])
    assert first == len(HEAD)
    # The last token was drawn and never read.
    again, texts = sample(engine, [[*text, 5, 6]], samples=4)
    assert again == 3 and len(texts) == 4
    assert sample(engine, [[*texts[1], 9], [*texts[3], 9]])[0] == 4
    assert sample(engine, [HEAD])[0] == 1, "of a text that is there as a whole its last token"
    assert sample(engine, [HEAD[:40] + [99] * 5])[0] == 5
    assert sample(engine, [[99, *HEAD]])[0] == len(HEAD) + 1


def test_texts_with_little_to_compute_do_not_compute_as_much_as_others(tiny_model):
    model, shapes = tiny_model("llama"), []
    engine = PortableEngine(model, PAD)
    _, (text,) = sample(engine, [HEAD])
    model.register_forward_pre_hook(
        lambda _model, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    sample(engine, [[*text, 5], HEAD[:30] + [7] * 200, [*text, 5, 6]], max_tokens=1)
    assert sorted(shapes) == [(1, 200), (2, 3)]


@pytest.mark.parametrize("by", ["release", "reset"])
def test_what_was_kept_is_forgotten(tiny_model, by):
    engine = PortableEngine(tiny_model("llama"), PAD)
    sample(engine, [HEAD])
    getattr(engine, by)()
    assert sample(engine, [HEAD])[0] == len(HEAD)


def test_each_policy_finds_its_own(tiny_model):
    engine = PortableEngine(tiny_model("llama"), PAD)
    _, (text,) = sample(engine, [HEAD])
    for policy in ("another", None):
        assert sample(engine, [HEAD[:50]], policy)[0] == 50
        engine.generate([HEAD], 1, sampled())
    assert sample(engine, [[*HEAD[:50], 5]], "another")[0] == 1
    sample(engine, [[*text, 5, 6]], "another")  # begins with all that the first has
    assert sample(engine, [[*text, 5]])[0] == 2


@pytest.mark.parametrize("policy", [None, "another"])
def test_a_session_that_goes_on_with_another_policy_neither_keeps_nor_takes(tiny_model, policy):
    engine, params = PortableEngine(tiny_model("llama"), PAD), sampled(max_tokens=9)
    with engine.session(params, policy="it") as session:
        session.start([HEAD, [7, 8]], 1, [sampled(max_tokens=1), params])
        session.next_finished()
    with engine.session(params, going_on=session, policy=policy):
        session.start([HEAD, HEAD[::-1]], 1)
        while session.busy:
            session.next_finished()
    assert session.prefilled_tokens == 3 * len(HEAD) + 2
    assert sample(engine, [HEAD[::-1]])[0] == len(HEAD), "nothing of it was kept"


def test_a_session_that_goes_on_with_its_policy_keeps_and_takes(tiny_model):
    engine, params = PortableEngine(tiny_model("llama"), PAD), sampled(max_tokens=9)
    with engine.session(params, policy="it") as session:
        session.start([HEAD], 1)
        session.next(one_round=True)
    with engine.session(params, going_on=session, policy="it"):
        while session.busy:
            session.next_finished()
        session.start([HEAD], 1)
        session.next()
    assert session.prefilled_tokens == len(HEAD) + 1


def test_after_logits_that_are_not_finite_nothing_is_kept(tiny_model):
    model = tiny_model("llama")
    engine = PortableEngine(model, PAD)
    weight = model.lm_head.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    sample(engine, [HEAD])
    with torch.no_grad():
        weight.copy_(before)
    assert sample(engine, [HEAD])[0] == len(HEAD)


def test_keys_between_turns_and_of_finished_sequences_have_one_bound(tiny_model):
    every = tuple(range(128))
    engine = PortableEngine(tiny_model("llama"), PAD, kept_bytes=100 * KEYS_OF_A_TOKEN)
    with engine.session(sampled(stop_token_ids=every), policy="it") as session:
        session.start([HEAD, [*HEAD[::-1], 9]], 1)
        session.next()
        session.finish(0)
        assert engine._prefixes.nbytes == len(HEAD) * KEYS_OF_A_TOKEN
        session.start([[5, 4, 3]], 1)
        session.next()  # in which the second, which may go on, has left its row
        assert session._kept and not engine._prefixes.nbytes
        session.finish(2)
        assert engine._prefixes.nbytes == 3 * KEYS_OF_A_TOKEN
        session.start([HEAD[:40]], 1)
        session.next()
        session.finish(3)
        assert not engine._prefixes.nbytes


def test_a_sequence_may_begin_with_what_another_has_that_goes_on(tiny_model):
    """As where history is written anew, while the conversation as it was goes on."""
    engine = PortableEngine(tiny_model("llama"), PAD)
    with engine.session(sampled(max_tokens=40, stop_token_ids=tuple(range(128))), policy="it") as session:
        session.start([HEAD], 1)
        (drawn,) = session.next()
        session.start([[*HEAD, *drawn.completion.token_ids, 5], HEAD[:60]], 1)
        session.go_on(0, [5])
        while session.busy:
            session.next()
        assert session.prefilled_tokens == len(HEAD) + 2 + 1 + 2


def kept(tokens):
    return Kept(tokens, [(torch.zeros(1, tokens, 1), torch.zeros(1, tokens, 1))])


def found(prefixes, text):
    had = prefixes.find("it", text)
    return 0 if had is None else had.tokens


def test_the_longest_unused_go_first():
    prefixes = Prefixes(whole=False)
    for first in range(4):
        prefixes.put("it", [first, 1, 2, 3, 4], kept(5))
    assert found(prefixes, [0, 1, 2, 3, 4, 9]) == 5
    prefixes.put("it", [7, 7, 7, 7], kept(4))
    prefixes.trim(3 * kept(5).nbytes)
    assert [found(prefixes, [first, 1, 2, 3, 4, 9]) for first in range(4)] == [5, 0, 0, 5]
    assert found(prefixes, [7, 7, 7, 7]) == 3
    prefixes.trim(0)
    assert not prefixes.nbytes and not found(prefixes, [0, 1, 2, 3, 4, 9])


def test_there_are_no_more_than_can_be_compared(monkeypatch):
    monkeypatch.setattr(portable_prefixes, "_MOST", 3)
    prefixes = Prefixes(whole=False)
    for first in range(5):
        prefixes.put("it", [first, 1, 2, 3], kept(4))
        prefixes.trim(1 << 30)
    assert [found(prefixes, [first, 1, 2, 3, 4]) for first in range(5)] == [0, 0, 4, 4, 4]


def test_where_entries_are_reused_whole_the_same_tokens_are_held_once():
    prefixes = Prefixes(whole=True)
    for text in ([1, 2], [1, 2, 3], [1, 2], [1, 2, 3]):
        prefixes.put("a", text, Kept(len(text), []))
    prefixes.put("b", [1, 2], Kept(2, []))
    assert [(each.policy, each.tokens.tolist()) for each in prefixes._ended] == [
        ("a", [1, 2]), ("a", [1, 2, 3]), ("b", [1, 2]),
    ]  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
def test_found_is_the_longest_beginning_by_hand(whole):
    chance, prefixes, texts = random.Random(1), Prefixes(whole), []
    for _ in range(200):
        text = [chance.randrange(2) for _ in range(chance.randrange(1, 12))]
        if texts and chance.random() < 0.5:
            text = [*chance.choice(texts), *text]
        lengths = [
            length
            for other in texts
            for length in ([len(other)] if whole else range(len(other) + 1))
            if 3 <= length < len(text) and text[:length] == other[:length]
        ]
        assert found(prefixes, text) == max(lengths, default=0)
        texts.append(text)
        prefixes.put("it", text, kept(len(text)))


def test_without_a_policy_nothing_is_copied(tiny_model, monkeypatch):
    """Nor for sequences that are finished at once, as all of a training step are."""
    monkeypatch.setattr(Runner, "kept_of", None)
    engine = PortableEngine(tiny_model("llama"), PAD)
    assert sample(engine, [HEAD, [5, 7]], None, 2)[0] == len(HEAD) + 2
