"""Batched runs on a GPU: a captured decode step draws what a CPU draws, and the update is the same."""

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
