"""Work of an update, balanced over processes by length.

Each process samples groups of its own, and processes meet when an optimizer step has been computed: the step
takes as long as the process that drew the longest samples, or the most groups with a signal. So groups change
places between processes once they are scored. A process gets as many groups of an optimizer step as it had,
and the step has the samples that it had; so the gradient is the same but for the order of its sums. Who gets
what follows from the lengths alone, and rollouts are kept with a checkpoint as they were dealt.

Groups are dealt the longest first, each to the process with the least so far that has room left (longest
processing time first, Graham 1969). Given up: a loss that divides by the tokens of a microbatch (`bnpo`, and
the entropy bonus of `entropy_coef`) or compares them (`top_entropy_quantile`) depends on which samples are in
one, and they are others.

Legend: R processes, G groups of one process in an optimizer step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from qerl.settings.config import QeRLConfig
from qerl.trainer.batch import Batch, on_host, padded
from qerl.trainer.dynamic_sampling import replace_groups, samples_of


class Move(NamedTuple):
    """A group that changes places; processes and groups are counted from 0."""

    source: int
    group: int
    target: int
    place: int


def owners(tokens_RG: Sequence[Sequence[int]]) -> list[list[int]]:
    """The process [R, G] to compute each group.

    Args:
        tokens_RG: What each group of each process costs.
    """
    groups = [(r, g) for r, tokens in enumerate(tokens_RG) for g in range(len(tokens))]
    room = [len(tokens) for tokens in tokens_RG]
    load = [0] * len(room)
    owner = [[0] * len(tokens) for tokens in tokens_RG]
    for r, g in sorted(groups, key=lambda at: (-tokens_RG[at[0]][at[1]], at[1])):  # of equals each its own
        free = (to for to in range(len(room)) if room[to])
        to = min(free, key=lambda to: (load[to], to != r))
        room[to] -= 1
        load[to] += tokens_RG[r][g]
        owner[r][g] = to
    return owner


def moves(owner_RG: Sequence[Sequence[int]]) -> list[Move]:
    """Groups whose owner is another process, each into a place that another one leaves there."""
    leaving = [(r, g) for r, owner in enumerate(owner_RG) for g, to in enumerate(owner) if to != r]
    places = {r: iter([g for source, g in leaving if source == r]) for r in range(len(owner_RG))}
    return [Move(r, g, owner_RG[r][g], next(places[owner_RG[r][g]])) for r, g in leaving]


def dealt(batch: Batch, rows: Sequence[int], args: QeRLConfig, pad: int, accelerator: Accelerator) -> Batch:
    """The batch of this process once groups have changed places; every process must call this.

    Args:
        batch: Scored samples of this process, whole groups side by side.
        rows: Those that the update will compute.
        args: Settings of the run.
        pad: Pad token of the ids.
        accelerator: Of the run.
    """
    assert args.num_generations is not None and args.steps_per_generation is not None
    size, in_step = (
        args.num_generations,
        math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
    )
    span, cut = divmod(in_step * args.per_device_train_batch_size, size)
    if cut:  # a step that cuts groups is left as it is
        return batch
    lengths, computed = padded(on_host(batch)).lengths, set(rows)
    groups = [range(start, start + size) for start in range(0, len(lengths.own_B), size)]
    tokens = [lengths.tokens([row for row in group if row in computed]) for group in groups]
    return balanced(batch, tokens, span, size, pad, accelerator)


def balanced(
    batch: Batch, tokens: Sequence[int], span: int, size: int, pad: int, accelerator: Accelerator
) -> Batch:
    """As `dealt`, by the costs of groups.

    Args:
        batch: Scored samples of this process, whole groups side by side.
        tokens: What each of its groups costs.
        span: Groups that are surely of one optimizer step; groups change places within such a span.
        size: Samples of a group.
        pad: Pad token of the ids.
        accelerator: Of the run.
    """
    own = torch.tensor([list(tokens)], device=accelerator.device)
    every_RG = accelerator.gather(own).tolist()
    moved = [
        Move(move.source, start + move.group, move.target, start + move.place)
        for start in range(0, len(tokens), span)
        for move in moves(owners([row[start : start + span] for row in every_RG]))
    ]
    if not moved:
        return batch
    rank = accelerator.process_index
    leaving = samples_of([move.group for move in moved if move.source == rank], size)
    sent: list[Batch] = gather_object(
        [{key: (t if t.ndim == 0 else t[leaving.to(t.device)]).cpu() for key, t in batch.items()}]
    )
    for source, arrived in enumerate(sent):
        of_source = [move for move in moved if move.source == source]
        mine = [(at, move.place) for at, move in enumerate(of_source) if move.target == rank]
        if mine:
            on_device = {key: t.to(batch[key].device) for key, t in arrived.items()}
            at, places = ([pair[side] for pair in mine] for side in (0, 1))
            batch = replace_groups(batch, places, on_device, at, size, pad)
    return batch
