"""`qerl plan` counts what a real model has, predicts what steps took, and proposes what fits."""

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.result import RESULTS, read_rows
from qerl.cli import main
from qerl.errors import QeRLError
from qerl.families.layer import LINEARS
from qerl.families.sizes import SIZES, Sizes
from qerl.families.table import FAMILIES
from qerl.fp4.linear import PackedLinear
from qerl.lora.adapter import add_lora
from qerl.models import hub
from qerl.models.load import load_model
from qerl.plan.command import plan_command
from qerl.plan.parts import Activations, Adapter, Cache, Weights
from qerl.plan.phases import make_plan
from qerl.plan.propose import (
    ENOUGH_TOKENS,
    FEW_TOKENS,
    MARGIN,
    STEP,
    cost,
    fastest,
    fits,
    propose,
    tokens_that_fit,
)
from qerl.plan.render import verdict
from qerl.plan.settings import refuse_full_tuning_that_cannot_fit
from qerl.plan.work import Work
from qerl.rollout.paged.limits import FILTER_BYTES, BlockDemand
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import load_config
from qerl.trainer import policy, run
from qerl.weight_formats import FORMATS

GB80 = 84_600_000_000

# Parameters as published with the models.
PUBLISHED = {
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
    "72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
}


def work(**changes) -> Work:
    values = {
        "weights": "nvfp4", "rank": 32, "targets": LINEARS, "prompt_tokens": 256,
        "completion_tokens": 2048, "group": 8, "sequences": 8, "microbatch": 8,
    }  # fmt: skip
    return Work(**(values | changes))


# Exact counts


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "bf16"])
def test_bytes_of_weights_and_adapter(tiny_model, tmp_path, family, changes, weights):
    tiny_model(family, **changes).save_pretrained(tmp_path)
    model = load_model(tmp_path, weights, torch.bfloat16, "cpu")
    sizes = Sizes.from_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = list(model.parameters())
    tensors += [b for m in model.modules() if isinstance(m, PackedLinear) for b in m.buffers(recurse=False)]
    assert Weights(sizes, FORMATS[weights]).bytes == sum(tensor.nbytes for tensor in tensors)
    if weights == "bf16":
        assert sizes.parameters == sum(tensor.numel() for tensor in tensors)
    targets = ("q_proj", "v_proj", "down_proj") if family == "qwen3" else LINEARS
    adapted = add_lora(model, rank=6, alpha=6, dropout=0.0, target_modules=targets)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    adapter = Adapter(sizes, 6, targets)
    assert adapter.parameters == sum(p.numel() for p in trained)
    assert adapter.bytes == sum(p.nbytes for p in trained)


def test_bytes_of_gradients_and_optimizer(tiny_model):
    model = tiny_model("qwen2")
    sizes = Sizes.from_config(model.config.to_dict())
    adapted = add_lora(model, rank=4, alpha=4, dropout=0.0)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    adapted(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    moments = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    adapter = Adapter(sizes, 4, LINEARS)
    assert adapter.gradients == sum(p.grad.nbytes for p in trained)
    assert work().optimizer_bytes * adapter.parameters == sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_known_models(name):
    assert SIZES[name].parameters == PUBLISHED[name]


def test_keys_and_values():
    """7B: 28 layers, 4 heads of 128, keys and values, 2 bytes: 57344 bytes a token."""
    cache = Cache(SIZES["7b"], work(sequences=16))
    block = cache.geometry.block_bytes
    assert block == 57344 * 64 == 2 * Cache(cache.sizes, work(cache_bytes=1)).geometry.block_bytes
    assert cache.bytes(10**12) == block * (16 * 32 + 3 * 4), "own blocks, prompts of two groups and a third"
    assert cache.bytes(100 * block + 1) == 100 * block


@pytest.mark.parametrize("prompt, completion, samples", [(1, 1, 1), (65, 64, 8), (300, 1000, 3)])
def test_rows_that_blocks_hold(prompt, completion, samples):
    demand = BlockDemand(prompt, completion, samples)
    for blocks in range(200):
        fitting = [rows for rows in range(1, 41) if demand.blocks(rows) <= blocks]
        alone = [1] if blocks >= demand.least else []
        assert demand.rows(blocks, 40) == max(fitting + alone, default=0)


# Measured peaks


def recorded():
    """Rows of the step benchmark whose update is this project's own."""
    rows = []
    for file in sorted(RESULTS.glob("step-*.json")):
        for row in read_rows(file.stem):
            if "update_gb" in row and row.get("engine", "qerl") == "qerl":
                name = (
                    f"{row['shape']}-{row['weights']}-r{row['lora_rank']}-{row['prompts']}x{row['samples']}"
                )
                rows.append(pytest.param(row, id=f"{name}x{row['completion_tokens']}-{file.stem}"))
    assert rows, f"{RESULTS} has no step-*.json"
    return rows


@pytest.mark.parametrize("row", recorded())
def test_prediction_of_recorded_peaks(row):
    samples = row["prompts"] * row["samples"]
    plan = make_plan(
        dataclasses.replace(
            SIZES[row["shape"]],
            qkv_bias=True,  # the benchmark builds Qwen2 models of any shape, whose embeddings are not tied
            qk_norm=False,
            tied=False,
            positions=row["prompt_tokens"] + row["completion_tokens"] + 64,
        ),
        work(
            weights=row["weights"],
            rank=row["lora_rank"],
            prompt_tokens=row["prompt_tokens"],
            completion_tokens=row["completion_tokens"],
            group=row["samples"],
            sequences=samples,
            microbatch=row["microbatch"],
            microbatches=samples // row["microbatch"],
            tokens_per_forward=row.get("tokens_per_forward"),
            every_n_layers=row.get("every_n_layers", 1),
        ),
        GB80,
    )
    resident = sum(part.update for part in plan.lines[: 2 if "resident_without" in row else 3])
    assert resident / 1e9 == pytest.approx(row["resident_gb"], rel=0.01)
    assert plan.update / 1e9 == pytest.approx(row["update_gb"], rel=0.05)
    # What torch's allocator still holds of the update before is in the measured figure, but can be had back.
    assert plan.rollout / 1e9 < 1.05 * row["rollout_gb"]


# What a plan says


def test_phases_and_sharing():
    sizes = SIZES["7b"]
    base = make_plan(sizes, work(), GB80)
    assert base.peak == base.update == sum(part.update for part in base.lines)
    twice = make_plan(sizes, work(microbatches=2), GB80)
    adapter = Adapter(sizes, 32, LINEARS)
    assert twice.update - base.update == adapter.gradients, "a first microbatch leaves its gradients"
    kept, half = (make_plan(sizes, work(every_n_layers=n), GB80) for n in (0, 2))
    assert kept.update > 2 * base.update
    assert base.update < half.update < kept.update
    assert kept.rollout == half.rollout == base.rollout
    counts = [Activations(sizes, work(every_n_layers=n)).recomputed for n in (1, 2, 3, 28, 0)]
    assert counts == [28, 14, 10, 1, 0]


def test_sequences_that_do_not_fit_wait():
    sizes = SIZES["72b"]
    plan = make_plan(sizes, work(sequences=128, completion_tokens=8192, microbatch=1), GB80)
    assert 0 < plan.sequences < 128
    assert f"{plan.sequences} of 128 sequences decode side by side" in verdict(plan)
    cache = next(part.rollout for part in plan.lines if part.name == "keys and values")
    keys_and_values = Cache(sizes, plan.work)
    block = keys_and_values.geometry.block_bytes
    assert block * keys_and_values.demand.blocks(plan.sequences) <= cache
    assert block * keys_and_values.demand.blocks(plan.sequences + 1) > cache


@pytest.mark.parametrize("name", ["1.5b", "7b", "32b", "72b"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_proposals_fit_and_keep_the_samples(name, tokens):
    sizes = SIZES[name]
    wanted = work(completion_tokens=tokens, group=16, microbatch=16, microbatches=8)
    plan = propose(sizes, wanted, GB80, samples=256)
    assert plan is not None and fits(plan)
    assert plan.peak * MARGIN <= GB80
    assert (plan.work.microbatch, plan.work.microbatches) == (16, 8)
    assert plan.sequences == plan.work.sequences


def test_dropout_leaves_layers_to_peft():
    """Each of the seven inputs is kept in fp32 with a mask, instead of three in bf16; no product is joint."""
    sizes = SIZES["7b"]
    joint, alone = (Activations(sizes, work(lora_dropout=p)) for p in (0.0, 0.1))
    nf4, nf4_dropout = (Activations(sizes, work(weights="nf4", lora_dropout=p)) for p in (0.0, 0.1))
    tokens = work().tokens
    inputs = tokens * (5 * sizes.hidden + sizes.queries + sizes.intermediate)
    assert alone.layer - joint.layer == 5 * inputs - 2 * tokens * (2 * sizes.hidden + sizes.intermediate)
    assert nf4_dropout.layer - nf4.layer == inputs and alone.layer == nf4_dropout.layer
    assert alone.workspace < joint.workspace, "gate and up are written one after the other"
    said = verdict(make_plan(sizes, work(lora_dropout=0.1), GB80))
    assert "run through PEFT, slower and larger: lora_dropout is 0.1." in said
    assert "PEFT" not in verdict(make_plan(sizes, work(), GB80))


def test_chunks():
    """8 samples of 256 + 2048 tokens: 16639 at once, or at most so many; a chunk holds at least a sample."""
    assert work().tokens == work(tokens_per_forward=16639).tokens == 16639
    assert work(tokens_per_forward=16638).tokens == 16638
    assert work(tokens_per_forward=100).tokens == 2303
    assert (work().scored_tokens, work(tokens_per_forward=2303).scored_tokens) == (16384, 2048)
    assert [work(tokens_per_forward=n, microbatches=2).passes for n in (None, 16638, 100)] == [2, 4, 16]
    sizes = SIZES["7b"]
    small, large = (make_plan(sizes, work(tokens_per_forward=n), GB80) for n in (2303, 8192))
    adapter = Adapter(sizes, 32, LINEARS)
    (gradients,) = [part.update for part in small.lines if part.name == "gradients"]
    assert gradients == adapter.gradients, "an earlier chunk leaves its gradients"
    assert small.update < large.update < make_plan(sizes, work(microbatches=2), GB80).update


@pytest.mark.parametrize("capacity", [9e9, 10e9, 11e9, 12.5e9, 16e9, 40e9])
@pytest.mark.parametrize("microbatch", [1, 8, 64])
def test_tokens_that_fit(capacity, microbatch):
    sizes, wanted = SIZES["7b"], work(microbatch=microbatch)
    sample, whole = wanted.tokens_of(1), wanted.tokens_of(microbatch)
    most = min(whole, ENOUGH_TOKENS)
    fitting = [
        limit
        for limit in (sample, *range(sample // STEP * STEP + STEP, most, STEP), most)
        if fits(make_plan(sizes, dataclasses.replace(wanted, tokens_per_forward=limit), int(capacity)))
    ]
    assert tokens_that_fit(sizes, wanted, int(capacity)) == max(fitting, default=None)


@pytest.mark.parametrize(
    "name, gigabytes", [("7b", 8), ("7b", 10), ("7b", 16), ("7b", 80), ("32b", 80), ("72b", 80)]
)
def test_fastest(name, gigabytes):
    """Of all settings that fit, whole samples in a forward pass, none is faster."""
    sizes, capacity = SIZES[name], gigabytes * 10**9
    wanted = work(rank=16, completion_tokens=1024)
    tried = [
        dataclasses.replace(wanted, tokens_per_forward=limit, every_n_layers=n)
        for limit in map(wanted.tokens_of, (2, 3, 4, 8))
        for n in (1, 2, 3, 4, 8, 16, 24, 64)
        if n <= sizes.layers
    ]
    fitting = [cost(sizes, one) for one in tried if fits(make_plan(sizes, one, capacity))]
    found = fastest(sizes, wanted, capacity)
    if gigabytes == 8:
        assert found is None and not fitting
        return
    assert found is not None and fits(make_plan(sizes, found, capacity))
    assert not fitting or cost(sizes, found) <= min(fitting)


def test_settings_that_are_given_are_kept():
    sizes, wanted = SIZES["7b"], work()
    free = fastest(sizes, wanted, GB80)
    assert free is not None and free.tokens_per_forward is not None
    assert free.every_n_layers > 1 and FEW_TOKENS <= free.tokens_per_forward <= ENOUGH_TOKENS
    every = fastest(sizes, wanted, GB80, every=[1])
    assert every is not None and (every.every_n_layers, every.tokens_per_forward) == (1, 16639)
    limit = fastest(sizes, wanted, GB80, limits=[5000])
    assert limit is not None and limit.tokens_per_forward == 5000
    assert fastest(sizes, wanted, GB80, limits=[16639], every=[28]) is None


def test_nothing_fits():
    sizes = SIZES["72b"]
    assert propose(sizes, work(weights="bf16"), GB80, samples=8) is None
    assert verdict(make_plan(sizes, work(weights="bf16"), GB80)).startswith("It does not fit: the update")


def test_verdicts():
    sizes = SIZES["7b"]
    peak = make_plan(sizes, work(), GB80).peak
    assert verdict(make_plan(sizes, work(), GB80)).startswith("It fits: ")
    tight = make_plan(sizes, work(), round(peak * 1.02))
    assert verdict(tight).startswith("It is tight: ")
    assert not fits(tight)


# The command


def test_command_on_a_shape(capsys):
    lengths = ["--max_completion_length", "2048", "--max_prompt_length=256"]
    assert main(["plan", "7b", *lengths]) == 0
    printed = capsys.readouterr().out
    assert "It fits" in printed
    assert "keys and values" in printed
    assert main(["plan", "7b", "--gpu", "12", *lengths]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "A microbatch of 8 samples is computed in chunks of at most 6399 tokens." in printed
    assert main(["plan", "7b", "--lora_dropout", "0.05", *lengths]) == 0
    assert "lora_dropout is 0.05." in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "7b", "--gpu", "12", *lengths, "--tokens_per_forward", "16639"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "It does not fit: the update takes" in printed
    assert "--tokens_per_forward 6399 --gradient_checkpointing true" in printed
    assert "--gradient_checkpointing_kwargs '{\"every_n_layers\": 1}' --max_sequences 8" in printed
    assert main(["plan", "7b", "--gpu", "8", *lengths]) == 1
    assert "No settings fit" in capsys.readouterr().out


def test_command_reads_a_folder_and_recipes(tiny_model, tmp_path, capsys):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lora_r: 8\nmax_prompt_length: 64\nmax_completion_length: 128\n")
    assert main(["plan", str(tmp_path), "--gpu", "80", str(recipe)]) == 0
    assert "LoRA rank 8; samples of 64 + 128 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpu", "big"], "--gpu is big; it must be the GPU's memory in GB"),
        (
            ["--tuning", "full", "--weights", "bf16"],
            "Full tuning takes at least 121.8 GB on each GPU for weights, gradients and Adam's moments of "
            "7.62 billion parameters, more than the 84.6 GB there are",
        ),
        (["--tuning", "full", "--weights", "bf16", "--dtype", "bfloat16"], "at least 60.9 GB on each GPU"),
        (["--tuning", "full", "--weights", "bf16", "--beta", "0.04"], "at least 152.3 GB on each GPU"),
        (["--gpu", "nan"], "--gpu is nan"),
        (["--gpu", "true"], "--gpu is True"),
        (["--processes", "0"], "--processes is 0; it must be a number of GPUs"),
        (["--max_completion_length", "40000"], "exceed the model's 32768 positions"),
        (["--lora_rank", "8"], "unknown key 'lora_rank'"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(["plan", "7b", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_other_families_and_formats(tmp_path, capsys):
    with pytest.raises(QeRLError, match="families llama, mistral, qwen2, qwen3, not for gpt2"):
        Sizes.from_config({"model_type": "gpt2"})
    quantised = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config = {"model_type": "llama", "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path)]) == 2
    assert "holds mxfp4 weights, which cannot become nvfp4" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "model.gguf"]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_docs_name_the_families_that_have_kernels():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("|") and "| paged" in line]
    assert row.split("|")[1].strip() == ", ".join(family.name for family in FAMILIES.values())


def test_only_the_config_is_downloaded(tiny_model, tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns, **kwargs):
        asked.append((name, allow_patterns))
        tiny_model("llama").config.save_pretrained(tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    lengths = ["--max_prompt_length", "32", "--max_completion_length", "64"]
    assert main(["plan", "owner/model", *lengths]) == 0
    assert asked == [("owner/model", ["config.json", "hf_quant_config.json"])]


def test_a_run_says_first_what_fits(capsys, monkeypatch):
    settings = {"model": "7b", "task": "none", "output_dir": "none", "max_completion_length": 2048}
    with monkeypatch.context() as patched:
        patched.setattr(policy, "propose_settings", lambda *_: pytest.fail("searched although it fits"))
        config = load_config([], settings)
        policy.plan_memory(config, GB80, Console())
    assert "It fits" in capsys.readouterr().out
    planned = fastest(SIZES["7b"], work(prompt_tokens=512), GB80)
    assert planned is not None and config.tokens_per_forward == planned.tokens_per_forward
    given = load_config([], {**settings, "tokens_per_forward": 16000})
    policy.plan_memory(given, 12 * 2**30, Console())
    assert given.tokens_per_forward == 16000
    printed = " ".join(capsys.readouterr().out.split())
    assert "It does not fit" in printed
    assert "Proposed, with a peak of" in printed
    full = load_config([], {**settings, "weights": "bf16", "tuning": "full"})
    policy.plan_memory(full, 2 * GB80, Console())
    assert "Memory was not planned. Full tuning takes" in " ".join(capsys.readouterr().out.split())
    assert full.tokens_per_forward is None


def test_full_tuning_that_cannot_fit_is_refused_before_it_is_loaded(
    tiny_model, tmp_path, monkeypatch, tiny_tokenizer
):
    fields = {"model": "7b", "task": "arithmetic", "output_dir": "none", "weights": "bf16", "tuning": "full"}
    config = load_config([], fields)
    monkeypatch.setattr(run, "find_model", lambda name: name)
    monkeypatch.setattr(run, "load_tokenizer", lambda name: tiny_tokenizer)
    monkeypatch.setattr(run, "_datasets", lambda *args: (None, None))
    monkeypatch.setattr(policy, "load_policy", lambda *given: pytest.fail("the model was loaded"))
    monkeypatch.setattr(QeRLConfig, "device", torch.device("cuda"))
    gpu = types.SimpleNamespace(total_memory=GB80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with pytest.raises(QeRLError, match="Full tuning takes at least 121"):
        run.build(config, Console(quiet=True))
    refuse_full_tuning_that_cannot_fit(config, 2 * GB80)


def test_filters_take_a_place_to_sort_in(capsys):
    free, filtered = (
        plan_command("7b", [], {"max_completion_length": 2048, "top_p": top_p}, 80, Console(quiet=True))
        for top_p in (1.0, 0.9)
    )
    assert filtered.rollout == free.rollout + FILTER_BYTES
    assert filtered.update == free.update


def test_positions_of_a_stretched_rotary_embedding():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    config = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_parameters": rope}
    assert Sizes.from_config(config).positions == 131072


def test_several_processes_hold_buckets_of_gradients(capsys):
    one, two = (
        plan_command("7b", [], {"max_completion_length": 2048}, 80, Console(quiet=True), n) for n in (1, 2)
    )
    adapter = Adapter(two.sizes, two.work.rank, two.work.targets)
    assert {p.name: p.update for p in two.lines}["buckets of gradients"] == 4 * adapter.parameters
    assert "buckets of gradients" not in {part.name for part in one.lines}
    assert main(["plan", "7b", "--processes", "2"]) == 0
    assert "buckets of gradients" in capsys.readouterr().out


def test_advice_names_what_could_change(capsys):
    words = ["plan", "72b", "--gpu", "16"]
    assert main(words) == 1
    assert "max_completion_length or lora_r." in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--weights", "bf16"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "or weights: nvfp4 instead of bf16." in printed
    assert "GB are 10^9 bytes; of the GPU's memory 16.9 of them are usable." in printed


def test_an_unknown_size_lists_those_that_are_known(capsys):
    assert main(["plan", "33b"]) == 2
    assert "Sizes that are known by name: 1.5b, 3b, 7b" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("given", [None, 5000])
def test_a_run_on_a_gpu_takes_the_limit_of_the_plan(monkeypatch, tiny_tokenizer, given):
    """`qerl plan` and training agree on the default; what is set stays."""
    fields = {"max_prompt_length": 256, "max_completion_length": 2048, "tokens_per_forward": given}
    plan = plan_command("7b", [], fields, 24, Console(quiet=True))
    assert (plan.work.tokens_per_forward, plan.work.every_n_layers) == ((5000, 2) if given else (2303, 16))

    class Loading(Exception):
        pass

    def load(config, model, peft_config):
        assert config.tokens_per_forward == plan.work.tokens_per_forward
        assert config.gradient_checkpointing_kwargs == {"every_n_layers": plan.work.every_n_layers}
        raise Loading

    config = load_config([], {**fields, "model": "7b", "task": "arithmetic", "output_dir": "none"})
    monkeypatch.setattr(run, "find_model", lambda name: name)
    monkeypatch.setattr(run, "load_tokenizer", lambda name: tiny_tokenizer)
    monkeypatch.setattr(run, "_datasets", lambda *args: (None, None))
    monkeypatch.setattr(policy, "load_policy", load)
    monkeypatch.setattr(QeRLConfig, "device", torch.device("cuda"))
    gpu = types.SimpleNamespace(total_memory=plan.capacity)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with pytest.raises(Loading):
        run.build(config, Console(quiet=True))
