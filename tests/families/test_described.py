"""Configs that a family's file would describe wrongly are told from those that it describes."""

import pytest
from transformers import AutoConfig

from qerl.errors import QeRLError
from qerl.families.sizes import PUBLISHED, Sizes, positions_of
from qerl.families.table import FAMILIES, why_not_described
from tests.support.families import NAMES

GEMMA4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


def test_every_described_family_is_tried():
    assert set(NAMES) == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_describes_its_default_but_for_the_smallest_gemma_4(model_type):
    found = why_not_described(AutoConfig.for_model(model_type))
    assert found == ("it adds an embedding to each layer" if model_type == "gemma4_text" else None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2 is not one of llama"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "its activation is gelu"),
        ({"model_type": "granite", "hidden_act": "relu"}, "its activation is relu"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "its activation is gelu"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "a soft cap"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "is bidirectional"),
        (GEMMA4 | {"num_kv_shared_layers": 6}, "take the keys of others"),
        (GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "mixture of experts"),
        ({"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "chunked"),
    ],
)
def test_what_no_file_describes(fields, reason):
    config = AutoConfig.for_model(**fields)
    assert reason in why_not_described(config)
    with pytest.raises(QeRLError, match="emory is"):
        Sizes.from_config(fields)


def test_what_a_config_says_of_windows_and_positions_counts_where_the_model_reads_it():
    leftover = AutoConfig.for_model("llama", sliding_window=4096)
    assert Sizes.of(leftover).spec.mixer.window is None
    assert Sizes.of(AutoConfig.for_model("mistral", sliding_window=4096)).spec.mixer.window == 4096
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    rope = {"full_attention": yarn, "sliding_attention": plain}
    olmo = AutoConfig.for_model("olmo3", rope_parameters=rope, max_position_embeddings=8192)
    assert positions_of(olmo) == 65536


@pytest.mark.parametrize(
    ("name", "billions"), [("smollm3-3b", 3.08), ("ministral3-8b", 8.49), ("gemma4-31b", 30.7)]
)
def test_parameters_of_published_configs(name, billions):
    assert name in PUBLISHED
    assert Sizes.by_name(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)
