"""Load balancing of an update: groups exchanged between processes by length.

Each process samples its own groups, and all processes synchronise at the end of an optimizer step: the step
takes as long as the process with the longest samples, or the most groups with a signal. So processes exchange
groups once these are scored. A process keeps its number of groups per optimizer step, and a step keeps its
samples; so the gradient is the same up to the order of its sums. The assignment depends on the lengths alone,
and a checkpoint stores rollouts as assigned.

The longest group is assigned first, each group to the process with the lowest load that has room left
(longest processing time first, Graham 1969). Given up: a loss that divides by the tokens of a microbatch
(`bnpo`, and the entropy bonus of `entropy_coef`) or compares them (`top_entropy_quantile`) depends on which
samples share a microbatch, and the exchange changes that.

Legend: R processes, G groups of one process in an optimizer step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from qerl.settings.config import QeRLConfig
from qerl.update.packed_row import Lengths, Sample


class Move(NamedTuple):
    """A group that moves to another process; processes and groups are counted from 0."""

    source: int
    group: int
    target: int
    place: int


def owners(tokens_RG: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the process [R, G] that computes each group.

    Args:
        tokens_RG: Cost of each group of each process, in tokens.
    """
    groups = [(r, g) for r, tokens in enumerate(tokens_RG) for g in range(len(tokens))]
    room = [len(tokens) for tokens in tokens_RG]
    load = [0] * len(room)
    owner = [[0] * len(tokens) for tokens in tokens_RG]
    for r, g in sorted(groups, key=lambda at: (-tokens_RG[at[0]][at[1]], at[1])):  # equal groups stay
        free = (to for to in range(len(room)) if room[to])
        to = min(free, key=lambda to: (load[to], to != r))
        room[to] -= 1
        load[to] += tokens_RG[r][g]
        owner[r][g] = to
    return owner


def moves(owner_RG: Sequence[Sequence[int]]) -> list[Move]:
    """Return the groups that change process, each with a place that another group leaves there."""
    leaving = [(r, g) for r, owner in enumerate(owner_RG) for g, to in enumerate(owner) if to != r]
    places = {r: iter([g for source, g in leaving if source == r]) for r in range(len(owner_RG))}
    return [Move(r, g, owner_RG[r][g], next(places[owner_RG[r][g]])) for r, g in leaving]


def dealt(
    samples: list[Sample], computed: Sequence[int], args: QeRLConfig, accelerator: Accelerator
) -> list[Sample]:
    """Exchange groups between processes and return this process's samples; every process must call this.

    Args:
        samples: Scored samples of this process, whole groups side by side.
        computed: Indices of the samples that the update will compute.
        args: Settings of the run.
        accelerator: Of the run.
    """
    assert args.num_generations is not None and args.steps_per_generation is not None
    size, in_step = (
        args.num_generations,
        math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
    )
    span, cut = divmod(in_step * args.per_device_train_batch_size, size)
    if cut:  # a step that splits groups is not balanced
        return samples
    lengths, rows = Lengths.of(samples), set(computed)
    groups = [range(start, start + size) for start in range(0, len(samples), size)]
    tokens = [lengths.tokens([row for row in group if row in rows]) for group in groups]
    return balanced(samples, tokens, span, size, accelerator)


def balanced(
    samples: list[Sample], tokens: Sequence[int], span: int, size: int, accelerator: Accelerator
) -> list[Sample]:
    """Exchange groups as `dealt` does, by given costs.

    Args:
        samples: Samples of this process, whole groups side by side.
        tokens: Cost of each of its groups.
        span: Number of groups guaranteed to be in one optimizer step; groups move only within such a span.
        size: Samples per group.
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
        return samples
    rank = accelerator.process_index
    leaving = [samples[m.group * size : (m.group + 1) * size] for m in moved if m.source == rank]
    sent: list[list[list[Sample]]] = gather_object([leaving])
    found = list(samples)
    for source, arrived in enumerate(sent):
        of_source = [move for move in moved if move.source == source]
        for move, group in zip(of_source, arrived, strict=True):
            if move.target == rank:
                place = slice(move.place * size, (move.place + 1) * size)
                first = samples[place.start].group
                found[place] = [replace(each, group=first + each.group - group[0].group) for each in group]
    return found
