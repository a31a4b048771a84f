"""Divergences from a teacher and their gradients, against dense formulas in FP64 and finite differences."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qerl.kernels import tensors
from qerl.update.distillation import Target, divergence
from qerl.update.head import Head, Transform

POSITIONS, WIDTH, TEACHER_WIDTH, VOCABULARY = 300, 16, 24, 1100
ALPHAS = [0.0, 0.3, 1.0]
TRANSFORMS = [Transform(temperature=0.7), Transform(scale=0.3, cap=2.0)]


def logits(hidden_SD, weight_VD, bias_V, transform):
    z_SV = hidden_SD @ weight_VD.T
    if bias_V is not None:
        z_SV = z_SV + bias_V
    z_SV = z_SV * transform.scale
    if transform.cap is not None:
        z_SV = transform.cap * torch.tanh(z_SV / transform.cap)
    return z_SV / transform.temperature


def kl(p_SV, q_SV):
    return (p_SV * (p_SV / q_SV).log()).sum(-1)


def dense(p_SV, q_SV, alpha):
    """GKD's definition, of probabilities."""
    if alpha in (0.0, 1.0):
        return kl(p_SV, q_SV) if alpha else kl(q_SV, p_SV)
    m_SV = alpha * q_SV + (1 - alpha) * p_SV
    return alpha * kl(q_SV, m_SV) + (1 - alpha) * kl(p_SV, m_SV)


def error(found, truth):
    return float(((found.double() - truth).norm() / truth.norm()).detach())


def drawn(biased):
    shapes = [
        (POSITIONS, WIDTH),
        (VOCABULARY, WIDTH),
        (POSITIONS, TEACHER_WIDTH),
        (VOCABULARY, TEACHER_WIDTH),
    ]
    hidden, weight, theirs, their_weight = (torch.randn(s, dtype=torch.float64) for s in shapes)
    bias = torch.randn(VOCABULARY, dtype=torch.float64) if biased else None
    return hidden * 0.4, weight, bias, theirs * 0.3, their_weight


class Alive(TorchDispatchMode):
    """Counts the storages of at least so many bytes that operations make and that are there at a time."""

    def __init__(self, least):
        super().__init__()
        self.least, self.alive, self.most = least, set(), 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    weakref.finalize(storage, self.alive.discard, storage._cdata)
        self.most = max(self.most, len(self.alive))
        return made


def test_the_plan_counts_the_matrices_of_a_tile():
    """The largest number over all divergences and transforms, neither fewer nor more."""
    hidden_SD, weight_VD = torch.randn(64, 4, requires_grad=True), torch.randn(512, 4)
    most = {}
    for alpha in ALPHAS:
        for cap in (None, 2.0):
            head = Head(weight_VD, None, Transform(cap=cap, temperature=0.7))
            with Alive(64 * 512 * 4) as counted:
                divergence(hidden_SD, head, Target(torch.randn(64, 4), head, alpha))
            most[alpha, cap] = counted.most
    assert max(most.values()) == tensors.DIVERGENCE_ROWS, most


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["hidden states", "head too"])
@pytest.mark.parametrize("tile, biased", [(tensors.HEAD_TILE, False), (1, True)])
def test_values_and_gradients(monkeypatch, alpha, transform, trained, tile, biased):
    """In one tile and in tiles of 128 positions (tile 1); the teacher is wider and has another transform."""
    monkeypatch.setattr(tensors, "HEAD_TILE", tile)
    theirs = Transform(scale=0.5, temperature=transform.temperature)
    hidden, weight, bias, their_hidden, their_weight = drawn(biased)
    truth = [hidden.requires_grad_(), weight.requires_grad_(trained)]
    if bias is not None:
        truth.append(bias.requires_grad_(trained))
    found = [x.detach().float().requires_grad_(x.requires_grad) for x in truth]
    pull_S = torch.randn(POSITIONS, dtype=torch.float64)

    p_SV = logits(*truth[:2], bias, transform).softmax(-1)
    q_SV = logits(their_hidden, their_weight, None, theirs).softmax(-1)
    wanted_S = dense(p_SV, q_SV, alpha)
    (wanted_S * pull_S).sum().backward()

    target = Target(their_hidden.float(), Head(their_weight.float(), None, theirs), alpha)
    ours_S = divergence(found[0], Head(found[1], found[2] if biased else None, transform), target)
    (ours_S * pull_S.float()).sum().backward()
    # A divergence is a mean of differences of log-probabilities of 4 to 8, which FP32 rounds by up to 2**-22.
    rounded = 2**-22 * POSITIONS**0.5
    assert (ours_S.double() - wanted_S).norm() < 1e-6 * wanted_S.norm() + rounded
    for one, other in zip(found, truth, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or error(one.grad, other.grad) < 5e-6


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_are_finite_differences(alpha):
    """Of the dense value, which no formula of a gradient has touched."""
    hidden, weight, bias, their_hidden, their_weight = (
        x if x is None else x[:20] if x.shape[0] == POSITIONS else x for x in drawn(True)
    )
    transform, step = TRANSFORMS[1], 1e-5
    along = torch.randn_like(hidden)
    q_SV = logits(their_hidden, their_weight, None, Transform()).softmax(-1)

    def value(at):
        return dense(logits(hidden + at * along, weight, bias, transform).softmax(-1), q_SV, alpha)

    slope_S = (value(step) - value(-step)) / (2 * step)
    found = hidden.float().requires_grad_()
    target = Target(their_hidden.float(), Head(their_weight.float()), alpha)
    divergence(found, Head(weight.float(), bias.float(), transform), target).sum().backward()
    assert error((found.grad.double() * along).sum(-1), slope_S) < 1e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_teacher_that_agrees_pulls_nowhere(alpha):
    hidden, weight, *_ = (x if x is None else x.float() for x in drawn(False))
    found = hidden.clone().requires_grad_()
    values_S = divergence(found, Head(weight), Target(hidden, Head(weight), alpha))
    values_S.sum().backward()
    assert values_S.abs().max() < 1e-5 and found.grad.abs().max() < 1e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_token_that_both_rule_out_weighs_nothing(alpha):
    """A bias of minus infinity is how some models forbid tokens."""
    hidden, weight, bias, theirs, their_weight = (x if x is None else x.float() for x in drawn(True))
    bias[7] = -torch.inf
    found = hidden.clone().requires_grad_()
    values_S = divergence(found, Head(weight, bias), Target(theirs, Head(their_weight, bias), alpha))
    values_S.sum().backward()
    assert values_S.isfinite().all() and found.grad.isfinite().all()


def test_without_a_gradient_nothing_is_kept():
    hidden, weight, _, theirs, their_weight = (x if x is None else x.float() for x in drawn(False))
    with torch.no_grad():
        values_S = divergence(hidden.requires_grad_(), Head(weight), Target(theirs, Head(their_weight)))
    assert values_S.grad_fn is None


def test_no_more_than_a_tile_of_logits_is_in_memory(monkeypatch):
    """Products of heads are made of at most as many positions as a tile has."""
    monkeypatch.setattr(tensors, "HEAD_TILE", 4 * 128 * VOCABULARY)
    sizes = []
    product = Head.product
    monkeypatch.setattr(Head, "product", lambda self, x: sizes.append(len(x)) or product(self, x))
    hidden, weight, _, theirs, their_weight = (x if x is None else x.float() for x in drawn(False))
    divergence(hidden.requires_grad_(), Head(weight), Target(theirs, Head(their_weight))).sum().backward()
    assert sizes == [128, 128, 128, 128, 44, 44]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_heads_of_16_bits_are_rounded_once(alpha):
    """Products are FP32 whatever the operands are; the gradient is rounded where it meets the head again."""
    hidden, weight, _, theirs, their_weight = (x if x is None else x.bfloat16() for x in drawn(False))
    truth = [x.double().requires_grad_() for x in (hidden, weight)]
    q_SV = logits(theirs.double(), their_weight.double(), None, Transform()).softmax(-1)
    wanted_S = dense(logits(*truth, None, Transform()).softmax(-1), q_SV, alpha)
    wanted_S.sum().backward()
    found = hidden.requires_grad_()
    ours_S = divergence(found, Head(weight), Target(theirs, Head(their_weight), alpha))
    ours_S.sum().backward()
    assert ours_S.dtype == torch.float32 and found.grad.dtype == torch.bfloat16
    assert error(ours_S, wanted_S) < 2e-6 and error(found.grad, truth[0].grad) < 1e-2
