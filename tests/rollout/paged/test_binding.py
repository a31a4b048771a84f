"""What the paged engine does to a model's weights, looked at on the CPU, where none of its kernels run."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qerl.fp4.linear import PackedLinear
from qerl.fp4.storage import PackedTiles
from qerl.lora.adapter import add_lora
from qerl.models.load import load_model
from qerl.rollout.paged.binding import Binding


@pytest.fixture
def plain(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def dense(model):
    return {
        name: module.dense() for name, module in model.named_modules() if isinstance(module, PackedLinear)
    }


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_a_bound_model_is_saved_as_it_was(plain, tmp_path, weights):
    model = load_model(plain, weights, torch.float32, "cpu")
    before = dense(model)
    assert len(before) == 7 * 2, "seven linears in each of two layers"
    Binding(model, positions=64)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert layers and all(isinstance(layer.storage, PackedTiles) for layer in layers)
    assert all(torch.equal(before[name], weight) for name, weight in dense(model).items())
    model.save_pretrained(tmp_path / "saved")
    after = dense(load_model(tmp_path / "saved", weights, torch.float32, "cpu"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_one_copy_of_the_weights(plain):
    """q, k and v are views of the matrix that the engine reads, as are gate and up."""
    model = load_model(plain, "nvfp4", torch.float32, "cpu")
    layer = Binding(model, positions=64).decoder.layers[0]
    for stacked, module in ((layer.mixer.qkv.weight, model.model.layers[0].self_attn.k_proj),
                            (layer.mlp.gate_up.weight, model.model.layers[0].mlp.up_proj)):  # fmt: skip
        storage = stacked.tiles.codes.untyped_storage()
        assert module.weight_packed.untyped_storage().data_ptr() == storage.data_ptr()


def test_a_head_that_is_replaced_is_read_anew_and_those_before_stay_as_they_were(plain):
    model = load_model(plain, "nvfp4", torch.bfloat16, "cpu")
    binding, heads = Binding(model, positions=64), [model.lm_head.weight]
    sequence = torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.float32
    for dtype, is_new in zip(sequence, (True, True, False, True, True), strict=True):
        model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 128).to(dtype))
        before = [head.clone() for head in heads]
        assert binding.refresh({}) is is_new
        assert torch.equal(binding.decoder.head_VD, model.lm_head.weight.bfloat16())
        assert all(torch.equal(*pair) for pair in zip(heads, before, strict=True))
        heads.append(model.lm_head.weight)


def test_a_head_in_another_dtype_from_the_start_is_no_new_buffer(plain):
    model = load_model(plain, "nvfp4", torch.bfloat16, "cpu")
    model.lm_head.float()
    binding = Binding(model, positions=64)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert not binding.refresh({})
    assert torch.equal(binding.decoder.head_VD, model.lm_head.weight.bfloat16())


def test_noise_and_adapter_are_copied_not_merged(plain):
    model = add_lora(load_model(plain, "nvfp4", torch.float32, "cpu"), rank=4, alpha=8, dropout=0.0)
    binding = Binding(model, positions=64)
    base = model.get_base_model()
    norm = base.model.layers[1].input_layernorm
    clean = norm.weight.detach().clone()
    with torch.no_grad():
        base.model.layers[1].mlp.down_proj.lora_B["default"].weight.normal_()
    binding.refresh({"model.layers.1.input_layernorm": torch.full((128,), 0.25)})
    layer = binding.decoder.layers[1]
    assert torch.equal(layer.before_mixer_D, clean + 0.25)
    assert torch.equal(norm.weight, clean)
    down = base.model.layers[1].mlp.down_proj
    assert layer.mlp.down.lora is not None
    assert torch.equal(layer.mlp.down.lora.b_NR[:, :4], 2 * down.lora_B["default"].weight)
    binding.refresh({})
    assert torch.equal(layer.before_mixer_D, clean)


def test_new_buffers_are_told_of_behind_a_refresh_that_failed(plain, monkeypatch):
    """Whoever dropped no captured step, because an error came in between, would replay it on old buffers."""
    model = load_model(plain, "nvfp4", torch.bfloat16, "cpu")
    binding = Binding(model, positions=64)
    assert not binding.refresh({})
    model.lm_head.weight = torch.nn.Parameter(torch.ones_like(model.lm_head.weight))
    with monkeypatch.context() as patch:
        patch.setattr(binding._adapter, "copy", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            binding.refresh({})
    assert binding.refresh({}) and not binding.refresh({})
