"""Log-probabilities, entropies and gradients of output heads, against FP64 and with unrounded logits."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput
from trl.trainer.utils import add_fused_lm_head

from qerl.kernels import limits, logits
from qerl.trainer.trl.head import all_positions_scored
from qerl.update import head
from qerl.update.head import Transform, head_backward, logps_and_entropies, target_logps

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


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("entropies, trained", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("tile, biased", [(limits.HEAD_TILE, False), (1, True)])
def test_values_and_gradients(monkeypatch, fold, transform, entropies, trained, tile, biased):
    """Every way through it, in one tile and in tiles of 128 positions (tile 1)."""
    monkeypatch.setattr(limits, "HEAD_TILE", tile)
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
    ours = logps_and_entropies(*found, *padded, target_S, transform, torch.float32, entropies)
    sum((out * pull).sum() for out, pull in zip(outs, pull_2S, strict=True)).backward()
    sum(
        (out * pull).sum() for out, pull in zip(ours, pull_2S[: 1 + entropies].float(), strict=False)
    ).backward()
    assert error(ours[0], outs[0]) < 1e-6
    assert error(ours[1], outs[1]) < 4e-6  # a difference of numbers that are some times as large
    for one, other in zip(found, truth, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or error(one.grad, other.grad) < 5e-6


class Config:
    """A decoder without a transform of its logits."""

    model_type = "any"
    final_logit_softcapping = logit_scale = logits_scaling = output_multiplier = lm_head_multiplier = None

    def get_text_config(self):
        return self


class Model(nn.Module):
    """Hidden states that are given, and TRL's head on them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.hidden = nn.Parameter(torch.randn(1, POSITIONS, WIDTH, dtype=dtype))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype).requires_grad_(False)
        self.base_model = lambda **_: BaseModelOutput(last_hidden_state=self.hidden)
        add_fused_lm_head(self, temperature=0.7, outputs=("log_probs", "entropy"))

    def get_output_embeddings(self):
        return self.head

    def forward(self):
        raise NotImplementedError

    def score(self):
        labels = torch.randint(VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(1))
        return self.forward(shift_labels=labels, fused_lm_head=True), labels[0]


def test_the_trainers_logits_are_not_rounded(fold):
    """A head scaled by 20 has logits as trained models have them, where bf16 numbers are far apart."""
    model = Model(torch.bfloat16)
    model.head.weight.data *= 20
    with all_positions_scored(entropy_has_gradient=False):
        found, labels = model.score()
    rounded, _ = model.score()
    truth, entropy = exact(
        model.hidden[0].double(), model.head.weight.double(), None, labels, Transform(temperature=0.7)
    )
    gaps = [(out.log_probs[0].double() - truth).abs().max().item() for out in (found, rounded)]
    assert gaps[0] < 1e-4 < 1e-2 < gaps[1]
    assert error(found.entropy[0], entropy) < 1e-5


def test_the_drivers_logits_are_not_rounded():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).bfloat16()
    model.lm_head.weight.data *= 500
    hidden_LD = torch.randn(40, 32, dtype=torch.bfloat16, requires_grad=True)
    position_P, target_P = torch.arange(40), torch.randint(VOCABULARY, (40,))
    inputs = [
        hidden_LD.detach().double().requires_grad_(),
        model.lm_head.weight.detach().double(),
        None,
        target_P,
    ]
    truth, _ = exact(*inputs, Transform())
    found = target_logps(model, hidden_LD.detach(), position_P, target_P)
    assert (found.double() - truth).abs().max() < 1e-4
    truth.sum().backward()
    gradient = head_backward(model, hidden_LD, position_P, target_P, torch.ones(40))
    assert error(gradient, inputs[0].grad) < 6e-3  # rounded to bf16, as gradients are
    assert "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize(
    "products, entropy_has_gradient, trained", [(2, False, False), (3, True, False), (4, False, True)]
)
def test_products_with_the_head(monkeypatch, products, entropy_has_gradient, trained):
    """Two, where hidden states alone have a gradient and entropies none."""
    made = []
    for name in ("product", "add_product"):
        real = getattr(logits, name)
        monkeypatch.setattr(head, name, lambda *a, real=real, **k: made.append(1) or real(*a, **k))
    model = Model()
    model.head.weight.requires_grad_(trained)
    with all_positions_scored(entropy_has_gradient):
        out, _ = model.score()
    (out.log_probs.sum() + (out.entropy.sum() if entropy_has_gradient else 0)).backward()
    assert len(made) == products
    made.clear()
    with all_positions_scored(entropy_has_gradient), torch.no_grad():
        model.score()
    assert len(made) == 1


def test_a_head_of_another_dtype_is_converted_a_part_at_a_time(monkeypatch):
    """A copy of a whole head takes gigabytes."""
    monkeypatch.setattr(head, "PART", 500)
    converted, model = [], Model()
    real = logits.product
    monkeypatch.setattr(head, "product", lambda a, b, out: converted.append(b.shape) or real(a, b, out))
    with all_positions_scored(entropy_has_gradient=False), torch.autocast("cpu", torch.bfloat16):
        found, _ = model.score()
    truth, _ = model.score()
    assert converted == [(WIDTH, 500), (WIDTH, 500), (WIDTH, 100)]
    torch.testing.assert_close(found.log_probs, truth.log_probs, rtol=0, atol=0.05)
