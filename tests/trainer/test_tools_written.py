"""What others wrote counts nowhere: not in rewards, losses, gradients or metrics."""

import pytest
import torch

from tests.support.tools import (
    make_trainer,
    sampled,
    written_reward,
)
from tests.support.trainer import gradients

pytestmark = pytest.mark.slow


def test_rewards_and_the_length_penalty_count_what_the_policy_wrote(tmp_path):
    lengths = []

    def reward(completion_ids, written_tokens, **_):
        lengths.append((written_tokens, [len(ids) for ids in completion_ids]))
        return written_reward(completion_ids)

    trainer = make_trainer(tmp_path, rewards=(reward,), overlong_buffer=0.9)
    batch = sampled(trainer)
    ((written, whole),) = lengths
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert written == mask.sum(dim=1).tolist() and sum(written) < sum(whole)
    found = trainer._logs["rewards"]["soft_overlong_punishment_reward"]
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
        batch = sampled(trainer)
        others = (batch["tool_mask"] == 0) & batch["completion_mask"].bool()
        assert others.any()
        for name in ("sampling_per_token_logps", "sampling_entropies", "ref_per_token_logps"):
            batch[name] = batch[name] + noise * others
        trainer._forget_losses()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        metrics = trainer._mismatch.metrics(trainer.accelerator) | {
            name: value for name, (value,) in trainer._metrics_of_losses().items()
        }
        results.append((loss.item(), gradients(trainer.model), metrics))
    (loss, grads, metrics), (other_loss, other_grads, other_metrics) = results
    assert loss == other_loss and metrics == pytest.approx(other_metrics, nan_ok=True)
    assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
    assert metrics["sampling/ratio/mean"] > 0 and "clip_ratio/region_mean" in metrics and "kl" in metrics


def test_the_rollout_log_knows_the_tokens_of_each_turn(tmp_path):
    trainer = make_trainer(tmp_path)
    batch = sampled(trainer)
    written = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (batch["sampling_entropies"][written] == 4.0).all()
    assert (batch["sampling_entropies"][~written] == 0.0).all()
    assert trainer._metrics["train"]["rollout/entropy"] == [4.0]
