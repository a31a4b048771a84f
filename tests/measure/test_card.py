"""`qerl bench card`: its parts on a CPU, the file that it writes, and the files that were sent."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

pytest.importorskip("triton", reason="Triton is not installed")

from lab.writers.captions import rows
from lab.writers.decode_tables import ON_H200
from qerl.cli import main
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.gpu_memory import usable_bytes
from qerl.kernels import needs
from qerl.kernels.cards import CARDS
from qerl.measure import card, decode
from qerl.measure.random_model import random_policy
from qerl.rollout.paged import engine as paged
from qerl.rollout.portable.engine import PortableEngine

SENT = Path(__file__).parents[2] / "bench" / "results" / "cards"
TINY = Sizes.uniform(64, 96, 1, 2, 1, 32, 1100)


@pytest.fixture
def rtx4090(monkeypatch):
    """A faked card whose parts take no time."""
    gpu = SimpleNamespace(
        total_memory=usable_bytes(24), is_integrated=False, pci_domain_id=0, pci_bus_id=0xCA, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(needs, "obstacles", lambda: [])
    monkeypatch.setattr(card, "card_of", lambda device: CARDS[8, 9])
    monkeypatch.setattr(card, "random_decoder", lambda *_: None)
    monkeypatch.setattr(card, "random_policy", lambda *_: None)
    monkeypatch.setattr(paged, "PagedEngine", lambda *_: None)
    speed = {"decode_tok_s": 100.0, "step_ms": 1.0, "spread": 0.0}
    monkeypatch.setattr(decode, "decode_speed", lambda *_: speed)
    step = {"step_s": 3.0, "rollout_s": 2.0, "update_s": 1.0, "peak_gb": 20.0}
    monkeypatch.setattr(card, "whole_step", lambda *_: step)
    monkeypatch.setattr(card, "parity", lambda *_: {"engine": 0.010, "trainer": 0.011})


@pytest.fixture
def written(rtx4090, tmp_path):
    """The file of that card."""
    assert main(["bench", "card", "--out", str(tmp_path / "card.json")]) == 0
    return json.loads((tmp_path / "card.json").read_text())


def test_a_file_says_what_was_measured_on_what(written):
    card.check(written)
    assert (written["gpu"], written["capability"], written["shape"]) == (
        "NVIDIA GeForce RTX 4090",
        "8.9",
        "14b",
    )
    assert [row.get("batch") for row in written["rows"]] == [1, 8, 64, 128, None]
    assert {"driver", "clocks_mhz", "commit", "version"} <= written.keys()


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda file: file.pop("driver"), "'driver' of a card's file is missing"),
        (lambda file: file.update(commit=3), "'commit' of a card's file is missing or of a wrong type: 3"),
        (lambda file: file["rows"].pop(), "must have the rows"),
        (lambda file: file.update(shape="999b"), "must have the rows"),
        (lambda file: file["rows"][2].update(decode_tok_s=0.0), "must be above 0"),
        (lambda file: file["parity"].update(engine=0.02), "parity check"),
    ],
)
def test_what_is_no_such_file_is_refused(written, damage, said):
    damage(written)
    with pytest.raises(QeRLError, match=said):
        card.check(written)


@pytest.mark.parametrize("shape", ["7b", "14b"])
def test_rows_are_compared_with_an_h200_where_one_was_measured(rtx4090, monkeypatch, tmp_path, capsys, shape):
    monkeypatch.setattr(card, "H200", {"7b": ("a file", dict(zip(card.ROWS, (400, 3, 2, 1), strict=True)))})
    assert main(["bench", "card", "--shape", shape, "--out", str(tmp_path / "card.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    compared = shape == "7b"
    beside = ", 0.25 of an H200 (400)" if compared else ""
    assert f"{shape}, 1 sequences: 100 tokens/s{beside} {shape}, 8 sequences" in said
    assert said.count(" of an H200 (") == compared * len(card.ROWS)
    assert said.count("known for 7b only; rows of 14b stand alone.") == (not compared)


def test_an_h200_has_the_speed_that_performance_shows():
    """Shapes whose newest file there has all rows, measured with the same settings."""
    settings = {
        "gpu": "NVIDIA H200", "arch": None, "engine": "qerl", "weights": "nvfp4", "lora_rank": card.RANK,
        "kv_cache_dtype": "auto", "prompt_tokens": card.PROMPT, "decode_tokens": card.DECODED,
        "group": card.GROUP, "lengths": None,
    }  # fmt: skip
    measured = {}
    for shape, (name, *_) in ON_H200.items():
        speeds = {row["batch"]: round(row["decode_tok_s"]) for row in rows(name, shape=shape, **settings)}
        if shape in card.SHAPES and speeds.keys() >= set(card.ROWS):
            measured[shape] = (name, {batch: speeds[batch] for batch in card.ROWS})
    assert measured == card.H200


def test_files_that_were_sent_are_whole():
    for file in sorted(SENT.glob("*.json")):
        card.check(json.loads(file.read_text(encoding="utf-8")))


def test_a_machine_without_a_gpu_is_told_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "card"]) == 2
    assert "measures a CUDA GPU and this machine has none" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("size, shape", [(8, "3b"), (16, "7b"), (24, "14b"), (48, "32b"), (141, "32b")])
def test_the_largest_shape_that_fits(size, shape):
    assert card.largest_shape(usable_bytes(size)) == shape


def test_a_card_on_which_nothing_fits():
    with pytest.raises(QeRLError, match=r"The smallest shape, 1.5b, does not fit in 1\.0 GB"):
        card.largest_shape(10**9)


@pytest.mark.slow
def test_parity_and_a_whole_step_run(monkeypatch):
    """On the CPU the portable engine stands in; it computes as the trainer does."""
    monkeypatch.setattr(card, "SMALL", TINY)
    found = card.parity(lambda model: PortableEngine(model, 0, 8), "cpu")
    assert 0 < found["engine"] < card.PARITY * found["trainer"] < 0.1
    monkeypatch.setattr(card, "PROMPT", 5)
    monkeypatch.setattr(card, "GROUP", 2)
    policy = random_policy(TINY, "nvfp4", 2, 64, device="cpu").float()
    seen = card.whole_step(
        policy, PortableEngine(policy, 0, 2), TINY, {}, 4, use_cpu=True, weights="nvfp4", lora_r=2
    )
    assert seen["step_s"] >= seen["rollout_s"] > 0 and seen["update_s"] > 0 and seen["peak_gb"] > 0


def test_a_card_that_computes_something_else_gets_no_table(written, monkeypatch, tmp_path):
    monkeypatch.setattr(card, "parity", lambda *_: {"engine": 0.020, "trainer": 0.011})
    with pytest.raises(QeRLError, match="The engine's probabilities differ from the trainer's"):
        card.measure_card(tmp_path / "none.json", Console(quiet=True))
    assert not (tmp_path / "none.json").exists()
