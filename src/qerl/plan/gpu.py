"""The GPU that a plan is for, given by its name or by the memory it is sold with."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from qerl.errors import QeRLError
from qerl.gpu_memory import UNIFIED_SHARE, usable_bytes
from qerl.kernels.cards import CARDS, Card

MEMORIES = (16, 24, 32, 40, 48, 80, 96, 141, 180)
"""GB with which GPUs are sold."""

DEFAULT = 80
"""GB of the GPU that a plan is for if none is named."""


@dataclass(frozen=True)
class PlannedGpu:
    """The GPU of a plan.

    Attributes:
        capacity: Bytes that a run may take.
        card: Class of the GPU; None if only the memory is known.
        name: Name of the GPU in that class; None if only the memory is known.
        memory: Clause that says how much memory the plan is for.
    """

    capacity: int
    card: Card | None = None
    name: str | None = None
    memory: str = ""


def planned_gpu(asked: Any) -> PlannedGpu:
    """Return the GPU that ``--gpu`` names.

    Args:
        asked: The vendor's GB, such as 24, or a name of `qerl.kernels.cards`: ``RTX 4090``, ``rtx4090`` and
            ``4090`` are the same; None for `DEFAULT`.

    Raises:
        QeRLError: ``asked`` is neither.
    """
    if asked is None:
        planned = planned_gpu(DEFAULT)
        said = f"--gpu is not given, so {DEFAULT} is assumed: {planned.memory}"
        return dataclasses.replace(planned, memory=said)
    named = {_plain(name): (gib, card, name) for card in CARDS.values() for name, gib in card.gpus}
    if _plain(str(asked)) in named:
        gib, card, name = named[_plain(str(asked))]
        capacity = round(gib * 2**30 * (UNIFIED_SHARE if card.unified else 1))
        memory = f"of the {name}'s memory {capacity / 1e9:.1f} GB ({capacity / 2**30:.1f} GiB) are usable"
        return PlannedGpu(capacity, card, name, memory)
    number = isinstance(asked, int | float) and not isinstance(asked, bool) and asked < math.inf
    if not number or usable_bytes(asked) <= 0:
        names = ", ".join(name for card in CARDS.values() for name, _ in card.gpus)
        raise QeRLError(f"--gpu is {asked}; give the GPU's memory in GB, such as 80, or a name: {names}.")
    capacity = usable_bytes(asked)
    memory = f"{asked:g} GiB are {asked * 2**30 / 1e9:.1f} GB, of which {capacity / 1e9:.1f} are usable"
    return PlannedGpu(capacity, memory=memory)


def _plain(name: str) -> str:
    return re.sub("nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())
