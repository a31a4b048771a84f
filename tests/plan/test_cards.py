"""Plans for small cards, by name and by size: what fits them, and what would where nothing does."""

import dataclasses

import pytest
from rich.console import Console

from qerl.cli import main
from qerl.families.sizes import SIZES
from qerl.gpu_memory import usable_bytes
from qerl.kernels import needs
from qerl.kernels.cards import CARDS
from qerl.plan.command import plan_command
from qerl.plan.gpu import MEMORIES, planned_gpu
from qerl.plan.instead import LENGTH_STEP, changes
from qerl.plan.phases import make_plan
from qerl.plan.propose import fastest, fits
from tests.support.plan import work


@pytest.mark.parametrize(
    "typed", ["rtx4090", "RTX 4090", "4090", 4090, "NVIDIA GeForce RTX 4090", "GeForce-RTX-4090"]
)
def test_a_card_is_known_by_its_name(typed):
    gpu = planned_gpu(typed)
    assert gpu.card is CARDS[8, 9] and gpu.capacity == round(23.5 * 2**30)


def test_names_are_of_one_card_and_no_size():
    names = [name for card in CARDS.values() for name, _ in card.gpus]
    assert all(card.gpus for card in CARDS.values())
    assert len({planned_gpu(name).capacity for name in names}) > 1
    for card in CARDS.values():
        assert all(planned_gpu(name).card is card for name, _ in card.gpus)
    assert all(planned_gpu(size).card is None for size in MEMORIES)
    assert planned_gpu(24).capacity == usable_bytes(24)


def test_a_memory_shared_with_the_cpu_is_planned_as_a_run_takes_it():
    assert planned_gpu("DGX Spark").capacity == round(0.75 * 119.6 * 2**30)


def test_what_is_no_card_is_told_which_there_are(capsys):
    assert main(["plan", "7b", "--gpu", "rtx 9999"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--gpu is rtx 9999; give the GPU's memory in GB" in said and "RTX 4090, L4" in said


@pytest.mark.parametrize("option", ["kv_cache_dtype", "backward_dtype"])
@pytest.mark.parametrize("name", ["A100", "rtx3090"])
def test_fp8_is_refused_where_a_card_has_none(name, option, capsys, monkeypatch):
    assert main(["plan", "qwen3-8b", "--gpu", name, f"--{option}", "fp8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "FP8 needs compute capability 8.9, and this is 8." in said
    assert f"remove {option}: fp8." in said
    monkeypatch.setattr(needs, "RUN_AS", frozenset())
    assert main(["plan", "qwen3-8b", "--gpu", "rtx4090", f"--{option}", "fp8"]) == 0
    assert "they were not run. To use it there: export QERL_ARCH=89." in capsys.readouterr().out


def test_fp8_keys_are_refused_for_a_model_whose_keys_have_a_bias(capsys):
    assert main(["plan", "7b", "--gpu", "rtx4090", "--kv_cache_dtype", "fp8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "biased keys are too large for E4M3; set kv_cache_dtype: auto" in said


@pytest.mark.parametrize("gpu, models", [
    (16, ["3b", "7b", "qwen3-8b"]),
    (24, ["3b", "7b", "qwen3-8b", "14b", "qwen3-14b"]),
    (32, ["3b", "7b", "qwen3-8b", "14b", "qwen3-14b", "32b", "qwen3-32b"]),
    (40, ["3b", "7b", "qwen3-8b", "14b", "qwen3-14b", "32b", "qwen3-32b"]),
    (48, ["3b", "7b", "qwen3-8b", "14b", "qwen3-14b", "32b", "qwen3-32b"]),
])  # fmt: skip
def test_groups_of_8_with_4096_tokens_on_small_cards(gpu, models):
    every = ["3b", "7b", "qwen3-8b", "14b", "qwen3-14b", "32b", "qwen3-32b"]
    wanted = work(prompt_tokens=512, completion_tokens=4096, microbatches=8)
    assert models == [name for name in every if fastest(SIZES[name], wanted, usable_bytes(gpu))]


def test_the_rollout_has_the_dequantised_weight_of_long_prompts():
    """Many tokens are multiplied with a dense weight where quack has no kernel, and the update's stays."""
    plan = make_plan(SIZES["7b"], work(), usable_bytes(24))
    (line,) = (line for line in plan.lines if line.name == "dequantised weight")
    assert line.rollout == line.update >= 2 * 2 * 18944 * 3584


@pytest.mark.parametrize(
    "model, gpu, said",
    [
        (
            "14b",
            16,
            ["max_completion_length 3840", "lora_r 16 instead", "size of qwen3-8b", "a GPU of 24 GB"],
        ),
        ("32b", 28, ["max_completion_length 512 ", "lora_r 16 instead", "size of 14b", "a GPU of 32 GB"]),
        ("72b", 24, ["size of 14b", "a GPU of 80 GB"]),
    ],
)
def test_what_would_fit_is_said_and_does(model, gpu, said, capsys):
    lengths = ["--max_prompt_length", "512", "--max_completion_length", "4096"]
    assert main(["plan", model, "--gpu", str(gpu), *lengths]) == 1
    (line,) = capsys.readouterr().out.split("One of these changes suffices: ")[1:]
    found = " ".join(line.split()).rstrip(".").split("; ")
    assert len(found) == len(said)
    for words, wanted in zip(found, said, strict=True):
        assert wanted in words
        name, value, *_ = words.split()
        if name in ("max_completion_length", "lora_r"):
            fields = {"max_prompt_length": 512, "max_completion_length": 4096} | {name: int(value)}
            assert fits(plan_command(model, [], fields, gpu, Console(quiet=True)))


@pytest.mark.slow
def test_changes_go_no_further_than_they_must():
    plan = make_plan(SIZES["14b"], work(prompt_tokens=512, completion_tokens=4096), usable_bytes(16))
    (length,) = (int(one.split()[1]) for one in changes(plan) if one.startswith("max_completion"))
    longer = dataclasses.replace(plan.work, completion_tokens=length + LENGTH_STEP)
    assert fastest(plan.sizes, longer, plan.capacity) is None
    bf16 = make_plan(SIZES["7b"], work(weights="bf16"), usable_bytes(16))
    assert changes(bf16)[0] == "weights: nvfp4 instead of bf16"
    assert changes(make_plan(SIZES["72b"], work(rank=256), 10**9)) == ["a GPU of 141 GB"]
