"""Requests that begin as earlier ones of their policy ended: the same samples, what is new computed alone."""

import random

import pytest

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.portable.engine import PortableSession
from qerl_serve.types import AdamParams
from tests.support.serve import DATA, lora, request, sampled, tiny_backend

NOISE = NoiseSchedule(sigma_start=0.5, sigma_end=0.4, stages=2, total_steps=4)
LONG = tuple(range(5, 105))


def train(backend):
    backend.forward_backward("a", DATA, "cross_entropy", {}, False)
    backend.optim_step("a", AdamParams(learning_rate=5e-2))


@pytest.fixture
def computed(monkeypatch):
    """Numbers of tokens that sessions have computed otherwise than as they drew them, added up."""
    counts = []

    class Counted:
        def __get__(self, session, owner):
            return session.__dict__.get("counted", 0)

        def __set__(self, session, value):
            counts.append(value - self.__get__(session, None))
            session.__dict__["counted"] = value

    monkeypatch.setattr(PortableSession, "prefilled_tokens", Counted(), raising=False)
    return counts


def played(backend, turns=4):
    """Turns of conversations, each a request with all that was said: of a model before and after steps, of
    its base, and greedy ones, in batches of one policy and of several."""
    chance = random.Random(7)
    backend.create_model("a", lora())
    train(backend)
    keys, found = [backend.sampler("tiny"), backend.save_for_sampler("a", None)], []
    for _ in range(2):
        train(backend)
        keys.append(backend.save_for_sampler("a", None))
        texts = [(key, (*LONG, number)) for number in range(2) for key in keys]
        for turn in range(turns):
            asked = [
                request(key, text, seed, 6, stop_token_ids=(), num_samples=2, temperature=temperature)
                for key, text in texts
                for seed, temperature in ((turn, 1.0), (turn, 0.0))
            ]
            cut = chance.randrange(1, len(asked))
            for batch in (asked[:cut], asked[cut:]):
                answers = sampled(backend, batch[:3], [batch[3:]])
                found += [answers[number] for number in range(len(batch))]
            last = found[-len(asked) :: 2]
            texts = [
                (key, (*text, *result.sequences[turn % 2].tokens, chance.randrange(128)))
                for (key, text), result in zip(texts, last, strict=True)
            ]
    return found


@pytest.mark.parametrize("options", [{}, {"noise": NOISE}], ids=["plain", "noise"])
def test_conversations_draw_what_they_would_and_compute_what_is_new(tmp_path, computed, options):
    counts, found = [], []
    for kept in (True, False):
        computed.clear()
        backend = tiny_backend(tmp_path / str(kept), enable_prefix_caching=kept, **options)
        found.append(played(backend))
        counts.append(sum(computed))
        prefixes = backend._base.engine._prefixes
        assert bool(prefixes.nbytes) if kept else prefixes is None
    for some, other in zip(*found, strict=True):
        for one, expected in zip(some.sequences, other.sequences, strict=True):
            assert one.tokens == expected.tokens
            assert one.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert counts[0] < counts[1] / 2


def test_what_is_found_is_not_counted_as_computed(tmp_path):
    for kept in (True, False):
        backend = tiny_backend(tmp_path / str(kept), enable_prefix_caching=kept)
        key, first = backend.sampler("tiny"), tuple(range(1, 101))
        (answer,) = sampled(backend, [request(key, first)]).values()
        assert backend.gauges()["prefilled_tokens"] == len(first)
        then = (*first, *answer.sequences[0].tokens[:-1], 9, 8, 7)
        sampled(backend, [request(key, then)] * 2)  # which share it
        assert backend.gauges()["prefilled_tokens"] == len(first) + (3 if kept else len(then))


def test_what_changes_a_model_frees_what_was_kept(tmp_path):
    backend = tiny_backend(tmp_path)
    key = backend.sampler("tiny")
    backend.create_model("a", lora())
    path = backend.save_state("a", "there")
    for change in (
        lambda: backend.create_model("b", lora()),
        lambda: backend.forward_backward("a", DATA, "cross_entropy", {}, False),
        lambda: backend.optim_step("a", AdamParams(learning_rate=1e-2)),
        lambda: backend.load_state("a", path, False),
        lambda: backend.load_state("c", path, True),
        backend.close,
    ):
        sampled(backend, [request(key)])
        assert backend._base.engine._prefixes.nbytes
        change()
        assert not backend._base.engine._prefixes.nbytes


def test_a_session_that_fails_frees_what_was_kept(tmp_path, monkeypatch):
    backend = tiny_backend(tmp_path)
    key = backend.sampler("tiny")
    sampled(backend, [request(key)])

    def fails(*_):
        raise QeRLError("no memory")

    monkeypatch.setattr(PortableSession, "_decode", fails)
    assert "no memory" in str(sampled(backend, [request(key)])[0])
    assert not backend._base.engine._prefixes.nbytes
