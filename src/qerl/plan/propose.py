"""The fastest settings with which a step fits: tokens per forward pass of the update, and layers that keep
their activations.

The user chooses how many samples a step has. How they are computed changes memory and speed, but no result
(`qerl.update.chunks`), so the plan chooses it. The two settings compete for the same memory. A layer that
keeps its activations saves its second forward pass, a third of its products. Fewer tokens per pass make room
for more such layers; but every forward pass dequantises every weight again, and a group that is split has its
prompt computed in each chunk.

If no such settings fit, every layer is recomputed and its input is offloaded to CPU memory. The transfers
take about a fifth of an update's time if samples are short, and little of it if attention is most of the
work, as it is when offloading is needed.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from qerl.families.sizes import Sizes
from qerl.plan.parts import Activations
from qerl.plan.phases import MemoryPlan, make_plan
from qerl.plan.work import Work
from qerl.rollout.paged.limits import MAX_ROWS

MARGIN = 1.05
"""Factor on a plan's peak: a plan is meant to be within 5 % of what the step takes."""

ENOUGH_TOKENS = 32768
"""Tokens per forward pass beyond which it gets no faster."""

ENOUGH_SHARED = 16384
"""Tokens from which on microbatches that share a pass take in no further one: dequantising weights is then
2 % of the time, and memory that the next rollout has to take back costs more."""

FEW_TOKENS = 2048
"""Smallest number of tokens per forward pass that is tried unless memory is short."""

STEP = 256
"""Tokens between the limits that `tokens_that_fit` tries."""

DENSE_TOKENS = 360
"""Tokens whose product with a weight takes as long as dequantising the weight: 2.56 bytes per element at
2.5 TB/s against 2 operations per element and token at 700 TFLOP/s (H100, docs/dev/log.md)."""

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def fits(plan: MemoryPlan) -> bool:
    """Return True if both phases fit with the margin, offloaded layer inputs fit in CPU memory, and at least
    one full-length sequence can be decoded."""
    return plan.sequences > 0 and plan.peak * MARGIN <= plan.capacity and fits_host(plan)


def fits_host(plan: MemoryPlan) -> bool:
    """Return True if offloaded layer inputs fit in CPU memory, or if its size is unknown."""
    room = plan.work.host_bytes
    return room is None or plan.on_host * MARGIN <= room


def cost(sizes: Sizes, work: Work) -> float:
    """Return the part of an update's duration that these settings change, in forward passes over a token."""
    times = 2 + Activations(sizes, work).recomputed / sizes.layers  # forward, input gradients, recomputation
    return times * (work.computed_tokens + DENSE_TOKENS * work.passes)


def fastest(
    sizes: Sizes,
    work: Work,
    capacity: int,
    limits: Sequence[int] | None = None,
    every: Sequence[int] | None = None,
    offload: bool | None = None,
) -> Work | None:
    """Return the work with the fastest settings that fit, None if no settings do.

    Args:
        sizes: Sizes of the model.
        work: The step; its own settings of the update are ignored.
        capacity: Bytes of the GPU.
        limits: Values of `tokens_per_forward` to choose from; None for any.
        every: Values of `every_n_layers` to choose from; None for any, and for 1 with offloading.
        offload: Whether layer inputs are offloaded; None to offload only if nothing else fits and the work
            allows it.
    """
    any_number = [*(n for n in _EVERY if n < sizes.layers), sizes.layers, sizes.layers + 1]
    choices = ([False, True] if work.may_offload else [False]) if offload is None else [offload]
    for there in choices:
        tried = dataclasses.replace(work, offload=there)
        found = _fastest(sizes, tried, capacity, limits, every or ([1] if there else any_number))
        if found is not None:
            return found
    return None


def beyond_host(
    sizes: Sizes,
    work: Work,
    capacity: int,
    limits: Sequence[int] | None = None,
    every: Sequence[int] | None = None,
    offload: bool | None = None,
) -> MemoryPlan | None:
    """Return the plan that would fit if CPU memory had room for the layer inputs; None if none would.

    Takes the arguments with which :func:`fastest` found nothing.
    """
    anywhere = dataclasses.replace(work, host_bytes=None)
    found = fastest(sizes, anywhere, capacity, limits, every, offload)
    if work.host_bytes is None or found is None:
        return None
    return make_plan(sizes, dataclasses.replace(found, host_bytes=work.host_bytes), capacity)


def _fastest(
    sizes: Sizes, work: Work, capacity: int, limits: Sequence[int] | None, every: Sequence[int]
) -> Work | None:
    def settings(limits: Sequence[int]) -> Iterator[Work]:
        for limit in limits:
            for n in every:
                tried = dataclasses.replace(work, tokens_per_forward=limit, every_n_layers=n)
                if fits(make_plan(sizes, tried, capacity)):
                    yield tried

    found = list(settings(limits or _limits(work)))
    if not found and limits is None:
        least = dataclasses.replace(work, every_n_layers=every[0])
        tokens = tokens_that_fit(sizes, least, capacity)
        found = [] if tokens is None else [dataclasses.replace(least, tokens_per_forward=tokens)]
    return min(found, key=lambda tried: cost(sizes, tried), default=None)


def _limits(work: Work) -> list[int]:
    """Limits to try: tokens of several microbatches, up to `ENOUGH_TOKENS`; then of one microbatch, half of
    it, a third and so on, down to `FEW_TOKENS`."""
    samples = {-(-work.microbatch // chunks) for chunks in range(1, work.microbatch + 1)}
    limits = sorted({work.tokens_of(n) for n in samples}, reverse=True)
    enough = [limit for limit in limits if FEW_TOKENS <= limit <= ENOUGH_TOKENS]
    few = [limits[0] if limits[0] < FEW_TOKENS else limits[-1]]
    return [*_shared_limits(work), *(enough or few)]


def _shared_limits(work: Work) -> Iterator[int]:
    """Tokens of two microbatches, of three and so on; empty if they cannot share a pass."""
    for count in range(2, work.microbatches + 1):
        tokens = work.tokens_of(count * work.microbatch)
        if work.tokens_of((count - 1) * work.microbatch) >= ENOUGH_SHARED or tokens > ENOUGH_TOKENS:
            return
        if tokens >= FEW_TOKENS or count == work.microbatches:
            yield tokens


def tokens_that_fit(sizes: Sizes, work: Work, capacity: int) -> int | None:
    """Return the largest useful number of tokens per forward pass that fits, regardless of the work's own
    limit; None if one sample is too much."""
    sample, whole = work.tokens_of(1), work.tokens_of(work.microbatch)
    maximum = min(whole, max(ENOUGH_TOKENS, sample))
    limits = [sample, *range(sample - sample % STEP + STEP, maximum, STEP)]

    def exceeds(limit: int) -> bool:
        return not fits(make_plan(sizes, dataclasses.replace(work, tokens_per_forward=limit), capacity))

    if not exceeds(maximum):  # an undivided update fits sooner than one a little shorter: see `Work.passes`
        return maximum
    fitting = bisect_right(limits, False, key=exceeds)
    return limits[fitting - 1] if fitting else None


def propose(sizes: Sizes, work: Work, capacity: int, samples: int) -> MemoryPlan | None:
    """Return the plan of the fastest settings that fit a rollout of ``samples`` samples, or None."""
    found = fastest(sizes, dataclasses.replace(work, sequences=min(samples, MAX_ROWS)), capacity)
    if found is None:
        return None
    side_by_side = make_plan(sizes, found, capacity).sequences
    return make_plan(sizes, dataclasses.replace(found, sequences=side_by_side), capacity)
