"""The head in two products gives what TRL's head in three gives."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from trl.kernels import chunked_logprob as trl_head
from trl.trainer.utils import add_fused_lm_head

from qerl.kernels import limits
from qerl.trainer.trl.head import all_positions_scored

POSITIONS, WIDTH, VOCABULARY = 300, 16, 1100


class Config:
    """A decoder's output transform."""

    def __init__(self, **changes):
        self.__dict__ |= {
            "final_logit_softcapping": None,
            "logit_scale": None,
            "logits_scaling": None,
        } | changes
        self.output_multiplier = self.lm_head_multiplier = None
        self.model_type = "any"

    def get_text_config(self):
        return self


class Model(nn.Module):
    """Hidden states that are given, and TRL's head on them."""

    def __init__(self, bias=False, **config):
        super().__init__()
        torch.manual_seed(0)
        self.config = Config(**config)
        self.hidden = nn.Parameter(torch.randn(1, POSITIONS, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(False)
        self.base_model = lambda **_: BaseModelOutput(last_hidden_state=self.hidden)
        add_fused_lm_head(self, temperature=0.7, outputs=("log_probs", "entropy"))

    def get_output_embeddings(self):
        return self.head

    def forward(self):
        raise NotImplementedError


def outputs(model, weight):
    """Log-probabilities, entropies and the gradient of hidden states."""
    labels = torch.randint(VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(1))
    out = model.forward(shift_labels=labels, fused_lm_head=True)
    model.zero_grad()
    (out.log_probs * weight).sum().backward()
    return out.log_probs.detach(), out.entropy.detach(), model.hidden.grad


@pytest.mark.parametrize(
    "config", [{}, {"bias": True}, {"final_logit_softcapping": 2.0}, {"logit_scale": 0.3}], ids=str
)
@pytest.mark.parametrize("tile", [limits.HEAD_TILE, 1])
def test_two_products_give_what_three_give(monkeypatch, config, tile):
    monkeypatch.setattr(limits, "HEAD_TILE", tile)  # 1: tiles of 128 positions
    model, weight = Model(**config), torch.randn(1, POSITIONS, generator=torch.Generator().manual_seed(2))
    expected = outputs(model, weight)
    with all_positions_scored(entropy_has_gradient=False):
        found = outputs(model, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "products, entropy_has_gradient, trained", [(2, False, False), (3, True, False), (4, False, True)]
)
def test_products_with_the_head(monkeypatch, products, entropy_has_gradient, trained):
    """Two, where hidden states alone have a gradient and entropies none; elsewhere TRL's."""
    made = []
    mm, add = torch.mm, trl_head._addmm_fp32
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: made.append(1) or mm(*args, **kwargs))
    monkeypatch.setattr(trl_head, "_addmm_fp32", lambda *args: made.append(1) or add(*args))
    model = Model()
    model.head.weight.requires_grad_(trained)
    with all_positions_scored(entropy_has_gradient):
        outputs(model, torch.ones(1, POSITIONS))
    assert len(made) == products


@pytest.mark.parametrize("held, products", [(torch.bfloat16, 2), (torch.float32, 3)], ids=str)
def test_no_copy_is_made_of_a_head_that_autocast_rounds(monkeypatch, held, products):
    """TRL's head rounds a part at a time; two products would need all of it at once."""
    made, add = [], trl_head._addmm_fp32
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: made.append(1) or mm(*args, **kwargs))
    monkeypatch.setattr(trl_head, "_addmm_fp32", lambda *args: made.append(1) or add(*args))
    model = Model()
    model.head.to(held)
    with all_positions_scored(entropy_has_gradient=False), torch.autocast("cpu", torch.bfloat16):
        outputs(model, torch.ones(1, POSITIONS))
    assert len(made) == products


def test_without_a_graph_there_is_one_product(monkeypatch):
    made = []
    monkeypatch.setattr(trl_head, "_addmm_fp32", lambda *args: made.append(1))
    with all_positions_scored(entropy_has_gradient=False), torch.no_grad():
        Model().forward(shift_labels=torch.ones(1, POSITIONS, dtype=torch.long), fused_lm_head=True)
    assert not made
