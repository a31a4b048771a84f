"""Samples of a server that are paused on a GPU: their keys and values are given back while the model trains,
captured steps stay, and what is drawn is of the snapshot."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from qerl_serve.types import AdamParams
from tests.gpu.test_serve_backend import PROMPTS, base_model
from tests.support.serve import datum, lora, request, sampled, tiny_backend

TOKENS = 96
DATA = [datum(list(range(9, 59))), datum(list(range(45, 95)))]


def train(backend, steps=1):
    """The norms of the gradients of steps."""
    norms = []
    for _ in range(steps):
        backend.forward_backward("a", DATA, "cross_entropy", {}, False)
        norms.append(backend.optim_step("a", AdamParams(learning_rate=3e-2))["grad_norm"])
    return norms


def trained(folder):
    made = tiny_backend(
        folder, base_model(), make_engine=lambda model: PagedEngine(model, 0, pace=Pace(round_steps=8))
    )
    made.create_model("a", lora())
    train(made, 2)
    return made


def free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def scored(backend, key, results):
    """Log-probabilities of what was drawn, by a policy's own pass over it."""
    rows = [(PROMPTS[number // 3], result.sequences[0]) for number, result in results.items()]
    asked = [request(key, (*p, *s.tokens), max_tokens=1, prompt_logprobs=True) for p, s in rows]
    answers = sampled(backend, asked)
    return torch.tensor(
        [one for number, (p, _) in enumerate(rows) for one in answers[number].prompt_logprobs[len(p) :]]
    )


def test_what_is_paused_for_updates_of_its_own_model_is_drawn_by_the_snapshot(tmp_path, monkeypatch):
    captured, capture = [], DecodeStep.capture
    monkeypatch.setattr(DecodeStep, "capture", lambda step: captured.append(step) or capture(step))
    alone, backend = trained(tmp_path / "alone"), trained(tmp_path / "paused")
    key = backend.save_for_sampler("a", None)
    asked = [request(key, prompt, seed, TOKENS, stop_token_ids=()) for prompt in PROMPTS for seed in range(3)]
    plain = sampled(backend, asked)
    every = tuple(range(1000))
    asked.append(
        request(key, (8,), 1, 900, num_samples=32, stop_token_ids=every)
    )  # so that the cache is large
    sampled(backend, asked)
    cache, steps = backend._base.engine.cache, len(captured)
    backend._sampling.release()  # what is kept for later samples
    size, between, rounds, pauses, norms = cache.geometry.bytes(cache.blocks), free(), [], [], []

    def work():
        assert cache.given_up
        pauses.append(free())
        norms.extend(train(backend))

    def overdue():
        assert not cache.given_up
        rounds.append(free())
        return work if len(rounds) in (2, 5, 9) else None

    results = sampled(backend, asked, overdue=overdue)
    del results[len(asked) - 1]
    assert len(pauses) == 3 and len(captured) == steps, "a pause captures nothing anew"
    assert min(pauses) > between - size / 4, "as between two batches"
    assert max(rounds) < min(pauses) - size / 2, "which is not so while samples are drawn"
    found = torch.tensor([one for result in results.values() for one in result.sequences[0].logprobs])
    of_snapshot, now = (
        scored(backend, key, results),
        scored(backend, backend.save_for_sampler("a", None), results),
    )
    gap, far = (found - of_snapshot).abs().mean(), (found - now).abs().mean()
    unpaused = torch.tensor([one for result in plain.values() for one in result.sequences[0].logprobs])
    usual = (unpaused - scored(backend, key, plain)).abs().mean()
    agree = sum(
        one == other
        for number, result in results.items()
        for one, other in zip(result.sequences[0].tokens, plain[number].sequences[0].tokens, strict=True)
    )
    print(
        f"mean |difference| from the snapshot {gap:.1e}, without pauses {usual:.1e}, from the model {far:.1e}"
    )
    print(f"{agree} of {len(found)} tokens are those without pauses; the cache has {size / 1e6:.0f} MB")
    assert gap < 1.5 * usual and gap < 0.2 * far
    assert norms == pytest.approx(train(alone, 3), rel=0.05)
