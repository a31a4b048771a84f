"""Peers of the benchmarks: the process they run in, and the folders they load."""

import textwrap
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from bench.peers import process
from bench.peers.checkpoint import write_adapter, write_zeros
from bench.peers.process import peer_rows
from qerl.families.sizes import Sizes
from qerl.fp4.checkpoint import read_config
from qerl.fp4.format import NVFP4
from qerl.fp4.published import check_declared, declared_format
from qerl.measure.model_config import model_config
from tests.support.peers import LLAMA, TINY

pytestmark = pytest.mark.slow

QWEN3 = Sizes.uniform(
    hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_size=32, vocabulary=1003, qk_norm=True
)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """``peer(source)``: rows of a module `fake_peer` with that source; logs go to the test's folder."""
    monkeypatch.setattr(process.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("QERL_PEER_PATH", str(tmp_path / "site"))
    (tmp_path / "site").mkdir()

    def start(source, spec=None):
        head = "import sys, time, subprocess\nfrom bench.peers.process import serve\n"
        (tmp_path / "site/fake_peer.py").write_text(head + textwrap.dedent(source) + "\nserve(run)\n")
        return peer_rows("fake", "fake_peer", spec or {})

    return start


def alive(pid):
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_rows_arrive_as_they_are_measured(peer, capsys):
    rows = peer(
        """
        def run(spec, folder):
            print("noise of a library")
            yield {"double": 2 * spec["value"]}
            while not (folder / "go").exists():
                time.sleep(0.05)
            yield {"folder": str(folder)}
        """,
        {"value": 21},
    )
    assert next(rows) == {"double": 42}
    folder = next(Path(process.tempfile.gettempdir()).glob("qerl-peer-*"))
    (folder / "go").touch()
    assert next(rows) == {"folder": str(folder)}
    assert list(rows) == []
    assert not folder.exists()
    assert capsys.readouterr().out == ""


def test_missing_peer_is_said_and_left_out(peer, capsys):
    assert list(peer("import no_such_engine\ndef run(spec, folder): yield {}")) == []
    said = capsys.readouterr().out
    assert said.startswith("fake is left out: No module named 'no_such_engine'; install it")
    assert "QERL_PEER_PATH" in said
    assert said.count("\n") == 1


def test_peer_that_hangs_is_ended_and_said(peer, capsys, monkeypatch, tmp_path):
    """vLLM, whose engine is by default in one process with what asks it."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    (tmp_path / "site/hangs.py").write_text(
        "import os, time\n"
        "print('separate engine:', os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'], flush=True)\n"
        "time.sleep(600)\n"
    )
    assert list(peer_rows("fake", "hangs", {}, minutes=0.05)) == []
    said = capsys.readouterr().out
    assert said.startswith(
        "fake is left out: it gave no row for 0.05 minutes (last line: separate engine: 0)"
    )
    assert "--peer_minutes" in said


def test_failing_peer_keeps_its_rows_and_its_log(peer, capsys, tmp_path):
    rows = peer(
        """
        def run(spec, folder):
            yield {"batch": 1}
            raise ValueError("no memory for batch 2")
        """
    )
    assert list(rows) == [{"batch": 1}]
    said = capsys.readouterr().out
    assert "status 1 (ValueError: no memory for batch 2)" in said
    (log,) = tmp_path.glob("qerl-fake-*.log")
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("crash", [False, True])
def test_nothing_of_the_peer_lives_on(peer, crash):
    rows = peer(
        f"""
        def run(spec, folder):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            yield {{"pid": child.pid}}
            if not {crash}:
                time.sleep(600)
        """
    )
    pid = next(rows)["pid"]
    assert alive(pid)
    if crash:
        list(rows)  # the leader ends, its child does not
    else:
        rows.close()  # the caller is interrupted
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.mark.parametrize(
    "sizes, kind", [(TINY, "Qwen2ForCausalLM"), (LLAMA, "LlamaForCausalLM"), (QWEN3, "Qwen3ForCausalLM")]
)
def test_folders_are_what_transformers_and_peft_load(sizes, kind, tmp_path):
    model_config(sizes, "bf16", 128).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == [kind]
    assert config.dtype == torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert type(model).__name__ == kind
    write_zeros(tmp_path, model.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {n: t.shape for n, t in loaded.state_dict().items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }
    assert all(not tensor.any() for tensor in loaded.state_dict().values())

    write_adapter(tmp_path / "adapter", sizes, 8)
    adapted = PeftModel.from_pretrained(loaded, str(tmp_path / "adapter"))
    lora = {n: p for n, p in adapted.named_parameters() if "lora_" in n}
    assert len(lora) == sizes.layers * 7 * 2
    assert all(parameter.any() for parameter in lora.values())


def test_zeros_take_no_disk(tmp_path):
    write_zeros(tmp_path, {"weight": torch.empty(1 << 15, 1 << 14, device="meta")})
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 1 << 30
    assert file.stat().st_blocks * 512 < 1 << 16
    with safe_open(file, framework="pt") as weights:
        assert weights.get_slice("weight").get_shape() == [1 << 15, 1 << 14]


def test_nvfp4_config_is_what_this_package_reads(tmp_path):
    model_config(TINY, "nvfp4", 128).save_pretrained(tmp_path)
    _, declared = read_config(tmp_path)
    check_declared(declared, tmp_path)
    assert declared_format(declared, "model.layers.0.mlp.up_proj") == NVFP4.name
    assert declared["ignore"] == ["lm_head"]
