"""The longest completion with which a step fits, for `qerl plan --max_context`."""

import dataclasses
import json
from bisect import bisect_left

from qerl.plan.instead import LENGTH_STEP
from qerl.plan.phases import MemoryPlan, make_plan
from qerl.plan.propose import fastest
from qerl.plan.work import Work

LONGEST = 1 << 20
"""Longest completion tried, in tokens."""


def longest_completion(plan: MemoryPlan, offload: bool = True) -> MemoryPlan | None:
    """Return the plan of the longest completion that fits, in steps of `LENGTH_STEP` tokens, with the fastest
    settings of the update; None if no completion fits.

    Args:
        plan: Model, GPU and everything else of a step. The model's number of positions is ignored.
        offload: True if layer inputs may be offloaded to CPU memory.
    """

    def settings(length: int) -> Work | None:
        may = plan.work.may_offload and offload
        work = dataclasses.replace(plan.work, completion_tokens=length, may_offload=may)
        return fastest(plan.sizes, work, plan.capacity)

    lengths = range(LENGTH_STEP, LONGEST + 1, LENGTH_STEP)
    fitting = bisect_left(lengths, True, key=lambda length: settings(length) is None)
    work = settings(lengths[fitting - 1]) if fitting else None
    return None if work is None else make_plan(plan.sizes, work, plan.capacity)


def in_words(longest: MemoryPlan | None) -> str:
    """A sentence on the longest completion, its settings, and the model's positions."""
    if longest is None:
        return f"No completion fits, not even one of {LENGTH_STEP} tokens."
    work, positions = longest.work, longest.sizes.positions
    said = (
        f"The longest completion that fits has {work.completion_tokens} tokens after a prompt of "
        f"{work.prompt_tokens}, with {work.group} samples per prompt, of which {longest.sequences} decode at "
        f"the same time: --max_completion_length {work.completion_tokens} --tokens_per_forward {work.tokens} "
        f"--gradient_checkpointing_kwargs '{json.dumps(work.checkpointing)}'."
    )
    if longest.on_host:
        here = longest_completion(longest, offload=False)
        said += f" That takes {longest.on_host / 1e9:.0f} GB of CPU memory for offloading; without it, "
        said += f"{here.work.completion_tokens} tokens fit." if here else "none fits."
    if work.prompt_tokens + work.completion_tokens > positions:
        said += f" The model has only {positions} positions."
    return said
