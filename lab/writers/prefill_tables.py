"""Table of the time of prefill passes by size, captured and launched kernel by kernel."""

from lab.writers.captions import files, rows, source, table
from qerl.rollout.paged.limits import PREFILL_TOKENS

_PASSES = "prefill-7b-h200"


def passes() -> str:
    """Return the table of milliseconds of a pass, and of those until the host has launched it, by tokens."""
    found = rows(_PASSES)
    sizes = sorted({each["tokens"] for each in found})

    def cells(captured: bool, key: str) -> list[str | None]:
        times = {each["tokens"]: f"{each[key]:.1f}" for each in found if each["captured"] == captured}
        return [times.get(tokens) for tokens in sizes]

    lines = [
        ("captured, ms", *cells(True, "ms")),
        ("launched kernel by kernel, ms", *cells(False, "ms")),
        ("of it until the host has launched it, ms", *cells(False, "queued_ms")),
    ]
    spreads = [[100 * each["spread"] for each in found if each["captured"] == way] for way in (True, False)]
    captured, launched = (f"{min(each):.0f} to {max(each):.0f} %" for each in spreads)
    *shorter, longest = PREFILL_TOKENS
    return table(
        ("7B, tokens of the pass", *map(str, sizes)),
        lines,
        f"NVFP4, LoRA rank 32, one prompt. Medians of passes that differ by {captured} where captured "
        f"and by {launched} where launched. Longer passes are never captured. A rollout has passes of "
        f"{', '.join(map(str, shorter))} and {longest} tokens. {source(_PASSES)} {files(_PASSES)}",
    )
