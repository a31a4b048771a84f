"""The fastest settings with which a step fits: tokens in a forward pass of the update, and layers that keep
their activations.

The user chooses how many samples a step has. How they are computed changes memory and speed, but no result
(`qerl.update.chunks`), so the plan chooses it. The two settings compete for the same memory. A layer that
keeps its activations saves its second forward pass, a third of its products. Fewer tokens at once make room
for more such layers; but every forward pass writes every weight densely anew, and a group that is divided has
its prompt computed in each chunk.

Where no such settings fit, every layer is recomputed and its input waits in the CPU's memory. There and back
takes a fifth of an update's time or so where samples are short, and little of it where attention is most of
the work, as it is where that is needed.
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
"""A plan is meant to be within 5 % of what a step then takes."""

ENOUGH_TOKENS = 32768
"""Tokens per forward pass; more do not make it faster."""

ENOUGH_SHARED = 16384
"""Tokens of microbatches that share a pass, from which on no other joins them: weights are then written in
2 % of the time, and memory that the next rollout has to take back costs more."""

FEW_TOKENS = 2048
"""Tokens per forward pass; only memory asks for fewer."""

STEP = 256
"""Tokens between the limits that are tried below `FEW_TOKENS`."""

DENSE_TOKENS = 360
"""Tokens whose product with a weight takes as long as writing the weight densely: 2.56 bytes per element at
2.5 TB/s against 2 operations per element and token at 700 TFLOP/s (H100, docs/dev/log.md)."""

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def fits(plan: MemoryPlan) -> bool:
    """True if both phases fit with the margin, inputs of layers in the CPU's memory fit there, and at
    least one sequence of full length can be decoded."""
    return plan.sequences > 0 and plan.peak * MARGIN <= plan.capacity and fits_host(plan)


def fits_host(plan: MemoryPlan) -> bool:
    """True if inputs of layers in the CPU's memory fit there, or if its size is not known."""
    room = plan.work.host_bytes
    return room is None or plan.on_host * MARGIN <= room


def cost(sizes: Sizes, work: Work) -> float:
    """Duration of an update in forward passes over one token, as far as these settings change it."""
    times = 2 + Activations(sizes, work).recomputed / sizes.layers  # forward, again, gradients of the inputs
    return times * (work.computed_tokens + DENSE_TOKENS * work.passes)


def fastest(
    sizes: Sizes,
    work: Work,
    capacity: int,
    limits: Sequence[int] | None = None,
    every: Sequence[int] | None = None,
    offload: bool | None = None,
) -> Work | None:
    """The work with the fastest settings that fit, None if no settings do.

    Args:
        sizes: Of the model.
        work: The step; its own settings of the update are not looked at.
        capacity: Bytes of the GPU.
        limits: Values of `tokens_per_forward` to choose from.
        every: Values of `every_n_layers` to choose from. None: any, and 1 where inputs of layers wait in the
            CPU's memory.
        offload: True if they wait there. None: where nothing else fits and the work may.
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
    """The plan that would fit if the CPU's memory had room for inputs of layers; None where none would.
    Arguments as of :func:`fastest`, which found nothing."""
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
    """Tokens of several microbatches, up to enough tokens; of all samples of one, of half of them, of a third
    and so on, down to few tokens."""
    samples = {-(-work.microbatch // chunks) for chunks in range(1, work.microbatch + 1)}
    limits = sorted({work.tokens_of(n) for n in samples}, reverse=True)
    enough = [limit for limit in limits if FEW_TOKENS <= limit <= ENOUGH_TOKENS]
    few = [limits[0] if limits[0] < FEW_TOKENS else limits[-1]]
    return [*_shared_limits(work), *(enough or few)]


def _shared_limits(work: Work) -> Iterator[int]:
    """Tokens of two microbatches, of three and so on; none where they cannot share a pass."""
    for count in range(2, work.microbatches + 1):
        tokens = work.tokens_of(count * work.microbatch)
        if work.tokens_of((count - 1) * work.microbatch) >= ENOUGH_SHARED or tokens > ENOUGH_TOKENS:
            return
        if tokens >= FEW_TOKENS or count == work.microbatches:
            yield tokens


def tokens_that_fit(sizes: Sizes, work: Work, capacity: int) -> int | None:
    """The largest useful number of tokens of a forward pass that fits, whatever the work's own limit; None
    if one sample is too much."""
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
    """The plan of the fastest settings that fit a rollout of this many samples; None where nothing fits."""
    found = fastest(sizes, dataclasses.replace(work, sequences=min(samples, MAX_ROWS)), capacity)
    if found is None:
        return None
    side_by_side = make_plan(sizes, found, capacity).sequences
    return make_plan(sizes, dataclasses.replace(found, sequences=side_by_side), capacity)
