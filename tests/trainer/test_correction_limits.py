"""What importance weights per token make up for: the choice of one token, exactly; an answer of two, not.

Expectations over a tiny model's whole vocabulary, mu with noise in its norms and pi without.

Legend: V vocabulary, S samples.
"""

import pytest
import torch

from qerl.noise.draw import AdaptiveNoise
from qerl.noise.norms import noisy_norms
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.update.policy_loss import importance_ratio

PROMPT = [5, 9, 3]
V = 64


@pytest.fixture(scope="module")
def policies(tiny_model):
    """The clean model and noise under which it is another policy."""
    model = tiny_model("llama", vocab_size=V)
    schedule = NoiseSchedule(sigma_start=0.3, sigma_end=0.3, stages=2, total_steps=2, kind="exponential")
    return model, AdaptiveNoise(model, schedule, 0).offsets(1)


def next_logps(model, contexts):
    """[contexts, V], with a graph."""
    return model(input_ids=torch.tensor(contexts)).logits[:, -1].log_softmax(-1)


def gradient(model, objective):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(objective, parameters)])


def error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def ratio(pi_SC, mu_SC, mode):
    return importance_ratio(pi_SC, mu_SC, torch.ones_like(pi_SC), mode)


def test_one_token_has_the_clean_gradient(policies):
    model, noise = policies
    advantages_V = torch.randn(V, generator=torch.Generator().manual_seed(1))
    pi_V = next_logps(model, [PROMPT])[0]
    with torch.no_grad(), noisy_norms(model, noise):
        mu_V = next_logps(model, [PROMPT])[0]
    rho_V = ratio(pi_V.detach()[:, None], mu_V[:, None], "token_truncate")[:, 0]
    exact = gradient(model, (pi_V.exp() * advantages_V).sum())
    pi_V = next_logps(model, [PROMPT])[0]
    corrected = gradient(model, (mu_V.exp() * rho_V * advantages_V * pi_V).sum())
    pi_V = next_logps(model, [PROMPT])[0]
    uncorrected = gradient(model, (mu_V.exp() * advantages_V * pi_V).sum())
    assert error(corrected, exact) < 1e-5
    assert error(uncorrected, exact) > 0.3


def test_samples_of_the_noisy_engine_have_it_in_the_mean(policies):
    """The engine draws under noise and says with what probability; the ratio turns its samples into pi's."""
    model, noise = policies
    advantages_V = torch.randn(V, generator=torch.Generator().manual_seed(1))
    engine = PortableEngine(model, 0, max_sequences=8192)
    drawn = engine.generate([PROMPT], 8192, SamplingParams(max_tokens=1, seed=3), noise).completions
    tokens_S = torch.tensor([c.token_ids[0] for c in drawn])
    mu_S = torch.tensor([c.logprobs[0] for c in drawn])
    exact = gradient(model, (next_logps(model, [PROMPT])[0].exp() * advantages_V).sum())
    errors = {}
    for corrects in (True, False):
        pi_S = next_logps(model, [PROMPT])[0][tokens_S]
        rho_S = ratio(pi_S.detach()[:, None], mu_S[:, None], "token_truncate")[:, 0] if corrects else 1.0
        errors[corrects] = error(gradient(model, (rho_S * advantages_V[tokens_S] * pi_S).mean()), exact)
    assert errors[True] < 0.1 < 0.3 < errors[False]


def two_tokens(model):
    """Log-probabilities [V * V, 2] of all answers of two tokens, with a graph."""
    first_V = next_logps(model, [PROMPT])[0]
    second_VV = next_logps(model, [[*PROMPT, token] for token in range(V)])
    return torch.stack([first_V[:, None].expand(V, V).flatten(), second_VV.flatten()], dim=1)


def test_two_tokens_have_it_with_a_ratio_per_answer_and_not_per_token(policies):
    model, noise = policies
    advantages_S = torch.randn(V * V, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), noisy_norms(model, noise):
        mu_S2 = two_tokens(model)
    pi_S2 = two_tokens(model)
    exact = gradient(model, (pi_S2.sum(1).exp() * advantages_S).sum())
    errors = {}
    for mode in ("token_truncate", "sequence_truncate"):
        pi_S2 = two_tokens(model)
        rho = ratio(pi_S2.detach(), mu_S2, mode)
        terms_S = (rho * pi_S2).sum(1) * advantages_S
        errors[mode] = error(gradient(model, (mu_S2.sum(1).exp() * terms_S).sum()), exact)
    assert errors["sequence_truncate"] < 1e-5
    assert errors["token_truncate"] > 0.1
