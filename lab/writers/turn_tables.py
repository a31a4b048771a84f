"""Tables of `bench.turns`: savings by keeping the KV cache between turns, by number of turns."""

from bench.result import Row
from lab.writers.captions import files, rows, source, table


def kept(name: str) -> str:
    """Return the table of a result measured on the CPU.

    Args:
        name: The result file, without its suffix.
    """
    lines = []
    for with_keys in rows(name, kept=True):
        both = [with_keys, *rows(name, kept=False, turns=with_keys["turns"])]
        prefilled = [found["prefilled_tokens"] for found in both]
        seconds = [f"{found['cpu_seconds']:.1f}" for found in both]
        empty = [None] * (2 - len(both))
        lines.append((with_keys["turns"], with_keys["drawn_tokens"], *prefilled, *empty, *seconds, *empty))
    first = rows(name)[0]
    head = ("turns", "tokens drawn", "prefilled, keys kept", "without", "CPU s, keys kept", "without")
    return table(
        head,
        lines,
        f"SmolLM2-135M with {first['layers']} of its 30 layers and random weights, {first['prompts']} "
        f"prompts of {first['prompt_tokens']} tokens x {first['samples']} samples; "
        f"{first['drawn_a_turn']} tokens are drawn in a turn on average, and others write "
        f"{first['written_a_turn']} after it. One run each on {first['machine']}, which did other things as "
        f"well, {first['date'][:10]}, commit {first['commit']}. {files(name)}",
    )


def on_gpu(name: str) -> str:
    """Return the table of a result measured on a GPU.

    Args:
        name: The result file, without its suffix.
    """
    lines = []
    for with_keys in rows(name, kept=True):
        both = [with_keys, *rows(name, kept=False, turns=with_keys["turns"])]
        empty = [None] * (2 - len(both))
        prefilled, speed, seconds = (
            [*(form(found) for found in both), *empty] for form in (_prefilled, _speed, _seconds)
        )
        lines.append((with_keys["turns"], with_keys["drawn_tokens"], *prefilled, *speed, *seconds))
    first = rows(name)[0]
    head = (
        "turns", "tokens drawn", "prefilled, keys kept", "without", "tokens/s, keys kept", "without",
        "s per step, keys kept", "without",
    )  # fmt: skip
    return table(
        head,
        lines,
        f"SmolLM2-135M's shape in 16 bits, random weights, LoRA of rank {first['lora_rank']}, "
        f"{first['prompts']} prompts of {first['prompt_tokens']} tokens x {first['samples']} samples; "
        f"{first['drawn_a_turn']} tokens are drawn in a turn on average, and others write "
        f"{first['written_a_turn']} after it. {source(name)} {files(name)}",
    )


def _prefilled(found: Row) -> str:
    return f"{found['prefilled_tokens']}"


def _speed(found: Row) -> str:
    return f"{found['tok_s']:.0f}"


def _seconds(found: Row) -> str:
    return f"{found['seconds']:.2f}"
