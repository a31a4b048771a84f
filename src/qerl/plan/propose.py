"""Settings with which a step fits: tokens in a forward pass of the update, and whether its activations stay.

How many samples a step has is the user's choice and stays as it is. How many of them are computed at once
changes memory and speed, but nothing that is learned (`qerl.trainer.pieces`), so it follows from the plan.
"""

import dataclasses
from bisect import bisect_right

from qerl.plan.phases import Plan, make_plan
from qerl.plan.sizes import Model, Work

MARGIN = 1.05
"""A plan is meant to be within 5 % of what a step then takes."""

MOST_SEQUENCES = 512  # that the paged engine runs side by side
ENOUGH_TOKENS = 32768  # in a forward pass; more do not make it faster
STEP = 256  # tokens between the limits that are tried


def fits(plan: Plan) -> bool:
    """Whether both phases fit with the margin, and at least one sequence of full length can be decoded."""
    return plan.sequences > 0 and plan.peak * MARGIN <= plan.capacity


def tokens_that_fit(model: Model, work: Work, capacity: int) -> int | None:
    """Tokens of a forward pass: as many as fit and make it faster, None if one sample is too much.

    Args:
        model: Sizes.
        work: What is wanted; its own limit is not looked at.
        capacity: Bytes of the GPU.
    """
    sample, whole = work.tokens_of(1), work.tokens_of(work.microbatch)
    most = min(whole, max(ENOUGH_TOKENS, sample))
    limits = [sample, *range(sample - sample % STEP + STEP, most, STEP)]

    def exceeds(limit: int) -> bool:
        return not fits(make_plan(model, dataclasses.replace(work, tokens_per_forward=limit), capacity))

    if not exceeds(most):  # an undivided update fits sooner than one a little shorter: see `Work.passes`
        return most
    fitting = bisect_right(limits, False, key=exceeds)
    return limits[fitting - 1] if fitting else None


def propose(model: Model, work: Work, capacity: int, samples: int) -> Plan | None:
    """The fastest settings that fit, for the samples of an update and of a rollout as they are.

    Layers are computed again for backward only if a group does not fit without that.

    Args:
        model: Sizes.
        work: What is wanted.
        capacity: Bytes of the GPU.
        samples: Samples of one rollout.

    Returns:
        The plan of these settings, None where nothing fits.
    """
    group = work.tokens_of(min(work.group, work.microbatch))
    for checkpointing, least in ((False, group), (True, 0)):
        sequences = min(samples, MOST_SEQUENCES)
        tried = dataclasses.replace(work, sequences=sequences, checkpointing=checkpointing)
        tokens = tokens_that_fit(model, tried, capacity)
        if tokens is not None and tokens >= min(least, ENOUGH_TOKENS):
            tried = dataclasses.replace(tried, tokens_per_forward=tokens)
            side_by_side = make_plan(model, tried, capacity).sequences
            return make_plan(model, dataclasses.replace(tried, sequences=side_by_side), capacity)
    return None
