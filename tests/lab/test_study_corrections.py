"""Corrections that studies alone have, against values worked out by hand and against an exact gradient.

Legend: V vocabulary.
"""

import math

import torch

from lab.study.batched.corrections import balance_ratio, one_sided

TRAINER = torch.tensor([[math.log(0.4), math.log(0.9)], [math.log(0.1), 0.0]])
NOISY = torch.tensor([[math.log(0.2), math.log(0.1)], [math.log(0.2), 0.0]])
MASK = torch.tensor([[1, 1], [1, 0]])


def test_one_sided_ratio():
    """Ratios 2, 9 and 0.5, 1: of a good sample they count 1 to 3, of a bad one 0 to 1."""
    ratio = torch.tensor([[2.0, 9.0], [0.5, 1.0]])
    good, bad = torch.ones(2, 1), -torch.ones(2, 1)
    torch.testing.assert_close(one_sided(ratio, good, 3.0), torch.tensor([[2.0, 3.0], [1.0, 1.0]]))
    torch.testing.assert_close(one_sided(ratio, bad, 3.0), torch.tensor([[1.0, 1.0], [0.5, 1.0]]))
    each = torch.tensor([[0.7], [-0.7]])
    torch.testing.assert_close(one_sided(ratio, each, 3.0), torch.tensor([[2.0, 3.0], [0.5, 1.0]]))


def test_balance_ratio():
    """0.4 / (0.25 x 0.2 + 0.75 x 0.4), and so on; never above 1 / (1 - 0.25)."""
    ratio = balance_ratio(TRAINER, NOISY, 0.25, MASK)
    torch.testing.assert_close(ratio, torch.tensor([[0.4 / 0.35, 0.9 / 0.7], [0.1 / 0.125, 1.0]]))
    never_by_noise = balance_ratio(torch.zeros(1, 1), torch.full((1, 1), -1e4), 0.5, torch.ones(1, 1))
    assert never_by_noise.item() == 2.0
    hardly_by_trainer = balance_ratio(torch.full((1, 1), -1e4), torch.zeros(1, 1), 0.5, torch.ones(1, 1))
    assert hardly_by_trainer.item() == 0.0
    assert balance_ratio(TRAINER, NOISY * math.nan, 0.5, MASK).eq(1).all()


def test_one_token_of_a_mixture_has_the_clean_gradient_and_one_sided_bounds_have_not():
    """With weights of the mixture, which need no bound; one-sided ones are biased on purpose."""
    draw = torch.Generator().manual_seed(1)
    advantages_V, logits_V = torch.randn(64, generator=draw), torch.randn(64, generator=draw)
    pi_V = logits_V.log_softmax(-1)
    mu_V = (logits_V + torch.randn(64, generator=draw)).log_softmax(-1)

    def gradient(objective):
        """By the logits, of what an expectation over all tokens is proportional to."""
        at_V = logits_V.clone().requires_grad_()
        return torch.autograd.grad(objective(at_V.log_softmax(-1)), at_V)[0]

    exact = gradient(lambda now_V: (now_V.exp() * advantages_V).sum())
    share = 0.25
    drawn_V = share * mu_V.exp() + (1 - share) * pi_V.exp()
    rho_V = balance_ratio(pi_V[None], mu_V[None], share, torch.ones(1, 64))[0]
    balanced = gradient(lambda now_V: (drawn_V * rho_V * advantages_V * now_V).sum())
    torch.testing.assert_close(balanced, exact)
    assert rho_V.max() <= 1 / (1 - share)
    rho_V = one_sided((pi_V - mu_V).exp()[:, None], advantages_V[:, None], 3.0)[:, 0]
    biased = gradient(lambda now_V: (mu_V.exp() * rho_V * advantages_V * now_V).sum())
    assert (biased - exact).norm() > 0.1 * exact.norm()
