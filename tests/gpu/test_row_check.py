"""Before a run on a GPU: bf16 rows by kernel or dense mask pass the check, and a wrong row does not."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from qerl.errors import QeRLError
from qerl.update import packed_row
from qerl.update.head import score
from qerl.update.kernels import use_kernels
from qerl.update.row_check import check_packed_row
from tests.support.families import NAMES, tiny

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, True),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 40}, True),
    "gemma2-eager": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 40}, False),
}
OF_FAMILIES = {"gemma4_text": {"global_head_dim": 512}, "gemma3_text": {"head_dim": 256}}


def built(name):
    if name in NAMES:
        sizes = SIZES | {"num_hidden_layers": 4} | OF_FAMILIES.get(name, {})
        model = tiny(name, **sizes).bfloat16().cuda().requires_grad_(False)
        assert not use_kernels(model).attention.why_not
        return model, True
    config, family, changes, by_kernel = MODELS[name]
    torch.manual_seed(0)
    settings = config(**SIZES, **changes)
    settings._attn_implementation = "eager" if name == "gemma2-eager" else "sdpa"
    model = family(settings).bfloat16().cuda().requires_grad_(False)
    assert (not use_kernels(model).attention.why_not) == by_kernel
    return model, by_kernel


@pytest.mark.parametrize("name", [*MODELS, *NAMES])
def test_a_right_row_passes_and_a_wrong_one_does_not(name, monkeypatch):
    model, by_kernel = built(name)

    def logps(row):
        return score(model, model, row, by_kernel)[0]

    state = torch.cuda.get_rng_state()
    check_packed_row(model, logps)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    if by_kernel:
        extents = packed_row.Branches
        monkeypatch.setattr(
            packed_row, "Branches", lambda **parts: extents(**parts | {"keys_M": parts["keys_M"].flip(0)})
        )
    else:
        monkeypatch.setattr(packed_row.PackedRow, "mask_function", lambda self, of_sample: of_sample)
    with pytest.raises(QeRLError, match="packed row than alone"):
        check_packed_row(model, logps)
