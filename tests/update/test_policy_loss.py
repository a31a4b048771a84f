"""Each policy loss has the value, the gradient and the metrics of TRL's, in float64, whatever its options."""

from itertools import product

import pytest
import torch

from qerl.update.policy_loss import (
    PolicyLoss,
    Share,
    Tokens,
    adapted_entropy_coef,
    gathered,
    high_entropy,
)
from tests.support.trl_loss import trl_loss

NAMES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
LENGTHS = [5, 8, 1, 0, 6, 3]
B, C = len(LENGTHS), max(LENGTHS)

# Ours, and TRL's by TRL's names.
OPTIONS = {
    "plain": ({}, {}),
    "KL": ({"beta": 0.3, "kl_times_ratio": False}, {"beta": 0.3, "use_bias_correction_kl": False}),
    "KL times the ratio": ({"beta": 0.3}, {"beta": 0.3}),
    "delta": ({"delta": 1.5}, {"delta": 1.5}),
    "delta below the upper bound": ({"delta": 1.1}, {"delta": 1.1}),
    "bounds": ({"epsilon_low": 0.05, "epsilon_high": 1.4}, {"epsilon_low": 0.05, "epsilon_high": 1.4}),
    "off-policy mask": ({"off_policy_threshold": 0.1}, {"off_policy_mask_threshold": 0.1}),
    "temperatures": (
        {"sapo": (2.0, 3.0)}, {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}
    ),
    "its curve": (
        {"vespo_positive": (1.5, 2.0), "vespo_negative": (2.5, 1.0)},
        {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.0},
    ),
    "entropy bonus": (
        {"entropy_bonus": True}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.4}
    ),
    "quantile": ({}, {"top_entropy_quantile": 0.4}),
    "quantile and bonus": (
        {"entropy_bonus": True},
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.4, "top_entropy_quantile": 0.4},
    ),
}  # fmt: skip


def drawn(seed=0):
    """Tokens of six samples, one of which has none; the log-probabilities of four policies, float64."""
    draw = torch.Generator().manual_seed(seed)

    def near(logps, by):
        return logps + by * torch.randn(B, C, generator=draw, dtype=torch.float64)

    mask = (torch.arange(C) < torch.tensor(LENGTHS)[:, None]).double()
    logps = -3 * torch.rand(B, C, generator=draw, dtype=torch.float64)
    return Tokens(
        mask_BC=mask,
        advantages_B=torch.tensor([1.0, -1.5, 0.5, 2.0, -0.25, 0.0], dtype=torch.float64),
        logps_BC=logps.requires_grad_(),
        entropy_BC=(4 * torch.rand(B, C, generator=draw, dtype=torch.float64)).requires_grad_(),
        old_BC=near(logps.detach(), 0.4),
        sampler_BC=near(logps.detach(), 0.4),
        reference_BC=near(logps.detach(), 0.5),
        correction=torch.where(mask.bool(), near(torch.ones(B, C), 0.2).abs(), 1.0),
    )


def of_trl(tokens, settings, name, accumulation=1, generations=1, items=23.0):
    """TRL's loss, its gradients and what it logs."""
    batch = {
        "completion_mask": tokens.mask_BC,
        "advantages": tokens.advantages_B,
        "ref_per_token_logps": tokens.reference_BC,
        "sampling_per_token_logps": tokens.sampler_BC,
        "importance_sampling_ratio": tokens.correction,
        "num_items_in_batch": torch.tensor(items),
    }
    if tokens.old_BC is not None:
        batch["old_per_token_logps"] = tokens.old_BC
    loss, metrics = trl_loss(
        tokens.logps_BC, tokens.entropy_BC, batch, loss_type=name,
        current_gradient_accumulation_steps=accumulation, steps_per_generation=generations, **settings,
    )  # fmt: skip
    return loss, metrics


def gradients(loss, tokens):
    found = torch.autograd.grad(
        loss, (tokens.logps_BC, tokens.entropy_BC), allow_unused=True, retain_graph=True
    )
    return [torch.zeros(B, C) if each is None else each for each in found]


def compare(tokens, loss, metrics, wanted, logged):
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-14)
    for found, expected in zip(gradients(loss, tokens), gradients(wanted, tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14, check_dtype=False)
    numbers = gathered([metrics], lambda own: own)
    for key in logged.keys() - {"entropy", "entropy_coef", "vespo/phi_seq_mean"}:
        assert numbers[key] == pytest.approx(logged[key], rel=1e-5), key
    assert numbers.keys() - logged.keys() <= {"entropy_bonus/nats", "entropy_bonus/tokens"}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name, options", product(NAMES, OPTIONS))
def test_a_loss_is_trls(name, options, level):
    ours, theirs = OPTIONS[options]
    tokens = drawn()
    wanted, logged = of_trl(tokens, theirs | {"importance_sampling_level": level}, name, 4, 2)
    kept = None
    if quantile := theirs.get("top_entropy_quantile"):
        values = tokens.entropy_BC.detach()
        threshold = values[tokens.mask_BC.bool()].quantile(1 - quantile)
        kept = high_entropy(values, tokens.mask_BC, threshold)
        assert 0 < kept.sum() < tokens.mask_BC.sum()
    loss = PolicyLoss(name, of_sequence=level == "sequence", longest=8, **ours)
    share = Share(4, 23.0 * 4 / 2)
    given = Tokens(**vars(tokens) | {"high_entropy_BC": kept})
    found, metrics = loss(given, share, theirs.get("entropy_coef", 0.0))
    assert any(map(torch.any, gradients(found, tokens)))
    compare(tokens, found, metrics, wanted, logged)


@pytest.mark.parametrize("name", NAMES)
def test_without_old_log_probabilities_the_policy_is_its_own(name):
    tokens = Tokens(**vars(drawn(1)) | {"old_BC": None})
    settings = {"off_policy_mask_threshold": 0.1, "beta": 0.2}
    wanted, logged = of_trl(tokens, settings, name)
    loss = PolicyLoss(name, longest=8, beta=0.2, off_policy_threshold=0.1)
    compare(tokens, *loss(tokens, Share(1, 23.0)), wanted, logged)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "vespo"])  # which needs one of each token
def test_a_correction_of_samples(name):
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0, 1.5, 1.0], dtype=torch.float64)[:, None]
    tokens = Tokens(**vars(drawn(2)) | {"correction": weight})
    wanted, logged = of_trl(tokens, {}, name)
    compare(tokens, *PolicyLoss(name, longest=8)(tokens, Share(1, 23.0)), wanted, logged)


@pytest.mark.parametrize("value", [1e4, -1e4, torch.inf, torch.nan])
@pytest.mark.parametrize("name", NAMES)
def test_what_stands_outside_of_the_mask_changes_nothing(name, value):
    loss, tokens = PolicyLoss(name, beta=0.1, entropy_bonus=True, longest=8), drawn(3)
    share = Share(1, 23.0)
    outside = ~tokens.mask_BC.bool()
    names = ("logps_BC", "entropy_BC", "old_BC", "sampler_BC", "reference_BC")
    strange = {name: getattr(tokens, name).detach().masked_fill(outside, value) for name in names}
    leaves = {name: strange[name].requires_grad_() for name in ("logps_BC", "entropy_BC")}
    other = Tokens(**vars(tokens) | strange | leaves)
    found, expected = (loss(each, share, 0.3)[0] for each in (other, tokens))
    assert torch.equal(found, expected)
    for mine, wanted in zip(gradients(found, other), gradients(expected, tokens), strict=True):
        assert torch.equal(mine, wanted)


def test_the_weight_of_the_adaptive_bonus_is_trls():
    """Two steps on entropies on both sides of the target, and at its bounds."""
    tokens = drawn(4)
    mask = tokens.mask_BC
    entropy = float((tokens.entropy_BC.detach() * mask).sum() / mask.sum())
    for target, coef in product((entropy - 0.1, entropy + 0.1), (0.0, 0.3, 1.0)):
        bounds = {"entropy_coef_delta": 0.2, "entropy_coef_min": 0.05, "entropy_coef_max": 0.4}
        settings = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": True, "entropy_target": target}
        _, logged = of_trl(tokens, settings | bounds | {"entropy_coef": coef}, "dapo")
        _, metrics = PolicyLoss("dapo", entropy_bonus=True)(tokens, Share(1, 23.0))
        found = gathered([metrics], lambda own: own)
        (nats,), (count,) = found["entropy_bonus/nats"], found["entropy_bonus/tokens"]
        assert logged["entropy_coef"] == [adapted_entropy_coef(coef, nats / count, target, *bounds.values())]
