"""Replay of routing: the update goes through the experts that the sampler chose, wherever these are known."""

import copy
import functools

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from qerl.trainer.update_step import Microbatch, load_rollouts, save_rollouts
from qerl.update.delta_net import read_sequences
from qerl.update.head import score
from qerl.update.packed_row import Sample, pack_row
from qerl.update.routing import Routing
from tests.support.families import MIXTURE, tiny
from tests.support.machine import Eager
from tests.support.models import move_adapter
from tests.support.routing import own_choices, routers_of, samples_of_engine, without

PACE = Pace(round_steps=4, prefill_tokens=(32,))
PROMPTS = [[5, 6, 7, 8, 9], [3, 4]]
"""Of which two samples each are drawn."""


def policy(name=MIXTURE):
    torch.manual_seed(1)
    model = move_adapter(add_lora(tiny(name), rank=4, alpha=8, dropout=0.0), 0.1).eval()
    read_sequences(model.get_base_model())
    return model


@pytest.fixture
def model():
    return policy()


def drawn(prompts=PROMPTS, name=MIXTURE):
    """Samples of the paged engine, drawn once for the same prompts."""
    return copy.deepcopy(_drawn(tuple(map(tuple, prompts)), name))


@functools.cache
def _drawn(prompts, name):
    engine = PagedEngine(policy(name), 0, machine=Eager(1 << 24), pace=PACE)
    return samples_of_engine(engine, [list(prompt) for prompt in prompts])


@pytest.mark.parametrize(("name", "mixtures"), [(MIXTURE, 3), ("gpt_oss", 4)])
def test_the_engine_keeps_the_experts_of_every_token(name, mixtures):
    """In FP32 they are those of transformers' own pass over each sample; also behind windows that have given
    pages back."""
    model, prompts = policy(name), [torch.randint(2, 128, (count,)).tolist() for count in (40, 1, 7)]
    for sample in drawn(prompts, name):
        tokens = len(sample.prompt) + len(sample.tokens) - 1
        assert sample.choices.shape == (tokens, mixtures, 2) and sample.choices.dtype == np.uint8
        alone = pack_row([Sample(sample.prompt, sample.tokens, [], [])], [0], torch.device("cpu"))
        found, _ = own_choices(model, alone)
        assert torch.equal(found, torch.from_numpy(sample.choices).long())


@pytest.mark.parametrize("replays", [True, False])
def test_the_update_takes_the_samplers_experts_everywhere(model, replays):
    """With choices that no router would make, half of them unknown: log-probabilities and gradients are those
    of a pass whose routers make them."""
    samples = drawn()
    generator = np.random.default_rng(0)
    for sample in samples:
        others = generator.random((*sample.choices.shape[:2], 4)).argsort(-1)[..., :2].astype(np.uint8)
        sample.choices = others[: len(others) // 2]
    for sample in samples[1::2]:  # a prompt that samples share was computed once
        shared = len(sample.prompt) - 1
        sample.choices[:shared] = samples[samples.index(sample) - 1].choices[:shared]
    row = pack_row(samples, range(len(samples)), torch.device("cpu"))
    known = row.choices_LMC >= 0
    before, plain = own_choices(model, pack_row(without(samples), range(len(samples)), torch.device("cpu")))
    routing = Routing(model.get_base_model(), replays)
    chosen, logps = own_choices(model, row)
    differ, all_known = routing.take_counts()
    assert routing.take_counts() == (0, 0)
    assert all_known == int(known.sum()) and 0.2 < differ / all_known < 0.8
    if not replays:
        assert torch.equal(chosen, before) and torch.equal(logps, plain)
        return
    assert torch.equal(chosen[known], row.choices_LMC.long()[known])
    assert not torch.allclose(logps, plain, atol=1e-2)
    logps.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for number, router in enumerate(routers_of(model)):
        router.forward = by_hand(router, chosen[:, number])
    _, again = own_choices(model, pack_row(without(samples), range(len(samples)), torch.device("cpu")))
    again.sum().backward()
    torch.testing.assert_close(again, logps, rtol=0, atol=1e-6)
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def by_hand(router, chosen_LC):
    """The forward pass of a router that chooses these, and weighs them by its own softmax."""

    def forward(x):
        logits = x.reshape(-1, x.shape[-1]) @ router.weight.T
        weight = logits.softmax(-1).gather(-1, chosen_LC)
        weight = weight / weight.sum(-1, keepdim=True) if router.norm_topk_prob else weight
        return logits, weight, chosen_LC

    return forward


@pytest.mark.parametrize("name", [MIXTURE, "qwen3_5_moe_text"])
def test_what_the_sampler_chose_is_what_the_update_computes_with(name):
    """All of it, and then the log-probabilities are the sampler's."""
    model, samples = policy(name), drawn(name=name)
    row = pack_row(samples, range(len(samples)), torch.device("cpu"))
    assert (row.choices_LMC >= 0).all()
    routing = Routing(model.get_base_model())
    chosen, logps = own_choices(model, row)
    assert torch.equal(chosen, row.choices_LMC.long())
    assert routing.take_counts() == (0, chosen.numel())
    assert logps.tolist() == pytest.approx([x for s in samples for x in s.logprobs], abs=1e-5)


def test_a_rollout_without_choices_is_computed_by_the_routers_own(model):
    """So is every pass that is not over a row, by the same modules."""
    samples = without(drawn()[:2])
    row = pack_row(samples, range(2), torch.device("cpu"))
    assert row.choices_LMC is None
    _, plain = own_choices(model, row)
    routing = Routing(model.get_base_model())
    _, found = own_choices(model, row)
    assert torch.equal(found, plain) and routing.take_counts() == (0, 0)


def test_a_router_that_chooses_twice_is_refused(model):
    samples = drawn()[:2]
    row = pack_row(samples, range(2), torch.device("cpu"))
    router = model.get_base_model().model.layers[0].mlp.gate
    forward = type(router).forward

    class Twice(type(router)):
        def forward(self, x):
            torch.topk(x, 1)
            return forward(self, x)

    router.__class__ = Twice
    Routing(model.get_base_model())
    with pytest.raises(QeRLError, match=r"calls torch\.topk 2 times"):
        score(model, model.get_base_model(), row, False)
    routing = Routing(model.get_base_model(), replays=False)  # as the message says
    score(model, model.get_base_model(), row, False)
    assert routing.take_counts()[1] > 0, "of the other routers"


def test_choices_are_saved_with_a_rollout_that_is_half_used(model, tmp_path):
    samples = drawn()[:2] + without(drawn()[2:])
    save_rollouts([Microbatch(samples, 0.5, 3)], tmp_path / "rollout.json")
    (found,) = load_rollouts(tmp_path / "rollout.json")
    assert found.samples[2].choices is None
    for mine, theirs in zip(found.samples[:2], samples, strict=False):
        assert np.array_equal(mine.choices, theirs.choices) and mine.choices.dtype == np.uint8


def test_a_layer_that_is_computed_again_takes_the_experts_of_its_own_pass(model):
    """Another row has gone through the model between its forward and its backward pass."""
    base, device = model.get_base_model(), torch.device("cpu")
    rows = [pack_row(samples, range(2), device) for samples in (drawn()[:2], drawn()[2:])]
    rows[0].choices_LMC.copy_(3 - rows[0].choices_LMC)  # as no router would
    Routing(base)
    gradients = []
    for recomputes in (False, True):
        if recomputes:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        model.train().zero_grad()
        logps, _ = score(model, base, rows[0], False)
        if recomputes:
            with torch.no_grad():
                score(model, base, rows[1], False)
        logps.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_passes_without_a_gradient_are_not_counted(model):
    row = pack_row(drawn()[:2], range(2), torch.device("cpu"))
    routing = Routing(model.get_base_model())
    with torch.no_grad():
        score(model, model.get_base_model(), row, False)
    assert routing.take_counts() == (0, 0)
