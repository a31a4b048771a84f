"""Samples that are paused between rounds: what is drawn does not depend on it, and the model is free then."""

import gc
import threading
import time
from dataclasses import replace

import pytest
import torch

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.portable.runner import Kept, Runner
from qerl_serve import descriptors as wire
from qerl_serve.types import AdamParams
from tests.support.http import Client, connected
from tests.support.machine import Forgetful
from tests.support.serve import DATA, lora, request, sampled, tiny_backend, weights

ADAM = AdamParams(learning_rate=3e-2)
NOISE = NoiseSchedule(sigma_start=0.3, sigma_end=0.1, stages=2, total_steps=2)
PROMPTS = [(5, 9, 77), (8,), (64, 7, 8, 9, 30)]


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_not_walked():
    """`held` looks at each object in each pause: at those that these tests make."""
    gc.collect()
    gc.freeze()


def train(backend, steps=1, model_id="a"):
    """One model, and the norm of its gradients in each step."""
    norms = []
    for _ in range(steps):
        backend.forward_backward(model_id, DATA, "cross_entropy", {}, False)
        norms.append(backend.optim_step(model_id, ADAM)["grad_norm"])
    return norms


def trained(folder, **options):
    backend = tiny_backend(folder, **options)
    backend.create_model("a", lora())
    train(backend, 2)
    return backend


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for number, result in found.items():
        for sequence, other in zip(result.sequences, expected[number].sequences, strict=True):
            assert sequence.tokens == other.tokens and sequence.stop_reason == other.stop_reason
            assert sequence.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def held():
    """Batches of keys and values, and copies of them, that are there for anybody."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, (Runner, Kept))]


class Pauses:
    """Work that is overdue after each round, or each of so many; tells how often it ran."""

    def __init__(self, work=lambda: None, every=1):
        self._work, self._every, self._asked = work, every, 0
        self.count = 0

    def __call__(self):
        self._asked += 1
        return None if self._asked % self._every else self._run

    def _run(self):
        self.count += 1
        self._work()


@pytest.mark.parametrize("options", [{}, {"noise": NOISE}], ids=["plain", "noise"])
def test_a_pause_after_each_round_changes_nothing_and_holds_nothing(tmp_path, options):
    backend = trained(tmp_path, **options)
    key = backend.save_for_sampler("a", None)
    asked = [request(key, prompt, 1, 20, num_samples=2) for prompt in PROMPTS]
    asked += [request(key, PROMPTS[0], 2, 20, temperature=0.0), request(key, PROMPTS[1], 3, 9, top_k=3)]
    late = [[], [request(key, (7, 7), 4, 5)], [], [request(key, PROMPTS[0], 5, 12)]]
    expected = sampled(backend, asked, late)

    def look():
        assert not held()
        assert backend._seats.model.active_adapter == "default", "no policy is lent"
        assert not any(parameter.requires_grad for parameter in backend._seats.model.parameters())
        session = backend._base.engine._last.session  # None between two sessions
        assert torch.is_grad_enabled() and (session is None or session.prefilled_tokens)

    pauses = Pauses(look)
    same(sampled(backend, asked, late, pauses), expected)
    assert pauses.count > 10


def test_a_session_that_cannot_go_on_is_begun_again_with_what_was_drawn(tmp_path, monkeypatch):
    """As for want of memory, in every other pause; who listens is told of each token once."""
    backend = trained(tmp_path)
    key, told, enter, refused = backend.save_for_sampler("a", None), {}, PortableEngine.session, []

    def tell(index, tokens):
        told.setdefault(index, []).extend(tokens)

    asked = [request(key, prompt, 1, 20, num_samples=2, stop_token_ids=()) for prompt in PROMPTS]
    asked.append(request(key, PROMPTS[0], 2, 30, num_samples=3, stop_token_ids=(), told=tell))
    late = [[], [request(key, (7, 7), 4, 5)]]
    expected, once = sampled(backend, asked, late), told.copy()
    told.clear()

    def session(engine, *args, going_on=None, **options):
        if going_on is not None and pauses.count % 2:
            refused.append(going_on)
            raise QeRLError("not enough memory")
        return enter(engine, *args, going_on=going_on, **options)

    monkeypatch.setattr(PortableEngine, "session", session)
    pauses = Pauses(every=3)
    same(sampled(backend, asked, late, pauses), expected)
    assert len(refused) > 3 and told == once and sorted(map(len, told.values())) == [29] * 3


def test_work_is_also_done_between_sessions_of_one_round(tmp_path):
    """As of several policies, or where prompts alone are scored."""
    backend = trained(tmp_path)
    keys = [backend.sampler("tiny"), backend.save_for_sampler("a", None)]
    train(backend)
    keys.append(backend.save_for_sampler("a", None))
    asked = [request(key, PROMPTS[0], 1, 1, prompt_logprobs=True) for key in keys]
    expected, done = sampled(backend, asked), []
    pauses = Pauses(lambda: (done.append(not held()), train(backend)))
    same(sampled(backend, asked, overdue=pauses), expected)
    assert done == [True] * 2


def test_an_update_in_a_pause_is_the_one_that_it_is_alone(tmp_path):
    """Of the very model whose snapshot is sampled, which stays what it was."""
    alone, backend = trained(tmp_path / "alone"), trained(tmp_path / "paused")
    key = backend.save_for_sampler("a", None)
    asked = [request(key, prompt, 1, 30, stop_token_ids=(), num_samples=2) for prompt in PROMPTS]
    expected, norms = sampled(backend, asked), []
    pauses = Pauses(lambda: norms.extend(train(backend)), every=10)
    same(sampled(backend, asked, overdue=pauses), expected)
    assert pauses.count == 2
    assert norms == train(alone, 2)
    for name, matrix in weights(alone, "a").items():
        assert torch.equal(matrix, weights(backend, "a")[name])
    assert sampled(backend, [request(backend.save_for_sampler("a", None), PROMPTS[0], 1, 30)]) != expected


def paged(model):
    from qerl.rollout.paged.engine import PagedEngine
    from qerl.rollout.paged.scheduler import Pace

    pace = Pace(round_steps=2, spare_rounds=0, prefill_tokens=(8, 72))
    return PagedEngine(model, 0, 4, machine=Forgetful(), pace=pace)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the engine itself")
def test_the_memory_of_the_paged_engine_is_given_back_in_pauses(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    backend = trained(tmp_path, make_engine=paged)
    key, cache = backend.save_for_sampler("a", None), backend._base.engine.cache
    asked = [request(key, (5, 9, 77), 1, 6, stop_token_ids=(), num_samples=2), request(key, (8,), 1, 6)]
    expected, steps = sampled(backend, asked), list(backend._base.engine.graphs.steps)

    def work():
        assert cache.given_up
        train(backend)

    pauses = Pauses(work)
    same(sampled(backend, asked, overdue=pauses), expected)
    assert pauses.count == 2 and not cache.given_up, "what is kept serves later samples until the next update"
    train(backend)
    assert cache.given_up
    assert list(backend._base.engine.graphs.steps) == steps


def test_whose_client_ends_in_a_pause_is_not_finished_and_the_others_are(tmp_path, monkeypatch):
    """Its sampler, its model, or all that are sampled go."""
    backend = trained(tmp_path)
    backend.create_model("b", lora())
    key = backend.save_for_sampler("a", None)
    there = {"gone": True, "other": True}
    asked = [
        request(key, prompt, 1, 60, stop_token_ids=(), num_samples=2, wanted=lambda who=who: there[who])
        for prompt, who in zip(PROMPTS, ("gone", "other", "gone"), strict=True)
    ]
    expected = sampled(backend, asked)

    def end(*who):
        for each in who:
            there[each] = False

    pauses = Pauses(lambda: end("gone"), every=5)
    found = sampled(backend, asked, overdue=pauses)
    for number in (0, 2):
        assert isinstance(found[number], QeRLError) and "is gone" in str(found[number])
    same({1: found[1]}, {1: expected[1]})
    there["gone"] = True

    def drop():
        if pauses.count == 1:
            backend.drop_sampler(key)
            backend.drop("a")

    pauses = Pauses(drop, every=5)
    same(sampled(backend, asked, overdue=pauses), expected)
    key = backend.sampler("tiny")
    computed, prefill = [], Runner.prefill
    monkeypatch.setattr(Runner, "prefill", lambda *args: computed.append(args[1]) or prefill(*args))
    pauses = Pauses(lambda: end("gone", "other"), every=5)
    found = sampled(backend, [replace(each, sampler=key) for each in asked], overdue=pauses)
    assert ["is gone" in str(found[number]) for number in range(3)] == [True] * 3 and pauses.count == 1
    assert not held() and len(computed) == 1, "nothing is computed for nobody"


def test_a_pause_that_fails_answers_those_who_wait(tmp_path):
    backend = trained(tmp_path)
    base = backend.sampler("tiny")

    def fail():
        raise RuntimeError("a defect")

    found = sampled(backend, [request(base, max_tokens=9, stop_token_ids=())], overdue=Pauses(fail))
    assert str(found[0]) == "a defect"
    assert len(sampled(backend, [request(base)])[0].sequences) == 1


def ask_for_much(client, tokens=400):
    sampler = client.post("create_sampling_session", session_id=client.session, base_model="tiny")
    return client.post(
        "asample", sampling_session_id=sampler["sampling_session_id"], seq_id=1, num_samples=3,
        prompt={"chunks": [{"tokens": [5, 9, 77]}]},
        sampling_params={"max_tokens": tokens, "seed": 3, "stop": []},
    )["request_id"]  # fmt: skip


def model_of(client, number):
    """One that begins as all others."""
    return client.ask(
        "create_model", session_id=client.session, model_seq_id=number, base_model="tiny",
        lora_config={"rank": 4, "seed": 7},
    )["model_id"]  # fmt: skip


def update(client, model, first):
    """The norm of the gradients of one step."""
    client.send_pass(model, first, [5, 9, 11])
    return client.ask("optim_step", model_id=model, seq_id=first + 1, adam_params={"learning_rate": 0.05})[
        "metrics"
    ]["grad_norm"]


def tokens(answer):
    return [sequence.tokens for sequence in wire.SampleResponse.FromString(answer).sequences]


class Steps:
    """Steps of the engine, each of which takes at least a while."""

    def __init__(self, step):
        self.count, self.begun, self._step = 0, threading.Event(), step

    def __call__(self, runner, tokens_B):
        time.sleep(0.003)
        self.count += 1
        self.begun.set()
        return self._step(runner, tokens_B)

    def wait(self):
        """Until there is one more."""
        self.begun.clear()
        assert self.begun.wait(10)


@pytest.fixture
def steps(monkeypatch):
    made = Steps(Runner.step)
    monkeypatch.setattr(Runner, "step", lambda runner, tokens_B: made(runner, tokens_B))
    return made


def test_a_long_rollout_does_not_stop_the_updates_of_another_client(tmp_path, steps):
    with connected(tmp_path, tiny_backend(tmp_path), context=512, pause_s=0.05) as samples:
        updates = Client(samples.http, samples.server, samples.backend)
        model = model_of(updates, 0)
        expected = tokens(samples.result(ask_for_much(samples)))
        norms = [update(updates, model, first) for first in (1, 3)]
        again = model_of(updates, 1)
        drawing = Client(samples.http, samples.server, samples.backend)
        asked = ask_for_much(drawing)
        steps.wait()
        future = samples.server.clients.futures.get(asked)
        assert [update(updates, again, first) for first in (1, 3)] == norms
        assert future.outcome is None, "the rollout goes on"
        assert tokens(drawing.result(asked)) == expected
        counted = samples.server.metrics.registry.get_sample_value
        assert counted("qerl_sampling_pauses_total") >= 1


def test_a_client_that_ends_its_session_ends_its_paused_rollout(tmp_path, steps):
    with connected(tmp_path, tiny_backend(tmp_path), context=512, pause_s=0.0) as updates:
        model = model_of(updates, 0)
        drawing = Client(updates.http, updates.server, updates.backend)
        asked = ask_for_much(drawing)
        steps.wait()
        run = updates.backend.forward_backward

        def ends(*args):
            updates.http.post(f"/api/v1/sessions/{drawing.session}/finish")
            steps.count = 0
            return run(*args)

        updates.backend.forward_backward = ends
        assert update(updates, model, 1) > 0
        batches = updates.server.metrics.registry.get_sample_value
        deadline = time.monotonic() + 30
        while batches("qerl_sample_batch_requests_count") != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert steps.count < 10, "of 400"
        assert updates.server.clients.futures.get(asked) is None
