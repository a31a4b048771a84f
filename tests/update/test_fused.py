"""The model as the update runs it on a GPU, in FP32 and Triton's interpreter, against plain transformers.

Attention of segments is computed by its definition here, because its kernels have no CPU form; tests/gpu runs
them.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.xglm.modeling_xglm import XGLMAttention

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)

from qerl.errors import QeRLError
from qerl.fp4.format import NVFP4
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.fp4.storage import stack_tiles
from qerl.lora import product as lora_product
from qerl.lora.adapter import adapt, add_lora
from qerl.lora.fused import why_not_fused
from qerl.models.load import load_model
from qerl.noise.norms import find_noise_norms, is_norm, noisy_norms
from qerl.update import fused
from qerl.update import kernels as update_kernels
from qerl.update import path as update_path
from qerl.update.attention import NAME, attention_kwargs
from qerl.update.kernels import use_backward_dtype
from qerl.update.packed_row import RowBuilder
from qerl.update.path import Share, find_path
from tests.support.e4m3 import use_exact_e4m3
from tests.support.families import NAMES, tiny
from tests.support.models import move_adapter
from tests.support.segments import use_dense_segments

IDS = torch.randint(3, 60, (1, 17), generator=torch.Generator().manual_seed(0))
TURNED = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 0}  # layers whose heads the kernel turns


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Kernels' names and numbers of tensors in the order of their calls; everything is taken as if it were
    16-bit on a GPU."""
    made = []

    def counted(name):
        kernel = getattr(fused, name)

        def call(*args):
            made.append((name, sum(isinstance(x, torch.Tensor) for x in args)))
            return kernel(*args)

        monkeypatch.setattr(fused, name, call)

    for name in ("rms_norm", "swiglu", "rotated_heads"):
        counted(name)
    for module in (lora_product, fused):
        monkeypatch.setattr(module, "is_16bit_cuda", lambda x: True)
    use_dense_segments(monkeypatch)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype=None, **kwargs: mm(a, b, **kwargs))
    return made


@pytest.fixture
def adapted(tiny_model, tmp_path):
    """``adapted(family, weights, targets)``: a tiny model in FP32 with an adapter whose B is not zero."""

    def build(family, weights="nvfp4", dropout=0.0, **kwargs):
        torch.manual_seed(0)
        tiny_model(family, vocab_size=61).save_pretrained(tmp_path / family)
        model = load_model(tmp_path / family, weights, torch.float32, "cpu").requires_grad_(False)
        model = add_lora(model, rank=8, alpha=16, dropout=dropout, **kwargs)
        return move_adapter(model, 0.2).train()

    return build


def logits_and_gradients(model, **kwargs):
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False, **kwargs).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def packed_row(model):
    """The arguments of a forward pass of a packed row, of one sample here; the model takes them."""
    builder = RowBuilder()
    builder.begin_group(IDS[0, :0])
    builder.add_branch(0, IDS[0], IDS[0])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(NAME)
    return attention_kwargs(builder.finish(IDS.device).branches)


def test_gradients_in_fp8_are_near_and_the_forward_pass_is_the_same(tiny_model, tmp_path, monkeypatch):
    """Against products in FP32, through all layers; adapters' own gradients are products of what came so
    far."""
    use_exact_e4m3(monkeypatch)
    torch.manual_seed(0)
    tiny_model("llama", vocab_size=61, num_key_value_heads=4).save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", "nvfp4", torch.float32, "cpu").requires_grad_(False)
    for layer in [m for m in model.modules() if isinstance(m, PackedLinear)]:
        layer.use(stack_tiles([layer.storage])[1][0])
    model = move_adapter(add_lora(model, rank=8, alpha=16, dropout=0.0), 0.2).train()
    fused.fuse(model)
    row, base = packed_row(model), model.get_base_model()
    logits, exact = logits_and_gradients(model, **row)
    with pytest.raises(QeRLError, match="fp8 is not available here: the model is not on a CUDA device"):
        use_backward_dtype(base, "fp8")
    monkeypatch.setattr(update_kernels, "check_fp8_gradients", lambda device: None)
    with pytest.raises(QeRLError, match="needs bfloat16 and the model is float32; set backward_dtype: auto"):
        use_backward_dtype(base, "fp8")
    monkeypatch.setattr(type(base), "dtype", torch.bfloat16)
    assert use_backward_dtype(base, "fp8") == 14
    same, found = logits_and_gradients(model, **row)
    assert torch.equal(same, logits)
    last = [name for name in exact if "layers.1.mlp.down_proj" in name]
    assert len(last) == 2 and all(torch.equal(found[name], exact[name]) for name in last), (
        "nothing lies behind"
    )
    one, other = (torch.cat([g[name].flatten() for name in sorted(exact)]) for g in (found, exact))
    assert 0.01 < (one - other).norm() / other.norm() < 0.15
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99
    assert use_backward_dtype(base, "auto") == 0
    assert all(torch.equal(g, exact[name]) for name, g in logits_and_gradients(model, **row)[1].items())
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj").get_base_layer()
    layer.use(layer.storage.to_rows())
    with pytest.raises(QeRLError, match="it needs weights that the paged engine samples from"):
        use_backward_dtype(base, "fp8")
    with pytest.raises(
        QeRLError, match="no linear layer outside of experts is in nvfp4 or mxfp4; set backward_dtype"
    ):
        use_backward_dtype(tiny_model("llama"), "fp8")


def test_experts_are_left_out_of_gradients_in_fp8(tmp_path, monkeypatch):
    """Theirs lie as on disk here, which is refused of others."""
    tiny("qwen3_moe", num_key_value_heads=4).save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", "nvfp4", torch.float32, "cpu")
    packed = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    others = {name for name in packed if ".experts." not in name}
    for name in others:
        packed[name].use(stack_tiles([packed[name].storage])[1][0])
    monkeypatch.setattr(update_kernels, "check_fp8_gradients", lambda device: None)
    monkeypatch.setattr(type(model), "dtype", torch.bfloat16)
    assert use_backward_dtype(model, "fp8") == len(others) < len(packed)
    assert {name for name, layer in packed.items() if layer.fp8_gradients} == others


@pytest.mark.slow
@pytest.mark.parametrize("family", TURNED)
@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_logits_and_gradients_are_those_of_the_plain_model(adapted, calls, monkeypatch, family, weights):
    model = adapted(family, weights)
    with monkeypatch.context() as plain:
        plain.setattr(lora_product, "is_16bit_cuda", lambda x: False)
        logits, gradients = logits_and_gradients(model)
    assert not calls
    fused.fuse(model)
    found, found_gradients = logits_and_gradients(model, **packed_row(model))
    assert calls.count(("rotated_heads", 3)) == TURNED[family]
    assert calls.count(("swiglu", 1)) == 2, "gate and up side by side"
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert found_gradients.keys() == gradients.keys() and len(gradients) == 2 * 7 * 2
    for name, gradient in gradients.items():
        assert (found_gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("shapes", [[(576, 384)], [(384, 576)], [(576, 384), (64, 384)]], ids=str)
def test_products_in_16_bits_round_no_packed_weight(shapes):
    """Rounding y and dx to bf16 leaves 0.16 % of error; a W rounded once more would make it 0.23 %."""
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    bases = [PackedLinear.of(quantize(0.02 * drawn(shape), NVFP4, "mse", 0.15)) for shape in shapes]
    exact_NK = torch.cat([base.dense() for base in bases]).double()
    n, k = exact_NK.shape
    adapters = [torch.zeros(8, k) for _ in shapes] + [torch.zeros(rows, 8) for rows, _ in shapes]
    x, dy = drawn(256, k).bfloat16().requires_grad_(), drawn(256, n).bfloat16()
    y = lora_product._LoraProduct.apply(x, bases, [2.0] * len(bases), *adapters)
    y.backward(dy)
    for found, truth in ((y, x.double() @ exact_NK.T), (x.grad, dy.double() @ exact_NK)):
        assert (found.double() - truth).norm() < 1.9e-3 * truth.norm()


@pytest.mark.parametrize("wrap", [get_peft_model, adapt], ids=["PEFT's layers", "our layers"])
def test_adapted_layers_are_one_product_whoever_made_them(tiny_model, monkeypatch, wrap):
    made = []
    product = lora_product._LoraProduct
    counting = SimpleNamespace(apply=lambda *args: made.append(1) or product.apply(*args))
    model = wrap(tiny_model("llama", vocab_size=61), LoraConfig(r=8, target_modules="all-linear"))
    move_adapter(model, 0.2).train()
    with monkeypatch.context() as plain:
        plain.setattr(lora_product, "is_16bit_cuda", lambda x: False)
        logits, gradients = logits_and_gradients(model)
    path = fit(monkeypatch, model)
    assert path.products == Share(14, 14)
    fused.fuse(model)
    monkeypatch.setattr(lora_product, "_LoraProduct", counting)
    found, found_gradients = logits_and_gradients(model, **packed_row(model))
    assert len(made) == 2 * 4, "q, k and v; o; gate and up; down"
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        assert (found_gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name


PATHS = {
    "llama": {"attention": "2/2", "norms": "5/5", "rotary embeddings": "2/2", "MLPs": "2/2"}
    | {"adapted layers": "14/14"},
    "qwen3": {
        "attention": "2/2",
        "norms": "9/9",
        "rotary embeddings": "0/2 (heads are not just rotated before attention)",
        "MLPs": "2/2",
        "adapted layers": "14/14",
    },
}


@pytest.mark.parametrize("family", PATHS)
def test_the_path_says_what_the_kernels_do(adapted, calls, monkeypatch, family):
    """How often each kernel is called in a forward pass is what the path counts."""
    model = adapted(family)
    path = fit(monkeypatch, model)
    record = path.record()
    assert record.pop("attention kernel") == "FlashAttention-2 (FlashAttention-4 was run on Hopper alone)"
    assert record == PATHS[family] and path.by_segment and not path.is_slow
    fused.fuse(model)
    calls.clear()
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False, **packed_row(model))
    names = [name for name, _ in calls]
    assert [names.count(name) for name in ("rms_norm", "rotated_heads", "swiglu")] == [
        path.norms.fused, path.rotary.fused, path.mlps.fused,
    ]  # fmt: skip


@pytest.mark.parametrize(("weights", "dropout"), [("nvfp4", 0.0), ("nvfp4", 0.05), ("bf16", 0.1)])
def test_the_plan_knows_from_settings_which_layers_are_fused(adapted, monkeypatch, weights, dropout):
    path = fit(monkeypatch, adapted("llama", weights, dropout=dropout))
    assert (path.products.why_not or None) == why_not_fused(weights, dropout)
    assert path.is_slow == (dropout > 0)
    if dropout:
        assert (
            path.products.fused == 0 and f"adapted layers 0/14 (lora_dropout is {dropout})" in path.sentence()
        )
        assert path.rotary.fused == 0, "it takes q, k and v as one product leaves them"


def test_nf4_layers_are_left_to_peft(tiny_model, to_nf4, monkeypatch):
    model = add_lora(to_nf4(tiny_model("llama")), rank=4, alpha=8, dropout=0.0)
    assert fit(monkeypatch, model).products.why_not == why_not_fused("nf4", 0.0)


def test_norms_are_fused_for_what_they_compute(adapted, monkeypatch):
    """Not for their names: one trains, one centres, and one has a gate, which another kernel takes; those of
    Gemma and OLMo are others."""
    model = adapted("llama").get_base_model()
    first, second, *_ = (module for module in model.modules() if is_norm(module))
    first.weight.requires_grad_(True)
    assert fit(monkeypatch, model).norms == Share(4, 5, "their weights train")
    first.weight.requires_grad_(False)
    no_plain = Share(4, 5, "CohereLayerNorm is no plain RMSNorm")
    for kind, share in ((CohereLayerNorm, no_plain), (Qwen3NextRMSNormGated, Share(5, 5))):
        other = kind(64)
        other.variance_epsilon, other.weight = second.variance_epsilon, second.weight
        model.model.layers[0].input_layernorm = other
        assert fit(monkeypatch, model).norms == share


@pytest.mark.parametrize(
    ("kind", "added", "rounds_unit"),
    [
        (LlamaRMSNorm, 0.0, True),
        (Gemma3RMSNorm, 1.0, False),
        (Gemma4RMSNorm, 0.0, False),
        (Olmo3RMSNorm, 0.0, False),
    ],
)
def test_norms_are_measured_with_their_rounding(kind, added, rounds_unit):
    norm = kind(64, eps=0.1).bfloat16().requires_grad_(False)
    norm.weight += 0.2 * torch.randn(64)
    ((_, formula),) = update_path.norms(norm)
    assert formula == (0.1, added, rounds_unit)


class Sparse(torch.nn.Module):
    """Gemma 3n's MLP, but for its size: small gates are left out before the activation."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x):
        gate = self.gate_proj(x)
        gate = torch.relu(gate - gate.mean(-1, keepdim=True))
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


def test_mlps_are_fused_for_what_they_compute():
    model = tiny("gemma3_text")
    mlp = model.model.layers[0].mlp
    assert (
        update_path.gate_of(mlp) == "gelu"
        and update_path.gate_of(tiny("mistral").model.layers[0].mlp) == "silu"
    )
    assert update_path.gate_of(Sparse(mlp)) == ""
    for activation in ("gelu", "quick_gelu", "relu"):
        mlp.act_fn = ACT2FN[activation]
        assert update_path.why_not_swiglu(mlp) == "Gemma3MLP has no SiLU or tanh-GELU gate"
    assert isinstance(mlp.gate_proj, torch.nn.Linear), "each linear is where it was"


def test_the_path_says_what_computes_attention(monkeypatch):
    """Long rows on Hopper, and the full layers of Gemma 4, whose heads no FlashAttention takes."""
    monkeypatch.setattr(update_path, "why_not_flash4", lambda device: "")
    long = "FlashAttention-4 for long rows without windows or sinks"
    for size, wide in ((32, ""), (512, ", memory-efficient attention for heads above 256 columns")):
        record = fit(monkeypatch, tiny("gemma4_text", global_head_dim=size)).record()
        assert record["attention kernel"] == long + wide


FAMILY_PATHS = {  # norms, layers whose heads are turned, forward passes that turn them, MLPs
    "llama": (9, 4, 4, 4),
    "qwen3": (4 * 4 + 1, 0, 0, 4),
    "qwen3_5_text": (4 * 2 + 2 + 1, 0, 0, 4),  # and three with a gate
    "granite": (9, 4, 4, 4),
    "mistral": (9, 4, 4, 4),
    "qwen2": (9, 4, 4, 4),
    "phi3": (9, 0, 0, 4),
    "gemma3_text": (4 * 6 + 1, 0, 0, 4),
    "gemma4_text": (4 * 6 + 1, 0, 0, 4),
    "ministral3": (9, 0, 0, 4),
    "smollm3": (9, 3, 3, 4),
    "olmo3": (4 * 4 + 1, 0, 0, 4),
    "qwen3_moe": (4 * 4 + 1, 0, 0, 1),  # three layers have experts
    "gpt_oss": (9, 0, 0, 0),
    "qwen3_5_moe_text": (11, 0, 0, 4),  # shared experts
    "granite_swa": (9, 4, 3, 4),  # a layer that is given no angles runs its own code
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_families_with_windows_sinks_and_the_like_on_the_kernels(calls, monkeypatch, name):
    model = add_lora(tiny(name).requires_grad_(False), rank=8, alpha=16, dropout=0.0)
    move_adapter(model, 0.2).train()
    with monkeypatch.context() as plain:
        plain.setattr(lora_product, "is_16bit_cuda", lambda x: False)
        logits, gradients = logits_and_gradients(model)
    path, kwargs = fit(monkeypatch, model), packed_row(model)
    norms, turned, turns, mlps = FAMILY_PATHS[name]
    gated = path.delta_nets.fused
    assert (path.norms.fused, path.rotary.fused, path.mlps.fused) == (norms + gated, turned, mlps)
    assert path.by_segment and path.attention == Share(4 - gated, 4 - gated) and not path.is_slow
    fused.fuse(model)
    joined, product = [], fused.fused_forward
    monkeypatch.setattr(fused, "fused_forward", lambda *args: joined.append(len(args)) or product(*args))
    calls.clear()
    found, found_gradients = logits_and_gradients(model, **kwargs)
    assert joined.count(1 + 3) == turns, "q, k and v are one product where the kernel turns them"
    names = [name for name, _ in calls]
    counts = [names.count(kernel) for kernel in ("rms_norm", "rotated_heads", "swiglu")]
    assert counts == [norms, turns, mlps]
    assert path.mixtures == Share(*[{"qwen3_moe": 3, "gpt_oss": 4, "qwen3_5_moe_text": 4}.get(name, 0)] * 2)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=2e-5)
    assert found_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        assert (found_gradients[parameter] - gradient).norm() < 1e-4 * gradient.norm(), parameter


def test_attention_that_does_not_know_its_config_is_left_as_it_is():
    assert update_path.turned_heads(XGLMAttention(8, 2)) == "a layer has no adapter"


def test_a_model_on_a_cpu_has_no_kernel(adapted):
    path = find_path(adapted("llama").get_base_model(), None)
    assert not path.by_segment and not path.is_slow
    assert path.sentence() == "The update runs on plain PyTorch: its kernels need a CUDA GPU."


def test_a_model_in_fp32_on_a_gpu_is_said_to_be_slow(adapted, monkeypatch):
    model = adapted("llama").get_base_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    path = find_path(model, None)
    assert path.is_slow and not path.by_segment
    assert path.sentence() == (
        "The update runs on plain PyTorch: its kernels need bfloat16 and the model is float32; set dtype: "
        "bfloat16, or load it so."
    )


def fit(monkeypatch, model):
    """The path of a model as if it were in 16 bits on a GPU."""
    monkeypatch.setattr(update_path, "why_unfit", lambda model: "")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return find_path(base, None)


def test_layers_that_are_not_all_adapted_are_computed_one_by_one(adapted, calls):
    model = adapted("llama", target_modules=("q_proj", "v_proj", "up_proj"))
    fused.fuse(model)
    logits_and_gradients(model)
    assert ("swiglu", 2) in calls and ("swiglu", 1) not in calls


@pytest.mark.slow
def test_noise_in_a_fused_model_is_that_of_the_plain_one(adapted, calls):
    """The kernel takes w + Z as it is: no hook, forward and backward."""
    model = adapted("llama")
    offsets = {name: 0.1 * torch.randn(64) for name in find_noise_norms(model)}
    clean, _ = logits_and_gradients(model)
    with noisy_norms(model, offsets):
        logits, gradients = logits_and_gradients(model)
    fused.fuse(model)
    calls.clear()
    with noisy_norms(model, offsets):
        assert not any(is_norm(m) and (m._forward_pre_hooks or m._forward_hooks) for m in model.modules())
        found, found_gradients = logits_and_gradients(model, **packed_row(model))
    assert calls.count(("rms_norm", 2)) == 5
    assert (logits - clean).abs().mean() > 1e-2
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        assert (found_gradients[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_noise_finds_its_norms_in_a_fused_model(adapted, calls):
    model = adapted("qwen2")
    before = find_noise_norms(model)
    fused.fuse(model)
    assert len(before) == 4 and find_noise_norms(model) == before
    logits_and_gradients(model)
    assert ("swiglu", 1) in calls, "joined again once the hooks are gone"


def test_a_bias_that_trains_gets_its_gradient(adapted):
    model = adapted("qwen2", "bf16")
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.base_layer.bias"):
            parameter.requires_grad_(True)
    fused.fuse(model)
    _, gradients = logits_and_gradients(model, **packed_row(model))
    assert sum(name.endswith("bias") for name in gradients) == 2
