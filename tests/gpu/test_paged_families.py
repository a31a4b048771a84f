"""Families with windows, sinks, layers without rotary embedding and heads of two sizes on the paged engine:
as near to FP32 as the trainer's own pass, and pages behind a window are given back."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.lora.adapter import add_lora
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from tests.gpu.test_family_rows import OF_FAMILIES, SIZES
from tests.gpu.test_paged_models import check
from tests.support.families import MIXTURES, NAMES, tiny
from tests.support.models import move_adapter, pack

ROUTED = (*MIXTURES, "qwen3_5_moe_text")


def on_gpu(name, packed, **settings):
    """bf16, in four bits if wanted, with an adapter whose B is not zero."""
    model = tiny(name, **(SIZES | OF_FAMILIES.get(name, {}) | settings)).to("cuda", torch.bfloat16)
    model = pack(model) if packed else model
    return move_adapter(add_lora(model, 32, 64, 0.0), 0.02).eval()


def prompts_of(count, longest=200):
    """Prompts of 9 tokens to ``longest``. Routers need many: a token of a prompt that goes to another expert
    moves all that follows, in all of its samples."""
    lengths = torch.linspace(9, longest, count).long().tolist()
    return [torch.randint(2, 500, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_family(name, packed):
    model = on_gpu(name, packed)
    engine, params = PagedEngine(model, 0), SamplingParams(max_tokens=12, seed=3)
    if name in ROUTED:
        check(model, engine, params, prompts_of(16), typical=torch.median)
    else:
        longest = 50 if name == "ministral3" else 200  # of its positions, which are few
        check(model, engine, params, prompts_of(2, longest), samples=3)


@pytest.mark.parametrize("rank", [4, 40])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_of_experts(name, shared, rank):
    """Of experts in four bits, with items of several sizes."""
    model = pack(tiny(name, **SIZES | OF_FAMILIES.get(name, {})).to("cuda", torch.bfloat16))
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = add_lora(model, rank, 2 * rank, 0.0, targets, share_experts=shared)
    assert all(parameter.is_cuda for parameter in model.parameters())
    model = move_adapter(model, 0.02).eval()
    params = SamplingParams(max_tokens=12, seed=3)
    check(model, PagedEngine(model, 0), params, prompts_of(16), typical=torch.median)


def test_pages_behind_a_window_are_given_back():
    """A window of 1024 behind 32k tokens takes less than a fifth of what all of them would."""
    model = on_gpu("gemma4_text", True, sliding_window=1024, max_position_embeddings=40960)
    engine = PagedEngine(model, 0)
    prompt = torch.randint(2, 500, (32768,)).tolist()
    check(model, engine, SamplingParams(max_tokens=200, seed=3), [prompt], samples=1)
    of_pool = dict(zip(engine.cache.geometry.pools, engine.cache.blocks, strict=True))
    assert 5 * of_pool[1024] <= of_pool[None]
    print(f"blocks: {of_pool}")
