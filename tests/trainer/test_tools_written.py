"""What others wrote counts nowhere: not in rewards, losses, gradients or metrics."""

import pytest
import torch

from tests.support.tools import (
    make_trainer,
    sampled,
    written_reward,
)
from tests.support.trainer import gradients, reported, samples_of, update_of

pytestmark = pytest.mark.slow


def test_rewards_and_the_length_penalty_count_what_the_policy_wrote(tmp_path):
    lengths = []

    def reward(completion_ids, written_tokens, **_):
        lengths.append((written_tokens, [len(ids) for ids in completion_ids]))
        return written_reward(completion_ids)

    trainer = make_trainer(tmp_path, rewards=(reward,), overlong_buffer=0.9)
    samples = samples_of(sampled(trainer))
    ((written, whole),) = lengths
    assert written == [sum(sample.written) for sample in samples] and sum(written) < sum(whole)
    found = [record.rewards["soft_overlong_punishment_reward"] for record in trainer._log.records]
    most, buffer = 300, 270
    assert list(found) == pytest.approx([min(0.0, (most - buffer - n) / buffer) for n in written])
    assert any(penalty < 0 for penalty in found)


def test_tokens_of_others_change_no_loss_gradient_or_metric(tmp_path):
    """Their log-probabilities and entropies under either policy may be anything."""
    results = []
    for noise in (0.0, 3.0):
        trainer = make_trainer(
            tmp_path, vllm_importance_sampling_mode="sequence_truncate", beta=0.1, entropy_coef=0.1
        )
        parts = sampled(trainer)
        for sample in samples_of(parts):
            for values in (sample.logprobs, sample.entropies, sample.reference_logprobs):
                values[:] = [v + noise * (not own) for v, own in zip(values, sample.written, strict=True)]
        assert any(0 in sample.written for sample in samples_of(parts))
        loss = update_of(trainer, parts)
        results.append((loss.item(), gradients(trainer.model), reported(trainer)))
    (loss, grads, metrics), (other_loss, other_grads, other_metrics) = results
    assert loss == other_loss and metrics == pytest.approx(other_metrics, nan_ok=True)
    assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
    assert metrics["sampling/ratio/mean"] > 0 and "clip_ratio/region_mean" in metrics and "kl" in metrics


def test_the_rollout_log_knows_the_tokens_of_each_turn(tmp_path):
    trainer = make_trainer(tmp_path)
    for sample in samples_of(sampled(trainer)):
        assert sample.entropies == [4.0 * own for own in sample.written]
    assert trainer._log.metrics["train"]["rollout/entropy"] == [4.0]
