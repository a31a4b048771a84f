"""Advice if nothing fits: changes that each suffice alone.

The plan chooses how a step is computed (`qerl.plan.propose`). If no such choice fits, model, settings or GPU
have to change, and only the user can say which. So each change goes as far as it must, and changes that do
not suffice alone are left out.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator

from qerl.families.sizes import SIZES
from qerl.gpu_memory import usable_bytes
from qerl.plan.gpu import MEMORIES
from qerl.plan.phases import MemoryPlan
from qerl.plan.propose import fastest
from qerl.plan.work import Work
from qerl.weight_formats import DEFAULT_FORMAT, FORMATS

LENGTH_STEP = 256
"""Tokens between the lengths that are tried."""

LEAST_RANK = 8
"""Smallest LoRA rank that is proposed."""


def changes(plan: MemoryPlan) -> list[str]:
    """Describe changes that each alone make the plan fit, if no settings of the update do; empty if there are
    none."""
    return [*_of_settings(plan), *_of_model(plan), *_of_gpu(plan)]


def _of_settings(plan: MemoryPlan) -> Iterator[str]:
    work = plan.work
    if work.keeps_keys and _fits(plan, keeps_keys=False):
        yield "max_staleness: 0, which frees the memory of keys and values during the update"
    if work.format.element_bits > FORMATS[DEFAULT_FORMAT].element_bits and _fits(
        plan, weights=DEFAULT_FORMAT
    ):
        yield f"weights: {DEFAULT_FORMAT} instead of {work.weights}"
    longest = (work.completion_tokens - 1) // LENGTH_STEP * LENGTH_STEP
    lengths = range(longest, 0, -LENGTH_STEP)
    shorter = bisect_left(lengths, True, key=lambda length: _fits(plan, completion_tokens=length))
    if shorter < len(lengths):
        yield f"max_completion_length {lengths[shorter]} instead of {work.completion_tokens}"
    rank = work.rank // 2
    while rank >= LEAST_RANK and not _fits(plan, rank=rank):
        rank //= 2
    if rank >= LEAST_RANK:
        yield f"lora_r {rank} instead of {work.rank}"


def _of_model(plan: MemoryPlan) -> Iterator[str]:
    smaller = [name for name, sizes in SIZES.items() if sizes.parameters < plan.sizes.parameters]
    smaller.sort(key=lambda name: SIZES[name].parameters, reverse=True)
    found = next((name for name in smaller if fastest(SIZES[name], plan.work, plan.capacity)), None)
    if found is not None:
        yield f"a model of the size of {found}"


def _of_gpu(plan: MemoryPlan) -> Iterator[str]:
    larger = [size for size in MEMORIES if usable_bytes(size) > plan.capacity]
    found = next((size for size in larger if fastest(plan.sizes, plan.work, usable_bytes(size))), None)
    if found is not None:
        yield f"a GPU of {found} GB"


def _fits(plan: MemoryPlan, **changed: object) -> bool:
    work: Work = dataclasses.replace(plan.work, **changed)  # type: ignore[arg-type]
    return fastest(plan.sizes, work, plan.capacity) is not None
