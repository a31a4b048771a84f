"""The benchmark of a step through the server, with the real client and a tiny model.

`make tinker` runs this too.
"""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("tinker", reason="needs the package tinker, which `make tinker` has")

from bench.__main__ import main
from bench.served import BASE, KEY, Served, serving
from qerl.families.sizes import Sizes

LLAMA = Sizes.uniform(128, 192, 2, 2, 1, 64, 100)


def test_steps_are_timed_and_their_memory_stands_beside_the_plan(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("bench.serve.Sizes", SimpleNamespace(by_name=lambda name: LLAMA))
    sizes = ["--rank", "4", "--prompts", "2", "--samples", "3", "--prompt", "9", "--tokens", "5"]
    out = tmp_path / "serve.json"
    assert main(["serve", "--adapters", "1", "3", "--steps", "2", *sizes, "--out", str(out)]) == 0
    one, three = (found := json.loads(out.read_text()))["rows"]
    assert [row["adapters"] for row in (one, three)] == [1, 3]
    for row in (one, three):
        assert len(row["steps"]) == 2 and row["tokens"] == 30
        assert row["held_tokens_per_forward"] == row["tokens_per_forward"]
        assert row["held_every_n_layers"] == 0  # a CPU keeps all activations
        for step in row["steps"]:
            assert step["grad_norm"] > 0
            assert step["total_s"] == pytest.approx(step["sample_s"] + step["update_s"])
    adapter = 4 * 4 * 2 * sum(linear.inputs + linear.outputs for linear in LLAMA.spec.linears)
    more = 2 * 4 * adapter / 1e9  # two more adapters, each with gradients and two moments
    assert three["planned_gb"] - one["planned_gb"] == pytest.approx(more)
    assert found["command"].startswith("python -m bench serve --adapters 1 3")
    assert "2 x 3 x 5, 3 adapters" in capsys.readouterr().out


def test_a_client_that_fails_is_said(monkeypatch, capsys):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("bench.serve.Sizes", SimpleNamespace(by_name=lambda name: LLAMA))
    monkeypatch.setattr("bench.serve.KEY", "tml-another")
    assert main(["serve", "--rank", "4", "--prompts", "1", "--samples", "1", "--tokens", "2"]) == 2
    assert "client of the benchmark failed" in capsys.readouterr().err


@pytest.mark.parametrize("single", [False, True])
def test_any_server_is_timed_from_outside(monkeypatch, tmp_path, capsys, single):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    out = tmp_path / "loop.json"
    sizes = ["--rank", "4", "--prompts", "2", "--samples", "3", "--prompt", "9", "--tokens", "5"]
    with serving(Served(LLAMA, "nvfp4", 4, 1, 32, 64, 1)) as server:
        what = ["--model", BASE, "--server", "ours", "--shape", "tiny", "--weights", "nvfp4"]
        words = ["--url", server.url, *what, "--vocabulary", "100", "--steps", "2", *sizes]
        assert main(["loop", *words, *["--single"] * single, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["server"], row["shape"], row["weights"], row["single"]) == ("ours", "tiny", "nvfp4", single)
    warm, *counted = row["steps"]
    assert len(counted) == 2 and row["total_s"] == pytest.approx(sum(each["total_s"] for each in counted) / 2)
    # The sampler and the update are the same weights in FP32.
    assert all(each["tokens"] == 30 and each["logprob_gap"] < 1e-4 for each in (warm, *counted))
    assert "ours: sample" in capsys.readouterr().out
