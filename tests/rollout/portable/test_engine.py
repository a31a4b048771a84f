"""The portable engine: what it samples is what the model would say."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from qerl.errors import QeRLError
from qerl.fp4.format import NVFP4, PackedRows
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.noise.draw import AdaptiveNoise
from qerl.noise.norms import noisy_norms
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.select import make_engine
from tests.support.portable import PAD, PROMPTS, sampled

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def with_lora(model, seed=0):
    """LoRA on all linears with B drawn at random, so that the adapter changes the logits."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.5))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def recomputed_logprobs(model, prompt, completion, params):
    """Log-probabilities of a completion from one forward pass over prompt and completion, without a cache."""
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits_TV = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs_TV = torch.log_softmax(logits_TV / (params.temperature or 1), dim=-1)
    return logprobs_TV.gather(-1, tokens[0, len(prompt) :, None])[:, 0]


def logprob_error(model, prompts, samples, result, params):
    """Mean absolute difference between the engine's log-probabilities and recomputed ones."""
    differences = [
        recomputed_logprobs(model, prompts[index // samples], completion, params)
        - torch.tensor(completion.logprobs)
        for index, completion in enumerate(result.completions)
    ]
    return torch.cat(differences).abs().mean().item()


def tokens_of(result):
    return [completion.token_ids for completion in result.completions]


class TestAgainstTheModel:
    @pytest.mark.parametrize(
        ("family", "config"),
        [
            *((family, {}) for family in FAMILIES),
            ("llama", {"attn_implementation": "eager"}),
            ("llama", {"num_key_value_heads": 4}),
            ("qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
            ("mistral", {"sliding_window": 6}),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ],
    )
    @pytest.mark.parametrize("beginning", [[], list(range(20, 40))], ids=["", "alike"])
    def test_greedy_equals_generate(self, tiny_model, family, config, beginning):
        model, prompts = tiny_model(family, **config), [beginning + prompt for prompt in PROMPTS]
        result = PortableEngine(model, PAD).generate(prompts, 1, sampled(max_tokens=30, temperature=0))
        computed_once = len(beginning) * (len(prompts) - 1)
        assert result.prompt_tokens == sum(map(len, prompts)) - computed_once
        for prompt, completion in zip(prompts, result.completions, strict=True):
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
            )
            assert completion.token_ids == expected[0, len(prompt) :].tolist()
            assert completion.finish_reason == "length"

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)])
    def test_logprobs_equal_a_forward_pass(self, tiny_model, family, dtype, bound, capsys):
        model = with_lora(tiny_model(family, initializer_range=0.02)).to(dtype).eval()
        params = sampled(max_tokens=24)
        result = PortableEngine(model, PAD).generate(PROMPTS, 4, params)
        error = logprob_error(model, PROMPTS, 4, result, params)
        with capsys.disabled():
            print(f"\n{family} {dtype}: mean |sampler - recomputed| = {error:.1e} (bound {bound:.0e})")
        assert 0 < error <= bound

    def test_bf16_is_as_close_to_the_truth_as_a_forward_pass(self, tiny_model):
        """Larger logits round more coarsely in bf16, in a forward pass as well: both against fp64."""
        model, truth = tiny_model("llama").bfloat16(), tiny_model("llama").bfloat16().double()
        params = sampled(max_tokens=24)
        result = PortableEngine(model, PAD).generate(PROMPTS, 8, params)
        own_error = logprob_error(truth, PROMPTS, 8, result, params)
        reference_errors = []
        for index, completion in enumerate(result.completions):
            prompt = PROMPTS[index // 8]
            reference = recomputed_logprobs(model, prompt, completion, params)
            reference_errors.append(reference - recomputed_logprobs(truth, prompt, completion, params))
        reference_error = torch.cat(reference_errors).abs().mean().item()
        assert 0 < own_error <= 1.5 * reference_error

    @pytest.mark.parametrize(
        "settings",
        [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1}, {"temperature": 0}],
    )
    def test_logprobs_are_those_at_temperature_before_the_filters(self, tiny_model, settings):
        model, params = tiny_model("llama"), sampled(**settings)
        result = PortableEngine(model, PAD).generate(PROMPTS, 3, params)
        assert logprob_error(model, PROMPTS, 3, result, params) < 1e-5

    def test_packed_weights_are_dequantised_once_a_call_and_not_kept(self, tiny_model, monkeypatch):
        model = tiny_model("llama")
        for name, linear in list(model.model.named_modules()):
            if name.endswith("_proj"):
                packed = PackedLinear.of(quantize(linear.weight.detach(), NVFP4, "rtn"))
                model.model.set_submodule(name, packed)
        calls = []
        write_dense = PackedRows.write_dense
        monkeypatch.setattr(PackedRows, "write_dense", lambda *args: calls.append(args) or write_dense(*args))
        result = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled())
        assert len(calls) == 14
        assert logprob_error(model, PROMPTS, 2, result, sampled()) < 1e-5
        assert len(calls) > 14


class TestIndependence:
    """What a sequence samples depends on the weights, its prompt and its stream, not on its company."""

    def test_of_the_number_of_sequences_at_a_time(self, tiny_model):
        model, params = tiny_model("qwen3"), sampled(max_tokens=20, stop_token_ids=tuple(range(1, 10)))
        results = [
            PortableEngine(model, PAD, max_sequences=limit).generate(PROMPTS, 3, params)
            for limit in (1, 2, 7, 64)
        ]
        assert len({str(tokens_of(result)) for result in results}) == 1
        for result in results[1:]:
            for a, b in zip(result.completions, results[0].completions, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
                assert a.entropies == pytest.approx(b.entropies, abs=1e-4)

    def test_of_the_other_prompts_and_samples(self, tiny_model):
        engine = PortableEngine(tiny_model("llama"), PAD)
        everything = tokens_of(engine.generate(PROMPTS, 4, sampled()))
        assert tokens_of(engine.generate(PROMPTS[:2], 4, sampled())) == everything[:8]
        fewer = tokens_of(engine.generate(PROMPTS, 2, sampled()))
        assert fewer == [tokens for index, tokens in enumerate(everything) if index % 4 < 2]

    def test_seed_and_sample_do_matter(self, tiny_model):
        engine = PortableEngine(tiny_model("llama"), PAD)
        first = tokens_of(engine.generate(PROMPTS, 4, sampled()))
        assert first == tokens_of(engine.generate(PROMPTS, 4, sampled()))
        second = tokens_of(engine.generate(PROMPTS, 4, sampled(seed=4)))
        assert len({str(tokens) for tokens in first + second}) == 40

    def test_of_global_random_numbers(self, tiny_model):
        engine, state = PortableEngine(tiny_model("llama"), PAD), torch.get_rng_state()
        engine.generate(PROMPTS, 2, sampled())
        assert torch.equal(torch.get_rng_state(), state)


class TestRunning:
    def watch(self, model):
        """Batch sizes and lengths of every forward pass."""
        shapes = []
        model.register_forward_pre_hook(
            lambda _model, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return shapes

    def test_prompts_run_once_and_finished_sequences_leave(self, tiny_model):
        model = tiny_model("llama")
        params = sampled(max_tokens=20, stop_token_ids=tuple(range(20)))
        shapes = self.watch(model)
        result = PortableEngine(model, PAD).generate(PROMPTS, 4, params)
        assert shapes[0] == (5, 11)
        lengths = [len(completion.token_ids) for completion in result.completions]
        assert shapes[1:] == [(sum(n > step for n in lengths), 1) for step in range(1, max(lengths))]
        assert len(set(lengths)) > 3
        assert result.prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
        assert result.generated_tokens == sum(lengths)
        assert result.seconds > 0

    def test_stop_tokens_end_a_completion_and_belong_to_it(self, tiny_model):
        engine, stops = PortableEngine(tiny_model("llama"), PAD), tuple(range(20))
        free = tokens_of(engine.generate(PROMPTS, 4, sampled()))
        result = engine.generate(PROMPTS, 4, sampled(stop_token_ids=stops))
        for completion, tokens in zip(result.completions, free, strict=True):
            end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
            assert completion.token_ids == tokens[:end]
            assert completion.finish_reason == ("length" if end is None else "stop")
        assert {completion.finish_reason for completion in result.completions} == {"length", "stop"}

    def test_one_token_needs_no_decode_step(self, tiny_model):
        model = tiny_model("llama")
        shapes = self.watch(model)
        result = PortableEngine(model, PAD).generate(PROMPTS, 2, sampled(max_tokens=1))
        assert len(shapes) == 1
        assert result.generated_tokens == 10

    def test_a_sequence_with_bad_logits_ends_and_the_others_go_on(self, tiny_model):
        model = tiny_model("llama")
        clean = PortableEngine(model, PAD).generate(PROMPTS, 4, sampled())
        poison = clean.completions[5].token_ids[3]
        with torch.no_grad():
            model.model.embed_tokens.weight[[poison, 33]] = float("nan")
        result = PortableEngine(model, PAD).generate(PROMPTS, 4, sampled())
        assert all(c.finish_reason == "error" and c.token_ids == [PAD] for c in result.completions[:4])
        assert len(result.completions[5].token_ids) <= 4
        for completion, expected in zip(result.completions[4:], clean.completions[4:], strict=True):
            end = min(
                (expected.token_ids.index(t) + 1 for t in (poison, 33) if t in expected.token_ids), default=12
            )
            assert completion.token_ids == expected.token_ids[:end]
            assert completion.finish_reason == ("length" if end == 12 else "error")

    @pytest.mark.parametrize(
        ("prompts", "samples", "max_tokens", "sentence"),
        [
            ([], 1, 4, "no prompt"),
            ([[1], []], 1, 4, "Prompt 1 is empty"),
            ([[1]], 0, 4, "samples_per_prompt is 0"),
            ([[1] * 500], 1, 13, "512 positions"),
        ],
    )
    def test_bad_calls_are_refused(self, tiny_model, prompts, samples, max_tokens, sentence):
        with pytest.raises(QeRLError, match=sentence):
            PortableEngine(tiny_model(), PAD).generate(prompts, samples, sampled(max_tokens=max_tokens))

    def test_the_last_position_can_be_used(self, tiny_model):
        result = PortableEngine(tiny_model(), PAD).generate([[1] * 500], 1, sampled(max_tokens=12))
        assert result.generated_tokens == 12


class TestOnTheTrainingModel:
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_training_state_comes_back(self, tiny_model, checkpointing):
        model = with_lora(tiny_model("llama"))
        expected = tokens_of(PortableEngine(model.eval(), PAD).generate(PROMPTS, 2, sampled()))
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        modes = [module.training for module in model.modules()]
        implementation = model.config._attn_implementation
        assert tokens_of(PortableEngine(model, PAD).generate(PROMPTS, 2, sampled())) == expected
        assert [module.training for module in model.modules()] == modes
        assert model.config._attn_implementation == implementation == "sdpa"

    def test_gradients_are_the_same_after_a_rollout(self, tiny_model):
        model = with_lora(tiny_model("llama")).eval()
        tokens = torch.tensor([PROMPTS[3]])

        def gradients():
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            return [p.grad.clone() for p in model.parameters() if p.requires_grad]

        before = gradients()
        PortableEngine(model, PAD).generate(PROMPTS, 2, sampled())
        assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))
        assert before[0].abs().sum() > 0

    def test_what_a_module_keeps_from_a_rollout_is_good_for_backward(self, tiny_model):
        model, kept = tiny_model("llama"), []
        model.model.layers[0].mlp.register_forward_hook(lambda _m, _a, output: kept.append(output))
        PortableEngine(model, PAD).generate(PROMPTS, 2, sampled())
        weight = torch.ones(64, requires_grad=True)
        (kept[0] * weight).sum().backward()
        assert torch.allclose(weight.grad, kept[0].sum(dim=(0, 1)))

    def test_lora_is_read_where_the_optimizer_writes(self, tiny_model):
        model = with_lora(tiny_model("llama")).eval()
        engine = PortableEngine(model, PAD)
        first = tokens_of(engine.generate(PROMPTS, 2, sampled()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-3)
        result = engine.generate(PROMPTS, 2, sampled())
        assert tokens_of(result) != first
        assert logprob_error(model, PROMPTS, 2, result, sampled()) < 1e-5

    @pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["plain", "lora"])
    def test_noise_acts_on_one_call_alone(self, tiny_model, wrap):
        model = wrap(tiny_model("qwen2")).eval()
        offsets = AdaptiveNoise(model, NoiseSchedule(0.3, 0.3, stages=2, total_steps=2), seed=5).offsets(1)
        engine = PortableEngine(model, PAD)
        before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
        clean = engine.generate(PROMPTS, 2, sampled())
        noisy = engine.generate(PROMPTS, 2, sampled(), offsets)
        assert tokens_of(noisy) != tokens_of(clean)
        with noisy_norms(model, offsets):
            assert logprob_error(model, PROMPTS, 2, noisy, sampled()) < 1e-5
        assert logprob_error(model, PROMPTS, 2, noisy, sampled()) > 1e-2
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1])
        assert tokens_of(engine.generate(PROMPTS, 2, sampled())) == tokens_of(clean)

    @pytest.mark.parametrize("noise", [True, False])
    def test_an_error_while_generating_leaves_the_model_as_it_was(self, tiny_model, noise):
        model = with_lora(tiny_model("llama")).train()
        offsets = AdaptiveNoise(model, NoiseSchedule(0.3, 0.3, stages=2, total_steps=2), seed=5).offsets(1)
        before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
        passes = iter([None] * 4)
        hook = model.get_base_model().model.layers[1].register_forward_pre_hook(lambda *_: next(passes))
        with pytest.raises(StopIteration):
            PortableEngine(model, PAD).generate(PROMPTS, 2, sampled(), offsets if noise else None)
        hook.remove()
        assert all(module.training for module in model.modules())
        assert model.config._attn_implementation == "sdpa"
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1])


def test_the_portable_engine_has_no_fp8_cache(tiny_model):
    with pytest.raises(
        QeRLError,
        match=r"fp8 needs the paged engine, .* not on a CUDA device.*; set kv_cache_dtype: auto",
    ):
        make_engine(tiny_model(), PAD, kv_cache_dtype="fp8")
