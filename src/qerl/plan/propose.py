"""Settings with which a step fits, found by trying them in order of speed."""

import dataclasses
from collections.abc import Iterator

from qerl.plan.phases import Plan, make_plan
from qerl.plan.sizes import Model, Work

MARGIN = 1.05
"""A plan is meant to be within 5 % of what a step then takes."""

MOST_SEQUENCES = 512  # that the paged engine runs side by side
ENOUGH_TOKENS = 32768  # in a forward pass; more do not make it faster


def fits(plan: Plan) -> bool:
    """Whether both phases fit with the margin, and at least one sequence of full length can be decoded."""
    return plan.sequences > 0 and plan.peak * MARGIN <= plan.capacity


def propose(model: Model, work: Work, capacity: int, samples: int) -> Plan | None:
    """The fastest settings that fit; the samples of an update and of a rollout stay as they are.

    Layers are computed again only if a group does not fit without that. Then the microbatch is made as large
    as it can be, in whole groups if possible, because a group's prompt is computed once for each microbatch.

    Args:
        model: Sizes.
        work: What is wanted.
        capacity: Bytes of the GPU.
        samples: Samples of one rollout.

    Returns:
        The plan of these settings, None where nothing fits.
    """
    sequences = min(samples, MOST_SEQUENCES)
    for microbatch, checkpointing in _settings(work):
        tried = dataclasses.replace(
            work,
            sequences=sequences,
            microbatch=microbatch,
            microbatches=work.microbatch * work.microbatches // microbatch,
            checkpointing=checkpointing,
        )
        plan = make_plan(model, tried, capacity)
        if fits(plan):
            fewer = dataclasses.replace(tried, sequences=plan.sequences)
            return make_plan(model, fewer, capacity)
    return None


def _settings(work: Work) -> Iterator[tuple[int, bool]]:
    """Microbatches and whether to checkpoint, fastest first."""
    update = work.microbatch * work.microbatches
    sizes = [n for n in range(update, 0, -1) if update % n == 0]
    groups = [n for n in sizes if n % work.group == 0 and _tokens(work, n) <= ENOUGH_TOKENS]
    whole = groups or [n for n in sizes if n == work.group]
    parts = [n for n in sizes if n < work.group and work.group % n == 0]
    yield from ((n, False) for n in whole)
    yield from ((n, True) for n in (*whole, *parts))


def _tokens(work: Work, microbatch: int) -> int:
    return dataclasses.replace(work, microbatch=microbatch).tokens
