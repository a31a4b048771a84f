"""What the plan counts of a mixture: all experts, and what the engine's passes keep of them."""

import json
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console

from qerl.families.layer import RoutedMLP
from qerl.families.sizes import Sizes
from qerl.fp4.checkpoint import quantization_config
from qerl.fp4.format import NVFP4
from qerl.kernels.decode.expert_lora import ExpertLoraMatrices
from qerl.kernels.limits import ITEM_SIZES
from qerl.plan.command import plan_command
from qerl.plan.parts import Adapter, Weights
from qerl.plan.phases import make_plan
from qerl.plan.render import render
from qerl.plan.work import Work
from qerl.rollout.paged.experts import Mixtures
from qerl.rollout.paged.limits import PREFILL_TOKENS, ROW_COUNTS, experts_bytes
from qerl.rollout.paged.weights import RoutedWeights
from qerl.weight_formats import FORMATS

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "mlp_only_layers": [0], "intermediate_size": 512, "vocab_size": 1000,
}  # fmt: skip


@dataclass
class Stack:
    """Experts in four bits without their numbers."""

    shape: tuple[int, int]
    in_order: bool = True
    sizes: tuple[int, ...] = ITEM_SIZES


def test_a_published_mixture_has_the_parameters_of_its_name():
    sizes = Sizes.by_name("qwen3-30b-a3b")
    assert 30.5e9 < sizes.parameters < 30.6e9
    experts = 48 * 128 * 3 * 2048 * 768
    assert sizes.parameters > experts > 0.9 * sizes.parameters
    assert Weights(sizes, FORMATS["nvfp4"]).linears > 9 / 16 * experts
    assert sizes.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("rank", [0, 16])
def test_the_engines_buffers_are_those_that_it_makes(rank):
    sizes = Sizes.from_config(CONFIG)
    mlp = sizes.specs[1].mlp
    assert isinstance(mlp, RoutedMLP) and not sizes.specs[0].experts
    like = torch.zeros(1, dtype=torch.bfloat16)
    weights = RoutedWeights(torch.zeros(8, 256), Stack((256, 256)), Stack((256, 128)))
    if rank:
        gate_up, down = (torch.empty(1, linears, rank, width) for linears, width in [(2, 256), (1, 128)])
        weights.gate_up_lora = ExpertLoraMatrices(gate_up, gate_up)
        weights.down_lora = ExpertLoraMatrices(down, down)
    made = 0
    for tokens in (*PREFILL_TOKENS, *(count for count in ROW_COUNTS if count <= 64)):
        buffers = Mixtures(mlp, [weights], tokens, 1e-6, like)
        tensors = (buffers._x, buffers._h, buffers._y, buffers._xa, buffers._logits.parts_PTR)
        made += sum(tensor.nbytes for tensor in tensors)
    assert experts_bytes(sizes, 60, rank) == made
    assert experts_bytes(Sizes.by_name("7b"), 64) == 0


def test_the_plan_of_a_mixture_is_drawn():
    sizes = Sizes.by_name("qwen3-30b-a3b")
    work = Work(
        weights="nvfp4", rank=32, targets=sizes.targets, prompt_tokens=256, completion_tokens=1024, group=8,
        sequences=8, microbatch=8, microbatches=1,
    )  # fmt: skip
    plan = make_plan(sizes, work, 80 * 10**9)
    assert next(line for line in plan.lines if line.name.startswith("experts")).rollout > 0
    assert render(plan, None, "qwen3-30b-a3b", "")


@pytest.mark.parametrize(("shared", "count"), [(True, 1), (False, 128)])
def test_adapters_on_experts_count_for_each_of_them_or_once(shared, count):
    """In the engine gate and up have A each, on top of each other."""
    sizes = Sizes.by_name("qwen3-30b-a3b")
    every = (*sizes.targets, "gate_proj", "up_proj", "down_proj")
    plain, whole = (Adapter(sizes, 24, targets, shared) for targets in (sizes.targets, every))
    each = 3 * (2048 + 768)
    assert whole.parameters - plain.parameters == 24 * 48 * count * each
    assert whole.copies - plain.copies == 2 * 32 * 48 * count * each


def test_a_folder_of_packed_experts_is_planned_with_them(tmp_path):
    """By its config alone: NVFP4 everywhere, but for the head."""
    quantised = quantization_config(NVFP4, ["lm_head"])
    config = CONFIG | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_command(str(tmp_path), ["gsm8k", "nvfp4-lora"], {}, 24, Console(quiet=True))
    found = next(line.rollout for line in plan.lines if line.name == "weights")
    assert found == Weights(Sizes.from_config(CONFIG), FORMATS["nvfp4"]).bytes
