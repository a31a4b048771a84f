"""Tables of `bench.turns`: savings by keeping the KV cache between turns, by number of turns."""

from collections.abc import Callable, Mapping

from bench.result import Row
from lab.writers.captions import files, rows, source, table


def kept(name: str) -> str:
    """Return the table of a result measured on the CPU.

    Args:
        name: The result file, without its suffix.
    """
    first = rows(name)[0]
    return _table(
        name,
        {"CPU s": lambda found: f"{found['cpu_seconds']:.1f}"},
        f"SmolLM2-135M with {first['layers']} of its 30 layers and random weights",
        f"One run each on {first['machine']}, which did other things as well, {first['date'][:10]}, "
        f"commit {first['commit']}.",
    )


def on_gpu(name: str) -> str:
    """Return the table of a result measured on a GPU.

    Args:
        name: The result file, without its suffix.
    """
    return _table(
        name,
        {
            "tokens/s": lambda found: f"{found['tok_s']:.0f}",
            "s per step": lambda found: f"{found['seconds']:.2f}",
        },
        f"SmolLM2-135M's shape in 16 bits, random weights, LoRA of rank {rows(name)[0]['lora_rank']}",
        source(name),
    )


def _table(name: str, columns: Mapping[str, Callable[[Row], str]], words: str, measured: str) -> str:
    """Return the table of a result, whose columns are each shown with keys kept and without.

    Args:
        name: The result file, without its suffix.
        columns: Formats of the columns after the prefilled tokens, by their words in the table's head.
        words: Model and weights, as the caption's first words.
        measured: The caption's sentence on machine, date and commit.
    """
    columns = {"prefilled": lambda found: f"{found['prefilled_tokens']}", **columns}
    lines = []
    for with_keys in rows(name, kept=True):
        both = [with_keys, *rows(name, kept=False, turns=with_keys["turns"])]
        empty = [None] * (2 - len(both))
        cells = [cell for form in columns.values() for cell in (*map(form, both), *empty)]
        lines.append((with_keys["turns"], with_keys["drawn_tokens"], *cells))
    first = rows(name)[0]
    return table(
        ("turns", "tokens drawn", *(head for one in columns for head in (f"{one}, keys kept", "without"))),
        lines,
        f"{words}, {first['prompts']} prompts of {first['prompt_tokens']} tokens x {first['samples']} "
        f"samples; {first['drawn_a_turn']} tokens are drawn in a turn on average, and others write "
        f"{first['written_a_turn']} after it. {measured} {files(name)}",
    )
