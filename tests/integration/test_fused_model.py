"""The model as the update runs it on a GPU, in FP32 and Triton's interpreter, against plain transformers.

Attention is a dense one here, because the kernel of stretches has no CPU form; tests/gpu runs it.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)

from qerl.lora import product as lora_product
from qerl.lora.adapter import add_lora
from qerl.models.load import load_model
from qerl.noise import find_noise_norms
from qerl.trainer.update import fused
from tests.support.models import move_adapter

IDS = torch.randint(3, 60, (1, 17), generator=torch.Generator().manual_seed(0))
TURNED = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 0}  # layers whose heads the kernel turns


def dense_attention(module, q, k, v, mask, *, scaling, branches, **_):
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Kernels' names in the order of their calls; everything is taken as if it were 16-bit on a GPU."""
    made = []

    def counted(name):
        kernel = getattr(fused, name)

        def call(*args):
            made.append((name, len(args)))
            return kernel(*args)

        monkeypatch.setattr(fused, name, call)

    for name in ("rms_norm", "swiglu", "rotated_heads"):
        counted(name)
    for module in (lora_product, fused):
        monkeypatch.setattr(module, "is_16bit_cuda", lambda x: True)
    monkeypatch.setattr(fused, "branch_attention", dense_attention)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None, **kwargs: mm(a, b, **kwargs))
    return made


@pytest.fixture
def adapted(tiny_model, tmp_path):
    """``adapted(family, weights, targets)``: a tiny model in FP32 with an adapter whose B is not zero."""

    def build(family, weights="nvfp4", **kwargs):
        torch.manual_seed(0)
        tiny_model(family, vocab_size=61).save_pretrained(tmp_path / family)
        model = load_model(tmp_path / family, weights, torch.float32, "cpu").requires_grad_(False)
        model = add_lora(model, rank=8, alpha=16, dropout=0.0, **kwargs)
        return move_adapter(model, 0.2).train()

    return build


def logits_and_gradients(model, **kwargs):
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False, **kwargs).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def joined_row():
    """What marks a forward pass of a joined row: somebody to attend along, and a mask that nobody reads."""
    return {"branches": object(), "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}


@pytest.mark.parametrize("family", TURNED)
@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_logits_and_gradients_are_those_of_the_plain_model(adapted, calls, monkeypatch, family, weights):
    model = adapted(family, weights)
    with monkeypatch.context() as plain:
        plain.setattr(lora_product, "is_16bit_cuda", lambda x: False)
        logits, gradients = logits_and_gradients(model)
    assert not calls
    fused.fuse(model)
    found, found_gradients = logits_and_gradients(model, **(joined_row() if TURNED[family] else {}))
    assert calls.count(("rotated_heads", 5)) == TURNED[family]
    assert calls.count(("swiglu", 1)) == 2, "gate and up side by side"
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert found_gradients.keys() == gradients.keys() and len(gradients) == 2 * 7 * 2
    for name, gradient in gradients.items():
        assert (found_gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_layers_that_are_not_all_adapted_are_computed_one_by_one(adapted, calls):
    model = adapted("llama", target_modules=("q_proj", "v_proj", "up_proj"))
    fused.fuse(model)
    logits_and_gradients(model)
    assert ("swiglu", 2) in calls and ("swiglu", 1) not in calls


def test_noise_finds_its_norms_in_a_fused_model(adapted, calls):
    model = adapted("qwen2")
    before = find_noise_norms(model)
    fused.fuse(model)
    assert len(before) == 4 and find_noise_norms(model) == before
    logits_and_gradients(model)
    assert ("swiglu", 1) in calls, "joined again once the hooks are gone"


def test_a_bias_that_trains_gets_its_gradient(adapted):
    model = adapted("qwen2", "bf16")
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.base_layer.bias"):
            parameter.requires_grad_(True)
    fused.fuse(model)
    _, gradients = logits_and_gradients(model, **joined_row())
    assert sum(name.endswith("bias") for name in gradients) == 2
