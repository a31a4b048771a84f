"""`qerl plan`: print whether a run fits on a GPU and how long it takes, before anything is loaded."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from qerl.errors import QeRLError
from qerl.families.sizes import SIZES
from qerl.host_memory import asked_bytes
from qerl.kernels.cards import why_no_fp8
from qerl.kernels.needs import obstacles_of_class
from qerl.plan.context import in_words, longest_completion
from qerl.plan.gpu import planned_gpu
from qerl.plan.parts import Adapter
from qerl.plan.phases import MemoryPlan
from qerl.plan.propose import fastest, fits
from qerl.plan.render import render, would_fit
from qerl.plan.settings import plan_beyond_host, plan_settings, propose_settings
from qerl.plan.time import in_words as step_in_words
from qerl.settings.library import packaged
from qerl.settings.recipe import load_config


def model_and_recipes(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the words of `qerl plan` into the model, None if no word names one, and the recipes.

    Args:
        words: Recipes as for training, and at most one model: a Hub id, a local folder, or a name of
            `qerl.families.sizes.SIZES`, which takes precedence over a recipe of the same name.
    """
    known = packaged()
    models = [word for word in words if word.lower() in SIZES]
    models += [word for word in words if word not in known and not word.endswith((".yaml", ".yml"))]
    if not models:
        return None, [*words]
    recipes = [*words]
    recipes.remove(models[0])
    return models[0], recipes


def plan_command(
    name: str | None,
    recipes: list[str],
    fields: dict[str, Any],
    gpu: Any,
    console: Console,
    processes: Any = 1,
    max_context: bool = False,
    adapters: Any = None,
    price: Any = None,
) -> MemoryPlan:
    """Plan the settings as given, print the plan, and return it.

    Args:
        name: Local folder, Hub id, or a name of `qerl.families.sizes.SIZES` such as ``32b``; None for the one
            that a recipe or a field names.
        recipes: Recipes as for training; may be empty.
        fields: Settings that override those of the recipes.
        gpu: Memory of the GPU in its vendor's GB, 80 for an H100 80GB, or its name; None if not given.
        console: Shows the plan.
        processes: GPUs of a data-parallel run, each with a whole model.
        max_context: True to also print the longest completion that fits.
        adapters: Adapters that `qerl serve` keeps on the GPU; None for a run, which has one.
        price: Price of a GPU per hour, for the cost of the run; None to leave the cost out.

    Raises:
        QeRLError: Unknown model or GPU, two models, a model family without a plan, wrong settings, full
            tuning, FP8 on a GPU that lacks it, or a `QERL_HOST_GB` that is no amount of memory.
    """
    planned = planned_gpu(gpu)
    serves, adapters = adapters is not None, 1 if adapters is None else adapters
    _check_number("processes", processes, "GPUs")
    _check_number("adapters", adapters, "adapters")
    if price is not None and (type(price) not in (int, float) or not 0 <= price < math.inf):
        raise QeRLError(f"--price is {price}; it must be the price of a GPU per hour, such as 2.5.")
    if name is not None:
        if fields.get("model", name) != name:
            raise QeRLError(
                f"The model to plan for is given twice, as {name} and with --model {fields['model']}; give "
                "it once."
            )
        fields = fields | {"model": name}
    config = load_config(recipes, fields, required=("model",))
    for field in ("kv_cache_dtype", "backward_dtype"):
        if getattr(config, field) == "fp8" and planned.card and not planned.card.fp8:
            raise QeRLError(f"{why_no_fp8(planned.card)}; remove {field}: fp8.")
    may, host = not serves and not (planned.card and planned.card.unified), asked_bytes(processes)
    engine: dict[str, Any] = {"adapters": adapters, "serves": serves}
    plan = plan_settings(config, planned.capacity, processes, may_offload=may, host_bytes=host, **engine)
    proposed = propose_settings(config, plan)
    shown = render(plan, proposed, str(config.model), planned.memory)
    console.print(shown, soft_wrap=True)  # settings are copied
    beyond = plan_beyond_host(config, plan)
    if beyond is not None:
        console.print(would_fit(beyond), markup=False, highlight=False, soft_wrap=True)
    for obstacle in obstacles_of_class(planned.card.capability) if planned.card else ():
        console.print(
            f"This plan is for the fast engine, but {obstacle.reason}. To use it there: {obstacle.remedy}.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    if not serves and fits(plan):
        said = step_in_words(plan, planned.name, config, price)
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    if adapters > 1:
        console.print(_adapters_in_words(plan), markup=False, highlight=False, soft_wrap=True)
    if max_context:
        console.print(in_words(longest_completion(plan)), markup=False, highlight=False, soft_wrap=True)
    return plan


def _check_number(flag: str, value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QeRLError(f"--{flag} is {value}; it must be a number of {what}, at least 1.")


_COUNTS = (1, 2, 4, 8)


def _adapters_in_words(plan: MemoryPlan) -> str:
    """Describe the memory of 1 to 8 adapters on the GPU, and whether a step can fit beside them."""
    work, adapter = plan.work, Adapter.of(plan.sizes, plan.work)
    each = adapter.bytes + adapter.gradients + work.optimizer_bytes * adapter.parameters
    said = []
    for count in _COUNTS:
        beside = fastest(plan.sizes, dataclasses.replace(work, adapters=count), plan.capacity) is not None
        said.append(f"{count} take {count * each / 1e9:.1f} GB" + ("" if beside else ", too much"))
    return (
        f"Adapters of rank {work.rank} on the GPU, with gradients and optimizer: {'; '.join(said)}. "
        "`qerl serve --resident` sets how many stay there; others wait in the host's memory."
    )
