"""The paged engine on a GPU beyond one plain adapter: ranks, switched adapters, families, a second GPU.

Each test compares the engine's log-probabilities with those of the model in FP32, and asks that it is no
further away than the model in bf16 is, nearly.
"""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from peft import LoraConfig, get_peft_model

from qerl.errors import QeRLError
from qerl.kernels.needs import obstacles
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.machine import Cuda
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.select import make_engine
from tests.support.models import FAMILIES, move_adapter, pack
from tests.support.plan import LINEARS

PROMPTS = [list(range(5, 105)), [7], list(range(200, 330))]


def dense(family="llama", device="cuda", **settings):
    config_class, model_class = FAMILIES[family]
    sizes = {
        "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if family == "mistral":
        sizes["sliding_window"] = None
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | settings)))
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.05 if parameter.ndim == 2 else 0.2)
    return model.to(device, torch.bfloat16).eval()


def trained(model, name="default"):
    """As if trained, with an effect that is small enough at any rank."""
    return move_adapter(model, 0.2 / model.peft_config[name].r ** 0.5, name).eval()


@torch.no_grad()
def scores(model, prompt, token_ids):
    ids = torch.tensor([prompt + token_ids], device=next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def check(model, engine, params=None, prompts=PROMPTS, samples=2, typical=torch.mean):
    """``typical`` is the median where a router may decide otherwise for a few tokens, which then weigh more
    than all rounding."""
    result = engine.generate(prompts, samples, params or SamplingParams(max_tokens=40, seed=3))
    exact = copy.deepcopy(model).float()
    pairs = [(prompts[i // samples], c.token_ids) for i, c in enumerate(result.completions)]
    found = torch.cat([torch.tensor(c.logprobs) for c in result.completions])
    truth = torch.cat([scores(exact, *pair) for pair in pairs])
    trainer = torch.cat([scores(model, *pair) for pair in pairs])
    error, bound = typical((found - truth).abs()), typical((trainer - truth).abs())
    print(f"from fp32: engine {error:.1e}, trainer {bound:.1e}")
    assert error < 1.2 * bound
    return result.completions


@pytest.mark.parametrize("rank", [1, 33, 40, 100, 128, 200, 256])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_any_rank_in_prefill_and_decode(rank, weights):
    model = pack(dense()) if weights == "nvfp4" else dense()
    model = trained(add_lora(model, rank, 2 * rank, 0.0))
    engine = PagedEngine(model, 0)
    completions = check(model, engine)
    check(model, engine, samples=20)  # other sizes of a step
    with model.disable_adapter():
        assert engine.generate(PROMPTS, 2, SamplingParams(max_tokens=40, seed=3)).completions != completions


def test_adapters_that_are_switched_loaded_and_merged_later():
    model = trained(get_peft_model(dense(), LoraConfig(r=40, target_modules=list(LINEARS))))
    engine = PagedEngine(model, 0)
    first = check(model, engine)
    model.add_adapter("small", LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    trained(model, "small")
    model.set_adapter("small")
    check(model, engine)
    model.add_adapter("large", LoraConfig(r=100, target_modules=list(LINEARS)))
    trained(model, "large")
    model.set_adapter("large")
    check(model, engine)
    model.set_adapter("default")
    again = check(model, engine)
    assert [c.token_ids[:8] for c in again] == [c.token_ids[:8] for c in first]
    model.merge_adapter()
    check(model, engine)
    model.base_model.disable_adapter_layers()
    with pytest.raises(QeRLError, match="merged and disabled"):
        engine.generate(PROMPTS, 1, SamplingParams(max_tokens=4))


def test_an_adapter_after_the_engine():
    base = dense()
    engine = PagedEngine(base, 0)
    check(base, engine)
    model = trained(get_peft_model(base, LoraConfig(r=8, target_modules=list(LINEARS))))
    check(model, engine)


def test_trained_biases_are_seen():
    model = dense("qwen2")
    engine = PagedEngine(model, 0)
    before = check(model, engine)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += torch.randn_like(parameter)
    assert check(model, engine) != before


def test_what_the_engine_does_not_compute_goes_to_the_portable_one():
    if missing := obstacles():
        pytest.skip(missing[0].reason)
    for config, reason in [
        (LoraConfig(r=8, target_modules=["q_proj"], use_dora=True), "variant of LoRA"),
        (LoraConfig(r=8, target_modules=["q_proj", "lm_head"]), "lm_head"),
    ]:
        model = get_peft_model(dense(), config)
        with pytest.warns(UserWarning, match=reason):
            assert isinstance(make_engine(model, 0), PortableEngine)
    with pytest.warns(UserWarning, match="heads are 48 wide"):
        assert isinstance(make_engine(dense(head_dim=48), 0), PortableEngine)


@pytest.mark.parametrize("head", [32, 64, 128])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_families_and_heads(family, head):
    model = trained(add_lora(dense(family, head_dim=head), 8, 16, 0.0))
    check(model, PagedEngine(model, 0))


def test_tied_embeddings():
    model = trained(add_lora(dense("qwen2", tie_word_embeddings=True), 8, 16, 0.0))
    engine = PagedEngine(model, 0)
    assert engine.decoder.head_VD.data_ptr() == engine.decoder.embedding_VD.data_ptr()
    check(model, engine)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128, "rope_theta": 1e4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_scaled_rotary_embeddings(rope):
    positions = 128 if rope["rope_type"] == "yarn" else 1024
    model = trained(add_lora(dense(max_position_embeddings=positions, rope_parameters=rope), 8, 16, 0.0))
    check(model, PagedEngine(model, 0), prompts=[list(range(300))])


def test_a_call_for_more_tokens_than_the_last():
    model = trained(add_lora(dense(), 8, 16, 0.0))
    engine = PagedEngine(model, 0)
    for most in (10, 100, 70, 300):
        completions = check(model, engine, SamplingParams(max_tokens=most, seed=3))
        assert all(len(c.token_ids) == most for c in completions)


def test_two_engines_take_turns():
    models = [trained(add_lora(dense(family), 8, 16, 0.0)) for family in ("llama", "qwen2")]
    engines = [PagedEngine(model, 0, machine=Cuda(cache_share=0.2)) for model in models]
    first = [check(model, engine) for model, engine in zip(models, engines, strict=True)]
    engines[0].release()
    second = [check(model, engine) for model, engine in zip(models, engines, strict=True)]
    assert first == second


def test_settings_come_and_go():
    model = trained(add_lora(dense(), 8, 16, 0.0))
    engine = PagedEngine(model, 0)
    params = [SamplingParams(max_tokens=20, temperature=t, seed=3) for t in (1.0, 0.9, 0.8, 0.7, 0.6)]
    first = [engine.generate(PROMPTS, 2, each).completions for each in params]
    assert [engine.generate(PROMPTS, 2, each).completions for each in params] == first


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = pack(dense(device="cuda:1"))
    model = trained(add_lora(model, 8, 16, 0.0))
    assert torch.cuda.current_device() == 0
    engine = PagedEngine(model, 0)
    check(model, engine)
    engine.release()
    check(model, engine)
    ids = torch.tensor([PROMPTS[0]], device="cuda:1")
    model.train()(input_ids=ids, labels=ids).loss.backward()  # dequantises in autograd's thread
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert torch.cuda.current_device() == 0
