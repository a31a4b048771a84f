"""Each family works whole (quantised, adapted, sampled, trained) or is refused before weights are read.

Tiny random models with the defaults of their families elsewhere.
"""

import json

import pytest
import torch
from torch import nn

from qerl.cli import main
from qerl.errors import QeRLError
from qerl.families.parts import cache_argument
from qerl.fp4.quantize import quantize_checkpoint
from qerl.lora.adapter import add_lora
from qerl.models.load import load_model
from qerl.noise.norms import find_noise_norms
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.update.delta_net import read_sequences
from qerl.update.head import score
from qerl.update.row_check import check_packed_row
from tests.support.models import move_adapter
from tests.update.test_row_check import ALTERNATING, build

LLAMA = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Of Ministral 3, whose queries are scaled by their position as well; samples go beyond the 16."""
GEMMA4 = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
"""A dense model without inputs by layer, whose full layers have other heads than its windows."""
QWEN35 = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
"""Three layers of gated delta nets before one of attention; the linears of their gates stay as they are."""
DELTA_NETS = ["in_proj_qkv", "in_proj_z", "out_proj"]
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
SHARED_MLP = ["shared_expert.down_proj", "shared_expert.gate_proj", "shared_expert.up_proj"]
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 48}
FOUR_BIT = {
    "Llama-80": ("Llama", {"head_dim": 80}, LLAMA, 4),
    "Gemma2": ("Gemma2", ALTERNATING | {"attn_logit_softcapping": 5.0}, LLAMA, 4),
    "Phi3": ("Phi3", {}, ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"], 4),
    "SmolLM3": ("SmolLM3", {}, LLAMA, 4),
    "Granite": ("Granite", {}, LLAMA, 4),
    "Cohere2": ("Cohere2", ALTERNATING, LLAMA, 2),
    "Olmo2": ("Olmo2", {}, LLAMA, 0),
    "Ministral3": ("Ministral3", {"rope_parameters": YARN}, LLAMA, 4),
    "GraniteSWA": ("GraniteSWA", ALTERNATING, LLAMA, 4),
    "Gemma3": ("Gemma3", ALTERNATING | {"query_pre_attn_scalar": 16}, LLAMA, 4),
    "Gemma4": ("Gemma4", ALTERNATING | GEMMA4, LLAMA, 4),
    "Qwen3.5": ("Qwen3_5", QWEN35, sorted(LLAMA + DELTA_NETS), 8),
    "Qwen3Moe": ("Qwen3Moe", MIXTURE, ATTENTION, 4),
    "Qwen3Moe-one-dense": ("Qwen3Moe", MIXTURE | {"mlp_only_layers": [0]}, sorted(ATTENTION + MLP), 4),
    "Qwen2Moe": ("Qwen2Moe", MIXTURE | SHARED, sorted(ATTENTION + SHARED_MLP), 4),
    "Olmoe": ("Olmoe", MIXTURE | {"intermediate_size": 32}, ATTENTION, 4),
    "Qwen3.5Moe": ("Qwen3_5Moe", QWEN35 | MIXTURE | SHARED, sorted(ATTENTION + DELTA_NETS + SHARED_MLP), 8),
}
UNQUANTISED = {
    "Falcon": {"head_dim": "unset", "new_decoder_architecture": True, "num_kv_heads": 2},
    "Starcoder2": {},
    "GPTNeoX": {},
}
EXPERTS = {
    "Mixtral": ({"num_local_experts": 2}, "has model.layers.0.block_sparse_moe.experts.0.w1.weight"),
}
"""Mixtures that are not read, and why."""
STATES = {
    "Mamba": {"num_heads": 4},
    "Jamba": {"num_experts": 1, "mamba_d_state": 4},
}


@pytest.fixture
def saved(tmp_path):
    def saved(family, changes):
        build(family, "eager", **changes).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return saved


def load(folder, weights="nvfp4", **settings):
    return load_model(folder, weights, torch.float32, "cpu", **settings)


def works(folder, weights) -> tuple[list[str], torch.nn.Module]:
    """Adapted layers, and the model; its sampler and its packed rows are right."""
    model = add_lora(load(folder, weights), rank=4, alpha=8, dropout=0.0)
    move_adapter(model)
    prompt = [5, 6, 7]
    (sample,) = PortableEngine(model, 0).generate([prompt], 1, SamplingParams(20, seed=1)).completions
    logits = model(input_ids=torch.tensor([prompt + sample.token_ids]), use_cache=False).logits[0]
    wanted = logits[2:-1].log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, rtol=0, atol=1e-4)
    base = model.get_base_model().train()
    read_sequences(base)
    check_packed_row(model, lambda row: score(model, base, row, False, 0.8)[0], 0.8)
    return sorted(model.peft_config["default"].target_modules), model


@pytest.mark.parametrize("name", FOUR_BIT)
def test_a_family_in_four_bits_works_whole(saved, tmp_path, name):
    family, changes, targets, norms = FOUR_BIT[name]
    folder = saved(family, changes)
    adapted, model = works(folder, "nvfp4")
    assert adapted == targets
    if norms:
        assert len(find_noise_norms(model)) == norms
    else:
        with pytest.raises(QeRLError, match="turn noise off"):
            find_noise_norms(model)
    quantize_checkpoint(folder, tmp_path / "packed")
    packed = load(tmp_path / "packed").state_dict()
    for name, tensor in model.get_base_model().state_dict().items():
        if name.endswith("base_layer.weight_packed"):
            assert torch.equal(packed[name.replace("base_layer.", "")], tensor)
    gates = {name for name in packed if ".in_proj_a" in name or ".in_proj_b" in name}
    assert all(name.endswith(".weight") for name in gates) and bool(gates) == family.startswith("Qwen3_5")


@pytest.mark.parametrize("family", UNQUANTISED)
def test_a_family_with_other_projections_is_not_quantised_by_half(saved, tmp_path, family):
    folder = saved(family, UNQUANTISED[family])
    works(folder, "bf16")
    with pytest.raises(QeRLError, match=r"named \*_proj"):
        load(folder)
    with pytest.raises(QeRLError, match=r"named \*_proj"):
        quantize_checkpoint(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_another_form_are_refused_before_weights_are_read(saved, tmp_path, monkeypatch, family):
    changes, reason = EXPERTS[family]
    folder = saved(family, changes)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **__: pytest.fail("read"))
    for weights in ("nvfp4", "bf16"):
        with pytest.raises(QeRLError, match=f"is a mixture of experts that .*{reason}"):
            load(folder, weights)
    with pytest.raises(QeRLError, match=r"is a mixture of experts that has model\.layers\.0"):
        quantize_checkpoint(folder, tmp_path / "packed")


def test_merged_experts_are_packed_as_they_load_and_not_by_quantize(saved, tmp_path):
    folder = saved("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1})
    adapted, model = works(folder, "nvfp4")
    assert adapted == ATTENTION and len(find_noise_norms(model)) == 4
    with pytest.raises(QeRLError, match=r"mlp\.experts\.down_proj\), .*; set weights: nvfp4"):
        quantize_checkpoint(folder, tmp_path / "packed")


def test_a_mixture_whose_checkpoint_names_no_experts_is_refused(saved):
    folder = saved("GraniteMoe", {"num_local_experts": 2, "num_experts_per_tok": 1})
    with pytest.raises(QeRLError, match="is a mixture of experts that names none of them"):
        load(folder, "bf16")


@pytest.mark.parametrize("family", STATES)
def test_layers_with_a_state_are_refused_before_weights_are_read(saved, monkeypatch, family):
    folder = saved(family, STATES[family])
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(QeRLError, match="carry a state from token to token"):
        load(folder)


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_what_nobody_can_mend_is_said_before_a_tokenizer_that_is_missing(saved, tmp_path, capsys, command):
    folder = str(saved("Mamba", STATES["Mamba"]))
    words = {
        "train": [
            "--task",
            "arithmetic",
            "--model",
            folder,
            "--output_dir",
            str(tmp_path),
            "--use_cpu",
            "true",
        ],
        "eval": [folder, "--task", "arithmetic"],
        "generate": [folder, "hello"],
    }
    assert main([command, *words[command]]) == 2
    assert "carry a state from token to token" in " ".join(capsys.readouterr().err.split())


def test_encoder_decoders_are_refused_before_weights_are_read(saved, monkeypatch):
    folder = saved("Bart", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(QeRLError, match="encoder-decoder"):
        load(folder, "bf16")


@pytest.mark.parametrize("targets", [["wq", "wv"], ["q_proj", "gate_projj"], ["proj"]])
def test_lora_targets_that_match_nothing_are_named_before_weights_are_read(saved, monkeypatch, targets):
    folder = saved("Llama", {})
    model = load(folder)
    with pytest.raises(QeRLError, match=f"{targets[-1]}, which LlamaForCausalLM does not have.*q_proj"):
        add_lora(model, rank=4, alpha=8, dropout=0.0, target_modules=targets)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(QeRLError, match=targets[-1]):
        load(folder, lora_targets=targets)


def test_lora_targets_may_be_longer_parts_of_names(saved):
    model = add_lora(
        load(saved("Llama", {})),
        rank=4,
        alpha=8,
        dropout=0.0,
        target_modules=["0.self_attn.q_proj", "down_proj"],
    )
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 3


def test_scores_with_a_soft_cap_are_not_left_to_sdpa(saved):
    capped = load(saved("Gemma2", {"attn_logit_softcapping": 5.0}), "bf16")
    assert capped.config._attn_implementation == "eager"
    torch.manual_seed(0)
    ids = torch.randint(2, 128, (1, 20))
    reference = build("Gemma2", "eager", attn_logit_softcapping=5.0)
    torch.testing.assert_close(capped(ids).logits, reference(ids).logits, rtol=0, atol=1e-4)


class Former(nn.Module):
    """A model with code of its own, written for transformers before 5.24."""

    def forward(self, input_ids, past_key_values=None, **settings): ...


class Present(nn.Module):
    def forward(self, input_ids, cache=None, **settings): ...


@pytest.mark.parametrize(("model", "name"), [(Former(), "past_key_values"), (Present(), "cache")])
def test_a_cache_goes_by_the_name_that_the_models_code_has(model, name):
    assert cache_argument(model) == name
