"""Log-probabilities, entropies and gradients of output heads, against FP64 and with unrounded logits."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from qerl.errors import QeRLError
from qerl.kernels import tensors
from qerl.update import head
from qerl.update.head import Head, Transform, head_backward, logps_and_entropies, target_logps

POSITIONS, WIDTH, VOCABULARY = 300, 16, 1100
TRANSFORMS = [Transform(temperature=0.7), Transform(scale=0.3, cap=2.0)]


@pytest.fixture(params=["torch", "kernel"])
def fold(request, monkeypatch):
    """The tiles' two implementations; the kernel runs in Triton's interpreter where there is no GPU."""
    if request.param == "kernel":
        pytest.importorskip("triton", reason="Triton is not installed")
        from qerl.kernels.update.token_logps import token_logps

        monkeypatch.setattr(head, "_fold", token_logps)
    return request.param


def exact(hidden_SD, weight_VD, bias_V, target_S, transform):
    """Log-probabilities and entropies in FP64."""
    z_SV = hidden_SD @ weight_VD.T * transform.scale
    if bias_V is not None:
        z_SV = (hidden_SD @ weight_VD.T + bias_V) * transform.scale
    if transform.cap is not None:
        z_SV = transform.cap * torch.tanh(z_SV / transform.cap)
    logp_SV = (z_SV / transform.temperature).log_softmax(-1)
    return logp_SV.gather(1, target_S[:, None])[:, 0], -(logp_SV.exp() * logp_SV).sum(-1)


def error(found, truth):
    return float(((found.double() - truth).norm() / truth.norm()).detach())


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("entropies, trained", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("tile, biased", [(tensors.HEAD_TILE, False), (1, True)])
def test_values_and_gradients(monkeypatch, fold, transform, entropies, trained, tile, biased):
    """Every way through it, in one tile and in tiles of 128 positions (tile 1)."""
    monkeypatch.setattr(tensors, "HEAD_TILE", tile)
    hidden_SD, weight_VD, bias_V = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((POSITIONS, WIDTH), (VOCABULARY, WIDTH), VOCABULARY)
    )
    inputs = [hidden_SD, weight_VD] + [bias_V] * biased
    truth = [x.clone().requires_grad_(trained or x is hidden_SD) for x in inputs]
    found = [x.detach().float().requires_grad_(x.requires_grad) for x in truth]
    target_S = torch.randint(VOCABULARY, (POSITIONS,))
    pull_2S = torch.randn(2, POSITIONS, dtype=torch.float64) * torch.tensor([[1.0], [entropies]])
    padded = [None] * (3 - len(inputs))
    outs = exact(*truth, *padded, target_S, transform)
    head = Head(*found[1:], *padded, transform)
    ours = logps_and_entropies(found[0], head, target_S, entropies)
    sum((out * pull).sum() for out, pull in zip(outs, pull_2S, strict=True)).backward()
    sum(
        (out * pull).sum() for out, pull in zip(ours, pull_2S[: 1 + entropies].float(), strict=False)
    ).backward()
    assert error(ours[0], outs[0]) < 1e-6
    assert error(ours[1], outs[1]) < 4e-6  # a difference of numbers that are some times as large
    for one, other in zip(found, truth, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or error(one.grad, other.grad) < 5e-6


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_drivers_values_and_gradients(monkeypatch, transform, biased):
    """Several targets at a position, and none at some; hidden states and head train."""
    monkeypatch.setattr(head, "TILE", 64 * VOCABULARY)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((POSITIONS, WIDTH), (VOCABULARY, WIDTH))]
    inputs += [torch.randn(VOCABULARY, dtype=torch.float64)] * biased
    truth = [x.clone().requires_grad_() for x in inputs]
    hidden, weight, *bias = [x.float().requires_grad_() for x in inputs]
    position_P, target_P = torch.randint(POSITIONS, (500,)), torch.randint(VOCABULARY, (500,))
    pull_P = torch.randn(500, dtype=torch.float64) * (torch.arange(500) % 3 > 0)
    wanted, _ = exact(truth[0][position_P], truth[1], truth[2] if biased else None, target_P, transform)
    ours = Head(weight, bias[0] if biased else None, transform)
    assert error(target_logps(ours, hidden.detach(), position_P, target_P), wanted) < 1e-6
    (wanted * pull_P).sum().backward()
    found = [head_backward(ours, hidden, position_P, target_P, pull_P.float()), weight.grad]
    found += [x.grad for x in bias]
    for mine, other in zip(found, truth, strict=True):
        assert error(mine, other.grad) < 5e-6


@pytest.mark.slow
def test_logits_are_not_rounded(fold):
    """A head scaled by 20 has logits as trained models have them, where bf16 numbers are far apart."""
    torch.manual_seed(0)
    hidden_SD = torch.randn(POSITIONS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = 20 * torch.nn.Linear(WIDTH, VOCABULARY).weight.detach().bfloat16()
    target_S, transform = torch.randint(VOCABULARY, (POSITIONS,)), Transform(temperature=0.7)
    doubles = [hidden_SD.detach().double().requires_grad_(), weight_VD.double()]
    truth, entropy = exact(*doubles, None, target_S, transform)
    rounded = (hidden_SD @ weight_VD.T).double().div(0.7).log_softmax(-1)
    rounded = rounded.gather(1, target_S[:, None])[:, 0]
    ours = Head(weight_VD, None, transform)
    logps, entropies = logps_and_entropies(hidden_SD, ours, target_S, False)
    position_S = torch.arange(POSITIONS)
    gaps = [
        (found.double() - truth).abs().max().item()
        for found in (logps, target_logps(ours, hidden_SD.detach(), position_S, target_S), rounded)
    ]
    assert max(gaps[:2]) < 1e-4 < 1e-2 < gaps[2]
    assert error(entropies, entropy) < 1e-5
    truth.sum().backward()
    logps.sum().backward()
    gradient = head_backward(ours, hidden_SD, position_S, target_S, torch.ones(POSITIONS))
    for found in (hidden_SD.grad, gradient):
        assert error(found, doubles[0].grad) < 6e-3  # rounded to bf16, as gradients are


@pytest.mark.parametrize(
    "products, entropy_has_gradient, trained", [(2, False, False), (3, True, False), (4, False, True)]
)
def test_products_with_the_head(monkeypatch, products, entropy_has_gradient, trained):
    """Two, where hidden states alone have a gradient and entropies none."""
    made = []
    for name in ("product", "add_product"):
        real = getattr(tensors, name)
        monkeypatch.setattr(head, name, lambda *a, real=real, **k: made.append(1) or real(*a, **k))
    hidden_SD = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    ours = Head(torch.randn(VOCABULARY, WIDTH, requires_grad=trained))
    target_S = torch.randint(VOCABULARY, (POSITIONS,))
    logps, entropies = logps_and_entropies(hidden_SD, ours, target_S, entropy_has_gradient)
    (logps.sum() + (entropies.sum() if entropy_has_gradient else 0)).backward()
    assert len(made) == products
    made.clear()
    with torch.no_grad():
        logps_and_entropies(hidden_SD, ours, target_S, entropy_has_gradient)
    assert len(made) == 1


@pytest.mark.parametrize(
    "family, changes, transform",
    [
        ("llama", {}, Transform()),
        ("gemma2", {"final_logit_softcapping": 5.0}, Transform(cap=5.0)),
        ("cohere", {"logit_scale": 0.5}, Transform(0.5)),
        ("granite", {"logits_scaling": 4.0}, Transform(0.25)),
        ("falcon_h1", {"lm_head_multiplier": 3.0}, Transform(3.0)),
    ],
)
def test_what_a_family_does_to_logits(family, changes, transform):
    assert Transform.of(CONFIG_MAPPING[family](**changes)) == transform


@pytest.mark.slow
def test_a_logit_of_minus_infinity_weighs_nothing(fold):
    hidden_SD, weight_VD = torch.randn(POSITIONS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    bias_V = torch.zeros(VOCABULARY)
    bias_V[7:] = -torch.inf
    target_S = torch.randint(7, (POSITIONS,))
    found = []
    for head_of in (Head(weight_VD, bias_V), Head(weight_VD[:7])):
        inputs = hidden_SD.clone().requires_grad_()
        logps_S, entropy_S = logps_and_entropies(inputs, head_of, target_S, True)
        (logps_S.sum() + entropy_S.sum()).backward()
        found.append((logps_S, entropy_S, inputs.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_head_of_64_bits_is_refused():
    inputs = torch.randn(4, WIDTH, dtype=torch.float64), Head(torch.randn(9, WIDTH, dtype=torch.float64))
    with pytest.raises(QeRLError, match="64-bit weights"):
        logps_and_entropies(*inputs, torch.zeros(4, dtype=torch.int64), False)
