"""Every described family on the paged engine in Triton's interpreter: windows, sinks, layers without rotary
embedding, norms of other forms, heads of two sizes. Completions are those of the portable engine, and
log-probabilities those of transformers' own forward pass, in FP32."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from peft import LoraConfig

from qerl.families.parts import layers_with_state
from qerl.families.sizes import Sizes
from qerl.lora.adapter import add_lora
from qerl.lora.experts import share
from qerl.noise.norms import noisy_norms
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.binding import (
    Binding,
    _why_not_with_linears,
    _why_not_with_routers,
    _why_not_with_sizes,
)
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.portable.engine import PortableEngine
from tests.support.captures import Replaying
from tests.support.families import DELTA_NETS, MIXTURE, NAMES, tiny
from tests.support.machine import Eager
from tests.support.models import move_adapter, pack

PACE = Pace(round_steps=4, prefill_tokens=(96,))


OFTEN = "gemma4_text"  # has most of what a layer can have
ELSEWHERE = ("llama", "qwen2", "qwen3")  # test_engine.py runs them
ALTERNATE = ("gpt_oss", OFTEN)
"""With two layers of each of two kinds: a layer's place among its like is not that among all."""

_TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_STATES = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FEWER = {
    "gemma3_text": _TWO_KINDS,
    "olmo3": _TWO_KINDS,
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "qwen3_5_text": _STATES,
    "qwen3_5_moe_text": _STATES,
    # With the biases that others lack, of attention and of what follows it.
    "granite_swa": {
        "num_hidden_layers": 2, "layer_rope_theta": [0, 1e5], "attention_bias": True, "mlp_bias": True,
    },
}  # fmt: skip
"""A layer of each kind, where two layers are not enough as they are."""
EACH = [OFTEN, *(name for name in NAMES if name not in (OFTEN, *ELSEWHERE))]


@pytest.fixture(
    params=[each if each == OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in EACH]
)
def model(request):
    torch.manual_seed(1)
    changes = {} if request.param in ALTERNATE else FEWER.get(request.param, {"num_hidden_layers": 2})
    adapted = add_lora(tiny(request.param, **changes), rank=4, alpha=8, dropout=0.0)
    return move_adapter(adapted, 0.1).eval()


def noise_of(model):
    """Noise for every norm of a decoder layer that stands around its parts."""
    generator = torch.Generator().manual_seed(3)
    around = {
        f"model.layers.{i}.{place}": model.get_base_model().get_submodule(f"model.layers.{i}.{place}")
        for i, spec in enumerate(Sizes.of(model.config).specs)
        for place in spec.around
        if place
    }
    return {name: 0.1 * torch.randn(norm.weight.shape, generator=generator) for name, norm in around.items()}


def test_completions_are_those_of_the_model(model):
    check(model, noise_of(model))


@pytest.mark.slow
def test_a_late_prompt_behind_a_window_that_was_given_back():
    """Its blocks have other numbers in each pool, so keys that went into another pool would be lost."""
    torch.manual_seed(1)
    model = tiny("gemma3_text", **FEWER["gemma3_text"]).eval()
    long, short, late = (torch.randint(2, 128, (count,)).tolist() for count in (140, 5, 70))
    limits = [SamplingParams(max_tokens=count, seed=1) for count in (12, 4)]

    def play(engine):
        found = {}

        def go_round():
            for ended in session.next(one_round=True):
                found[ended.index] = ended.completion
                session.finish(ended.index)

        with engine.session(limits[0]) as session:
            session.start([long, short], 1, limits)  # the short one's memory is the late one's
            while session.length(0) < 8:
                go_round()
            session.start([late], 1)
            go_round()
            tables = session._sequences[2].prompt.blocks.copy()
            while session.busy:
                go_round()
        return found, tables

    found, tables = play(PagedEngine(model, 0, machine=Replaying(1 << 24), pace=PACE))
    assert tables[0] != tables[1]
    wanted, _ = play(PortableEngine(model, 0))
    for index, theirs in wanted.items():
        assert found[index].token_ids == theirs.token_ids
        assert found[index].logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.slow
def test_adapters_of_experts():
    """Of some linears, one for all experts; then of none; then of all linears, one of each expert."""
    torch.manual_seed(1)
    model = tiny("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"])
    model = add_lora(model, rank=4, alpha=8, dropout=0.0, target_modules=["q_proj", "up_proj"])
    share(model)
    move_adapter(model, 0.1).eval()
    engine = PagedEngine(model, 0, machine=Replaying(1 << 24), pace=PACE)
    check(model, engine=engine, lengths=(9,))
    with model.disable_adapter():
        assert not engine._binding.refresh({})  # buffers stay what they are, and what was captured with them
        check(model, engine=engine, lengths=(9,))
    model.add_adapter("other", LoraConfig(r=18, target_modules=["gate_proj", "up_proj", "down_proj"]))
    model.set_adapter("other")
    check(move_adapter(model, 0.1, "other").eval(), engine=engine, lengths=(9,))


def check(model, noise=None, engine=None, lengths=(45, 9)):
    noise = noise or {}
    params = SamplingParams(max_tokens=4, seed=1)
    # Of several passes, longer than a window, and past the original positions of a stretched embedding.
    prompts = [torch.randint(2, 128, (count,)).tolist() for count in lengths]
    # Without a GPU torch steps the states, in operations that depend on the position.
    machine = Eager if any(layers_with_state(model.config)) else Replaying
    engine = engine or PagedEngine(model, 0, machine=machine(1 << 24), pace=PACE)
    found = engine.generate(prompts, 2, params, noise)
    wanted = PortableEngine(model, 0).generate(prompts, 2, params, noise)
    double = copy.deepcopy(model).double()
    for i, (mine, theirs) in enumerate(zip(found.completions, wanted.completions, strict=True)):
        assert mine.token_ids == theirs.token_ids
        prompt = prompts[i // 2]
        ids = torch.tensor([prompt + mine.token_ids])
        with torch.no_grad(), noisy_norms(double, noise):
            logps = double(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        exact = logps.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
        entropies = -(logps.exp() * logps).sum(-1)
        for engine in (mine, theirs):
            assert engine.logprobs == pytest.approx(exact, abs=1e-5)
            assert engine.entropies == pytest.approx(entropies.tolist(), abs=1e-5)


def test_packed_experts_with_adapters_are_taken():
    model = tiny("gpt_oss", head_dim=32)
    model = add_lora(pack(model), 4, 8, 0.0, ["up_proj", "down_proj"])
    assert _why_not_with_linears(model.get_base_model()) is None


def test_experts_that_are_transformers_own_and_routers_of_another_dtype_take_the_portable_engine():
    model = tiny(MIXTURE)
    assert _why_not_with_routers(model) is None
    merged = type(model)(model.config)
    assert "not linears of their own" in _why_not_with_routers(merged)
    model.model.layers[2].mlp.gate.bfloat16()
    assert "the router of model.layers.2.mlp is torch.bfloat16 [4, 64]" in _why_not_with_routers(model)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text"])
def test_embeddings_are_scaled_as_the_model_scales_them(name):
    """By a factor that has been rounded to the model's dtype."""
    model = tiny(name, hidden_size=80).bfloat16()
    scale = Binding(model, 64).decoder.embedding_scale
    assert scale == float(torch.tensor(80**0.5).bfloat16()) != 80**0.5
    ids = torch.tensor([[7, 9]])
    embedded, table = model.model.embed_tokens(ids), model.model.embed_tokens.weight[ids[0]]
    assert torch.equal(embedded[0], (table.float() * scale).bfloat16())


def test_sinks_and_factors_are_those_of_the_moment():
    model = tiny("granite_swa")
    binding = Binding(model, 64)
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.full((4,), 3.0))
    binding.refresh({})
    assert binding.decoder.layers[1].mixer.sink_H.tolist() == [3.0] * 4


def test_biases_of_experts_are_those_of_the_moment():
    model = tiny("gpt_oss")
    binding = Binding(model, 64)
    mlp = model.model.layers[1].mlp
    for bias in (mlp.router.bias, mlp.experts[2].up_proj.bias, mlp.experts[2].down_proj.bias):
        bias.data.fill_(3.0)
    binding.refresh({})
    weights = binding.decoder.layers[1].mlp
    assert weights.router_bias_E.tolist() == [3.0] * 4
    gate, up = weights.gate_up_bias_EN[2].chunk(2)
    assert (up == 3).all() and not (gate == 3).any()
    torch.testing.assert_close(weights.down_bias_ED[2] * weights.down.scale_EL[2], torch.full((64,), 3.0))


def test_rotary_embeddings_that_change_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    for kinds in ({"full_attention": rope, "sliding_attention": plain}, None):
        config = {"rope_parameters": kinds} if kinds else {}
        found = _why_not_with_sizes(tiny("gemma3_text", **config).bfloat16())
        assert found is None if kinds is None else "dynamic" in found


@pytest.mark.parametrize("config", [{"linear_key_head_dim": 136}, {"linear_value_head_dim": 36}])
def test_delta_nets_of_sizes_that_the_step_does_not_take_are_refused(config):
    assert _why_not_with_sizes(tiny(DELTA_NETS).bfloat16()) is None
    found = _why_not_with_sizes(tiny(DELTA_NETS, **config).bfloat16())
    assert "the kernels take keys up to 128 and values of a multiple of 8" in found


def test_biases_that_the_config_does_not_tell_of_are_refused():
    model = tiny("llama").bfloat16()
    assert _why_not_with_linears(model) is None
    model.model.layers[2].mlp.down_proj.bias = torch.nn.Parameter(torch.ones(64))
    assert "down_proj of layer 2 has a bias, which contradicts its config" in _why_not_with_linears(model)
