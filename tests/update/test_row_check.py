"""Packed rows are right for every kind of attention, and a run with one that is not does not start.

Tiny random models whose windows are shorter than their samples. `plain_logps` is transformers' own forward
pass of one sample, without mask, positions or padding.
"""

import pytest
import torch
import transformers
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from qerl.errors import QeRLError
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.update import attention
from qerl.update.head import Transform, score
from qerl.update.packed_row import PackedRow, masked_by_branch, pack_row
from qerl.update.row_check import check_packed_row
from tests.support.families import NAMES, tiny
from tests.support.models import TINY
from tests.support.samples import samples_of

WINDOW = 8
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ATTENTIONS = {
    "llama-sdpa": ("Llama", "sdpa", {}),
    "llama-eager": ("Llama", "eager", {}),
    "mistral-window": ("Mistral", "sdpa", {"sliding_window": WINDOW}),
    "mistral-window-eager": ("Mistral", "eager", {"sliding_window": WINDOW}),
    "qwen2-window": (
        "Qwen2",
        "sdpa",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "gemma2-soft-caps": (
        "Gemma2",
        "eager",
        ALTERNATING
        | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3-alternating": ("Gemma3", "sdpa", ALTERNATING | {"query_pre_attn_scalar": 16}),
    "cohere2-alternating": ("Cohere2", "sdpa", ALTERNATING),
    "gpt-oss-sinks": ("GptOss", "eager", ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4-chunks": (
        "Llama4",
        "sdpa",
        {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
        | {"num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
}
PROMPTS = [list(range(20, 33)), list(range(40, 45))]
SAMPLES = [
    (PROMPTS[0], [50, 51, 52, 53, 54]),
    (PROMPTS[0], [60, 61]),
    (PROMPTS[0], [70, 71, 72]),
    (PROMPTS[1], [80, 81, 82, 83]),
]


def build(family: str, attention: str = "sdpa", **changes) -> transformers.PreTrainedModel:
    settings = TINY | {"max_position_embeddings": 64}
    text = "Text" if family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    given = {name: value for name, value in (settings | changes).items() if value != "unset"}
    config = getattr(transformers, f"{family}{text}Config")(**given)
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(params=ATTENTIONS)
def model(request) -> transformers.PreTrainedModel:
    family, attention, changes = ATTENTIONS[request.param]
    return build(family, attention, **changes)


def row() -> PackedRow:
    prompts, completions = zip(*SAMPLES, strict=True)
    return pack_row(samples_of(prompts, completions), range(len(SAMPLES)), torch.device("cpu"))


def joined_logps(model) -> torch.Tensor:
    """Log-probabilities of all completions, one after the other."""
    joined = row()
    decoder = getattr(model, "model", model.base_model)  # Llama 4 names the head's model its base
    with masked_by_branch(model.config, joined) as seen:
        hidden = decoder(
            input_ids=joined.input_ids_1L, position_ids=joined.position_ids_1L, use_cache=False, **seen
        ).last_hidden_state
    logits = model.get_output_embeddings()(hidden) * getattr(model.config, "logit_scale", 1.0)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    labels = joined.labels_1L.clamp(min=0)[..., None]
    return logits.log_softmax(-1).gather(-1, labels)[joined.labels_1L >= 0][:, 0]


def plain_logps(model) -> torch.Tensor:
    out = []
    for prompt, completion in SAMPLES:
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits
        logps = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        out.append(logps.gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(out)


def test_a_packed_row_is_the_samples_in_it(model):
    found, wanted = joined_logps(model), plain_logps(model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    found.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wanted.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 0:
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, f"{name}: {error:.1e}"


def test_masks_are_the_models_own_again_after_a_row(model):
    before = plain_logps(model)
    joined_logps(model)
    assert torch.equal(plain_logps(model), before)
    with pytest.raises(RuntimeError, match="in the row"), masked_by_branch(model.config, row()):
        raise RuntimeError("in the row")
    assert torch.equal(plain_logps(model), before)


# The check

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}


def check(model, longest=None) -> None:
    check_packed_row(model, lambda row: score(model, model, row, False, 0.8)[0], 0.8, longest)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "llama4-chunks"])
def test_the_check_takes_what_is_right_and_leaves_nothing_behind(name):
    family, attention, changes = ATTENTIONS[name]
    model = build(family, attention, **changes).train()
    model.gradient_checkpointing_enable()
    model.base_model.embed_tokens.eval()  # a mode that somebody set on purpose
    modes = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert model.is_gradient_checkpointing
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("llama-sdpa", lambda self, of_sample: of_sample),
        ("mistral-window", lambda self, of_sample: lambda b, h, q, k: causal_in_branch(self, q, k)),
        ("gemma3-alternating", lambda self, of_sample: lambda b, h, q, k: causal_in_branch(self, q, k)),
    ],
)
def test_the_check_sees_a_wrong_mask(monkeypatch, name, broken, dtype):
    family, attention, changes = ATTENTIONS[name]
    model = build(family, attention, **changes).train().to(dtype)
    check(model)
    monkeypatch.setattr(PackedRow, "mask_function", broken)
    with pytest.raises(QeRLError, match=r"other log-probabilities in a packed row than alone, \S+ nats"):
        check(model)


def causal_in_branch(row, query, key) -> torch.Tensor:
    position, group, branch = row.position_ids_1L[0], row.group_L, row.branch_L
    own = (branch[query] == branch[key]) | (branch[key] == 0)
    return (group[query] == group[key]) & own & (position[query] >= position[key])


@pytest.mark.parametrize("name", ["gemma2-soft-caps", "cohere2-alternating"])
def test_the_check_sees_what_a_model_does_to_logits_by_another_name(monkeypatch, name):
    family, attention, changes = ATTENTIONS[name]
    model = build(family, attention, **changes).train()
    model.get_output_embeddings().weight.data *= 20
    check(model)
    monkeypatch.setattr(Transform, "of", lambda config, temperature: Transform(temperature=temperature))
    with pytest.raises(QeRLError, match="other log-probabilities in a packed row than alone"):
        check(model)


def test_the_check_goes_as_far_as_the_run():
    """A window that no sample reaches cannot do harm; one that is reached is crossed."""
    lengths = []
    model = build("Mistral", sliding_window=30).train()

    def spy(row):
        lengths.append(int(row.position_ids_1L.max()) + 1)
        return score(model, model, row, False, 0.8)[0]

    for longest in (None, 50, 34, 30, 12, 2):
        check_packed_row(model, spy, 0.8, longest)
    assert lengths == [n - 1 for n in (38, 38, 34, 12, 12, 2)], "the last token of a sample predicts nothing"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Bloom", {"n_head": 4, "n_layer": 2}),
        (
            "GPTNeo",
            {
                "num_layers": 2,
                "attention_types": [[["global", "local"], 1]],
                "num_heads": 4,
                "window_size": 8,
            },
        ),
        ("Phi3", {"original_max_position_embeddings": 20, "rope_parameters": LONGROPE}),
    ],
)
def test_other_constructions_that_look_at_the_whole_row_are_refused(family, changes):
    model = build(family, "eager", **changes).train()
    with pytest.raises(QeRLError, match="other log-probabilities in a packed row than alone"):
        check(model)
    if family == "Phi3":
        with pytest.raises(QeRLError, match="within 20 tokens"):
            check(model)
        check(model, longest=20)


def test_errors_of_the_model_are_told_from_those_around_it(monkeypatch):
    model = build("Llama").train()
    with monkeypatch.context() as broken:
        broken.delattr(PackedRow, "scatter")
        with pytest.raises(AttributeError, match="'scatter'"):
            check(model)
    model.model.register_forward_hook(lambda *_: ModelOutput(logits=torch.zeros(1)))
    with pytest.raises(QeRLError, match=r"cannot run packed rows.*last_hidden_state"):
        check(model)
    model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(QeRLError, match=r"cannot run packed rows.*TypeError"):
        check(model)


# At the start of a run


class Scripted(RolloutEngine):
    def generate(self, *args, **kwargs):
        raise NotImplementedError


@pytest.fixture
def start(tiny_tokenizer, tmp_path):
    def start(model, engine=None, **changes):
        settings = {"noise": False, "num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True}
        settings |= {"max_completion_length": 32}
        args = QeRLConfig(output_dir=str(tmp_path), report_to="none", **(settings | changes))
        data = Dataset.from_dict({"prompt": ["one two"]})
        engine = engine or PortableEngine(model, tiny_tokenizer.pad_token_id)
        rewards = [lambda completions, **_: [0.0] * len(completions)]
        return QeRLTrainer(model, rewards, args, data, engine=engine, processing_class=tiny_tokenizer)

    return start


def test_a_run_with_a_wrong_mask_does_not_start(start, monkeypatch):
    start(build("Llama"))
    monkeypatch.setattr(PackedRow, "mask_function", lambda self, of_sample: of_sample)
    with pytest.raises(QeRLError, match="so updates would be wrong"):
        start(build("Llama"))


def test_the_engine_of_another_model_is_refused(start, tiny_tokenizer):
    model = build("Llama")
    with pytest.raises(QeRLError, match="make the engine from the model that you pass to the trainer"):
        start(model, PortableEngine(build("Llama"), tiny_tokenizer.pad_token_id))
    start(model, Scripted())


RECURRENT = {
    "Mamba": {"num_heads": 4},
    "Jamba": {"num_experts": 1, "mamba_d_state": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
}


@pytest.mark.parametrize("family", RECURRENT)
def test_layers_with_a_state_are_refused(start, family):
    model = build(family, "eager", **RECURRENT[family])
    with pytest.raises(QeRLError, match="carry a state from token to token"):
        start(model)


def test_prompt_tuning_is_refused(start):
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(build("Llama"), adapter)
    with pytest.raises(QeRLError, match="PROMPT_TUNING"):
        start(model, Scripted())


def test_noise_without_a_norm_is_refused_before_the_first_rollout(start):
    model = build("Phi")
    with pytest.raises(QeRLError, match="turn noise off"):
        start(model, noise=True)
    start(model)


# The kernel for packed rows on a GPU, which here is a dense stand-in


@pytest.fixture
def dense_kernel(monkeypatch):
    class Dense:
        @staticmethod
        def apply(q_LHE, k_LGE, v_LGE, branches, scoring, sinks_H):
            assert branches.longest_key == 3
            return torch.zeros_like(q_LHE)

    monkeypatch.setattr(attention, "_BranchAttention", Dense)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Phi3", "Granite", "SmolLM3", "Cohere"])
def test_the_kernel_serves_causal_attention(dense_kernel, family):
    model = build(family)
    assert attention.why_not(model) is None
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_serves_windows_and_sinks(dense_kernel, name):
    model = tiny(name).requires_grad_(False)
    before = model.config._attn_implementation
    assert attention.why_not(model) is None
    assert model.config._attn_implementation == before
    assert attention.NAME not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_the_kernel_declines_a_window_that_only_the_mask_or_only_attention_knows(dense_kernel):
    for change in (None, 5):
        model = tiny("gemma3_text")
        model.model.layers[2].self_attn.sliding_window = change
        assert "the mask of Gemma3Attention differs from its argument" in attention.why_not(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma2-soft-caps", "attention is called with softcap"),
        ("llama4-chunks", "the mask of a layer is neither causal nor a sliding window"),
        ("gpt-oss-sinks", "its sinks train"),
        ("odd-heads", "heads have 12"),
        ("dropout", "dropout"),
        ("gpt-neo", "does not allow its attention to be replaced"),
    ],
)
def test_the_kernel_declines_what_it_would_leave_out(dense_kernel, name, reason):
    others = {
        "odd-heads": ("Llama", "sdpa", {"head_dim": 12}),
        "dropout": ("Llama", "sdpa", {"attention_dropout": 0.1}),
        "gpt-neo": (
            "GPTNeo",
            "eager",
            {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4},
        ),
    }
    family, before, changes = (ATTENTIONS | others)[name]
    model = build(family, before, **changes)
    assert reason in (attention.why_not(model) or "")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("extra", [{"softcap": 5.0}, {"dropout": 0.1}, {"is_causal": False}])
def test_the_kernel_takes_no_argument_that_it_would_ignore(dense_kernel, extra):
    heads = torch.zeros(1, 4, 3, 16)
    harmless = {
        "softcap": None,
        "dropout": 0.0,
        "is_causal": True,
        "branches": object(),
    }
    with pytest.raises(attention._Declined, match=next(iter(extra))):
        attention.branch_attention(torch.nn.Module(), heads, heads, heads, None, **(harmless | extra))


def test_gradients_of_the_kernel_are_not_copied(monkeypatch):
    """q, k and v lie token by token, and so do the kernel's gradients: what it writes is what leaves."""
    written = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors[:3])
            return tensors[0].clone()

        @staticmethod
        def backward(ctx, gradient):
            written.extend(torch.empty_like(tensor) for tensor in ctx.saved_tensors)
            return *written, None, None, None

    monkeypatch.setattr(attention, "_BranchAttention", Kernel)
    heads = [torch.zeros(1, 3, count, 16, requires_grad=True) for count in (4, 2, 2)]
    products = [x * 1.0 for x in heads]
    seen = {}
    for number, x in enumerate(products):
        x.register_hook(lambda gradient, number=number: seen.update({number: gradient}))
    q, k, v = (x.transpose(1, 2) for x in products)
    out, _ = attention.branch_attention(torch.nn.Module(), q, k, v, None, branches=object())
    out.sum().backward()
    assert [seen[n].data_ptr() for n in range(3)] == [gradient.data_ptr() for gradient in written]
