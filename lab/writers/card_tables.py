"""Tables of GPUs: the code that runs on each and where it was tested, and the planned fits on small ones."""

from typing import Any

from bench.result import RESULTS, Row, read_rows
from lab.writers.captions import attention, files, row, rows, source, table
from lab.writers.captions import card as gpu_of
from qerl.kernels import needs
from qerl.kernels.cards import CARDS, words
from qerl.plan.context import longest_completion
from qerl.plan.gpu import planned_gpu
from qerl.plan.phases import MemoryPlan
from qerl.plan.propose import fits
from qerl.plan.settings import plan_settings
from qerl.settings.recipe import load_config

_SHOWN = " and ".join(words(one) for one in sorted(needs.RUN_ON))


def cards() -> str:
    """Return the table of the kernels' variants on each class of GPUs, and where each was run."""
    lines = [
        (
            ", ".join(name for name, _ in card.gpus),
            words(card.capability),
            f"{'bulk copies' if card.loader == 'bulk' else card.loader}, {card.math}",
            "quack-kernels" if card.quack else "dequantisation and cuBLAS",
            "yes" if card.dependent_launch else "no",
            "yes" if card.fp8 else "no",
            needs.run_on(card),
        )
        for card in CARDS.values()
    ]
    head = (
        "GPUs, among others", "compute capability", "few tokens", "many tokens", "kernels overlap",
        "FP8 keys, values, gradients", "this code was",
    )  # fmt: skip
    others = (
        "Cards on which it was only compiled run it as well, and a run says so at its start."
        if needs.RUN_AS
        else "Cards on which it was only compiled take the portable engine, unless `QERL_ARCH` names a class."
    )
    return table(head, lines, f"Tests compile the kernels without a GPU. {others}")


def runs_on() -> str:
    """Return the three-line table of rollout and training paths per kind of device."""
    since = "NVIDIA GPUs since Ampere (RTX 30 to 50, A100, L40S, B200)"
    more = "[per card](docs/install.md#what-runs-where)"
    code = f"compiled; on {_SHOWN}, the code of {' and '.join(map(words, sorted(needs.RUN_AS)))} was run"
    others = (
        (f"other {since}", f"paged engine, not measured ({code}; {more})", "fused kernels")
        if needs.RUN_AS
        else (f"other {since}", f"portable engine, slow ({more})", "not measured")
    )
    measured = "paged engine: CUDA graphs, continuous batching"
    lines = [
        ("Hopper (measured on H100 and H200)", measured, "fused kernels"),
        others,
        ("CPU", "portable engine", "for demos and tests"),
    ]
    return table(("runs on", "rollout", "training"), lines, "").rstrip() + "\n"


_BESIDE = ("rollout-7b-128-h200", "step-7b-beside-serve-h200")
_TREATED = ("rollout-7b-arch80-h200", "step-7b-arch80-h200")
_GOAL = 80
"""Percent of the speed as 9.0 that each line should keep."""


def older_path() -> str:
    """Return the table of a Hopper card's speed as compute capability 8.0, beside its usual speed."""
    decoded, stepped = zip(_BESIDE, _TREATED, strict=True)
    lines: list[tuple[str, ...]] = []
    for batch in (1, 8, 64, 128):
        native, treated = (row(name, batch=batch)["decode_tok_s"] for name in decoded)
        name = f"decode, {batch} sequence{'s' if batch > 1 else ''}, tokens/s"
        lines.append((name, f"{native:.0f}", f"{treated:.0f}", f"{100 * treated / native:.0f} %"))
    steps = [row(name) for name in stepped]
    seconds = (f"{r['total_s']:.2f} ({r['rollout_s']:.2f}, {r['update_s']:.2f})" for r in steps)
    kept = f"{100 * steps[0]['total_s'] / steps[1]['total_s']:.0f} %"
    lines.append(("step of 128 x 1024, s (rollout, update)", *seconds, kept))
    (tokens,) = {found["decode_tokens"] for name in decoded for found in rows(name)}
    return table(
        ("7B, NVFP4, LoRA rank 32", "as 9.0", "as 8.0", f"speed kept, goal {_GOAL} %"),
        lines,
        f"Decoding: {source(*decoded)} {tokens} decoded tokens. Step: {source(*stepped)} "
        f"Attention of its long rows is {' as 9.0 and '.join(map(attention, steps))} as 8.0. "
        f"{files(*_BESIDE, *_TREATED)}",
    )


def capped() -> str:
    """Return the table of steps on a large card treated as one of 24 GB."""
    found = row("step-7b-arch80-24gb-h200")
    head = (
        "7B, NVFP4, LoRA rank 32", "rollout, s", "update, s", "step, s", "peak in use, 10^9 bytes", "limit",
    )  # fmt: skip
    name = f"{found['prompts'] * found['samples']} x {found['completion_tokens']}, three steps"
    times = (f"{found[key]:.2f}" for key in ("rollout_s", "update_s", "total_s"))
    plan = _plan("7b", {}, 24, "gsm8k", "nvfp4-lora", "24gb")
    return table(
        head,
        [(name, *times, f"{found['peak_gb']:.2f}", f"{plan.capacity / 1e9:.2f}")],
        f"{gpu_of(found)} as compute capability {words((8, 0))} with 24 GB, {found['date'][:10]}, commit "
        f"{found['commit']}. In use is what the driver says, its context included. "
        f"By the plan the recipe takes {plan.peak / 1e9:.1f} of the limit with 7B and leaves "
        f"{(plan.capacity - plan.peak) / 1e9:.1f}. "
        f"{files('step-7b-arch80-24gb-h200')}",
    )


_MEMORIES = (16, 24, 32, 40, 48)
_MODELS = {
    "3b": "3B",
    "7b": "7B",
    "qwen3-8b": "Qwen3 8B",
    "14b": "14B",
    "qwen3-14b": "Qwen3 14B",
    "32b": "32B",
    "qwen3.5-4b": "Qwen3.5 4B",
    "qwen3.5-9b": "Qwen3.5 9B",
    "qwen3.6-27b": "Qwen3.6 and 3.8 27B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B",
}
_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_PROMPT = 512


def small_cards() -> str:
    """Return the table of the longest completions that fit small cards, and how many decode concurrently."""
    lines = [(name, *(_longest(model, size) for size in _MEMORIES)) for model, name in _MODELS.items()]
    caption = (
        f"NVFP4, LoRA rank 32, groups of 8 samples, prompts of {_PROMPT} tokens. Tokens of a completion "
        f"({', '.join(map(str, _LENGTHS))} were tried), and how many samples of that length decode side by "
        "side; + with inputs of layers in the CPU's memory. Planned, not measured."
    )
    return table(("model", *(f"{size} GB" for size in _MEMORIES)), lines, caption)


_LONGEST_ON = (80, 141)


def longest() -> str:
    """Return the table of the longest planned completion, with layer inputs on the GPU or in CPU memory."""
    lines = []
    for model in ("qwen3-8b", "14b", "32b"):
        cells = [_MODELS[model]]
        for size in _LONGEST_ON:
            fields = {"max_prompt_length": _PROMPT, "num_generations": 8, "per_device_train_batch_size": 8}
            fields |= {"max_completion_length": 4096, "gradient_accumulation_steps": 8}
            plan = _plan(model, fields, size)
            here, there = (longest_completion(plan, offload) for offload in (False, True))
            assert here is not None and there is not None
            cells += [f"{here.work.completion_tokens}, {here.sequences}"]
            cells += [f"{there.work.completion_tokens}, {there.sequences} ({there.on_host / 1e9:.0f} GB)"]
        lines.append(cells)
    head = ["model"]
    for size in _LONGEST_ON:
        head += [f"{size} GB", f"{size} GB, inputs of layers in the CPU's memory"]
    caption = (
        f"NVFP4, LoRA rank 32, groups of 8 samples, prompts of {_PROMPT} tokens. Tokens of a completion, and "
        "how many of that length decode side by side; the others wait. In brackets what torch pins of the "
        "CPU's memory. How many positions a model has is not looked at. All of it is planned; below is what "
        "was measured."
    )
    return table(head, lines, caption)


def context() -> str:
    """Return the table of measured steps with the longest completions, beside their plans."""
    names = sorted(path.stem for path in RESULTS.glob("context-*.json"))
    if not names:
        return "None of it was measured yet; `python -m bench context` does that.\n"
    found = [row for name in names for row in read_rows(name)]
    head = (
        "model, memory", "tokens", "inputs of layers", "GB in update (planned)", "GB in rollout (planned)",
        "s to update one sample", "ms of a decode step there, sequences",
    )  # fmt: skip
    whole = all("rollout_gb" in row for row in found)
    cut = "" if whole else "; where its cells are empty, the run ended ahead of it"
    held = "".join(
        f"{_MODELS[row['shape']]}'s update was given {row['held_gb']:.1f} GB at most. "
        for row in found
        if "held_gb" in row
    )
    caption = (
        "Measured: one sample of that length in the update, of tokens that were not drawn; in the rollout so "
        f"many sequences, prefilled to that length{cut}. Where the plan leaves memory, torch keeps more of "
        f"what it has freed. {held}{source(*names)} {files(*names)}"
    )
    return table(head, map(_context_line, found), caption)


def _context_line(row: Row) -> tuple[Any, ...]:
    drawn = "rollout_gb" in row
    return (
        f"{_MODELS[row['shape']]}, {row.get('memory_gb') or row['capacity_gb']:.0f} GB",
        row["completion_tokens"],
        f"CPU, {row['planned_host_gb']:.0f} GB of it" if row.get("offload") else "GPU",
        f"{row['update_gb']:.1f} ({row['planned_update_gb']:.1f})",
        f"{row['rollout_gb']:.1f} ({row['planned_rollout_gb']:.1f})" if drawn else None,
        f"{row['update_s']:.0f}",
        f"{row['step_ms']:.1f}, {row['sequences']}" if drawn else None,
    )


def _longest(model: str, size: int) -> str | None:
    for tokens in reversed(_LENGTHS):
        fields = {"max_prompt_length": _PROMPT, "max_completion_length": tokens, "num_generations": 8}
        fields |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}
        plan = _plan(model, fields, size)
        if fits(plan):
            return f"{tokens}, {plan.sequences}{' +' if plan.on_host else ''}"
    return None


def _plan(model: str, fields: dict[str, Any], size: int, *recipes: str) -> MemoryPlan:
    """Return the plan of `qerl plan` without its advice, which takes most of the time."""
    config = load_config([*recipes], fields | {"model": model}, required=("model",))
    return plan_settings(config, planned_gpu(size).capacity, processes=1)
