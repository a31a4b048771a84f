"""Tables of models and recipes that fit each card by the plan, and of the settings of packaged recipes."""

from lab.writers.captions import table
from qerl.plan.gpu import planned_gpu
from qerl.plan.propose import fits
from qerl.plan.settings import plan_settings
from qerl.plan.time import estimate
from qerl.settings.recipe import load_config

_CHOICES = (
    ("RTX 4080", "qwen2.5-7b", "7b", "24gb"),
    ("RTX 4090", "qwen2.5-7b", "7b", "24gb"),
    ("RTX 4090", "qwen3-8b", "qwen3-8b", "24gb"),
    ("RTX 4090", "qwen3-14b", "qwen3-14b", "24gb"),
    ("RTX 5090", "qwen3-14b", "qwen3-14b", "32gb"),
    ("RTX 5090", "qwen3-30b-a3b", "qwen3-30b-a3b", "32gb"),
    ("L40S", "qwen2.5-32b", "32b", "32gb"),
    ("A100", "qwen2.5-32b", "32b", None),
    ("H100", "qwen2.5-7b", "7b", None),
    ("H100", "qwen2.5-14b", "14b", None),
    ("H100", "qwen2.5-32b", "32b", None),
    ("H200", "qwen2.5-7b", "7b", None),
    ("H200", "qwen2.5-32b", "32b", None),
)
"""Card, recipe of the model, name of its sizes known without a network, and recipe of the card."""


def choices() -> str:
    """Return the table of packaged recipes that fit a card: memory, sequences, and time if known."""
    lines = []
    for card, model, sizes, small in _CHOICES:
        words = ["gsm8k", "nvfp4-lora", *([small] if small else [])]
        config, gpu = load_config(words, {"model": sizes}, required=("model",)), planned_gpu(card)
        plan = plan_settings(config, gpu.capacity, processes=1)
        assert fits(plan) and gpu.name is not None
        found = estimate(plan, gpu.name, config)
        lines.append(
            (
                card,
                f"`{' '.join([*words[:2], model, *words[2:]])}`",
                f"{plan.work.microbatch * plan.work.microbatches} x {plan.work.completion_tokens}",
                f"{plan.peak / 1e9:.1f} of {plan.capacity / 1e9:.1f}",
                plan.sequences,
                None if found is None else f"{found.total_s:.0f}",
            )
        )
    head = (
        "card", "words of `qerl train`", "samples x tokens of a step", "GB at the peak, planned",
        "sequences side by side", "s a step, at full length",
    )  # fmt: skip
    caption = (
        "By `qerl plan`, not run with these settings. GB are 10^9 bytes. A step is that of the optimizer, "
        "with its share of the rollout; its time is carried over from measured steps, if the card has some, "
        "and is that of answers which are all as long as they may be."
    )
    return table(head, lines, caption)


_FIELDS = (
    "learning_rate", "lora_r", "num_generations", "temperature", "epsilon", "epsilon_high", "beta",
    "loss_type", "max_completion_length", "max_grad_norm",
)  # fmt: skip
_RECIPES = {
    "defaults": (),
    "`gsm8k nvfp4-lora`": ("gsm8k", "nvfp4-lora"),
    "`bigmath nvfp4-lora`": ("bigmath", "nvfp4-lora"),
    "`demo`": ("demo",),
}


def set_by_recipes() -> str:
    """Return the table of often-asked fields: their defaults and their values in some packaged recipes."""
    columns = []
    for names in _RECIPES.values():
        config = load_config([*names], {"model": "7b"} if "demo" not in names else {}, required=("model",))
        columns.append([getattr(config, field) for field in _FIELDS])
    lines = [(f"`{field}`", *map(_shown, values)) for field, *values in zip(_FIELDS, *columns, strict=True)]
    return table(
        ("field", *_RECIPES), lines, "The recipes of the tasks have the paper's settings (its Table 4)."
    )


def _shown(value: object) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
