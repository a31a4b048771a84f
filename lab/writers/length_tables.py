"""Tables of steps with drawn completion lengths: measured on one GPU and on two, beside TRL with vLLM, and
simulated with rows refilled across steps."""

from bench.result import Row
from lab.writers.captions import RECOMPUTES, attention, files, recomputed, rows, source, table

_STEPS = ("step-7b-lognormal-h200", "step-7b-lognormal-trl-h200", "step-7b-two-gpus-h200")


def steps() -> str:
    """Return the table of measured steps."""
    found = [row for name in _STEPS for row in rows(name)]
    one = next(row for row in found if row["engine"] == "qerl" and row.get("processes", 1) == 1)
    head = (
        "7B",
        "samples",
        "tokens drawn",
        "layers recomputed",
        "rollout, s",
        "update, s",
        "step, s",
        "tokens/s",
        "times one GPU",
    )
    caption = (
        "Lengths are lognormal with a mean of 400 tokens before they are cut at 1024, the same ones for all. "
        "Each GPU has as many samples; of two, update is what lies behind the longer rollout. Medians of the "
        f"steps after the first. {_apart(one, found)}{RECOMPUTES} {source(*_STEPS)} {files(*_STEPS)}"
    )
    return table(head, [_line(row, one) for row in found], caption)


_REFILLED = ("tail-refilled", "tail-refilled-8k")


def refilled() -> str:
    """Return the table of decoding seconds per step and mean age of tokens, by `max_staleness`."""
    found = [row for name in _REFILLED for row in rows(name)]
    early = sorted({row["max_staleness"] for row in found})
    lines = []
    for spec, samples, most in dict.fromkeys((r["lengths"], r["samples"], r["most"]) for r in found):
        of_lengths = {
            row["max_staleness"]: row
            for row in found
            if (row["lengths"], row["samples"], row["most"]) == (spec, samples, most)
        }
        mean = spec.partition(":")[2]
        cells = [f"{of_lengths[n]['decode_s']:.1f} s, {of_lengths[n]['mean_age']:.1f}" for n in early]
        lines.append((f"{samples} samples, mean {mean} of at most {most}", *cells))
    steps_of = dict.fromkeys(row["steps_of"] for row in found)
    caption = (
        "Seconds of decoding a step of 7B, and how many optimizer steps old its tokens are on average, by "
        "`max_staleness`. Simulated: lognormal lengths, groups of 8, steps on a line through "
        f"{', '.join(f'{name}.json' for name in steps_of)}. {files(*_REFILLED)}"
    )
    return table(("", *map(str, early)), lines, caption)


def _apart(one: Row, found: list[Row]) -> str:
    """Return a sentence on different attention kernels, which the last column also compares; else empty."""
    several = [row for row in found if row.get("processes", 1) > 1]
    said = [
        f"{attention(row)} on {row.get('processes', 1)} GPU{'s' * (row in several)} (commit {row['commit']})"
        for row in (one, *several)
    ]
    if len({attention(row) for row in (one, *several)}) < 2:
        return ""
    return f"Attention of long rows is {' and '.join(said)}, so a part of the last column may be that. "


def _line(row: Row, one: Row) -> tuple[object, ...]:
    gpus = row.get("processes", 1)
    who = "TRL with vLLM, 16-bit" if row["engine"] == "trl+vllm" else f"NVFP4, {gpus} GPU{'s' * (gpus > 1)}"
    return (
        who, gpus * row["prompts"] * row["samples"], round(row["tokens"]), recomputed(row),
        f"{row['rollout_s']:.2f}", f"{row['update_s']:.2f}", f"{row['total_s']:.2f}",
        round(row["tokens_per_s"]),
        f"{row['tokens_per_s'] / one['tokens_per_s']:.2f}" if gpus > 1 else None,
    )  # fmt: skip
