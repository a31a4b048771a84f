"""The two phases of a step on one GPU: which part is there when, and what is left for keys and values."""

from dataclasses import dataclass

from qerl.plan.sizes import Activations, Adapter, Cache, Model, Weights, Work
from qerl.rollout.paged.limits import CONTEXT_BYTES, FILTER_BYTES, cache_budget

SLACK = 0.12
"""Memory that torch's allocator holds without a use, as a share of the inputs of layers and of what one layer
or the head takes: freed blocks of one size do not serve the next. Fitted to measured steps
(bench/results/step-*.json, H100, torch 2.11), as `KEPT_SLACK` is."""

KEPT_SLACK = 0.02
"""The same as a share of layers that keep their activations; few of these blocks are freed before the
backward pass."""


@dataclass(frozen=True)
class Part:
    """A line of the plan: bytes in each phase."""

    name: str
    rollout: int
    update: int


@dataclass(frozen=True)
class Plan:
    """What a step takes on a GPU.

    Attributes:
        model, work: What was planned.
        capacity: Bytes the GPU has.
        parts: In the order of the table.
        sequences: Sequences of full length that decode side by side.
    """

    model: Model
    work: Work
    capacity: int
    parts: tuple[Part, ...]
    sequences: int

    @property
    def rollout(self) -> int:
        return sum(part.rollout for part in self.parts)

    @property
    def update(self) -> int:
        return sum(part.update for part in self.parts)

    @property
    def peak(self) -> int:
        return max(self.rollout, self.update)


def make_plan(model: Model, work: Work, capacity: int) -> Plan:
    """Both phases of a step, part by part.

    Args:
        model: Sizes.
        work: What the step does.
        capacity: Bytes of the GPU; keys and values take at most their share of what is free, and sequences
            that do not fit wait their turn.
    """
    adapter, cache = Adapter(model, work.rank, work.targets), Cache(model, work)
    update = Activations(model, work)
    # The paged engine writes MXFP4 as NVFP4.
    weights = "nvfp4" if work.weights == "mxfp4" else work.weights
    resident = {
        "weights": Weights(model, weights).bytes,
        "LoRA": adapter.bytes,
        "LoRA for sampling": adapter.copies,
        "optimizer": work.optimizer_bytes * adapter.parameters,
    }
    if work.processes > 1:  # DistributedDataParallel reduces copies of the gradients, which it keeps
        resident["buckets of gradients"] = adapter.gradients
    sorting = FILTER_BYTES if work.filtered else 0
    held = resident["weights"] + resident["LoRA"]
    budget = cache_budget(capacity, held, adapter.parameters, work.filtered)
    # Within one backward pass, gradients grow while what was kept for them goes.
    gradients = adapter.gradients if work.passes > 1 else max(0, adapter.gradients - update.kept)
    slack = round(SLACK * (update.inputs + update.working) + KEPT_SLACK * update.whole_layers)
    parts = (
        *(Part(name, size, size) for name, size in resident.items()),
        Part("keys and values", cache.bytes(budget), 0),
        Part("gradients", 0, gradients),
        Part("activations kept", 0, update.kept),
        Part("one layer or the head", 0, update.working),
        Part("dequantised weight", 0, update.workspace),
        Part("context and slack", CONTEXT_BYTES + sorting, CONTEXT_BYTES + slack),
    )
    return Plan(model, work, capacity, parts, cache.sequences(budget))
