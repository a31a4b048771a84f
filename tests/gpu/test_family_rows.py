"""Rows of each family with windows, sinks or layers without rotary embedding, on all kernels of the update in
bf16, against FP32 through dense masks; and that the same row gives the same bits."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.lora.adapter import add_lora
from qerl.update.delta_net import read_sequences
from qerl.update.head import score
from qerl.update.kernels import use_kernels
from qerl.update.packed_row import PackedRow, pack_row
from tests.support.families import NAMES, tiny
from tests.support.models import move_adapter
from tests.support.samples import samples_of

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "initializer_range": 0.05,
    "sliding_window": 40,
}
OF_FAMILIES = {
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma4_text": {"head_dim": 256, "global_head_dim": 512},
    **{name: {"sliding_window": None} for name in ("llama", "qwen3", "granite", "ministral3")},
    "phi3": {"sliding_window": None},
    "qwen3_5_text": {"initializer_range": 0.02},
    "qwen3_moe": {"sliding_window": None, "moe_intermediate_size": 128, "num_experts": 8},
    "qwen3_5_moe_text": {
        "initializer_range": 0.02,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 192,
        "num_experts": 8,
    },
    "gpt_oss": {"intermediate_size": 128, "num_local_experts": 8},
    "smollm3": {"sliding_window": None},
}
PATHS = {  # norms, layers whose heads the kernel turns, MLPs
    "llama": (9, 4, 4), "qwen3": (17, 0, 4), "qwen3_5_text": (14, 0, 4), "granite": (9, 4, 4),
    "mistral": (9, 4, 4), "qwen2": (9, 4, 4), "phi3": (9, 0, 4), "gemma3_text": (25, 0, 4),
    "gemma4_text": (25, 0, 4), "ministral3": (9, 0, 4), "smollm3": (9, 3, 4), "olmo3": (17, 0, 4),
    "granite_swa": (9, 4, 4), "qwen3_moe": (17, 0, 1),
    "gpt_oss": (9, 0, 0), "qwen3_5_moe_text": (14, 0, 4),
}  # fmt: skip
PULLS = torch.randn(2, 520, generator=torch.Generator().manual_seed(1))


def drawn_row() -> PackedRow:
    """Prompts longer than a window, and one shorter; as many positions as `PULLS` has are scored."""
    draw = lambda n: torch.randint(3, 500, (n,)).tolist()  # noqa: E731
    groups = (130, [100, 30, 65]), (7, [200, 64]), (61, [1, 60])
    pairs = [(prompt, draw(n)) for tokens, rest in groups for prompt in [draw(tokens)] for n in rest]
    samples = samples_of(*zip(*pairs, strict=True))
    return pack_row(samples, range(len(samples)), torch.device("cuda"))


def computed(model, row: PackedRow, by_segment: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities, and gradients of the adapters."""
    model.zero_grad()
    logps, entropies = score(model, model.get_base_model(), row, by_segment, 0.8, entropy_has_gradient=True)
    pulls = PULLS.to(logps.device)
    (logps @ pulls[0] + entropies @ pulls[1]).backward()
    return logps.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_on_the_kernels_is_as_near_to_fp32_as_bf16(name) -> None:
    torch.manual_seed(0)
    model = tiny(name, **(SIZES | OF_FAMILIES.get(name, {}))).requires_grad_(False)
    for layer in model.model.layers if name == "gemma4_text" else ():  # which scales no scores
        layer.self_attn.q_norm.weight *= layer.self_attn.head_dim**-0.5
    model = model.bfloat16().cuda()
    model = move_adapter(add_lora(model, rank=16, alpha=32, dropout=0.0), 0.05).train()
    exact, own, row = copy.deepcopy(model).float(), copy.deepcopy(model), drawn_row()
    for each in (exact, own):
        read_sequences(each)  # which transformers' code takes for one
    path = use_kernels(model.get_base_model())
    assert path.by_segment and not path.is_slow, path.sentence()
    assert (path.norms.fused, path.rotary.fused, path.mlps.fused) == PATHS[name]
    truth, gradients = computed(exact, row, by_segment=False)
    logps, found = computed(model, row, by_segment=True)
    worst, off = gap(found, gradients), float((logps - truth).abs().mean())
    rounded = gap(computed(own, row, by_segment=False)[1], gradients)
    print(
        f"{name}: {off:.4f} nats; gradients off by {worst:.1e} at most, of transformers' code {rounded:.1e}"
    )
    # Tiny delta nets, and routers before clamped gates, are badly conditioned.
    bound = max(0.1, 1.2 * rounded) if name in ("qwen3_5_text", "qwen3_5_moe_text", "gpt_oss") else 0.1
    assert off < 0.05 and worst < bound and found.keys() == gradients.keys()

    again, repeated = computed(model, row, by_segment=True)
    assert torch.equal(again, logps) and all(torch.equal(repeated[n], found[n]) for n in found)


def gap(found: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient."""
    return max(float((found[n] - g).norm() / g.norm()) for n, g in gradients.items())
