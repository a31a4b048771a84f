"""A plan on the terminal: a table of parts, a bar for each phase, a verdict, and settings that fit."""

import json
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from qerl.host_memory import HOST
from qerl.plan.instead import changes
from qerl.plan.parts import Activations
from qerl.plan.phases import MemoryPlan
from qerl.plan.propose import MARGIN, fits, fits_host

_WIDTH = 48  # characters of a bar, so that the line fits a terminal of 80
_LESS = 0.98  # a peak of more than this share of another counts as equal: a plan is less exact
_COLORS = {
    "weights": "blue",
    "LoRA": "cyan",
    "LoRA of the reference": "cyan",
    "teacher": "blue",
    "LoRA for sampling": "cyan",
    "sequences' state": "yellow",
    "optimizer": "magenta",
    "other adapters": "cyan",
    "buckets of gradients": "magenta",
    "keys and values": "yellow",
    "states of layers": "yellow",
    "experts' inputs and results": "yellow",
    "gradients": "magenta",
    "activations kept": "green",
    "one layer or the head": "green",
    "divergence from the teacher": "green",
    "scores of the teacher": "green",
    "dequantised weight": "blue",
    "context and slack": "bright_black",
}


def render(plan: MemoryPlan, proposal: MemoryPlan | None, name: str, memory: str) -> Group:
    """Render the output of `qerl plan`: the plan of the settings as given, and settings that fit, if any.

    Args:
        plan: The plan.
        proposal: The plan of the proposed settings; None if none fit.
        name: The model's name.
        memory: Clause that says how much memory the GPU has (`qerl.plan.gpu.PlannedGpu.memory`).
    """
    bars = [_bar(plan, phase) for phase in ("rollout", "update")]
    texts = _title(plan, name, memory), verdict(plan), advice(plan, proposal)
    title, said, advised = (Text(text) for text in texts)
    return Group(title, _table(plan), *bars, said, advised)


def verdict(plan: MemoryPlan) -> str:
    """Say in a sentence or two whether the plan fits."""
    peak, capacity = _gb(plan.peak), _gb(plan.capacity)
    phase = "update" if plan.update >= plan.rollout else "rollout"
    if fits(plan):
        left = _gb(plan.capacity - plan.peak)
        said = f"It fits: {peak} of {capacity} GB at the peak, in the {phase}; {left} GB are left."
    elif plan.peak > plan.capacity:
        said = f"It does not fit: the {phase} takes {peak} GB, and the GPU has {capacity}."
    elif plan.sequences == 0:
        said = "It does not fit: beside the weights there is no room for the keys and values of one sequence."
    elif not fits_host(plan):
        said = "It does not fit: CPU memory has no room for the offloaded layer inputs."
    else:
        off = f"{MARGIN - 1:.0%}"
        said = f"It is tight: {peak} of {capacity} GB in the {phase}, and a plan may be off by {off}."
    if plan.on_host:
        said += f" Layer inputs are offloaded to CPU memory: {on_host(plan)}."
    if 0 < plan.sequences < plan.work.sequences:
        said += (
            f" {plan.sequences} of {plan.work.sequences} sequences decode side by side at full length; the "
            "others wait."
        )
    samples, tokens = plan.work.microbatch, plan.work.tokens
    if tokens < plan.work.tokens_of(samples):
        said += f" A microbatch of {samples} samples is computed in chunks of at most {tokens} tokens."
    if plan.work.lora_dropout and plan.work.why_not_fused:
        said += f" Adapted layers run through PEFT, slower and larger: {plan.work.why_not_fused}."
    return said


def on_host(plan: MemoryPlan) -> str:
    """Describe the CPU memory pinned per process for layer inputs, and how much is available if known."""
    said = f"{_gb(plan.on_host)} GB are pinned there"
    if plan.work.processes > 1:
        said += " by each process"
    if plan.work.host_bytes is None:
        return said
    said += f", where {_gb(plan.work.host_bytes)} GB may be used"
    if fits_host(plan):
        return said
    total = "a run" if plan.work.processes == 1 else "all its processes together"
    return f"{said}; if this machine has more than it reports, set {HOST} to the GB that {total} may take"


def would_fit(plan: MemoryPlan) -> str:
    """A sentence for a plan that needs more CPU memory than there is (`qerl.plan.propose.beyond_host`)."""
    return f"It would fit with layer inputs offloaded to CPU memory, but {on_host(plan)}."


def advice(plan: MemoryPlan, proposal: MemoryPlan | None) -> str:
    """Format the proposed settings as command-line fields, or the changes that would make a plan fit."""
    if proposal is None:
        found = changes(plan)
        if not found:
            return "No settings fit, and no single change of model, lengths, rank or GPU is enough."
        return f"No settings of the update fit. One of these changes suffices: {'; '.join(found)}."
    gains = _gains(plan, proposal)
    if fits(plan) and not gains:
        return "No other settings are proposed: a run with these takes the fastest update that fits."
    work = proposal.work
    fields: dict[str, Any] = {"tokens_per_forward": work.tokens_per_forward}
    if _recomputed(proposal):
        fields["gradient_checkpointing"] = "true"
        fields["gradient_checkpointing_kwargs"] = f"'{json.dumps(work.checkpointing)}'"
    else:
        fields["gradient_checkpointing"] = "false"
    fields["max_sequences"] = work.sequences
    flags = " ".join(f"--{name} {value}" for name, value in fields.items())
    than = f" ({', '.join(gains)})" if gains else ""
    return f"Proposed, with a peak of {_gb(proposal.peak)} GB{than}: {flags}"


def _gains(plan: MemoryPlan, proposal: MemoryPlan) -> list[str]:
    """Say what the proposed settings improve, without a difference of memory that is small."""
    gains = []
    if proposal.peak < _LESS * plan.peak:
        gains.append(f"{_gb(plan.peak - proposal.peak)} GB less")
    for what, of in (("layers recomputed", _recomputed), ("passes per step", lambda one: one.work.passes)):
        if of(proposal) < of(plan):
            gains.append(f"{of(proposal)} instead of {of(plan)} {what}")
    if plan.on_host and not proposal.on_host:
        gains.append("no layer inputs in CPU memory")
    return gains


def _recomputed(plan: MemoryPlan) -> int:
    return Activations(plan.sizes, plan.work).recomputed


def _title(plan: MemoryPlan, name: str, memory: str) -> str:
    work = plan.work
    where = f", on each of {work.processes} GPUs" if work.processes > 1 else ""
    return (
        f"{name}, {work.weights} weights, LoRA rank {work.rank}{where}; samples of {work.prompt_tokens} + "
        f"{work.completion_tokens} tokens, {work.sequences} side by side in the rollout, {work.microbatch} "
        f"in a microbatch of the update, {_checkpointing(plan)}. GB are 10^9 bytes; {memory}."
    )


def _checkpointing(plan: MemoryPlan) -> str:
    recomputed, layers = _recomputed(plan), plan.sizes.layers
    if not recomputed:
        return "no gradient checkpointing"
    said = f"gradient checkpointing of {'all' if recomputed == layers else recomputed} of {layers} layers"
    if plan.on_host:
        said += f", whose inputs are offloaded to {_gb(plan.on_host)} GB of CPU memory"
    return said


def _table(plan: MemoryPlan) -> Table:
    table = Table()
    table.add_column("GB")
    table.add_column("rollout", justify="right")
    table.add_column("update", justify="right")
    for line in plan.lines:
        table.add_row(Text(line.name, style=_COLORS[line.name]), _cell(line.rollout), _cell(line.update))
    table.add_section()
    table.add_row("together", _gb(plan.rollout), _gb(plan.update), style="bold")
    return table


def _bar(plan: MemoryPlan, phase: str) -> Text:
    """Draw the parts side by side, scaled to the GPU's memory; a red mark at the end if they exceed it."""
    bar, total, drawn = Text(f"{phase:>8} "), 0, 0
    for line in plan.lines:
        total += getattr(line, phase)
        until = min(_WIDTH, round(_WIDTH * total / plan.capacity))
        bar.append("█" * (until - drawn), style=_COLORS[line.name])
        drawn = until
    bar.append("░" * (_WIDTH - drawn), style="bright_black")
    if total > plan.capacity:
        bar.append("▶", style="red")
    bar.append(f" {_gb(total)} of {_gb(plan.capacity)} GB")
    return bar


def _cell(size: int) -> str:
    return _gb(size) if size else "-"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
