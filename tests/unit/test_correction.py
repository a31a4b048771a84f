"""Importance ratio and divergence against values worked out by hand."""

import math

import pytest
import torch

from qerl.trainer.correction import importance_ratio, rows_with_gradient, sampler_trainer_kl

TRAINER = torch.tensor([[math.log(0.4), math.log(0.9)], [math.log(0.1), 0.0]])
SAMPLER = torch.tensor([[math.log(0.2), math.log(0.1)], [math.log(0.2), 0.0]])
MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [[2.0, 3.0], [0.5, 1.0]]),
        ("token_truncate", 0.8, None, [[2.0, 9.0], [0.8, 1.0]]),
        ("token_mask", None, 3.0, [[2.0, 0.0], [0.5, 1.0]]),
        ("sequence_truncate", None, 3.0, [[3.0], [0.5]]),
        ("sequence_mask", None, 3.0, [[0.0], [0.5]]),
    ],
)
def test_ratio(mode, low, high, expected):
    ratio = importance_ratio(TRAINER, SAMPLER, MASK, mode, low, high)
    torch.testing.assert_close(ratio, torch.tensor(expected))


def test_unknown_sampler_log_prob_is_no_mismatch():
    sampler = SAMPLER.clone()
    sampler[0, 1] = float("nan")
    ratio = importance_ratio(TRAINER, sampler, MASK, "token_truncate", None, 3.0)
    assert ratio[0, 1] == 1.0


def test_kl_estimate_converges_to_the_exact_divergence():
    torch.manual_seed(0)
    sampler, trainer = torch.randn(2, 16, dtype=torch.double).log_softmax(-1)
    exact = (sampler.exp() * (sampler - trainer)).sum()
    tokens = torch.multinomial(sampler.exp(), 400_000, replacement=True)[None]
    estimate = sampler_trainer_kl(trainer[tokens], sampler[tokens], torch.ones_like(tokens)).mean()
    assert estimate == pytest.approx(exact.item(), rel=0.02)
    assert not sampler_trainer_kl(sampler[tokens], sampler[tokens], torch.ones_like(tokens)).any()


def test_rows_without_advantage_or_tokens_are_left_out():
    advantages = torch.tensor([0.0, 1.0, -1.0, 2.0])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]])
    assert rows_with_gradient(advantages, mask) == [1, 3]
