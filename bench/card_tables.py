"""Tables of GPUs: what fits on small ones, by the memory plan."""

from rich.console import Console

from bench.captions import table
from qerl.plan.command import plan_command
from qerl.plan.propose import fits

_MEMORIES = (16, 24, 32, 40, 48)
_MODELS = {
    "3b": "3B",
    "7b": "7B",
    "qwen3-8b": "Qwen3 8B",
    "14b": "14B",
    "qwen3-14b": "Qwen3 14B",
    "32b": "32B",
}
_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_PROMPT = 512


def small_cards() -> str:
    """The longest completions that fit, and how many of them decode side by side."""
    lines = [(name, *(_longest(model, size) for size in _MEMORIES)) for model, name in _MODELS.items()]
    caption = (
        f"NVFP4, LoRA rank 32, groups of 8 samples, prompts of {_PROMPT} tokens. Tokens of a completion "
        f"({', '.join(map(str, _LENGTHS))} were tried), and how many samples of that length decode side by "
        "side. Planned, not measured."
    )
    return table(("model", *(f"{size} GB" for size in _MEMORIES)), lines, caption)


def _longest(model: str, size: int) -> str | None:
    for tokens in reversed(_LENGTHS):
        fields = {"max_prompt_length": _PROMPT, "max_completion_length": tokens, "num_generations": 8}
        fields |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}
        plan = plan_command(model, [], fields, size, Console(quiet=True))
        if fits(plan):
            return f"{tokens}, {plan.sequences}"
    return None
