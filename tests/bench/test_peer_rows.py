"""Peers of the benchmarks with a stand-in for vLLM: what they are asked, and the rows they give."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from bench.lengths import draw_lengths
from qerl.measure.model_config import model_config
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from tests.support.machine import Eager
from tests.support.peers import LLAMA, TINY

FAKE_VLLM = """
import json, os, time
from types import SimpleNamespace
now = [0.0]  # the only clock, so that times are exact
time.perf_counter = lambda: now[0]
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **settings): self.__dict__ = settings
class LLM:
    def __init__(self, model, **settings):
        config = json.load(open(model + "/config.json"))
        json.dump([config, settings], open(os.environ["SEEN"], "w"), default=str)
    def generate(self, prompts, params, use_tqdm, lora_request):
        assert os.path.exists(lora_request.path + "/adapter_model.safetensors")
        assert len(params) == len(prompts) and all(each.ignore_eos for each in params)
        assert all(0 <= token < 1003 for prompt in prompts for token in prompt["prompt_token_ids"])
        now[0] += 0.05 + 0.001 * max(each.max_tokens for each in params)
        outputs = [SimpleNamespace(token_ids=[0] * each.max_tokens) for each in params]
        return [SimpleNamespace(outputs=[output]) for output in outputs]
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A package `vllm` for a peer, and what the peer is asked for."""
    site = tmp_path / "site/vllm"
    (site / "lora").mkdir(parents=True)
    (site / "__init__.py").write_text(FAKE_VLLM)
    (site / "lora/__init__.py").touch()
    (site / "lora/request.py").write_text(
        "class LoRARequest:\n    def __init__(self, name, number, path): self.path = path\n"
    )
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return {
        "config": model_config(TINY, "bf16", 128).to_dict(),
        "weights": "nvfp4", "quantization": "humming", "rank": 24, "batches": [8, 1],
        "prompt_tokens": 16, "decode_tokens": 100, "group": 2, "repeats": 2, "lengths": None,
    }  # fmt: skip


@pytest.fixture
def vllm_rows(fake_vllm, tmp_path, monkeypatch):
    """``vllm_rows(**changes)``: the rows of `bench.peers.vllm_decode` in this process."""
    from bench.peers import vllm_decode

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # which the stand-in replaces
    names = ("vllm", "vllm.lora", "vllm.lora.request")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "work").mkdir()
    yield lambda **changes: list(vllm_decode.run(fake_vllm | changes, tmp_path / "work"))
    for name in names:
        del sys.modules[name]


def test_vllm_ends_each_request_at_its_own_length(vllm_rows, tmp_path):
    first, second = vllm_rows(lengths="lognormal:40")
    lengths = draw_lengths("lognormal:40", 8, 100)
    assert (first["tokens"], first["longest"]) == (sum(lengths), max(lengths))
    assert first["call_s"] == pytest.approx(0.05 + 0.001 * max(lengths))  # prefill and all
    assert first["call_tok_s"] == pytest.approx(first["tokens"] / first["call_s"])
    assert second["tokens"] == lengths[0]
    _, settings = json.loads((tmp_path / "seen.json").read_text())
    assert settings["compilation_config"] == {}


def test_vllm_decodes_what_is_asked(vllm_rows, tmp_path):
    rows = vllm_rows()
    assert [row["batch"] for row in rows] == [8, 1]
    assert rows[0]["version"] == "vllm 0.0"
    # 1 ms a token; what a call costs before its first token is not in it.
    assert rows[0]["step_ms"] == pytest.approx(1.0)
    assert rows[0]["decode_tok_s"] == pytest.approx(8000)
    config, settings = json.loads((tmp_path / "seen.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert settings["quantization"] == "humming"
    assert settings["max_lora_rank"] == 32
    assert len(settings["lora_target_modules"]) == 7
    assert settings["compilation_config"] == {"cudagraph_capture_sizes": [1, 8]}


class FakeLLM:
    """What TRL uses of vLLM: answers with random tokens and keeps the weights that it is sent."""

    def __init__(self, model, **settings):
        self.settings, self.weights, self.calls = settings, {}, []
        with safe_open(Path(model) / "model.safetensors", framework="pt") as weights:
            self.names = set(weights.keys())
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=settings["max_model_len"]),
        )
        FakeLLM.last = self

    def load_weights(self, weights):
        self.weights |= {name: tensor.clone() for name, tensor in weights}

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        assert set(self.weights) == self.names  # sent before the first token
        assert any(tensor.any() for tensor in self.weights.values())
        self.calls.append((len(prompts), all(each.ignore_eos for each in sampling_params)))
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[
                    SimpleNamespace(
                        token_ids=[7] * params.max_tokens,
                        logprobs=[{7: SimpleNamespace(rank=1, logprob=-1.0)}] * params.max_tokens,
                    )
                ],
            )
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]


def test_trl_takes_the_steps_that_are_asked(tmp_path, monkeypatch):
    from trl.generation import vllm_generation

    from bench.peers import trl_step

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.0"))
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **kw: SimpleNamespace(**kw), raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))  # TRL sets them; so they are put back
        monkeypatch.delenv(name)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_reserved", "max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, int(80e9)))
    spec = {
        "config": model_config(TINY, "bf16", 128).to_dict(),
        "rank": 8, "prompts": 2, "samples": 4, "microbatch": 4, "prompt_tokens": 6,
        "tokens": 5, "steps": 2, "lengths": "uniform",
    }  # fmt: skip
    (row,) = trl_step.run(spec, tmp_path)
    llm = FakeLLM.last
    assert llm.calls == [(8, True)] * 3
    assert llm.settings["max_num_seqs"] == 8
    assert llm.settings["max_model_len"] == 11
    assert 0.1 < llm.settings["gpu_memory_utilization"] < 0.11  # 8 GB beside a model of nothing
    assert (row["engine"], row["every_n_layers"]) == ("trl+vllm", 1)
    assert len(row["steps"]) == 3
    assert row["tokens"] == sum(draw_lengths("uniform", 8, 5)) < 2 * 4 * 5
    assert 0 < row["sync_s"] < row["rollout_s"]
    assert all(step["grad_norm"] > 0 for step in row["steps"])


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """The benchmarks' own readings of a GPU replaced; ``asked`` collects what peers are asked for."""
    from bench import rollout, step

    asked = []

    def rows(name, module, spec, minutes):
        asked.append((name, module, spec))
        row = {"batch": 8, "decode_tok_s": 800.0, "step_ms": 10.0, "spread": 0.0, "version": "vllm 0"}
        times = {"rollout_s": 1.0, "update_s": 2.0, "total_s": 3.0, "tokens_per_s": 4.0}
        memory = {"rollout_gb": 5.0, "update_gb": 6.0}
        yield {"engine": "trl+vllm", **times, **memory} if name == "trl-vllm" else row

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(rollout, "read_bandwidth", lambda: 3000.0)
    for module in (rollout, step):
        monkeypatch.setattr(module, "peer_rows", rows)
    return asked


def test_rollout_benchmark_adds_peers_to_its_rows(no_gpu_needed, tmp_path, capsys):
    from bench import rollout
    from bench.peers import vllm_decode

    out = tmp_path / "results/rollout.json"
    names = ["vllm-bf16", "vllm-nvfp4", "vllm-humming"]
    flags = ["--shape", "7b", "--layers", "2", "--batch", "8", "--decode", "16", "--weights", "--peers"]
    rollout.main([*flags, *names, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["engine"], row["weights"], row["lora_rank"]) for row in rows] == [
        ("vllm-bf16", "bf16", 32), ("vllm-nvfp4", "nvfp4", 32), ("vllm-humming", "nvfp4", 32),
    ]  # fmt: skip
    # Two layers and the head: what is read is counted for the layers that are there.
    head = 152064 * 3584 * 2
    linears = 2 * (4608 * 3584 + 3584 * 3584 + 37888 * 3584 + 3584 * 18944)
    assert rows[0]["gb_s"] * 10e6 == pytest.approx(head + linears * 2, rel=0.03)
    assert rows[0]["limit_fraction"] == rows[0]["gb_s"] / 3000
    assert {spec["quantization"] for *_, spec in no_gpu_needed} == {None, "humming"}
    assert all(spec["config"]["num_hidden_layers"] == 2 for *_, spec in no_gpu_needed)
    assert {module for _, module, _ in no_gpu_needed} == {vllm_decode.__name__}
    assert capsys.readouterr().out.count("vllm-") == 3


@pytest.mark.slow
def test_rollout_benchmark_times_calls_of_drawn_lengths(no_gpu_needed, tmp_path, monkeypatch):
    """Of the paged engine in Triton's interpreter; peers are asked for the same, with and without adapter."""
    from bench import rollout

    pace = Pace(round_steps=4, prefill_tokens=(8, 64))
    monkeypatch.setattr(
        rollout, "PagedEngine", lambda *args, **kw: PagedEngine(*args, **kw, machine=Eager(), pace=pace)
    )
    made = rollout.random_policy
    monkeypatch.setattr(rollout, "random_policy", lambda *args, **kw: made(*args, **kw, device="cpu").float())
    monkeypatch.setattr(rollout.Sizes, "by_name", lambda name: replace(LLAMA.with_layers(1), vocabulary=1001))
    out = tmp_path / "rollout.json"
    flags = "--rank 0 --batch 2 --prompt 3 --decode 4 --group 2 --repeats 1 --lengths uniform"
    rollout.main(["--weights", "bf16", *flags.split(), "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens"] == sum(draw_lengths("uniform", 2, 4))
    assert row["call_s"] > 0 and row["gpu_state"] is None

    monkeypatch.setattr(rollout, "_print", lambda row: None)
    flags = ["--weights", "--peers", "vllm-bf16", "--rank", "8", "--no_adapter", "--lengths", "lognormal:9"]
    rollout.main(flags)
    assert [(spec["rank"], spec["lengths"]) for *_, spec in no_gpu_needed] == [
        (8, "lognormal:9"), (0, "lognormal:9"),
    ]  # fmt: skip


def test_step_benchmark_adds_peers_to_its_rows(no_gpu_needed, tmp_path):
    from bench import step

    out = tmp_path / "step.json"
    flags = "--weights --prompts 16 --tokens 1024 --steps 1 --peers trl-vllm"
    step.main([*flags.split(), "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["engine"], row["weights"], row["prompts"], row["samples"]) == ("trl+vllm", "bf16", 16, 8)
    assert row["completion_tokens"] == 1024
    ((name, module, spec),) = no_gpu_needed
    assert (name, module, spec["microbatch"]) == ("trl-vllm", "bench.peers.trl_step", 8)
