"""The benchmarks' command line and random models."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench.__main__ import main
from bench.clock import of_all
from bench.result import write_result
from qerl.families.sizes import Sizes
from qerl.measure.random_model import as_if_trained, random_decoder, random_policy

QWEN2 = Sizes.uniform(128, 192, 2, 2, 1, 64, 100, qkv_bias=True)
QWEN3 = Sizes.uniform(128, 192, 2, 2, 1, 64, 100, qk_norm=True)
LLAMA = Sizes.uniform(128, 192, 2, 2, 1, 64, 100)


def test_benchmarks_say_what_they_need(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["rollout", "--shape", "7b"]) == 2
    assert "CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_random_weights_are_the_same_in_every_process(weights):
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append(random_policy(QWEN2, weights, 0, 64, device="cpu").state_dict())
        assert torch.initial_seed() == seed
    assert all(torch.equal(x, drawn[1][name]) for name, x in drawn[0].items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_turns_with_and_without_kept_keys_draw_the_same(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.turns.SMOLLM2", LLAMA)
    sizes = [
        "--rank",
        "2",
        "--prompts",
        "2",
        "--samples",
        "2",
        "--prompt",
        "9",
        "--drawn",
        "4",
        "--written",
        "3",
        "--repeats",
        "1",
    ]
    assert main(["turns", "--turns", "1", "3", *sizes, "--out", str(tmp_path / "turns.json")]) == 0
    result = json.loads((tmp_path / "turns.json").read_text())
    assert "CPU cores" in result["machine"]
    once, kept, again = result["rows"]
    assert once["prefilled_tokens"] == 18 and once["drawn_tokens"] < kept["drawn_tokens"]
    assert kept["drawn_tokens"] == again["drawn_tokens"]
    assert kept["prefilled_tokens"] < again["prefilled_tokens"]
    assert "keys computed again" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU where there is one")
def test_turns_as_requests_compute_what_is_new_where_prefixes_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.turns.SMOLLM2", LLAMA)
    sizes = ["--rank", "0", "--prompts", "2", "--prompt", "70", "--drawn", "4", "--written", "3"]
    once = ["--turns", "3", "--repeats", "1", "--out", str(tmp_path / "turns.json")]
    assert main(["turns", "--requests", *sizes, *once]) == 0
    anew, prefixes, going_on = json.loads((tmp_path / "turns.json").read_text())["rows"]
    assert [row["drawn_tokens"] for row in (anew, prefixes, going_on)] == [2 * 3 * 4] * 3
    assert anew["prefilled_tokens"] == 2 * (70 + 77 + 84)
    assert prefixes["prefilled_tokens"] == going_on["prefilled_tokens"] == 2 * (70 + 4 + 4)


def test_a_benchmark_may_treat_the_gpu_as_an_older_or_smaller_one(capsys, monkeypatch):
    given = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("bench.__main__.import_module", lambda name: SimpleNamespace(main=given.append))
    monkeypatch.setenv("QERL_ARCH", "")
    monkeypatch.setenv("QERL_MEMORY_GB", "")
    monkeypatch.setenv("QERL_HOST_GB", "")
    everywhere = ["--arch", "80", "--memory", "24", "--host", "200"]
    assert main(["rollout", "--shape", "7b", *everywhere]) == 0
    assert given == [["--shape", "7b"]]
    assert [os.environ[f"QERL_{name}"] for name in ("ARCH", "MEMORY_GB", "HOST_GB")] == ["80", "24", "200"]
    assert main(["rollout", "--arch", "7"]) == 2
    assert "QERL_ARCH is '7'; set one of 80" in capsys.readouterr().err
    assert main(["rollout", "--arch", "80", "--memory", "much"]) == 2
    assert "QERL_MEMORY_GB is 'much'" in capsys.readouterr().err
    assert main(["rollout", *everywhere, "--host", "0"]) == 2
    assert "QERL_HOST_GB is '0'; set it to the CPU memory" in capsys.readouterr().err


def test_a_result_has_the_whole_command(monkeypatch, tmp_path):
    def measure(options):
        write_result(tmp_path / "result.json", " ".join(["step", *options]), [])

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("bench.__main__.import_module", lambda name: SimpleNamespace(main=measure))
    monkeypatch.setattr("bench.result.provenance", lambda command: {"command": command})
    monkeypatch.setenv("QERL_ARCH", "")
    monkeypatch.setenv("QERL_MEMORY_GB", "")
    monkeypatch.setenv("QERL_HOST_GB", "")
    for options, asked in (
        (["--shape", "7b"], "--shape 7b"),
        (
            ["--arch", "80", "--host", "200", "--shape", "7b", "--memory", "24"],
            "--shape 7b --arch 80 --memory 24 --host 200",
        ),
    ):
        assert main(["step", *options]) == 0
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["command"] == f"python -m bench step {asked}"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["step"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("torchrun --nproc_per_node 2 -m bench step ")


def test_steps_of_several_processes_are_as_long_as_the_slowest_and_have_all_tokens():
    def seen(rollout, total, tokens, gb, loss):
        memory = {"rollout_gb": gb, "update_gb": 2 * gb, "update_allocated_gb": gb}
        times = {"rollout_s": rollout, "update_s": total - rollout, "total_s": total, "release_s": 0.0}
        return {**times, **memory, "tokens": tokens, "tokens_per_s": tokens / total, "loss": loss}

    (step,) = of_all([[seen(3.0, 8.0, 100, 5.0, 0.1)], [seen(4.0, 8.1, 80, 4.0, 0.2)]])
    assert (step["rollout_s"], step["total_s"], step["shortest_rollout_s"]) == (4.0, 8.1, 3.0)
    assert step["update_s"] == pytest.approx(4.1)
    assert (step["tokens"], step["update_gb"], step["loss"]) == (180, 10.0, 0.1)
    assert step["tokens_per_s"] == pytest.approx(180 / 8.1)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "nf4", "bf16"])
def test_a_random_policy_keeps_activations_near_one(weights):
    if weights == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    model = as_if_trained(random_policy(QWEN2, weights, 4, 64, device="cpu")).eval()
    hidden = []
    for layer in model.get_base_model().model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: hidden.append(out))
        layer.mlp.down_proj.register_forward_hook(lambda module, args, out: hidden.append(out))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(32)[None]).logits
    assert all(0.05 < out.float().std() < 10 for out in [*hidden, logits])
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("sizes, rank", [(QWEN2, 4), (QWEN3, 0), (LLAMA, 4)])
def test_a_random_decoder_has_every_part(sizes, rank):
    decoder = random_decoder(sizes, "nvfp4", rank, 64, device="cpu")
    assert (len(decoder.layers), decoder.sizes) == (2, replace(sizes, positions=decoder.sizes.positions))
    for layer in decoder.layers:
        assert (layer.mixer.qkv.bias_N is not None) == sizes.spec.mixer.qkv_bias
        assert (layer.mixer.heads.norm_N is not None) == bool(sizes.spec.mixer.qk_norm)
        assert (layer.mlp.down.lora is not None) == (rank > 0)
        assert layer.before_mixer_D.std() > 0.1
