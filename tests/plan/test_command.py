"""`qerl plan` on shapes, folders and recipes, and what a run does with its plan."""

import json
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console

from qerl import host_memory
from qerl.cli import main
from qerl.errors import QeRLError
from qerl.families.sizes import SIZES, Sizes
from qerl.families.table import FAMILIES
from qerl.gpu_memory import usable_bytes
from qerl.models import hub
from qerl.plan.command import plan_command
from qerl.plan.context import in_words, longest_completion
from qerl.plan.phases import make_plan
from qerl.plan.propose import fastest, fits
from qerl.plan.settings import refuse_full_tuning_that_cannot_fit
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import load_config
from qerl.trainer import policy, run
from qerl.trainer.prompts import ReadyPrompts
from tests.support.plan import GB80, work

SHORT = {
    "model": "7b",
    "task": "arithmetic",
    "task_options": {"examples": 0, "train_size": 8},
    "output_dir": "none",
    "max_steps": 10,
}
"""Fields of a run whose data are made at once."""


def a_shape_is_its_model(monkeypatch, tokenizer):
    """A shape that a run names needs no files: its tokenizer is given, and no positions limit completions."""
    ready = ReadyPrompts(load_config([], SHORT), tokenizer, positions=None)
    monkeypatch.setattr(run, "find_model", lambda name: name)
    monkeypatch.setattr(run, "check_trainable", lambda *_: None)
    monkeypatch.setattr(run, "load_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setattr(run.ReadyPrompts, "of", lambda *_, **__: ready)


def test_command_on_a_shape(capsys):
    lengths = ["--max_completion_length", "2048", "--max_prompt_length=256"]
    assert main(["plan", "7b", *lengths]) == 0
    printed = capsys.readouterr().out
    assert "It fits" in printed
    assert "keys and values" in printed
    assert main(["plan", "7b", "--gpu", "12", *lengths]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "A microbatch of 8 samples is computed in chunks of at most 4351 tokens." in printed
    assert main(["plan", "7b", "--lora_dropout", "0.05", *lengths]) == 0
    assert "lora_dropout is 0.05." in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "7b", "--gpu", "12", *lengths, "--tokens_per_forward", "16639"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "It does not fit: the update takes" in printed
    assert "--tokens_per_forward 4351 --gradient_checkpointing true" in printed
    assert "--gradient_checkpointing_kwargs '{\"every_n_layers\": 1}' --max_sequences 8" in printed
    assert main(["plan", "7b", "--gpu", "8", *lengths]) == 1
    assert "No settings of the update fit" in capsys.readouterr().out


def test_the_longest_completion_is_the_last_that_fits(capsys):
    sizes = SIZES["qwen3-8b"]
    longest = longest_completion(make_plan(sizes, work(), GB80))
    tokens = longest.work.completion_tokens
    assert fits(longest) and tokens > 100_000
    assert fastest(sizes, work(completion_tokens=tokens + 256), GB80) is None
    said = in_words(longest)
    assert f"fits has {tokens} tokens" in said and "The model has only 40960 positions." in said
    here = longest_completion(make_plan(sizes, work(), GB80), offload=False)
    assert 100_000 < here.work.completion_tokens < tokens and not here.work.offload
    assert f"of CPU memory for offloading; without it, {here.work.completion_tokens} tokens fit." in said
    assert '{"every_n_layers": 1, "offload": true}' in said
    assert main(["plan", "72b", "--max_context", "--gpu", "24"]) == 1
    assert "No completion fits, not even one of 256 tokens." in capsys.readouterr().out


def test_a_server_hears_what_its_adapters_take(capsys):
    each = 16 * 80_740_352 / 1e9  # rank 32 of a 7B model, in FP32 with gradients and AdamW's moments
    assert main(["plan", "7b", "--gpu", "16", "--adapters", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 take {each:.1f} GB; 2 take {2 * each:.1f} GB; 4 take {4 * each:.1f} GB; " in said
    assert f"8 take {8 * each:.1f} GB, too much. `qerl serve --resident`" in said
    assert main(["plan", "7b", "--gpu", "80"]) == 0
    assert "--resident" not in capsys.readouterr().out


def test_command_reads_a_folder_and_recipes(tiny_model, tmp_path, capsys):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lora_r: 8\nmax_prompt_length: 64\nmax_completion_length: 128\n")
    assert main(["plan", str(tmp_path), "--gpu", "80", str(recipe)]) == 0
    assert "LoRA rank 8; samples of 64 + 128 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpu", "big"], "--gpu is big; give the GPU's memory in GB"),
        (
            ["--tuning", "full", "--weights", "bf16"],
            "Full tuning takes at least 121.8 GB on each GPU for weights, gradients and Adam's moments of "
            "7.62 billion parameters, more than the 84.5 GB there are",
        ),
        (["--tuning", "full", "--weights", "bf16", "--dtype", "bfloat16"], "at least 60.9 GB on each GPU"),
        (["--tuning", "full", "--weights", "bf16", "--beta", "0.04"], "at least 152.3 GB on each GPU"),
        (["--gpu", "nan"], "--gpu is nan"),
        (["--gpu", "0.001"], "--gpu is 0.001; give the GPU's memory in GB"),
        (["--gpu", "true"], "--gpu is True"),
        (["--processes", "0"], "--processes is 0; it must be a number of GPUs"),
        (["--adapters", "none"], "--adapters is none; it must be a number of adapters"),
        (["--max_completion_length", "40000"], "exceed the model's 32768 positions"),
        (
            ["--model", "14b"],
            "The model to plan for is given twice, as 7b and with --model 14b; give it once.",
        ),
        (["--lora_rank", "8"], "unknown key 'lora_rank'"),
        (["gsm8kk"], "There is no recipe named 'gsm8kk'; did you mean 'gsm8k'"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(["plan", "7b", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        "MODEL gsm8k nvfp4-lora 24gb",
        "gsm8k nvfp4-lora 24gb --model MODEL",
        "gsm8k nvfp4-lora MODEL 24gb",
        "gsm8k nvfp4-lora mine.yaml 24gb",
    ],
)
def test_the_words_of_train_are_words_of_plan(words, tmp_path, capsys, monkeypatch):
    """Recipes, one of which may name the model; or a model among them."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: 7b\n")
    assert main(["plan", "7B", "gsm8k", "nvfp4-lora", "24gb", "--gpu", "24"]) == 0
    wanted = capsys.readouterr().out.replace("7B", "7b")
    assert main(["plan", *words.replace("MODEL", "7b").split(), "--gpu", "24"]) == 0
    assert capsys.readouterr().out == wanted


def test_a_plan_needs_a_model(capsys):
    assert main(["plan", "gsm8k", "--gpu", "24"]) == 2
    assert "model is not set; pass --model, or name the recipe of a model" in capsys.readouterr().err


def test_other_families_and_formats(tmp_path, capsys):
    with pytest.raises(QeRLError, match=r"families llama, mistral, .*, smollm3, not for gpt2"):
        Sizes.from_config({"model_type": "gpt2"})
    quantised = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config = {"model_type": "llama", "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--weights", "nvfp4"]) == 2
    assert "holds mxfp4 weights, which cannot become nvfp4" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "model.gguf"]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_docs_name_the_families_that_have_kernels():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    body = page.split("<!-- table families -->")[1].split("<!-- /table -->")[0]
    named = [line.split("|")[1].strip() for line in body.splitlines() if line.startswith("| ")]
    assert named[1:] == [family.name for family in FAMILIES.values()]


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
    config = load_config([], SHORT | {"weights": "bf16", "tuning": "full"})
    a_shape_is_its_model(monkeypatch, tiny_tokenizer)
    monkeypatch.setattr(policy, "load_policy", lambda *given: pytest.fail("the model was loaded"))
    monkeypatch.setattr(QeRLConfig, "device", torch.device("cuda"))
    gpu = types.SimpleNamespace(total_memory=GB80, is_integrated=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with pytest.raises(QeRLError, match="Full tuning takes at least 121"):
        run.build(config, Console(quiet=True))
    refuse_full_tuning_that_cannot_fit(config, 2 * GB80)


def test_advice_names_what_could_change(capsys):
    words = ["plan", "72b", "--gpu", "16"]
    assert main(words) == 1
    assert "a model of the size of 14b; a GPU of 80 GB." in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "14b", "--gpu", "16", "--weights", "bf16"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "One of these changes suffices: weights: nvfp4 instead of bf16;" in printed
    assert "GB are 10^9 bytes; 16 GiB are 17.2 GB, of which 16.5 are usable." in printed


@pytest.mark.parametrize("name", ["33b", "owner/model"])
def test_a_model_that_is_not_found_lists_the_sizes_that_are_known(name, capsys, monkeypatch):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("no network, not cached")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    assert main(["plan", name]) == 2
    said = capsys.readouterr().err
    assert "Sizes that are known by name, without network: 1.5b, 3b, 7b" in said


@pytest.mark.parametrize("kwargs", [None, {"every_n_layers": 1, "offload": True}, {"offload": True}])
def test_a_run_puts_inputs_of_layers_where_the_plan_or_the_settings_say(kwargs):
    fields = {
        "max_prompt_length": 512,
        "max_completion_length": 4096,
        "gradient_checkpointing_kwargs": kwargs,
    }
    plan = plan_command("32b", [], fields, 32, Console(quiet=True))
    config = load_config([], SHORT | fields)
    policy.take_plan(config, plan.work)
    assert config.gradient_checkpointing_kwargs == {"every_n_layers": 1, "offload": True}
    large = plan_command("32b", [], fields, 80, Console(quiet=True))
    assert large.work.offload == bool(kwargs)
    assert not fits(plan_command("32b", [], fields, 32, Console(quiet=True), adapters=1)) or kwargs, (
        "a server"
    )


def test_where_inputs_wait_and_which_layers_are_two_settings():
    def chosen(gpu, **kwargs):
        fields = {"max_prompt_length": 512, "max_completion_length": 4096}
        fields["gradient_checkpointing_kwargs"] = kwargs
        return plan_command("32b", [], fields, gpu, Console(quiet=True))

    free, never = chosen(80), chosen(80, offload=False)
    assert never.work == free.work and never.work.every_n_layers > 1
    assert not fits(chosen(32, offload=False)) and not chosen(32, offload=False).work.offload
    assert chosen(32, every_n_layers=1).work.checkpointing == {"every_n_layers": 1, "offload": True}
    assert chosen(80, every_n_layers=2).work.checkpointing == {"every_n_layers": 2}


@pytest.mark.parametrize(
    ("gigabytes", "processes", "asked"),
    [(64, 1, ""), (4, 1, ""), (64, 16, ""), (None, 1, ""), (4, 2, "64"), (64, 1, "4"), (None, 1, "4")],
)
def test_a_run_says_what_it_takes_of_the_cpus_memory(
    capsys, monkeypatch, tmp_path, gigabytes, processes, asked
):
    meminfo = tmp_path / "meminfo"
    if gigabytes:
        meminfo.write_text(f"MemFree: 1 kB\nMemAvailable: {gigabytes * 10**6} kB\n", encoding="ascii")
    for name in ("_MEMINFO", "_OWN_GROUPS"):
        monkeypatch.setattr(host_memory, name, meminfo if name == "_MEMINFO" else tmp_path / "none")
    monkeypatch.setenv("QERL_HOST_GB", asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(policy, "is_unified", lambda device: False)
    config = load_config(
        [], SHORT | {"model": "32b", "max_prompt_length": 512, "max_completion_length": 4096}
    )
    policy.plan_memory(config, usable_bytes(32), Console())
    said = " ".join(capsys.readouterr().out.split())
    known = float(asked) if asked else gigabytes and 1.024 * gigabytes
    room = known is None or known / processes > 10
    assert config.gradient_checkpointing_kwargs.get("offload", False) == room
    assert ("It fits" in said) == room
    assert ("It would fit with layer inputs offloaded to CPU memory, but" in said) != room
    assert "GB are pinned there" in said
    assert (f"there, where {known / processes:.1f} GB may be used" in said) if known else "where" not in said
    assert ("set QERL_HOST_GB to the GB that a run may take" in said) != room


def test_a_plan_takes_the_cpus_memory_that_it_is_told(capsys, monkeypatch):
    command = ["plan", "32b", "--gpu", "32", "--max_prompt_length", "512", "--max_completion_length", "4096"]
    for asked, exit_status, sentence in (
        ("", 0, "It fits"),
        ("24", 0, "are pinned there, where 24.0 GB may be used."),
        ("4", 1, "where 4.0 GB may be used; if this machine has more than it reports, set QERL_HOST_GB to"),
        ("none", 2, "QERL_HOST_GB is 'none'; set it to the CPU memory that a run may take in GB"),
    ):
        monkeypatch.setenv("QERL_HOST_GB", asked)
        assert main(command) == exit_status
        captured = capsys.readouterr()
        assert sentence in " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize("given", [None, 5000])
def test_a_run_on_a_gpu_takes_the_limit_of_the_plan(monkeypatch, tiny_tokenizer, given):
    """`qerl plan` and training agree on the default; what is set stays."""
    fields = {"max_prompt_length": 256, "max_completion_length": 2048, "tokens_per_forward": given}
    plan = plan_command("7b", [], fields, 24, Console(quiet=True))
    assert (plan.work.tokens_per_forward, plan.work.every_n_layers) == ((5000, 2) if given else (2303, 29))

    class Loading(Exception):
        pass

    def load(config, model, peft_config):
        assert config.tokens_per_forward == plan.work.tokens_per_forward
        assert config.gradient_checkpointing_kwargs == plan.work.checkpointing
        raise Loading

    config = load_config([], SHORT | fields)
    a_shape_is_its_model(monkeypatch, tiny_tokenizer)
    monkeypatch.setattr(policy, "load_policy", load)
    monkeypatch.setattr(QeRLConfig, "device", torch.device("cuda"))
    gpu = types.SimpleNamespace(total_memory=plan.capacity, is_integrated=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with pytest.raises(Loading):
        run.build(config, Console(quiet=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--gpu is not given, so 80 is assumed: 80 GiB are 85.9 GB, of which 84.5 are usable."),
        (["--gpu", "24"], "GB are 10^9 bytes; 24 GiB are 25.8 GB, of which 25.0 are usable."),
        (["--gpu", "rtx4090"], "of the RTX 4090's memory 25.2 GB (23.5 GiB) are usable."),
    ],
)
def test_the_memory_that_a_plan_is_for_is_said(words, said, capsys):
    main(["plan", "7b", "gsm8k", "nvfp4-lora", *words])
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed and ("is not given" in printed) == (not words)


def test_what_a_run_chooses_by_itself_is_not_proposed(capsys):
    same = "No other settings are proposed: a run with these takes the fastest update that fits."
    words = ["plan", "7b", "gsm8k", "nvfp4-lora", "--gpu", "80"]
    assert main(words) == 0
    assert same in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--gradient_checkpointing_kwargs", "{every_n_layers: 1}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert same not in printed
    assert "(0 instead of 28 layers recomputed): --tokens_per_forward" in printed
    assert "--gradient_checkpointing false --max_sequences" in printed and "every_n_layers" not in printed
