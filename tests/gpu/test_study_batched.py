"""Batched runs on a GPU: a captured decode step draws what a CPU draws, and the update is the same."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from lab.study.arms import Run
from tests.support.batched import RATE, a_batch, an_arm, full_arm

ARMS = {
    "plain": an_arm(),
    "by sample": an_arm(noise_per="sample", noise_share=0.5),
    "in the loss": an_arm(noise_in_loss=True),
    "full": full_arm(),
}


@pytest.mark.parametrize("name", ARMS)
def test_a_batch_on_the_gpu_does_what_it_does_on_a_cpu(name):
    runs = Run(ARMS[name], 7, RATE), Run(ARMS[name], 8, RATE)
    batches = [a_batch(*runs, device=device) for device in ("cpu", "cuda")]
    first, drawn = [batch.step() for batch in batches], []
    for one, other in zip(*first, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    for batch in batches:
        batch._trained.values_SE.copy_(batches[0]._trained.values_SE)
        batch.done = 1  # still without noise, which is drawn on the device where it is by sample
        exploration = batch._explorers.at(1)
        picked = [batch._orders[run.seed].batch(1) for run in batch.runs]
        drawn.append(batch._sample(picked, exploration))
    assert drawn[0].completions() == drawn[1].completions()
    torch.testing.assert_close(drawn[0].logprobs_SRC, drawn[1].logprobs_SRC.cpu(), rtol=1e-4, atol=1e-4)


def test_all_steps_run_and_resume_on_the_gpu():
    runs = [Run(an_arm(noise_share=0.5, correction="token_balance"), seed, RATE) for seed in range(3)]
    through, stopped, resumed = (a_batch(*runs, device="cuda") for _ in range(3))
    expected = [through.step() for _ in range(4)]
    first = [stopped.step() for _ in range(3)]
    resumed.load_state(stopped.state())
    assert [*first, resumed.step()] == expected
    assert torch.equal(resumed._trained.values_SE, through._trained.values_SE)
    scores = through.evaluate(through._evaluation._task.test(), samples=2)
    assert all(0 <= score["accuracy"] <= 1 and score["entropy"] > 0 for score in scores)


@pytest.mark.parametrize("arm", [an_arm(), full_arm()])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_16_bits_the_kernels_have_the_gradients_of_float32(family, arm):
    runs = Run(arm, 7, RATE), Run(arm, 8, RATE)
    wide = a_batch(*runs, family=family)
    narrow = a_batch(*runs, family=family, device="cuda", dtype=torch.bfloat16)
    drawn, gradients = [], []
    fields = ("tokens_SRC", "mask_SRC", "logprobs_SRC", "entropies_SRC", "finite_S")
    for batch in (wide, narrow):
        batch._trained.values_SE.add_(0.02 if arm.tuning == "lora" else 0.0)
        step, generate = batch._optimizer.step, batch._sampler.generate

        def generated(*args, generate=generate):
            own = generate(*args)
            drawn.append(own)
            return replace(own, **{name: getattr(drawn[0], name).to(own.mask_SRC.device) for name in fields})

        def stepped(*args, step=step, batch=batch):
            gradients.append(batch._trained.gradients_SE.to("cpu", copy=True))
            return step(*args)

        batch._sampler.generate, batch._optimizer.step = generated, stepped
        batch.step()
    apart = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    print(f"{family}, {arm.tuning}: gradients differ by {apart:.3f}")
    assert apart < 0.15  # bfloat16 weights of a model that rounds badly
    same = (drawn[0].tokens_SRC == drawn[1].tokens_SRC.cpu()).float().mean()
    assert same > 0.5  # of random weights, whose distributions are flat
