"""What is published in four bits, with made-up tensors of reduced sizes: loaded, or refused for its layers.

The descriptions are those of the published config.json, with fewer names in their lists.
"""

import pytest
import torch
import transformers
from peft import PeftModel

from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear
from qerl.lora.adapter import add_lora, load_adapter
from qerl.models.load import check_model, load_model
from qerl.plan.settings import plan_settings
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from tests.support.families import of_expert
from tests.support.models import TINY, move_adapter
from tests.support.published import write
from tests.support.wrappers import QWEN_SIGHT, make_wrapper, text_logits

FOUR = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
GEMMA4_31B = {
    "config_groups": {"group_0": {"input_activations": FOUR, "weights": FOUR, "targets": ["Linear"]}},
    "ignore": [
        "lm_head", "model.embed_vision*", "model.vision_tower*",
        "model.language_model.layers.0.self_attn*", "model.language_model.layers.1.self_attn*",
    ],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.43.0"},
    "quant_method": "modelopt",
}  # fmt: skip
MIXED = {
    "config_groups": {
        "group_0": {"input_activations": EIGHT, "weights": EIGHT, "targets": ["Linear"]},
        "group_1": {"input_activations": FOUR, "weights": FOUR, "targets": ["Linear"]},
    },
    "ignore": ["mtp*", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b", "model.visual*"],
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "quant_method": "modelopt",
}
QWEN36_27B = MIXED | {
    "quantized_layers": {
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
        "model.language_model.layers.0.linear_attn.in_proj_z": {"quant_algo": "FP8"},
        "model.language_model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
    }
}
QWEN36_35B = MIXED | {
    "quantized_layers": {
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.language_model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
    }
}
LIGHTNING = MIXED | {
    "quantized_layers": {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "backbone.layers.1.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def in_mlp(module: str) -> str | None:
    return "nvfp4" if ".mlp." in module and "language_model" in module else None


def qwen36(module: str) -> str | None:
    """MLPs and the head in four bits, attention and delta nets in eight but for decay and rate."""
    if module.endswith(("in_proj_a", "in_proj_b")):
        return None
    if module == "lm_head":
        return "nvfp4"
    return in_mlp(module) or ("fp8" if "attn." in module and "language_model" in module else None)


@pytest.mark.parametrize(
    ("family", "held", "declared"), [("Gemma4", in_mlp, GEMMA4_31B), ("Qwen3_5", qwen36, QWEN36_27B)]
)
def test_what_nvidia_publishes_loads_and_trains(tmp_path, family, held, declared):
    """Gemma 4 31B, and Qwen3.6 and 3.8 27B with their heads packed."""
    made = make_wrapper(family, tied=family == "Gemma4")
    wrapper, dense = write(tmp_path / "base", held, declared, "modelopt", made)
    texts = torch.randint(3, 128, (2, 20))
    model = load_model(tmp_path / "base", None, torch.float32, "cpu")
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 6 and all(".mlp." in name for name in packed)
    for module, weight in dense.items():
        wrapper.get_submodule(
            module.replace("language_model.model", "model.language_model")
        ).weight.data = weight.float()
    torch.testing.assert_close(text_logits(model, texts), text_logits(wrapper, texts), rtol=0, atol=1e-4)
    model = move_adapter(add_lora(model, rank=4, alpha=8, dropout=0.0))
    (sample,) = PortableEngine(model, 0).generate([[5, 6, 7]], 1, SamplingParams(8, seed=1)).completions
    logits = text_logits(model, torch.tensor([[5, 6, 7, *sample.token_ids]]))[0, 2:-1].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(wrapper, tmp_path / "adapter").eval()
    torch.testing.assert_close(text_logits(theirs, texts), text_logits(model, texts), rtol=0, atol=1e-4)
    again = load_adapter(load_model(tmp_path / "base", None, torch.float32, "cpu"), tmp_path / "adapter")
    assert torch.equal(text_logits(again, texts), text_logits(model, texts))
    assert check_model(tmp_path / "base", None) == "as-published"
    assert check_model(tmp_path / "base", "nvfp4") == "nvfp4"


def test_experts_beside_a_shared_one_load_out_of_a_wrapper(tmp_path):
    """Qwen3.6 35B-A3B with its experts, the shared ones and the head in four bits."""
    shared = {"shared_expert_intermediate_size": 48}
    config = transformers.Qwen3_5MoeConfig(
        text_config=TINY | DELTA | EXPERTS | shared, vision_config=QWEN_SIGHT
    )
    made = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    held = lambda module: None if module.endswith("gate") else qwen36(module)  # noqa: E731
    wrapper, dense = write(tmp_path, held, QWEN36_35B, "modelopt", made)
    for module, weight in dense.items():
        place = module.replace("language_model.model", "model.language_model")
        merged, _, own = place.partition(".experts.")
        if own:
            number, linear = own.split(".")
            experts = wrapper.get_submodule(f"{merged}.experts")
            of_expert(experts, int(number))[linear]["weight"].data.copy_(weight)
        else:
            wrapper.get_submodule(place).weight.data = weight.float()
    texts = torch.randint(3, 128, (2, 20))
    model = load_model(tmp_path, None, torch.float32, "cpu")
    packed = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 2 * (4 + 1) * 3 and all("expert" in name for name in packed)
    torch.testing.assert_close(text_logits(model, texts), text_logits(wrapper, texts), rtol=0, atol=1e-4)
    whole = load_model(tmp_path, "nvfp4", torch.float32, "cpu")
    assert isinstance(whole.model.layers[1].self_attn.o_proj, PackedLinear)


def lightning(folder) -> None:
    layers = ["linear_attention", "moe", "full_attention"]
    config = transformers.NemotronHConfig(
        **TINY | EXPERTS, layers_block_type=layers, mamba_num_heads=4, mamba_head_dim=16, n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
    )  # fmt: skip
    held = lambda module: "fp8" if module.endswith("in_proj") else None  # noqa: E731
    write(folder, held, LIGHTNING, "modelopt", transformers.NemotronHForCausalLM(config))


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (lightning, "layers .* that carry a state"),
    ],
)
@pytest.mark.parametrize("weights", [None, "nvfp4", "as-published", "bf16"])
def test_others_are_refused_for_their_layers_and_not_for_their_format(tmp_path, make, layers, weights):
    make(tmp_path)
    with pytest.raises(QeRLError, match=layers):
        check_model(tmp_path, weights)


@pytest.mark.parametrize("weights", [None, "nvfp4"])
def test_the_plan_counts_each_layer_as_it_is_held(tmp_path, weights):
    """From headers, and from the config alone; of Qwen3-VL, which is a Qwen3 on text."""
    declared = MIXED | {
        "quantized_layers": {
            f"model.language_model.layers.{i}.{place}": {
                "quant_algo": "FP8" if "attn" in place else "W4A16_NVFP4"
            }
            for i in range(2)
            for place in (
                *(f"self_attn.{x}_proj" for x in "qkvo"),
                *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
            )
        }
    }
    write(tmp_path / "whole", qwen36, declared, "modelopt", make_wrapper("Qwen3VL"))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    model = load_model(tmp_path / "whole", weights, torch.bfloat16, "cpu")
    bytes_here = sum(tensor.nbytes for tensor in model.state_dict().values()) - model.lm_head.weight.nbytes
    for name in ("whole", "alone"):
        config = QeRLConfig(
            model=str(tmp_path / name), weights=weights, num_generations=2, per_device_train_batch_size=2,
            max_prompt_length=16, max_completion_length=16, output_dir=str(tmp_path),
        )  # fmt: skip
        plan = plan_settings(config, 24 << 30, 1)
        assert plan.lines[0].name == "weights" and plan.lines[0].rollout == bytes_here
        assert plan.work.weights == (weights or "as-published")
