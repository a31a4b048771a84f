"""`qerl plan`: what fits on a GPU, printed before anything is loaded."""

import math
from typing import Any

from rich.console import Console

from qerl.errors import QeRLError
from qerl.gpu_memory import usable_bytes
from qerl.plan.phases import MemoryPlan
from qerl.plan.render import render
from qerl.plan.settings import plan_settings, propose_settings
from qerl.settings.recipe import load_config


def plan_command(
    name: str, recipes: list[str], fields: dict[str, Any], gpu: Any, console: Console, processes: Any = 1
) -> MemoryPlan:
    """Print what fits, and return the plan of the settings as they are.

    Args:
        name: Local folder, Hub id, or a name of `qerl.families.sizes.SIZES` such as ``32b``.
        recipes: As for training; none are needed.
        fields: Settings over those of the recipes.
        gpu: Memory of the GPU as its vendor counts, 80 for an H100 80GB.
        console: Where the plan is printed.
        processes: GPUs of a data-parallel run, each with a whole model.

    Raises:
        QeRLError: No such model, a family that is not planned, wrong settings, full tuning.
    """
    if isinstance(gpu, bool) or not isinstance(gpu, int | float) or not 0 < gpu < math.inf:
        raise QeRLError(f"--gpu is {gpu}; it must be the GPU's memory in GB, such as 80.")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise QeRLError(f"--processes is {processes}; it must be a number of GPUs, at least 1.")
    config = load_config(recipes, fields | {"model": name}, required=("model",))
    plan = plan_settings(config, usable_bytes(gpu), processes)
    console.print(render(plan, propose_settings(config, plan), name))
    return plan
