"""What the adapters of a server take: what `qerl plan --adapters` prints below the plan."""

import dataclasses

from qerl.plan.parts import Adapter
from qerl.plan.phases import MemoryPlan
from qerl.plan.propose import fastest

COUNTS = (1, 2, 4, 8)


def adapters_in_words(plan: MemoryPlan) -> str:
    """Memory of 1 to 8 adapters on the GPU, and whether a step fits beside them with its fastest settings."""
    work, adapter = plan.work, Adapter(plan.sizes, plan.work.rank, plan.work.targets)
    each = adapter.bytes + adapter.gradients + work.optimizer_bytes * adapter.parameters
    said = []
    for count in COUNTS:
        fits = fastest(plan.sizes, dataclasses.replace(work, adapters=count), plan.capacity) is not None
        said.append(f"{count} take {count * each / 1e9:.1f} GB" + ("" if fits else ", too much"))
    return (
        f"Adapters of rank {work.rank} on the GPU, with gradients and optimizer: {'; '.join(said)}. "
        "`qerl serve --resident` sets how many stay there; others wait in the host's memory."
    )
