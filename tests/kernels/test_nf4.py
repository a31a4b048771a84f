"""NF4 weights on top of each other, by bitsandbytes' CPU build; its GPU kernels are in tests/gpu."""

import pytest
import torch

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

import bitsandbytes as bnb
from bitsandbytes.functional import dequantize_4bit
from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

from qerl.kernels.weights.nf4 import BLOCK, NF4Stack, why_not
from qerl.rollout.paged.binding import Binding

WIDTH = 192
ROWS = (128, 64, 96)


def layer_of(rows, width=WIDTH, dtype=torch.float32, **settings):
    layer = bnb.nn.Linear4bit(
        width, rows, bias=False, **({"compute_dtype": torch.bfloat16, "quant_type": "nf4"} | settings)
    )
    # Magnitudes of rows differ, so that a block taken for another is seen.
    layer.weight.data = (torch.randn(rows, width) * torch.rand(rows, 1) * 3).to(dtype)
    layer.support_avx512bf16_for_cpu = False
    return layer.to("cpu")


def dense(layer):
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def decoded(weight, levels_16):
    """float64 [N, K], by the format's definition."""
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], dim=-1).flatten().long()
    blocks = levels_16.double()[codes].view(-1, BLOCK) * weight.absmax.double()[:, None]
    return blocks.view(weight.shape)


@pytest.mark.parametrize("nested", [True, False])
def test_layers_and_stack_are_the_same_weights(nested):
    layers = [layer_of(rows, compress_statistics=nested) for rows in ROWS]
    x = torch.randn(5, WIDTH, requires_grad=True)

    def run(layer):
        y = layer(x)
        return torch.cat([y.flatten(), torch.autograd.grad(y.square().sum(), x)[0].flatten()])

    before, outputs = [dense(layer) for layer in layers], [run(layer) for layer in layers]
    weight = NF4Stack.of(layers)
    assert weight.shape == (sum(ROWS), WIDTH)
    assert weight.absmax.dtype == torch.float32
    for layer, wanted, output in zip(layers, before, outputs, strict=True):
        assert torch.equal(dense(layer), wanted)
        assert torch.equal(run(layer), output)
        assert layer.weight.untyped_storage().data_ptr() == weight.codes.untyped_storage().data_ptr()
        state = layer.weight.quant_state
        assert state.absmax.untyped_storage().data_ptr() == weight.absmax.untyped_storage().data_ptr()
    exact = decoded(weight, layers[0].weight.quant_state.code)
    assert torch.equal(exact.float(), torch.cat(before))


def test_product_is_that_of_the_decoded_weight():
    layers = [layer_of(rows) for rows in ROWS]
    weight, levels_16 = NF4Stack.of(layers), layers[0].weight.quant_state.code
    x_TK = torch.randn(7, WIDTH)
    exact = x_TK.double() @ decoded(weight, levels_16).T
    error = (weight.gemm(x_TK) - exact).norm() / exact.norm()
    assert error < 1e-6


def test_a_bound_model_is_saved_with_the_same_weights(tiny_model, tmp_path):
    tiny_model("qwen2").bfloat16().save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = Qwen2ForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    names = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    assert all(why_not(model.get_submodule(name)) is None for name in names)
    before = {name: dense(model.get_submodule(name)) for name in names}
    Binding(model, positions=64)
    model.save_pretrained(tmp_path / "saved")
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": "cpu"})
    assert all(torch.equal(dense(loaded.get_submodule(name)), before[name]) for name in names)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({}, None),
        ({"quant_type": "fp4"}, "is fp4 in blocks of 64"),
        ({"width": 96}, "96 columns"),
        ({"quant_storage": torch.bfloat16}, "stores its codes as torch.bfloat16"),
        ({"compute_dtype": torch.float32}, "computes in torch.float32"),
    ],
)
def test_layers_that_are_refused(layer, reason):
    found = why_not(layer_of(64, **layer))
    assert found is None if reason is None else reason in found
