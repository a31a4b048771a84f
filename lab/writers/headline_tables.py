"""The table on README's first screen: one comparison per row, all on one card.

A row compares QeRL with NVFP4 with another engine if one was measured, else with QeRL's 16-bit weights.
"""

from dataclasses import dataclass
from typing import Any

from bench.result import Row
from lab.writers.captions import card, rows, table


@dataclass(frozen=True)
class Headline:
    """A row of the table.

    Attributes:
        words: Description of the comparison.
        file: Name of the file in ``bench/results`` with both results.
        where: Values of fields that select both rows.
        key: The field to show.
        words_of: Format string of the field.
        most: Whether larger is better.
    """

    words: str
    file: str
    where: dict[str, Any]
    key: str
    words_of: str
    most: bool = False


HEADLINES = (
    Headline(
        "GRPO step, 7B, 128 samples of drawn lengths", "step-7b-lognormal-trl-h200", {}, "total_s", "{:.1f} s"
    ),
    *(
        Headline(
            f"Decoding, 7B, {batch} sequence{'s' * (batch > 1)}", "rollout-7b-vllm-h200", {"batch": batch},
            "decode_tok_s", "{:.0f} tokens/s", most=True,
        )
        for batch in (1, 64)
    ),
)  # fmt: skip
"""Rows of the table, all from results of an H200; results of several cards raise an error."""


def first_screen() -> str:
    """Return the table of the headlines."""
    lines: list[tuple[str, ...]] = []
    shown: list[Row] = []
    for headline in HEADLINES:
        found = _found(headline)
        ours, beside = (headline.words_of.format(one[headline.key]) for one in found)
        lines.append((headline.words, f"**{ours}**", f"{beside} ({_who(found[1])})"))
        shown += found
    (gpu,) = {card(one) for one in shown}
    dates = sorted({one["date"][:10] for one in shown})
    return table(
        (f"LoRA rank 32, one {gpu}", "QeRL, NVFP4", "beside it"),
        lines,
        f"Random weights, measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. "
        "[All results and conditions](docs/performance.md)",
    )


def _found(headline: Headline) -> tuple[Row, Row]:
    """Return QeRL's row with NVFP4 and the best row to compare it with."""
    every = rows(headline.file, **headline.where)
    (ours,) = (one for one in every if one["engine"] == "qerl" and one["weights"] == "nvfp4")
    others = [one for one in every if one["engine"] != "qerl"]
    others = others or [one for one in every if one["weights"] == "bf16"]
    return ours, (max if headline.most else min)(others, key=lambda one: one[headline.key])


def _who(found: Row) -> str:
    """Return a row's engine, with its versions, and weights, in words."""
    weights = {"bf16": "16-bit", "nvfp4": "NVFP4"}[found["weights"]]
    if found["engine"] == "qerl":
        return f"ours, {weights}"
    engines = {"trl": "TRL", "vllm": "vLLM"}
    versions = [one.split() for one in found["version"].split(", ")]
    named = [f"{engines[name]} {version.removesuffix('.0')}" for name, version in versions]
    return f"{' with '.join(named)}, {weights}"
