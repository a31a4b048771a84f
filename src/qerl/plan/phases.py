"""Memory of the two phases of a step on one GPU, part by part, with the rest for the KV cache.

If rows are refilled across steps (`max_staleness`), the KV cache stays allocated during the update, so both
phases hold it.
"""

from dataclasses import dataclass

from qerl.families.sizes import Sizes
from qerl.plan.parts import Activations, Adapter, Cache, Weights
from qerl.plan.work import Work
from qerl.rollout.paged.limits import CONTEXT_BYTES, cache_budget
from qerl.weight_formats import AS_PUBLISHED

SLACK = 0.12
"""Memory that torch's allocator holds unused, as a share of the layer inputs and of what one layer or the
head takes: freed blocks of one size do not serve the next. Fitted to measured steps
(bench/results/step-*.json, H100, torch 2.11), as is `KEPT_SLACK`."""

KEPT_SLACK = 0.02
"""The same as a share of layers that keep their activations; few of these blocks are freed before the
backward pass. For delta nets `SLACK` applies, because their convolution and rule free large FP32 blocks
between kept ones (bench/results/step-qwen3.6-27b-80gb-h200.json)."""


@dataclass(frozen=True)
class Line:
    """One line of the plan: bytes in each phase."""

    name: str
    rollout: int
    update: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a step takes on a GPU.

    Attributes:
        sizes, work: The planned model and step.
        capacity: Bytes of the GPU.
        lines: Parts of the memory, in the order of the table.
        sequences: Full-length sequences that decode at the same time.
    """

    sizes: Sizes
    work: Work
    capacity: int
    lines: tuple[Line, ...]
    sequences: int

    @property
    def rollout(self) -> int:
        """Bytes at the peak of the rollout."""
        return sum(line.rollout for line in self.lines)

    @property
    def update(self) -> int:
        """Bytes at the peak of the update."""
        return sum(line.update for line in self.lines)

    @property
    def on_host(self) -> int:
        """Bytes of CPU memory for the update's offloaded layer inputs."""
        return Activations(self.sizes, self.work).on_host

    @property
    def peak(self) -> int:
        """Bytes at the peak of the step."""
        return max(self.rollout, self.update)


def make_plan(sizes: Sizes, work: Work, capacity: int) -> MemoryPlan:
    """Plan both phases of a step.

    Args:
        sizes: Sizes of the model.
        work: The step.
        capacity: Bytes of the GPU; the KV cache takes at most its share of the free ones, and sequences that
            do not fit wait in the queue.
    """
    adapter, cache = Adapter.of(sizes, work), Cache(sizes, work)
    update = Activations(sizes, work)
    idle = (work.adapters - 1) * (
        adapter.bytes + adapter.gradients + work.optimizer_bytes * adapter.parameters
    )
    # A server samples from its teacher too: that engine has room for an adapter, and the KV caches of teacher
    # and policy take turns.
    sampled = work.teacher if work.serves and work.teacher_bytes else None
    weights = Weights(sizes, work.format.on_engine)
    published = work.published if work.weights == AS_PUBLISHED else None
    resident = {
        "weights": weights.bytes if published is None else published + weights.dense,
        "LoRA": adapter.bytes,
        "LoRA of the reference": adapter.bytes if work.copies_adapter else 0,
        "teacher": work.teacher_bytes + (Adapter.of(sampled, work).copies if sampled else 0),
        "LoRA for sampling": adapter.copies,
        "sequences' state": cache.state,
        "experts' inputs and results": cache.experts,
        "optimizer": work.optimizer_bytes * adapter.parameters,
        "other adapters": idle,
        # DistributedDataParallel reduces copies of the gradients, which it keeps.
        "buckets of gradients": adapter.gradients if work.processes > 1 else 0,
    }
    held = resident["weights"] + resident["LoRA"] + resident["LoRA of the reference"] + idle
    held += resident["teacher"]
    budget = cache_budget(capacity, held, adapter.parameters)
    # Within one backward pass, gradients grow while kept activations are freed.
    gradients = adapter.gradients if work.passes > 1 else max(0, adapter.gradients - update.kept)
    often_freed = update.inputs + update.working + update.whole_delta_nets
    seldom_freed = update.whole_layers - update.whole_delta_nets
    compared = "scores of the teacher" if work.serves else "divergence from the teacher"
    slack = round(SLACK * often_freed + KEPT_SLACK * seldom_freed)
    states, keys = cache.states(budget), cache.bytes(budget)
    if sampled:
        keys = max(keys, Cache(sampled, work).bytes(budget))
    lines = (
        *(Line(name, size, size) for name, size in resident.items() if size),
        Line("keys and values", keys - states, (keys - states) * work.keeps_keys),
        *([Line("states of layers", states, states * work.keeps_keys)] if states else []),
        Line("gradients", 0, gradients),
        Line("activations kept", 0, update.kept),
        Line("one layer or the head", 0, update.working),
        *([Line(compared, 0, update.divergence)] if work.teacher else []),
        Line("dequantised weight", update.workspace, update.workspace),
        Line("context and slack", CONTEXT_BYTES, CONTEXT_BYTES + slack),
    )
    return MemoryPlan(sizes, work, capacity, lines, cache.sequences(budget))
