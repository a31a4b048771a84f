"""What PEFT can do to a model: the paged engine computes it or is refused, looked at on the CPU."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MambaConfig, MambaForCausalLM

from qerl.errors import QeRLError
from qerl.families.sizes import positions_of
from qerl.fp4.format import NVFP4
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.lora.adapter import add_lora, load_adapter
from qerl.lora.product import why_not_fused
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.adapter import why_not_with_adapters
from qerl.rollout.paged.binding import Binding, _why_not_with_sizes
from qerl.rollout.portable.engine import PortableEngine
from qerl.update.driver import LossDriver
from qerl.update.losses import Datum
from tests.support.models import make_tiny_model
from tests.support.plan import LINEARS

ALL = list(LINEARS)
PAIR = ["q_proj", "down_proj"]


def lora(**settings):
    return LoraConfig(**({"r": 4, "target_modules": ALL, "task_type": "CAUSAL_LM"} | settings))


def randomized(model):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    "config",
    [
        lora(),
        lora(use_rslora=True),
        lora(bias="all"),
        lora(bias="lora_only"),
        lora(layers_to_transform=[1], layers_pattern="layers"),
        lora(rank_pattern={"q_proj": 7}, alpha_pattern={"down_proj": 3}),
        lora(modules_to_save=["lm_head", "embed_tokens"]),
    ],
    ids=lambda config: next((k for k, v in vars(config).items() if v not in vars(lora()).values()), "plain"),
)
def test_adapters_that_the_engine_applies(tiny_model, config):
    """Every product of a layer: s B A of the buffers is what PEFT says the adapter adds."""
    model = randomized(get_peft_model(tiny_model("qwen2"), config))
    base = model.get_base_model()
    assert why_not_with_adapters(base) is None
    binding = Binding(model, 64)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)
    assert binding.refresh({}) is False
    decoder = binding.decoder
    assert torch.equal(decoder.head_VD, base.lm_head.weight)
    assert torch.equal(decoder.embedding_VD, base.model.embed_tokens.weight)
    for layer, bound in zip(base.model.layers, decoder.layers, strict=True):
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert torch.equal(bound.mixer.qkv.bias_N, torch.cat([part.bias for part in parts]))
        groups = [(bound.mixer.qkv.lora, parts), (bound.mixer.o.lora, (attention.o_proj,)),
                  (bound.mlp.gate_up.lora, (layer.mlp.gate_proj, layer.mlp.up_proj)),
                  (bound.mlp.down.lora, (layer.mlp.down_proj,))]  # fmt: skip
        for found, modules in groups:
            row = 0
            for index, module in enumerate(modules):
                rank = found.b_NR.shape[1]
                b = found.b_NR[row : row + module.out_features]
                delta = b @ found.a_RK[index * rank : (index + 1) * rank]
                wanted = torch.zeros_like(delta)
                if hasattr(module, "lora_A") and "default" in module.lora_A:
                    wanted = module.get_delta_weight("default")
                torch.testing.assert_close(delta, wanted)
                row += module.out_features


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lora(use_dora=True), "variant of LoRA"),
        (lora(lora_bias=True), "bias inside its adapter"),
        (lora(target_modules=[*ALL, "embed_tokens"]), "embed_tokens carries"),
        (lora(target_modules=[*ALL, "lm_head"]), "lm_head carries"),
        (lora(trainable_token_indices=[1, 2]), "embed_tokens"),
        (lora(r=300), "rank 300"),
        (peft.IA3Config(target_modules=PAIR, feedforward_modules=["down_proj"]), "ia3"),
        (peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=4), "vera"),
        (peft.OFTConfig(target_modules=PAIR, oft_block_size=4), "oft"),
        (peft.LoHaConfig(target_modules=PAIR, r=2), "loha"),
        (peft.LoKrConfig(target_modules=PAIR, r=2), "lokr"),
        (peft.AdaLoraConfig(target_modules=PAIR, total_step=10), "adalora"),
        (lora(target_modules=PAIR, modules_to_save=["mlp"]), "trained beside"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_adapters_are_refused_with_the_reason(tiny_model, config, reason):
    model = get_peft_model(tiny_model("llama"), config)
    found = why_not_with_adapters(model.get_base_model())
    assert found is not None and reason in found


def test_a_smaller_adapter_after_a_larger_one_leaves_nothing_behind(tiny_model):
    model = randomized(get_peft_model(tiny_model("llama"), lora(r=8)))
    model.add_adapter("small", lora(r=4, target_modules=PAIR))
    randomized(model)
    binding = Binding(model, 64)
    binding.refresh({})
    model.set_adapter("small")
    binding.refresh({})
    bound = binding.decoder.layers[0]
    down = model.get_base_model().model.layers[0].mlp.down_proj
    torch.testing.assert_close(
        bound.mlp.down.lora.b_NR @ bound.mlp.down.lora.a_RK, down.get_delta_weight("small")
    )
    assert not bound.mlp.down.lora.a_RK[4:].any() and not bound.mlp.down.lora.b_NR[:, 4:].any()
    assert not bound.mixer.o.lora.a_RK.any() and not bound.mixer.o.lora.b_NR.any()


def test_an_adapter_that_comes_later_is_seen(tiny_model):
    base = tiny_model("llama")
    binding = Binding(base, 64)
    assert binding.refresh({}) is False and binding.decoder.layers[0].mixer.qkv.lora is None
    model = randomized(get_peft_model(base, lora()))
    assert binding.refresh({}) is True and binding.decoder.layers[0].mixer.qkv.lora is not None
    assert binding.decoder.layers[1].mlp.down.lora.b_NR.any()
    assert binding.refresh({}) is False
    model.add_adapter("larger", lora(r=20))
    assert binding.refresh({}) is True and binding.decoder.layers[0].mixer.o.lora.b_NR.shape[1] == 32
    model.base_model.set_adapter(["default", "larger"])
    with pytest.raises(QeRLError, match=r"several active adapters \(default, larger\)"):
        binding.refresh({})


def test_merged_and_replaced_weights(tiny_model):
    model = randomized(get_peft_model(tiny_model("llama"), lora()))
    binding = Binding(model, 64)
    binding.refresh({})
    product = binding.decoder.layers[0].mlp.down.weight.weight_NK
    before = product.clone()
    model.merge_adapter()
    binding.refresh({})
    assert not torch.equal(product, before), "the sum is in the weights that the engine reads"
    assert not binding.decoder.layers[0].mlp.down.lora.b_NR.any()
    model.unmerge_adapter()
    binding.refresh({})
    assert binding.decoder.layers[0].mlp.down.lora.b_NR.any()
    model.merge_adapter(safe_merge=True)
    with pytest.raises(QeRLError, match=r"q_proj was replaced"):
        binding.refresh({})


def test_a_disabled_adapter_is_not_applied(tiny_model):
    model = randomized(get_peft_model(tiny_model("llama"), lora()))
    binding = Binding(model, 64)
    with model.disable_adapter():
        binding.refresh({})
        assert not binding.decoder.layers[0].mixer.qkv.lora.b_NR.any()
    binding.refresh({})
    assert binding.decoder.layers[0].mixer.qkv.lora.b_NR.any()


def test_a_head_that_was_cast_is_followed(tiny_model):
    model = tiny_model("llama").to(torch.bfloat16)
    binding = Binding(model, 64)
    model.lm_head.float()
    assert binding.refresh({}) is True
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert binding.refresh({}) is False
    assert torch.equal(binding.decoder.head_VD, model.lm_head.weight.bfloat16())


def test_noise_of_another_width_is_refused(tiny_model):
    binding = Binding(tiny_model("llama"), 64)
    with pytest.raises(QeRLError, match=r"shape \[3\], but the norm has a width of 64"):
        binding.refresh({"model.layers.0.input_layernorm": torch.zeros(3)})


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 48}, "heads are 48 wide"),
        ({"head_dim": 48}, "heads are 48 wide"),
        ({"hidden_size": 66, "num_attention_heads": 66, "num_key_value_heads": 1}, "66 query heads"),
        ({}, None),
    ],
)
def test_sizes_that_no_kernel_takes(tiny_model, sizes, reason):
    found = _why_not_with_sizes(tiny_model("llama", **sizes).bfloat16())
    assert found is None if reason is None else reason in found


@pytest.mark.slow
def test_part_of_a_head_rotated(tiny_model):
    model = tiny_model("llama").bfloat16()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]
    assert "has 4 angles, but its config asks for 8" in _why_not_with_sizes(model)


def test_positions_of_a_stretched_rotary_embedding(tiny_model):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    model = tiny_model("qwen2", max_position_embeddings=64, rope_parameters=rope)
    assert positions_of(model.config) == 256
    assert positions_of(tiny_model("llama").config) == 512
    PortableEngine(model, 0).generate([[5] * 70], 1, SamplingParams(max_tokens=2))
    assert len(Binding(model, 256).decoder.layers[0].mixer.cos_MP) == 256


def test_stretched_positions_are_all_there_in_an_update():
    """As `qerl serve` announces them: the original length times YaRN's factor."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    model = make_tiny_model(max_position_embeddings=64, rope_parameters=rope)
    model = randomized(add_lora(model, rank=4, alpha=8, dropout=0.0))
    tokens = [torch.arange(length) % 128 for length in (256, 257)]
    data = [Datum(each, {"target_tokens": each, "weights": torch.ones(len(each))}) for each in tokens]
    (logprobs,) = LossDriver(model).forward(data[:1], "cross_entropy", {}).logprobs
    with torch.no_grad():
        logits_TV = model(input_ids=tokens[0][None]).logits[0]
    expected = logits_TV.log_softmax(-1).gather(-1, tokens[0][:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    with pytest.raises(QeRLError, match="it has 257 tokens and the model takes 256"):
        LossDriver(model).forward(data[1:], "cross_entropy", {})


def test_what_no_engine_samples_from_is_refused_when_it_is_made(tiny_model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(QeRLError, match="PROMPT_TUNING"):
        PortableEngine(get_peft_model(tiny_model("llama"), config), 0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(QeRLError, match="carry a state"):
        PortableEngine(mamba, 0)


def test_lora_on_the_head_is_refused_in_training(tiny_model):
    with pytest.raises(QeRLError, match="output head learns nothing"):
        add_lora(tiny_model("llama"), 4, 8, 0.0, target_modules=["q_proj", "lm_head"])


def test_dora_on_packed_layers_is_a_sentence(tiny_model, tmp_path):
    dense = tiny_model("llama")
    get_peft_model(copy.deepcopy(dense), lora(use_dora=True)).save_pretrained(tmp_path)
    for name, linear in list(dense.model.named_modules()):
        if name.endswith("_proj"):
            dense.model.set_submodule(name, PackedLinear.of(quantize(linear.weight.detach(), NVFP4, "rtn")))
    with pytest.raises(QeRLError, match="DoRA adapter, which needs"):
        load_adapter(dense, tmp_path)


@pytest.mark.parametrize(
    ("config", "taken"),
    [(lora(), True), (lora(use_dora=True), False), (lora(lora_bias=True), False), (lora(bias="all"), False)],
)
def test_the_update_takes_what_it_computes(tiny_model, config, taken):
    model = get_peft_model(tiny_model("qwen2"), config)
    module = model.get_base_model().model.layers[0].self_attn.q_proj
    assert (why_not_fused(module, module.training) is None) is taken
    with model.disable_adapter():
        assert why_not_fused(module, module.training)
    if taken:
        model.merge_adapter()
        assert why_not_fused(module, module.training)
