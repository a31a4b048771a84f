"""DPPO, covariances, the pull to the sampler, rejection and means, each against loops over tokens in numpy
that are written another way, and against finite differences."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from qerl.update.policy_loss import (
    Correction,
    PolicyLoss,
    Share,
    Tokens,
    binary_kl,
    covariance,
    gathered,
    kept_samples,
    largest_covariance,
    squared_log_ratio,
    within_covariance,
)

LENGTHS = [7, 4, 1, 0, 6, 7]
B, C = len(LENGTHS), max(LENGTHS)
MASK = (torch.arange(C) < torch.tensor(LENGTHS)[:, None]).double()
ADVANTAGES = [1.0, -1.5, 0.5, 2.0, -0.25, 0.0]
WHOLE = Share(1, 23.0)
SEEN = [(b, c) for b in range(B) for c in range(LENGTHS[b])]


def drawn(seed=0, apart=0.8):
    """Tokens of six samples, of which one has none and one no advantage, float64."""
    draw = np.random.default_rng(seed)
    logps = -2.5 * draw.random((B, C))
    old = np.minimum(logps + apart * draw.standard_normal((B, C)), -1e-3)
    return Tokens(
        mask_BC=MASK,
        advantages_B=torch.tensor(ADVANTAGES, dtype=torch.float64),
        logps_BC=torch.tensor(logps).requires_grad_(),
        entropy_BC=torch.ones(B, C, dtype=torch.float64),
        old_BC=torch.tensor(old),
        sampler_BC=torch.tensor(old),
    )


def gradient(loss, tokens, share=WHOLE):
    (found,) = torch.autograd.grad(loss(tokens, share)[0], tokens.logps_BC)
    return found.numpy()


def differences(value, tokens, step=1e-5):
    """Central differences of a function of log-probabilities [B, C]."""
    logps = tokens.logps_BC.detach().numpy()
    found = np.zeros_like(logps)
    for at in SEEN:
        moved = np.zeros_like(logps)
        moved[at] = step
        found[at] = (value(logps + moved) - value(logps - moved)) / (2 * step)
    return found


def is_masked(name, pi, mu, advantage, low, high):
    if name == "dppo_tv":
        return pi - mu > high if advantage > 0 else advantage < 0 and mu - pi > low
    divergence = float(kl_divergence(*(Bernoulli(torch.tensor(p, dtype=torch.float64)) for p in (mu, pi))))
    if advantage > 0:
        return pi > mu and divergence > high
    return advantage < 0 and pi < mu and divergence > low


@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize(
    ("name", "low", "high"), [("dppo_tv", 0.1, 0.05), ("dppo_tv", 0.02, 0.2), ("dppo_kl", 0.01, 0.05)]
)
def test_dppo_masks_what_has_moved_too_far_where_its_advantage_pushes(name, low, high, delta):
    tokens = drawn()
    loss = PolicyLoss(name, epsilon_low=low, epsilon_high=high, delta=delta)
    wanted, masked, far_but_back = np.zeros((B, C)), set(), 0
    for b, c in SEEN:
        advantage = ADVANTAGES[b]
        pi, mu = (math.exp(float(x.detach()[b, c])) for x in (tokens.logps_BC, tokens.old_BC))
        if is_masked(name, pi, mu, advantage, low, high):
            masked.add((b, c))
            continue
        far_but_back += abs(pi - mu) > 0.2 and (pi - mu) * advantage < 0
        wanted[b, c] = -min(pi / mu, delta or math.inf) * advantage / 23
    signs = {ADVANTAGES[b] > 0 for b, _ in masked}
    assert signs == {True, False} and far_but_back and len(masked) < len(SEEN) - 5
    np.testing.assert_allclose(gradient(loss, tokens), wanted, rtol=1e-12, atol=1e-15)
    numbers = gathered([loss(tokens, WHOLE)[1]], lambda own: own)
    assert numbers["clip_ratio/region_mean"][0] == pytest.approx(len(masked) / len(SEEN))
    high_share = sum(ADVANTAGES[b] > 0 for b, _ in masked) / len(SEEN)
    assert numbers["clip_ratio/high_mean"][0] == pytest.approx(high_share)
    if delta is None:  # the value whose gradient that is: the ratio times the advantage, where it is kept

        def value(logps):
            kept = [at for at in SEEN if at not in masked]
            return (
                -sum(math.exp(logps[at] - float(tokens.old_BC[at])) * ADVANTAGES[at[0]] for at in kept) / 23
            )

        np.testing.assert_allclose(gradient(loss, tokens), differences(value, tokens), rtol=1e-7, atol=1e-9)


def test_the_binary_divergence_at_the_ends_of_its_range():
    """In float32, where 1 - p has no digits left, and where one of the policies is sure."""
    near = [-1e-7, -1e-4, -0.01, -1.0, -8.0]
    for q in near:
        p = torch.tensor([x for x in near if x != q])
        found = binary_kl(p, torch.full_like(p, q))
        mu, rest = math.exp(q), -math.expm1(q)
        wanted = [mu * (q - x) + rest * (math.log(rest) - math.log(-math.expm1(x))) for x in p.tolist()]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=2e-3, atol=1e-7)
    sure, unsure = torch.tensor([0.0]), torch.tensor([-0.5])
    assert binary_kl(sure, sure).item() == 0 and binary_kl(sure, unsure).item() == math.inf
    assert binary_kl(unsure, sure).item() == pytest.approx(0.5)


def test_a_policy_that_has_not_moved_is_plain_policy_gradient():
    tokens = Tokens(**vars(drawn()) | {"old_BC": None})
    for name in ("dppo_tv", "dppo_kl"):
        found = gradient(PolicyLoss(name, epsilon_low=0.0, epsilon_high=0.0), tokens)
        np.testing.assert_allclose(found, -np.array(ADVANTAGES)[:, None] * MASK.numpy() / 23)


def test_the_pull_is_the_squared_log_ratio_to_the_sampler_where_there_is_an_advantage():
    tokens = drawn(1)
    sampler = tokens.sampler_BC.clone()
    sampler[0, 2] = math.nan
    tokens = Tokens(**vars(tokens) | {"sampler_BC": sampler, "old_BC": tokens.old_BC - 0.3})
    plain, pulled = PolicyLoss("dppo_tv"), PolicyLoss("dppo_tv", kl_tau=0.7)

    def value(logps):
        pulling = [at for at in SEEN if ADVANTAGES[at[0]] and not math.isnan(sampler[at])]
        return 0.7 * sum((logps[at] - float(sampler[at])) ** 2 for at in pulling) / 23

    found = gradient(pulled, tokens) - gradient(plain, tokens)
    np.testing.assert_allclose(found, differences(value, tokens), rtol=1e-7, atol=1e-9)
    more = (pulled(tokens, WHOLE)[0] - plain(tokens, WHOLE)[0]).item()
    assert more == pytest.approx(value(tokens.logps_BC.detach().numpy())) and more > 0
    (logged,) = gathered([pulled(tokens, WHOLE)[1]], lambda own: own)["sampling/squared_log_ratio"]
    assert logged == pytest.approx(more / 0.7 * 23 / sum(LENGTHS[:5]))
    assert squared_log_ratio(torch.zeros(1), torch.tensor([math.nan])).item() == 0


def test_covariances_of_tokens_are_on_average_that_of_numpy():
    tokens = drawn(2)
    found = covariance(tokens.old_BC, tokens.advantages_B, tokens.mask_BC)
    pairs = np.array([(float(tokens.old_BC[at]), ADVANTAGES[at[0]]) for at in SEEN])
    wanted = np.cov(pairs.T, bias=True)[0, 1]
    values = np.array([float(found[at]) for at in SEEN])
    assert values.mean() == pytest.approx(wanted, rel=1e-12)
    assert values[3] == pytest.approx(np.prod(pairs[3] - pairs.mean(axis=0)), rel=1e-12)
    assert (found[~MASK.bool()] == -math.inf).all()

    order = sorted(range(len(SEEN)), key=lambda at: -values[at])
    chosen = largest_covariance(found, 4)
    assert {at for at in SEEN if chosen[at]} == {SEEN[at] for at in order[:4]} and chosen.sum() == 4
    assert largest_covariance(found, 10**6).sum() == len(SEEN)

    low, high = np.sort(values)[[3, 15]]
    inside = [at for at in SEEN if low < float(found[at]) < high]
    uniform = torch.rand(B, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    taken = within_covariance(found, low, high, 5, uniform)
    assert {at for at in SEEN if taken[at]} == set(sorted(inside, key=lambda at: -float(uniform[at]))[:5])
    assert within_covariance(found, low, high, 100, uniform).sum() == len(inside) > 5
    assert not within_covariance(found, high, low, 5, uniform).any()


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_large_covariance_are_held_back(seed):
    tokens = drawn(3 + seed)
    chosen = torch.tensor(np.random.default_rng(seed).random((B, C)) < 0.3)
    held = Tokens(**vars(tokens) | {"chosen_BC": chosen})
    free = gradient(PolicyLoss("clip_cov", epsilon_low=1.0, epsilon_high=1.0), tokens)
    found = gradient(PolicyLoss("clip_cov", epsilon_low=1.0, epsilon_high=1.0), held)
    assert np.array_equal(found, np.where(chosen.numpy(), 0, free)) and found.any()

    def value(logps):
        total = 0.0
        for at in SEEN:
            log_ratio = logps[at] - float(tokens.old_BC[at])
            total -= math.exp(log_ratio) * ADVANTAGES[at[0]]
            total += 0.4 * abs(log_ratio) if chosen[at] else 0.0
        return total / 23

    loss = PolicyLoss("kl_cov", kl_cov_coef=0.4)
    np.testing.assert_allclose(gradient(loss, held), differences(value, tokens), rtol=1e-7, atol=1e-9)
    assert loss(held, WHOLE)[0].item() == pytest.approx(value(tokens.logps_BC.detach().numpy()))


def test_samples_are_rejected_by_their_mean():
    tokens = drawn(6, apart=0.3)
    sampler = tokens.sampler_BC.clone()
    sampler[0, 1] = math.nan
    logps = tokens.logps_BC.detach()
    kept = {"seq_mean_k1": [], "seq_mean_k3": []}
    limits = {"seq_mean_k1": 1.1, "seq_mean_k3": 0.05}
    for b, length in enumerate(LENGTHS):
        gaps = [float(logps[b, c] - sampler[b, c]) for c in range(length)]
        gaps = [0.0 if math.isnan(x) else x for x in gaps]
        mean = math.prod(math.exp(x) for x in gaps) ** (1 / max(length, 1))
        kept["seq_mean_k1"].append(1 / 1.1 <= mean <= 1.1)
        kept["seq_mean_k3"].append(sum(math.exp(x) - 1 - x for x in gaps) / max(length, 1) <= 0.05)
    for rule, wanted in kept.items():
        found = kept_samples(logps, sampler, MASK, rule, limits[rule])
        assert found[:, 0].tolist() == wanted and len(set(wanted)) == 2, rule
        correction = Correction(True, "token_truncate", None, 3.0, False, rule, limits[rule])
        assert torch.equal(correction.kept(logps, sampler, MASK), found)
    assert Correction(True, "token_truncate", None, 3.0).kept(logps, sampler, MASK) is None


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "vespo", "dppo_tv", "sapo"])
def test_a_rejected_sample_has_no_gradient_and_counts_in_the_mean(name):
    tokens = drawn(7)
    kept = torch.tensor([[True], [False], [True], [True], [False], [False]])
    rejecting = Tokens(**vars(tokens) | {"kept_B1": kept})
    loss = PolicyLoss(name, epsilon_high=2.0)
    found, plain = gradient(loss, rejecting), gradient(loss, tokens)
    assert np.array_equal(found, np.where(kept.numpy(), plain, 0)) and found.any()
    numbers = gathered([loss(rejecting, WHOLE)[1]], lambda own: own)
    assert numbers["rollout_rs/rejected"] == [2 / 4], "of the samples that have tokens and an advantage"


def test_a_ratio_that_is_in_the_loss_is_no_factor_once_more():
    ratio = torch.tensor([[0.1, 0.9], [2.0, 9.0]])
    for mode, wanted in (
        ("token_truncate", [[1.0, 1.0], [1.0, 1.0]]),
        ("token_mask", [[0.0, 1.0], [1.0, 0.0]]),
    ):
        correction = Correction(True, mode, 0.5, 3.0, in_ratio=True)
        assert correction.weight(ratio).tolist() == wanted
    assert Correction(False, "token_mask", 0.5, 3.0, in_ratio=True).weight(ratio).eq(1).all()


MEANS = {
    "token-mean": lambda b, tokens: 23.0,
    "seq-mean-token-mean": lambda b, tokens: B * 0.5 * max(LENGTHS[b], 1),
    "seq-mean-token-sum": lambda b, tokens: B * 0.5,
    "seq-mean-token-sum-norm": lambda b, tokens: B * 0.5 * 8,
    "prompt-mean": lambda b, tokens: B * 0.5 * float(tokens.group_tokens_B[b]),
}


@pytest.mark.parametrize("name", ["dapo", "grpo", "cispo", "dppo_tv", "luspo"])
@pytest.mark.parametrize("aggregation", MEANS)
def test_what_losses_are_divided_by_is_a_choice_of_its_own(aggregation, name):
    """Groups of two samples, and half of the samples count."""
    lengths = [sum(LENGTHS[b : b + 2]) / 2 for b in (0, 2, 4) for _ in range(2)]
    tokens = Tokens(**vars(drawn(8)) | {"group_tokens_B": torch.tensor(lengths, dtype=torch.float64)})
    share = Share(1, 23.0, 0.5)
    raw = gradient(PolicyLoss(name, epsilon_high=2.0, aggregation="token-mean"), tokens, share) * 23.0
    found = gradient(PolicyLoss(name, epsilon_high=2.0, longest=8, aggregation=aggregation), tokens, share)
    for b in range(B):
        np.testing.assert_allclose(found[b], raw[b] / MEANS[aggregation](b, tokens), rtol=1e-12)


def test_prompts_count_alike_in_their_mean():
    """The mean over prompts of the mean over a prompt's tokens, however prompts are cut into microbatches."""
    lengths = [sum(LENGTHS[b : b + 2]) / 2 for b in (0, 2, 4) for _ in range(2)]
    tokens = Tokens(**vars(drawn(9)) | {"group_tokens_B": torch.tensor(lengths, dtype=torch.float64)})
    loss = PolicyLoss("kl_cov", aggregation="prompt-mean")
    whole, _ = loss(tokens, WHOLE)
    ratio = (tokens.logps_BC - tokens.old_BC).exp().detach().numpy()
    prompts = [
        np.mean([-ratio[at] * ADVANTAGES[at[0]] for at in SEEN if at[0] in (b, b + 1)]) for b in (0, 2, 4)
    ]
    assert whole.item() == pytest.approx(np.mean(prompts), rel=1e-12)
    parts = []
    for start in range(0, B, 2):
        part = {k: x if x is None else x[start : start + 2] for k, x in vars(tokens).items()}
        parts.append(loss(Tokens(**part), Share(3, 23.0))[0].item())
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-12)
