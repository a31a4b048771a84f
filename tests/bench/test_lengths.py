"""Drawn lengths of completions, and what the GPU was doing meanwhile, of the benchmarks."""

import json
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from bench.lengths import draw_lengths, random_ids
from qerl.errors import QeRLError
from qerl.measure.gauge import gauge
from qerl.measure.provenance import provenance


def test_lengths_are_the_same_for_every_engine_and_have_their_mean():
    lengths = draw_lengths("lognormal:400", 4000, 100_000)
    assert lengths == draw_lengths("lognormal:400", 4000, 100_000)
    assert statistics.fmean(lengths) == pytest.approx(400, rel=0.05)
    assert statistics.stdev(lengths) == pytest.approx(0.8 * 400, rel=0.1)
    cut = draw_lengths("lognormal:400", 4000, 1024)
    assert cut == [min(length, 1024) for length in lengths]
    uniform = draw_lengths("uniform", 4000, 100)
    assert (min(uniform), max(uniform)) == (1, 100)
    assert statistics.fmean(uniform) == pytest.approx(50.5, rel=0.05)
    assert draw_lengths("equal", 3, 7) == [7, 7, 7]


def test_lengths_of_a_file_begin_again_and_are_cut(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[3, 900, 5]")
    assert draw_lengths(f"file:{path}", 5, 100) == [3, 100, 5, 3, 100]


@pytest.mark.parametrize("content", ["[]", "[0]", "[1.5]", "[true]", "{}", "no json", None])
def test_files_without_lengths_are_refused(tmp_path, content):
    path = tmp_path / "lengths.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(QeRLError, match="lengths\\.json"):
        draw_lengths(f"file:{path}", 1, 10)


@pytest.mark.parametrize(
    "spec", ["normal:4", "lognormal", "lognormal:0", "lognormal:many", "file:", "uniform:3"]
)
def test_other_lengths_are_refused(spec):
    with pytest.raises(QeRLError, match="lognormal:MEAN"):
        draw_lengths(spec, 1, 10)


def test_no_two_prompts_of_two_calls_begin_alike():
    prompts = [tuple(ids[:8]) for call in range(3) for ids in random_ids(call, 16, 32)]
    assert len(set(prompts)) == len(prompts)


@pytest.fixture
def second_gpu(monkeypatch):
    """torch sees one GPU, which is not the first of the machine."""
    at = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xCA, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: at}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def nvidia_smi_of(monkeypatch, folder, script):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_driver_is_asked_for_the_gpu_in_use(tmp_path, monkeypatch, second_gpu):
    nvidia_smi_of(
        monkeypatch, tmp_path, 'case "$*" in *--id=00000000:CA:00.0*) ;; *) exit 6 ;; esac\n'
        'case "$*" in *driver*) echo 580.1 ;; *loop*) echo 99,7,7,7,7,7 ;; *) echo "1980, 2600" ;; esac'
    )  # fmt: skip
    said = provenance("a command")
    assert (said["driver"], said["clocks_mhz"]) == ("580.1", {"sm": 1980, "memory": 2600})
    with gauge() as state:
        assert waited_for(state)["sm_mhz"]["max"] == 7


def test_the_gauge_reads_a_busy_gpu(tmp_path, monkeypatch, second_gpu):
    nvidia_smi_of(
        monkeypatch, tmp_path,
        "echo '3, 300, 2600, 90.0, 700.00, 30'\necho '99, 1980, 2600, 690.5, 700.00, 60'\n"
        "echo '100, 1700, 2600, 700.5, 700.00, 64'\necho '[N/A], 1, 1, 1, 1, 1'\nexec sleep 60"
    )  # fmt: skip
    with gauge() as state:
        seen = waited_for(state)
        assert state.take() is None
    assert seen["sm_mhz"] == {"min": 1700, "median": 1840, "max": 1980}
    assert seen["power_w"]["max"] == 700.5
    assert json.dumps(seen)


def waited_for(state):
    deadline = time.monotonic() + 10
    while (seen := state.take()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen


def test_the_gauge_says_nothing_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with gauge() as state:
        assert state.take() is None


def test_the_gauge_says_nothing_without_nvidia_smi(monkeypatch, second_gpu):
    monkeypatch.setenv("PATH", "/nowhere")
    with gauge() as state:
        assert state.take() is None
