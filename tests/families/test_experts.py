"""Experts as linears of their own: they compute, hold, learn and save what transformers' merged ones do."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qerl.errors import QeRLError
from qerl.families.experts import Experts, _why_not, experts_of, separated
from qerl.fp4.format import MXFP4, NVFP4
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.lora.adapter import adapt, add_frozen_adapter, add_lora, load_adapter
from qerl.lora.experts import share, state_of
from qerl.models.load import load_model
from qerl.settings.config import QeRLConfig
from qerl.trainer import reference
from qerl.trainer.ready import check_policy
from tests.support.families import of_expert, tiny
from tests.support.models import TINY, move_adapter
from tests.support.published import write

MIXTURES = {
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "olmoe": {"intermediate_size": 32},
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 48,
    },
    "gpt_oss": {"num_local_experts": 6, "sliding_window": 8, "swiglu_limit": 0.3, "intermediate_size": 32},
}
PROJECTIONS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MIXTURES)
def theirs(request):
    """transformers' own model in FP32."""
    settings = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(request.param, **(TINY | settings | MIXTURES[request.param]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(std=0.2)
    return model


@pytest.fixture
def folder(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder, weights="bf16"):
    return load_model(folder, weights, torch.float32, "cpu", "rtn")


def logits(model) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits(model).flatten(0, 1), IDS.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def adapted(model, targets):
    """The model with an adapter that is the same each time."""
    model = add_lora(model, 4, 8, 0.0, targets)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return move_adapter(model)


def equal(found, wanted, atol=1e-5):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=atol)


@torch.no_grad()
def dequantised(theirs):
    """transformers' model with the weights that a packed one stands for."""
    model = copy.deepcopy(theirs)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for number in range(6):
                own = {linear: tensors["weight"] for linear, tensors in of_expert(module, number).items()}
                of_both = max(float(own[linear].abs().max()) for linear in ("gate_proj", "up_proj"))
                for linear, weight in own.items():
                    amax = float(weight.abs().max()) if linear == "down_proj" else of_both
                    weight.copy_(_rounded(weight, amax))
    return model


def _rounded(weight, amax):
    packed = quantize(weight.contiguous(), NVFP4, "rtn", amax)
    return PackedLinear.of(packed).dense()


def test_experts_in_16_bits_compute_what_transformers_does(theirs, folder):
    own = load(folder)
    assert sum(1 for _ in experts_of(own)) == 2
    with torch.no_grad():
        equal(logits(own), logits(theirs))
    found, wanted = (gradients(adapted(model, ["q_proj", "o_proj"])) for model in (own, theirs))
    assert found.keys() == wanted.keys()
    for name in wanted:
        equal(found[name], wanted[name])


def test_packed_experts_compute_what_their_dequantised_weights_do(theirs, folder):
    own, dense = load(folder, "nvfp4"), dequantised(theirs)
    packed = {
        name: m for name, m in own.named_modules() if isinstance(m, PackedLinear) and ".experts." in name
    }
    assert len(packed) == 2 * 6 * 3
    for linear, tensors in of_expert(dense.model.layers[1].mlp.experts, 4).items():
        equal(packed[f"model.layers.1.mlp.experts.4.{linear}"].dense(), tensors["weight"], atol=0)
    names = [name for name, module in own.named_modules() if isinstance(module, PackedLinear)]
    with torch.no_grad():
        for name in names:
            if ".experts." not in name:
                dense.get_submodule(name).weight.copy_(own.get_submodule(name).dense())
        equal(logits(own), logits(dense))


DECLARED = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "mixed-precision"},
}


@pytest.mark.parametrize("layout", DECLARED)
def test_experts_that_are_published_packed_keep_their_bytes(theirs, folder, tmp_path, layout):
    """Experts in NVFP4 beside attention in FP8."""

    def held(module):
        return "nvfp4" if ".experts." in module else "fp8" if ".self_attn." in module else None

    if theirs.config.model_type == "gpt_oss":
        pytest.skip("it is not published so; see the test below")
    _, dense = write(tmp_path / "packed", held, DECLARED[layout], layout, theirs)
    own, wanted = load_model(tmp_path / "packed", None, torch.float32, "cpu"), load(folder)
    packed = {name for name, module in own.named_modules() if isinstance(module, PackedLinear)}
    assert packed == {name for name in dense if held(name) == "nvfp4"} and len(packed) == 2 * 6 * 3
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    for name, weight in dense.items():
        if name in packed:
            codes = stored[f"{name}.weight" if layout == "modelopt" else f"{name}.weight_packed"]
            assert torch.equal(own.get_submodule(name).weight_packed, codes)
            # ModelOpt has the reciprocal of the global scale, which is rounded once more.
            equal(own.get_submodule(name).dense(), weight, atol=0)
        wanted.get_submodule(name).weight.data = weight.float()
    with torch.no_grad():
        equal(logits(own), logits(wanted))


def test_merged_experts_in_mxfp4_keep_their_bytes_and_are_what_transformers_makes_of_them(tmp_path):
    """As gpt-oss is published, beside attention in 16 bits: fresh codes and scales, and the dense model."""
    theirs = tiny("gpt_oss").float()
    merged = AutoModelForCausalLM.from_config(theirs.config).float().eval()
    state = {name: tensor for name, tensor in theirs.state_dict().items() if ".experts." not in name}
    stored = dict(state)
    for layer, (name, experts) in enumerate(sorted(_merged(merged))):
        for linear in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, linear).shape
            blocks = torch.randint(256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(117, 127, (count, outputs, inputs // 32), dtype=torch.uint8)
            bias = torch.randn(count, outputs) / 4
            stored |= {f"{name}.{linear}_blocks": blocks, f"{name}.{linear}_scales": scales,
                       f"{name}.{linear}_bias": bias}  # fmt: skip
            state[f"{name}.{linear}"] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            state[f"{name}.{linear}_bias"] = bias
        assert layer < 4
    merged.load_state_dict(state)
    theirs.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4_EXPERTS}))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})

    own = load_model(tmp_path, None, torch.float32, "cpu")
    packed = {name: m for name, m in own.named_modules() if isinstance(m, PackedLinear)}
    assert len(packed) == 4 * 4 * 3 and all(m.format is MXFP4 for m in packed.values())
    assert sum(name.endswith("bias") for name, _ in own.model.layers[0].mlp.experts.named_parameters()) == 12
    for name, experts in _merged(merged):
        for number in range(4):
            for linear, tensors in of_expert(experts, number).items():
                module = packed[f"{name}.{number}.{linear}"]
                assert torch.equal(module.dense(), tensors["weight"])
                assert torch.equal(module.bias, tensors["bias"])
        up = stored[f"{name}.gate_up_proj_blocks"][2, 1::2].flatten(1)
        assert torch.equal(packed[f"{name}.2.up_proj"].weight_packed, up)
    with torch.no_grad():
        equal(logits(own), logits(merged))
    found, wanted = (gradients(adapted(model, ["q_proj", "o_proj"])) for model in (own, merged))
    assert found.keys() == wanted.keys()
    for name in wanted:
        equal(found[name], wanted[name])
    attention = load_model(tmp_path, "mxfp4", torch.float32, "cpu")
    assert isinstance(attention.model.layers[0].self_attn.o_proj, PackedLinear)
    with pytest.raises(QeRLError, match="holds mxfp4 weights, which cannot become nvfp4"):
        load_model(tmp_path, "nvfp4", torch.float32, "cpu")


@pytest.mark.parametrize(("family", "alternate"), [("gpt_oss", True), ("qwen3_5_moe_text", False)])
def test_merged_experts_in_16_bits_are_cut_into_views(family, alternate):
    """Of tensors that are as large as a file's, nothing is copied."""
    merged = torch.randn(3, 8, 10) if alternate else torch.randn(3, 10, 8)  # of 8 inputs and 2 x 5 outputs
    found = dict(separated(family, "model.layers.7.mlp.experts.gate_up_proj", merged))
    assert len(found) == 3 * 2 and all(part.shape == (5, 8) for part in found.values())
    rows_10 = merged[2].T if alternate else merged[2]
    up = found["model.layers.7.mlp.experts.2.up_proj.weight"]
    assert torch.equal(up, rows_10[1::2] if alternate else rows_10[5:])
    assert all(part.untyped_storage().data_ptr() == merged.data_ptr() for part in found.values())
    plain = separated("qwen3_moe", "model.layers.7.mlp.experts.gate_up_proj", merged)
    assert [name for name, _ in plain] == ["model.layers.7.mlp.experts.gate_up_proj"]


def _merged(model):
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


MXFP4_EXPERTS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def test_adapters_on_experts_have_the_gradients_of_dense_weights(folder):
    packed, dense = load(folder, "nvfp4"), load(folder)
    for name, module in list(packed.named_modules()):
        if isinstance(module, PackedLinear):
            dense.get_submodule(name).weight.data = module.dense()
    found, wanted = (gradients(adapted(model, PROJECTIONS)) for model in (packed, dense))
    assert found.keys() == wanted.keys()
    assert sum(".experts." in name for name in wanted) == 2 * 6 * 3 * 2
    for name in wanted:
        equal(found[name], wanted[name])


def test_an_expert_without_tokens_has_gradients_of_zero():
    layer = Experts([torch.nn.Linear(8, 8, bias=False) for _ in range(3)])
    x_TD, expert_TK = torch.randn(5, 8), torch.tensor([[0, 2]] * 5)
    layer(x_TD, expert_TK, torch.full((5, 2), 0.5)).sum().backward()
    assert torch.equal(layer[1].weight.grad, torch.zeros(8, 8)) and layer[0].weight.grad.any()


def test_a_token_s_result_does_not_depend_on_the_tokens_beside_it():
    layer = Experts([torch.nn.Linear(8, 8, bias=False) for _ in range(3)])
    x_TD, weight_TK = torch.randn(6, 8), torch.rand(6, 2)
    expert_TK = torch.stack([torch.randperm(3)[:2] for _ in range(6)])
    with torch.no_grad():
        together = layer(x_TD, expert_TK, weight_TK)
        for t in range(6):
            alone = sum(weight_TK[t, k] * layer[expert_TK[t, k]](x_TD[t]) for k in range(2))
            equal(together[t], alone, atol=1e-6)


def test_adapters_are_saved_for_each_expert_and_load_here_and_around_merged_experts(theirs, folder, tmp_path):
    model = adapted(load(folder), PROJECTIONS)
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.mlp.experts.5.gate_proj.lora_A.weight" in saved
    with torch.no_grad():
        wanted = logits(model)
        equal(logits(load_adapter(load(folder), tmp_path / "adapter")), wanted, atol=0)
        # Whose experts PEFT 0.21 does not know, or whose shared ones it takes for them.
        if theirs.config.model_type not in ("qwen2_moe", "gpt_oss", "qwen3_5_moe_text"):
            equal(logits(PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))), wanted)


def test_experts_that_share_an_adapter_train_one_and_save_it_for_each(theirs, folder, tmp_path):
    model = adapted(load(folder), PROJECTIONS)
    with pytest.raises(QeRLError, match="cannot share one; set lora_experts: each"):
        share(model)
    model = add_lora(load(folder), 4, 8, 0.0, PROJECTIONS, share_experts=True)
    own = [name for name, p in model.named_parameters() if p.requires_grad and ".experts." in name]
    assert own and all(".experts.0." in name for name in own)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        logits(model).square().mean().backward()
        optimizer.step()
    state = state_of(model)
    assert state_of(add_lora(load(folder), 4, 8, 0.0)) is None
    model.save_pretrained(tmp_path / "adapter", state_dict=state)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.{}.gate_proj.lora_B.weight"
    assert saved[name.format(0)].any() and torch.equal(saved[name.format(0)], saved[name.format(5)])
    again = load_adapter(load(folder), tmp_path / "adapter", trainable=True)
    share(again)
    with torch.no_grad():
        equal(logits(again), logits(model), atol=0)


def test_frozen_adapters_beside_a_shared_one_are_shared_and_the_same(theirs, folder, tmp_path):
    model = add_lora(load(folder), 4, 8, 0.0, PROJECTIONS)
    share(model)
    move_adapter(model, 0.1).eval()
    model.save_pretrained(tmp_path / "adapter")
    wanted, count = logits(model), len(list(model.parameters()))
    reference._add_adapter(model)
    add_frozen_adapter(model, "teacher", tmp_path / "adapter")
    names = [name for name, _ in model.named_parameters() if ".experts." in name and ".lora_" in name]
    assert all(".experts.0." in name for name in names)
    assert sum(".teacher." in name for name in names) == sum(".ref." in name for name in names) > 0
    for name in ("ref", "teacher"):
        model.set_adapter(name)
        with torch.no_grad():
            equal(logits(model), wanted, atol=0)
    assert len(list(model.parameters())) > count


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_a_model_is_saved_under_the_names_of_the_checkpoint(theirs, folder, tmp_path, weights):
    model = load(folder, weights)
    model.save_pretrained(tmp_path / "again")
    published, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    if theirs.config.model_type == "gpt_oss":  # whose merged experts are saved one by one
        end = "weight" if weights == "bf16" else "weight_packed"
        assert {
            f"model.layers.0.mlp.experts.3.up_proj.{end}",
            "model.layers.0.mlp.router.bias",
        } <= saved.keys()
    elif weights == "bf16":
        assert published.keys() == saved.keys() and all(torch.equal(saved[k], published[k]) for k in saved)
    else:
        assert "model.layers.0.mlp.experts.3.up_proj.weight_packed" in saved
    with torch.no_grad():
        equal(logits(load_model(tmp_path / "again", None, torch.float32, "cpu")) if weights == "nvfp4"
              else logits(load(tmp_path / "again")), logits(model), atol=0)  # fmt: skip


@pytest.mark.parametrize(
    "path", ["step3p7.modeling_step3p7.Step3p7", "deepseek_v4.modeling_deepseek_v4.DeepseekV4"]
)
def test_a_limit_of_another_family_is_no_clamp_of_gpt_oss(path):
    module, _, name = path.rpartition(".")
    experts = getattr(pytest.importorskip(f"transformers.models.{module}"), f"{name}Experts")
    made = experts.__new__(experts)
    torch.nn.Module.__init__(made)
    made.limit, made.has_bias, made.is_transposed = 7.0, False, False
    made.gate_up_proj, made.down_proj = (torch.nn.Parameter(torch.empty(2, *s)) for s in ((8, 6), (6, 4)))
    assert _why_not(made) == "has a gate of its own"


def test_what_does_not_pack_experts_is_refused(folder):
    with pytest.raises(QeRLError, match="nf4 does not pack the experts of a mixture; use nvfp4 or bf16"):
        load(folder, "nf4")


def test_an_adapter_that_peft_would_misplace_is_told(folder, caplog):
    model = add_lora(load(folder), 4, 8, 0.0)
    shared = model.config.model_type in ("qwen2_moe", "qwen3_5_moe_text")
    assert ("may apply the adapter of model.layers.0.mlp.shared_expert" in caplog.text) is shared
    assert all(".experts." not in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("learns", [True, False])
def test_a_router_that_learns_needs_its_loss_to_be_turned_off(theirs, folder, tmp_path, learns):
    router = "router" if theirs.config.model_type == "gpt_oss" else "gate"
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=[router] if learns else None)
    model = adapt(load(folder), config)
    model.get_base_model().config.router_aux_loss_coef = 0.01
    args = QeRLConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(QeRLError, match="router_aux_loss_coef=0") if learns else nullcontext():
        check_policy(model, args, None)
