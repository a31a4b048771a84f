"""AQN: the schedule, which norms are perturbed, by how much, and that nothing stays behind."""

import math
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from qerl.errors import QeRLError
from qerl.noise.draw import AdaptiveNoise, magnitude
from qerl.noise.norms import find_noise_norms, noisy_norms
from qerl.noise.schedule import SCHEDULES, NoiseSchedule

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
PRE_NORMS = [
    f"model.layers.{layer}.{norm}"
    for layer in (0, 1)
    for norm in ("input_layernorm", "post_attention_layernorm")
]
SCHEDULE = NoiseSchedule(sigma_start=0.1, sigma_end=0.01, stages=2, total_steps=2)
TOKENS = torch.tensor([[5, 17, 33, 2, 90, 41]])


def with_lora(model):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.1))


def snapshot(model):
    return {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}


def assert_untouched(model, before):
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, (parameter, value) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter.detach(), value), name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class TestSchedule:
    def test_stages_of_a_run_that_stages_do_not_divide(self):
        schedule = NoiseSchedule(1e-2, 1e-4, stages=4, total_steps=25)
        assert [schedule.stage(step) for step in range(25)] == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 7
        assert schedule.stage(1000) == 3

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("exponential", [0, 0.4, 0.2519842, 0.1587401, 0.1]),
            ("linear", [0, 0.4, 0.3, 0.2, 0.1]),
            ("cosine", [0, 0.4, 0.325, 0.175, 0.1]),
            ("logarithmic", [0, 0.4, 0.25, 0.1622556, 0.1]),
            ("constant", [0, 0.4, 0.4, 0.4, 0.4]),
        ],
    )
    def test_sigma_by_hand(self, kind, expected):
        schedule = NoiseSchedule(0.4, 0.1, stages=5, total_steps=10, kind=kind)
        assert [schedule.sigma(step) for step in range(0, 10, 2)] == pytest.approx(expected, rel=1e-6)
        assert [schedule.sigma(step) for step in range(1, 10, 2)] == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_two_stages_have_one_noisy_one(self, kind):
        schedule = NoiseSchedule(1e-2, 1e-3, stages=2, total_steps=4, kind=kind)
        assert [schedule.sigma(step) for step in range(4)] == [0, 0, 1e-2, 1e-2]

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_released_settings_run_from_start_to_end(self, kind):
        schedule = NoiseSchedule(1e-2, 1e-4, stages=10, total_steps=500, kind=kind)
        assert schedule.sigma(49) == 0
        assert schedule.sigma(50) == pytest.approx(1e-2)
        assert schedule.sigma(499) == pytest.approx(1e-2 if kind == "constant" else 1e-4)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"stages": 1}, "at least 2"),
            ({"total_steps": 9}, "only 9 steps"),
            ({"sigma_start": 0.0}, "sigma_start is 0.0"),
            ({"sigma_end": -1.0}, "sigma_end is -1.0"),
            ({"sigma_start": math.nan}, "sigma_start is nan"),
            ({"kind": "cubic"}, "'cubic' is unknown"),
        ],
    )
    def test_bad_settings_are_refused(self, change, sentence):
        settings = {"sigma_start": 1e-2, "sigma_end": 1e-4, "stages": 10, "total_steps": 100}
        with pytest.raises(QeRLError, match=sentence):
            NoiseSchedule(**(settings | change))

    def test_growing_noise_is_said(self):
        with pytest.warns(UserWarning, match="grows"):
            assert NoiseSchedule(1e-3, 1e-2, stages=3, total_steps=3).sigma(2) == pytest.approx(1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            NoiseSchedule(1e-2, 1e-3, stages=3, total_steps=3)


class TestFindNorms:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_norm_before_attention_and_mlp_and_no_other(self, tiny_model, family):
        assert find_noise_norms(tiny_model(family)) == PRE_NORMS

    @pytest.mark.parametrize("family", FAMILIES)
    def test_names_do_not_depend_on_the_lora_wrapper(self, tiny_model, family):
        assert find_noise_norms(with_lora(tiny_model(family))) == PRE_NORMS

    def test_a_tied_or_adapted_head_does_not_make_the_final_norm_one(self, tiny_model):
        assert find_noise_norms(tiny_model("llama", tie_word_embeddings=True)) == PRE_NORMS
        adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
        assert find_noise_norms(adapted) == PRE_NORMS

    def test_norms_after_a_block_are_left_alone(self):
        model = Gemma2ForCausalLM(Gemma2Config(**TINY))
        before = ("input_layernorm", "pre_feedforward_layernorm")
        assert find_noise_norms(model) == [f"model.layers.{i}.{norm}" for i in (0, 1) for norm in before]

    @pytest.mark.parametrize(
        "model",
        [
            Olmo2ForCausalLM(Olmo2Config(**{k: v for k, v in TINY.items() if k != "head_dim"})),
            GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)),
        ],
        ids=["norms after the blocks", "layer norm with bias"],
    )
    def test_a_model_without_such_norms_is_an_error(self, model):
        with pytest.raises(QeRLError, match="No RMSNorm"):
            find_noise_norms(model)

    def test_leaves_modes_hooks_parameters_and_rng_as_they_were(self, tiny_model):
        model = with_lora(tiny_model("llama")).train()
        model.get_submodule("base_model.model.model.layers.0.mlp").eval()
        modes = {name: module.training for name, module in model.named_modules()}
        before, rng = snapshot(model), torch.get_rng_state()
        find_noise_norms(model)
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert torch.equal(torch.get_rng_state(), rng)
        assert_untouched(model, before)


class TestDraws:
    def test_two_instances_draw_the_same_sequence_whatever_else_is_drawn(self, tiny_model):
        first = AdaptiveNoise(tiny_model("qwen2"), SCHEDULE, seed=7)
        second = AdaptiveNoise(with_lora(tiny_model("qwen2", seed=3)), SCHEDULE, seed=7)
        for step in (1, 5, 2):
            torch.randn(step)
            a, b = first.offsets(step), second.offsets(step)
            assert list(a) == list(b) == PRE_NORMS == first.norm_names
            assert all(torch.equal(a[name], b[name]) for name in a)

    def test_seed_step_and_layer_each_change_the_draw(self, tiny_model):
        noise = AdaptiveNoise(tiny_model(), SCHEDULE, seed=7)
        draws = [*noise.offsets(1).values(), *noise.offsets(2).values()]
        draws += AdaptiveNoise(tiny_model(), SCHEDULE, seed=8).offsets(1).values()
        assert len({tuple(draw.tolist()) for draw in draws}) == 12

    def test_no_noise_in_stage_zero(self, tiny_model):
        assert AdaptiveNoise(tiny_model(), SCHEDULE, seed=7).offsets(0) == {}

    def test_mean_and_deviation(self, tiny_model):
        noise = AdaptiveNoise(tiny_model(), SCHEDULE, seed=7)
        draws = [offset for step in range(1, 101) for offset in noise.offsets(step).values()]
        z = torch.cat(draws).double()
        assert z.numel() == 25600
        # Five standard errors of each estimate.
        assert abs(z.mean()) < 5 * 0.1 / math.sqrt(z.numel())
        assert abs(z.std() - 0.1) < 5 * 0.1 / math.sqrt(2 * z.numel())

    def test_leaves_the_global_generator_alone(self, tiny_model):
        noise = AdaptiveNoise(tiny_model(), SCHEDULE, seed=7)
        rng = torch.get_rng_state()
        noise.offsets(1)
        assert torch.equal(torch.get_rng_state(), rng)


class TestRelative:
    def test_is_a_share_of_each_channel(self, tiny_model):
        model = tiny_model("llama")
        weights = {name: model.get_submodule(name).weight for name in PRE_NORMS}
        for index, weight in enumerate(weights.values()):
            torch.nn.init.normal_(weight, std=10.0**-index)
        absolute = AdaptiveNoise(model, SCHEDULE, seed=7).offsets(1)
        relative = AdaptiveNoise(model, SCHEDULE, seed=7, scale="relative").offsets(1)
        for name, weight in weights.items():
            torch.testing.assert_close(relative[name], absolute[name] * weight.detach().abs())

    def test_follows_a_weight_that_trains(self, tiny_model):
        model = tiny_model("llama")
        noise = AdaptiveNoise(model, SCHEDULE, seed=7, scale="relative")
        before = noise.offsets(1)
        with torch.no_grad():
            model.get_submodule(PRE_NORMS[0]).weight.mul_(-2)
        torch.testing.assert_close(noise.offsets(1)[PRE_NORMS[0]], 2 * before[PRE_NORMS[0]])

    def test_a_norm_that_multiplies_with_one_plus_w(self):
        norm = Gemma2ForCausalLM(Gemma2Config(**TINY)).get_submodule("model.layers.0.input_layernorm")
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(-2, 2, 32))
        torch.testing.assert_close(magnitude(norm), (1 + torch.linspace(-2, 2, 32)).abs())


class TestMerged:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_equals_row_noise_on_the_next_weights(self, tiny_model, family):
        """The paper's identity: w + Z in the norm is a factor Z / w + 1 on inputs of q/k/v and gate/up."""
        model, scaled = tiny_model(family).double(), tiny_model(family).double()
        offsets = AdaptiveNoise(model, SCHEDULE, seed=1).offsets(1)
        after = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
        with torch.no_grad():
            for name, z in offsets.items():
                layer, norm = name.rsplit(".", 1)
                weight = model.get_submodule(name).weight
                z_merged = (weight.float() + z).double() - weight
                block = scaled.get_submodule(f"{layer}.{after[norm]}")
                for linear in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                    if hasattr(block, linear):
                        getattr(block, linear).weight *= z_merged / weight + 1
            clean = model(TOKENS).logits
            with noisy_norms(model, offsets):
                noisy = model(TOKENS).logits
            expected = scaled(TOKENS).logits
        assert (expected - clean).abs().mean() > 1e-2
        assert (noisy - expected).abs().max() < 1e-12

    def test_reaches_bf16_models_where_a_bf16_sum_would_not(self, tiny_model):
        model = tiny_model("llama").bfloat16()
        noise = AdaptiveNoise(model, NoiseSchedule(5e-4, 5e-4, stages=2, total_steps=2), seed=1)
        for name in noise.norm_names:
            torch.nn.init.ones_(model.get_submodule(name).weight)
        offsets = noise.offsets(1)
        assert all(torch.equal(1 + z.bfloat16(), torch.ones_like(z).bfloat16()) for z in offsets.values())
        with torch.no_grad():
            clean = model(TOKENS).logits
            with noisy_norms(model, {name: torch.zeros_like(z) for name, z in offsets.items()}):
                once_rounded = model(TOKENS).logits
            with noisy_norms(model, offsets):
                noisy = model(TOKENS).logits
        assert noisy.dtype == torch.bfloat16
        assert (noisy != clean).float().mean() > 0.2
        assert (noisy != once_rounded).float().mean() > 0.2

    def test_bf16_norms_keep_small_noise_on_average(self, tiny_model):
        """Rounding moves few entries, each by far more than Z; over many tokens the mean shift is still Z."""
        model = tiny_model("llama").bfloat16()
        norm, z = model.get_submodule(PRE_NORMS[0]), 5e-4 * torch.randn(64)
        torch.nn.init.ones_(norm.weight)
        hidden = torch.randn(1, 20000, 64).bfloat16()
        with torch.no_grad():
            with noisy_norms(model, {PRE_NORMS[0]: torch.zeros(64)}):
                clean = norm(hidden).double()
            with noisy_norms(model, {PRE_NORMS[0]: z}):
                shift = norm(hidden).double() - clean
        measured = (shift * clean).sum(dim=(0, 1)) / clean.square().sum(dim=(0, 1))
        assert (measured - z).abs().max() < 1e-4

    def test_norm_output_keeps_the_dtype_of_its_input(self, tiny_model):
        model = tiny_model("llama").bfloat16()
        norm = model.get_submodule(PRE_NORMS[0])
        hidden = torch.randn(1, 3, 64).bfloat16()
        with noisy_norms(model, {PRE_NORMS[0]: torch.full((64,), 0.5)}), torch.no_grad():
            assert norm.weight.dtype == torch.float32
            assert norm(hidden).dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["plain", "lora"])
    def test_clean_parameters_return_bit_identical_also_after_an_error(self, tiny_model, dtype, wrap):
        model = wrap(tiny_model("qwen3").to(dtype))
        offsets = AdaptiveNoise(model, SCHEDULE, seed=1).offsets(1)
        before = snapshot(model)
        for _ in range(3):
            with noisy_norms(model, offsets), torch.no_grad():
                model(input_ids=TOKENS)
        assert_untouched(model, before)
        with pytest.raises(KeyboardInterrupt), noisy_norms(model, offsets):
            raise KeyboardInterrupt
        assert_untouched(model, before)

    def test_same_noise_with_and_without_lora(self, tiny_model):
        model = tiny_model("llama")
        offsets = AdaptiveNoise(model, SCHEDULE, seed=1).offsets(1)
        with torch.no_grad():
            with noisy_norms(model, offsets):
                plain = model(TOKENS).logits
            adapted = with_lora(model).eval()
            with noisy_norms(adapted, offsets):
                assert torch.equal(adapted(input_ids=TOKENS).logits, plain)

    @pytest.mark.parametrize(
        "offsets", [{"model.layers.9.input_layernorm": torch.zeros(64)}, {PRE_NORMS[0]: torch.zeros(32)}]
    )
    def test_noise_of_another_model_is_refused_and_nothing_is_left_swapped(self, tiny_model, offsets):
        model = tiny_model("llama")
        before = snapshot(model)
        with (
            pytest.raises(QeRLError, match="no norm"),
            noisy_norms(model, {PRE_NORMS[1]: torch.ones(64)} | offsets),
        ):
            pass
        assert_untouched(model, before)
