"""Importance ratio and divergence against values worked out by hand."""

import math

import pytest
import torch

from qerl.update import policy_loss
from qerl.update.policy_loss import Correction, gathered, importance_ratio, sampler_trainer_kl, weights

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
    ratio = weights(importance_ratio(TRAINER, SAMPLER, MASK, mode), mode, low, high)
    torch.testing.assert_close(ratio, torch.tensor(expected))


def test_unknown_sampler_log_prob_is_no_mismatch():
    sampler = SAMPLER.clone()
    sampler[0, 1] = float("nan")
    ratio = importance_ratio(TRAINER, sampler, MASK, "token_truncate")
    assert ratio[0, 1] == 1.0


def test_kl_estimate_converges_to_the_exact_divergence():
    torch.manual_seed(0)
    sampler, trainer = torch.randn(2, 16, dtype=torch.double).log_softmax(-1)
    exact = (sampler.exp() * (sampler - trainer)).sum()
    tokens = torch.multinomial(sampler.exp(), 400_000, replacement=True)[None]
    estimate = sampler_trainer_kl(trainer[tokens], sampler[tokens], torch.ones_like(tokens)).mean()
    assert estimate == pytest.approx(exact.item(), rel=0.02)
    assert not sampler_trainer_kl(sampler[tokens], sampler[tokens], torch.ones_like(tokens)).any()


def test_without_the_correction_the_weight_is_one_and_the_ratio_is_measured():
    for is_on in (True, False):
        correction = Correction(is_on, "token_truncate", None, 3.0)
        ratio = correction.ratio(TRAINER, SAMPLER, MASK)
        torch.testing.assert_close(ratio, torch.tensor([[2.0, 9.0], [0.5, 1.0]]))
        weight = [[2.0, 3.0], [0.5, 1.0]] if is_on else [[1.0, 1.0], [1.0, 1.0]]
        torch.testing.assert_close(correction.weight(ratio), torch.tensor(weight))


def alone(own):
    """What a process gathers by itself."""
    return own


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_a_ratio_without_bounds(mode):
    ratio = importance_ratio(TRAINER, SAMPLER, MASK, mode)
    assert weights(ratio, mode, None, None).equal(ratio)


def mismatch(mode, mask, sampler=SAMPLER):
    ratio = importance_ratio(TRAINER, sampler, mask, mode)
    entropies = torch.full((2, 2), 2.0), torch.full((2, 2), 1.5)
    bounded = weights(ratio, mode, None, 3.0)
    return policy_loss.mismatch(TRAINER, sampler, *entropies, mask, ratio, bounded, (None, 3.0))


def logged_of(own, gather=alone):
    found = policy_loss.mismatch_metrics(gathered([own], gather), 1.0)
    return {name: value for name, (value,) in found.items()}


def test_mismatch_of_tokens_is_measured_before_truncation():
    """Ratios 2, 9 and 0.5."""
    logged = logged_of(mismatch("token_truncate", MASK))
    assert logged["sampling/ratio/mean"] == pytest.approx(11.5 / 3)
    assert logged["sampling/ratio/max"] == pytest.approx(9.0)
    assert logged["sampling/ratio/truncated"] == pytest.approx(1 / 3)
    assert logged["sampling/ratio/effective_sample_size"] == pytest.approx(11.5**2 / (3 * 85.25))
    assert logged["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(5.5 / 3)
    assert logged["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(9))
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(math.log(36) / 3)
    total = sampler_trainer_kl(TRAINER, SAMPLER, MASK).sum().item()
    assert logged["sampling/kl"] == pytest.approx(total / 3)
    assert logged["sampling/kl_sequence"] == pytest.approx(total / 2)
    assert (logged["entropy/computed"], logged["entropy"]) == (2.0, 1.5)


def test_mismatch_of_sequences_counts_samples():
    """Ratios 18 and 0.5."""
    logged = logged_of(mismatch("sequence_truncate", MASK))
    assert logged["sampling/ratio/mean"] == pytest.approx(9.25)
    assert logged["sampling/ratio/truncated"] == pytest.approx(0.5)
    assert logged["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)


def test_mismatch_leaves_out_what_the_sampler_does_not_know():
    sampler = SAMPLER.clone()
    sampler[0, 1] = math.nan
    known = torch.tensor([[1, 0], [1, 0]])
    expected = logged_of(mismatch("token_mask", known))
    assert logged_of(mismatch("token_mask", MASK, sampler)) == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_mismatch_adds_over_processes(mode):
    """Sums are added, maxima compared; the mean of means would be another number."""
    parts = [mismatch(mode, torch.tensor(mask)) for mask in ([[1, 1], [0, 0]], [[0, 0], [1, 0]])]
    sent: list[torch.Tensor] = []
    for part in parts:
        logged_of(part, lambda own: sent.append(own) or own)
    whole = logged_of(mismatch(mode, MASK))
    for part in parts:
        assert logged_of(part, lambda own: torch.cat(sent)) == pytest.approx(whole)


def test_nothing_computed_is_not_zero():
    logged = logged_of(mismatch("token_mask", torch.zeros_like(MASK)))
    assert all(math.isnan(value) for value in logged.values())


def test_a_trainer_that_diverged_is_seen_in_the_extremes(monkeypatch):
    trainer = TRAINER.clone()
    trainer[0, 0] = math.nan
    monkeypatch.setitem(globals(), "TRAINER", trainer)
    assert math.isnan(logged_of(mismatch("token_truncate", MASK))["sampling/sampling_logp_difference/max"])
    trainer[0, 0] = math.inf
    logged = logged_of(mismatch("token_truncate", MASK))
    assert logged["sampling/ratio/max"] == logged["sampling/sampling_logp_difference/max"] == math.inf
