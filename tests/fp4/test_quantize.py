"""`qerl quantize`: what it writes, what it leaves when it is stopped, and the memory that it takes."""

import json
import os
import resource
import shutil
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.errors import QeRLError
from qerl.fp4 import quantize as quantize_module
from qerl.fp4.checkpoint import INDEX_FILE, Checkpoint, new_checkpoint, open_checkpoint
from qerl.fp4.format import BLOCK_FORMATS, MXFP4, NVFP4, dequantize
from qerl.fp4.groups import fused_group, is_quantized
from qerl.fp4.quantize import quantize_checkpoint
from qerl.fp4.rounding import error_sums, quantize, relative_error
from tests.support.checkpoint import (
    HIDDEN,
    LAYER,
    SHAPES,
    nothing_but,
    packed_layer,
    plain_tensors,
    write_plain,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "source", plain_tensors(), shards=3)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("rounding", ["rtn", "mse"])
@pytest.mark.parametrize("format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS.keys())
def test_quantized_folder_holds_what_quantize_makes_of_each_layer(tmp_path, format, rounding, shards, capsys):
    plain = plain_tensors()
    source, target = write_plain(tmp_path / "source", plain, shards), tmp_path / "new" / "target"
    report = quantize_checkpoint(source, target, format.name, rounding)

    assert sorted(file.name for file in target.glob("*.safetensors")) == sorted(
        file.name for file in source.glob("*.safetensors")
    )
    assert (target / INDEX_FILE).exists() == (shards > 1)
    checkpoint = open_checkpoint(target)
    assert checkpoint.quantization["quant_method"] == "compressed-tensors"
    assert checkpoint.format is format
    tensors = dict(checkpoint.tensors())
    squared_error = squared_norm = 0.0
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            assert torch.equal(tensors.pop(name), weight)
            continue
        amax = max(float(plain[f"{member}.weight"].abs().max()) for member in fused_group(module))
        expected, packed = quantize(weight, format, rounding, amax), packed_layer(tensors, module, format)
        for part in ("codes", "scales", "global_scale"):
            if getattr(expected, part) is not None:
                assert torch.equal(getattr(packed, part).float(), getattr(expected, part).float())
        squared_error += (weight.double() - dequantize(expected)).square().sum().item()
        squared_norm += weight.double().square().sum().item()
    assert report.layers == 2 * len(SHAPES)
    assert report.relative_error[rounding] == pytest.approx((squared_error / squared_norm) ** 0.5, rel=1e-9)
    assert set(report.relative_error) == {rounding, "rtn"}
    assert report.bytes_before == sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert f"{report.relative_error['rtn']:.4f} (rtn)" in capsys.readouterr().out


def test_group_that_spans_shards_shares_its_global_scale(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "target")
    files = {path.name: load_file(path) for path in (tmp_path / "target").glob("*.safetensors")}
    scales = {
        name.split(".")[-2]: (shard, tensor.item())
        for shard, tensors in files.items()
        for name, tensor in tensors.items()
        if name.startswith(LAYER) and name.endswith("weight_global_scale")
    }
    assert len({scales[name][0] for name in ("q_proj", "k_proj", "v_proj")}) == 3
    assert scales["q_proj"][1] == scales["k_proj"][1] == scales["v_proj"][1]
    assert scales["gate_proj"][1] == scales["up_proj"][1]
    assert len({scales[name][1] for name in ("q_proj", "o_proj", "gate_proj", "down_proj")}) == 4


def test_config_index_and_other_files(source, tmp_path):
    (source / "pytorch_model.bin").write_text("a pickle")
    (source / "LICENSE").write_text("terms")
    for name in (".env", "config.yaml", "metrics.jsonl", "trainer_state.json", "policy.json", "rewards.py"):
        (source / name).write_text("of a run")
    target = tmp_path / "target"
    quantize_checkpoint(source, target)
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.float8_e4m3fn",
                },
            }
        },
    }
    assert config.pop("qerl_rounding") == "mse"
    assert config == json.loads((source / "config.json").read_text())
    index = json.loads((target / INDEX_FILE).read_text())
    stored = {name: path.name for path in target.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == stored
    tensors = dict(open_checkpoint(target).tensors()).values()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    copied = {"tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE"}
    assert {file.name for file in target.iterdir()} == copied | {"config.json", INDEX_FILE, *stored.values()}
    for name in copied:
        assert (target / name).read_text() == (source / name).read_text()


def test_a_matrix_outside_of_the_layers_stays_and_is_listed_as_ignored(tmp_path):
    tensors = plain_tensors() | {"model.connector.weight": torch.randn(4, HIDDEN)}
    quantize_checkpoint(write_plain(tmp_path / "source", tensors), tmp_path / "target")
    checkpoint = open_checkpoint(tmp_path / "target")
    assert checkpoint.config["quantization_config"]["ignore"] == ["lm_head", "model.connector"]
    assert "model.connector.weight" in dict(checkpoint.tensors())


def test_quantized_input_is_refused(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "once", "mxfp4")
    with pytest.raises(QeRLError, match="once is quantised already"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice")
    with pytest.raises(QeRLError, match="no four-bit format nf4"):
        quantize_checkpoint(source, tmp_path / "twice", "nf4")
    assert not nothing_but(tmp_path, "source", "once")


def test_existing_target_is_left_alone(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("data")
    with pytest.raises(QeRLError, match="exists and is not overwritten"):
        quantize_checkpoint(source, target)
    assert [file.name for file in target.iterdir()] == ["precious"]


def test_target_that_appears_meanwhile_is_left_alone(tmp_path):
    with pytest.raises(QeRLError, match="could not be written"), new_checkpoint(tmp_path / "target"):
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "precious").write_text("data")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "target",
        "target/precious",
    ]


def test_two_runs_with_one_target(source, tmp_path):
    with new_checkpoint(tmp_path / "target") as partial:
        with pytest.raises(QeRLError, match="Another run is writing"):
            quantize_checkpoint(source, tmp_path / "target")
        assert partial.is_dir()
    assert (tmp_path / "target").is_dir()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, QeRLError, MemoryError])
def test_nothing_is_left_of_an_interrupted_run(source, tmp_path, monkeypatch, error):
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 9:  # in the second of three shards
            assert list((tmp_path / ".target.partial").glob("*.safetensors"))
            raise error("now")
        return quantize(*args)

    monkeypatch.setattr(quantize_module, "quantize", interrupted)
    with pytest.raises(error):
        quantize_checkpoint(source, tmp_path / "target")
    assert not nothing_but(tmp_path, "source")


def killed_run(source: Path, target: Path, signum: int) -> int:
    """Wait status of a process that is sent a signal while it quantises, when one shard is written."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads do not survive the fork
        quantize_module.quantize = lambda *args: (time.sleep(0.05), quantize(*args))[1]
        status = 70
        try:
            quantize_checkpoint(source, target)
            status = 0
        except SystemExit as error:
            status = error.code
        finally:
            os._exit(status)
    partial = target.with_name(f".{target.name}.partial")
    deadline = time.monotonic() + 20
    while not list(partial.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child, signum)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_sigterm_leaves_nothing(source, tmp_path):
    assert killed_run(source, tmp_path / "target", signal.SIGTERM) == 128 + signal.SIGTERM
    assert not nothing_but(tmp_path, "source")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigkill_leaves_no_target_and_the_next_run_says_what_to_remove(source, tmp_path):
    assert killed_run(source, tmp_path / "target", signal.SIGKILL) == -signal.SIGKILL
    assert not (tmp_path / "target").exists()
    with pytest.raises(QeRLError, match=r"remove .*\.target\.partial"):
        quantize_checkpoint(source, tmp_path / "target")
    shutil.rmtree(tmp_path / ".target.partial")
    quantize_checkpoint(source, tmp_path / "target")


def test_disk_too_small_is_said_before_the_work(source, tmp_path, monkeypatch):
    needed = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    for name, tensor in plain_tensors().items():
        if name.endswith("_proj.weight"):
            needed += tensor.numel() * 9 // 16 - tensor.nbytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(QeRLError, match="make room"):
        quantize_checkpoint(source, tmp_path / "target")
    assert not nothing_but(tmp_path, "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    quantize_checkpoint(source, tmp_path / "target")


def test_disk_that_fills_up_leaves_nothing(source, tmp_path):
    # A limit on the size of a file fails in the same place and way as a full disk: in write(2).
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(QeRLError, match=r"could not be written .* and was removed"):
            quantize_checkpoint(source, tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not nothing_but(tmp_path, "source")


def test_memory_holds_one_shard_and_one_weight(tmp_path, monkeypatch):
    plain = plain_tensors(layers=12)
    source = write_plain(tmp_path / "source", plain, shards=12)
    largest_shard = max(file.stat().st_size for file in source.glob("*.safetensors"))
    largest_weight = max(tensor.nbytes for tensor in plain.values())
    seen: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    def track(*tensors: torch.Tensor) -> None:
        nonlocal peak
        seen.extend(weakref.ref(tensor) for tensor in tensors)
        peak = max(peak, sum(tensor.nbytes for ref in seen if (tensor := ref()) is not None))

    def tracked_read(checkpoint, shard, read=Checkpoint.read):
        for name, tensor in read(checkpoint, shard):
            track(tensor)
            yield name, tensor

    def tracked_quantize(*args):
        packed = quantize(*args)
        track(packed.codes, packed.scales, packed.global_scale)
        return packed

    monkeypatch.setattr(Checkpoint, "read", tracked_read)
    monkeypatch.setattr(quantize_module, "quantize", tracked_quantize)
    quantize_checkpoint(source, tmp_path / "target", rounding="rtn")
    assert len(seen) == 2 * len(plain) + 3 * 12 * len(SHAPES)
    assert (
        largest_weight
        < peak
        <= largest_shard + 2 * largest_weight
        < sum(t.nbytes for t in plain.values()) / 2
    )


def test_relative_error_of_the_report_is_that_of_the_format(source, tmp_path):
    report = quantize_checkpoint(source, tmp_path / "target", "nvfp4", "mse")
    assert 0.06 < report.relative_error["mse"] < report.relative_error["rtn"] < 0.11
    weight = torch.randn(64, 64)
    mxfp4, nvfp4 = (
        relative_error(error_sums(weight, quantize(weight, format, "rtn"))) for format in (MXFP4, NVFP4)
    )
    assert mxfp4 > nvfp4


@pytest.mark.parametrize(
    ("module", "quantized"),
    [
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.31.mlp.down_proj", True),
        ("layers.3.mlp.gate_proj", True),
        ("base_model.model.model.layers.0.self_attn.o_proj", True),
        ("model.layers.3.mlp.experts.7.up_proj", True),
        ("model.layers.3.mlp.gate", False),
        ("model.layers.0.input_layernorm", False),
        ("model.layers.0.self_attn.q_norm", False),
        ("model.embed_tokens", False),
        ("lm_head", False),
        ("vision_model.encoder.layers.0.self_attn.q_proj", False),
        ("visual.layers.0.q_proj", False),
        ("model.norm", False),
    ],
)
def test_which_layers_are_quantized(module, quantized):
    assert is_quantized(module) == quantized


def test_members_of_a_group_name_the_same_group():
    attention = tuple(f"{LAYER}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    assert {fused_group(member) for member in attention} == {attention}
    gate_up = (f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj")
    assert {fused_group(member) for member in gate_up} == {gate_up}
    assert fused_group(f"{LAYER}mlp.down_proj") == (f"{LAYER}mlp.down_proj",)
