"""Tables of decoded tokens per second: by shape and number of sequences, and by ways to multiply."""

from statistics import fmean

from bench.captions import files, rows, source, table
from bench.result import Row

_H100 = {
    "7b": (("rollout-7b-h100", (1, 8, 64, 128, 256)), ("rollout-7b-512-h100", (512,))),
    "14b": (("rollout-14b-h100", (8, 64)),),
    "32b": (("rollout-32b-h100", (1, 8, 64, 128)),),
    "72b": (("rollout-72b-h100", (1, 8, 32)),),
}
_NF4 = "rollout-7b-nf4-h100"
_H200 = {"7b": "rollout-7b-h200", "32b": "rollout-32b-h200"}
"""The newest of each shape; all their rows are shown."""
_WAYS = "decode-128-ways-h200"


def decode() -> str:
    """Decoded tokens per second by shape and batch."""
    lines = []
    for shape, parts in _H100.items():
        where = {batch: name for name, batches in parts for batch in batches}
        newest = _H200.get(shape)
        for batch in sorted({*where, *(row["batch"] for row in _of(newest))}):
            lines.append(
                (
                    f"{shape.upper()}, {batch}",
                    _tokens_s(_of(where.get(batch), batch=batch, weights="nvfp4")),
                    _tokens_s(_of(where.get(batch), batch=batch, weights="bf16")),
                    _tokens_s(_of(_NF4, batch=batch, weights="nf4")) if shape == "7b" else None,
                    _tokens_s(_of(newest, batch=batch, weights="nvfp4")),
                    _tokens_s(_of(newest, batch=batch, weights="bf16")),
                )
            )
    h100 = [*(name for parts in _H100.values() for name, _ in parts), _NF4]
    h200 = [*_H200.values()]
    (usual,) = {_decoded(name) for name in h100}
    decoded = {shape.upper(): _decoded(name) for shape, name in _H200.items()}
    others = " and ".join(f"{tokens} ({shape})" for shape, tokens in decoded.items() if tokens != usual)
    but = f", on the H200 {others}; after fewer there are fewer keys to read" if others else ""
    return table(
        (
            "tokens per second: shape, sequences", "NVFP4", "16-bit", "NF4", "NVFP4 on an H200",
            "16-bit on an H200",
        ),
        lines,
        f"{source(*h100, *h200)} {usual} tokens were decoded{but}. Empty cells were not measured. "
        f"{files(*h100, *h200)}",
    )  # fmt: skip


def ways_of_128() -> str:
    """What clusters and three warpgroups do to the speed of steps of 128 sequences, by shape."""
    shapes = ("7b", "qwen3-8b", "14b", "32b")
    compared = (
        ("clusters, where two warpgroups multiply all weights", "pairs", "single"),
        ("three warpgroups for gate_up, beside that", "three", "pairs"),
        ("for down, too", "three-down", "three"),
        ("all weights without clusters", "none", "three"),
    )
    lines = []
    for what, first, second in compared:
        changes = [_change(shape, first, second, "decode_tok_s") for shape in shapes]
        lines.append((what, *changes))
        if second == "single":
            lines.append(("the clock by it", *(_change(shape, first, second, "sm_mhz") for shape in shapes)))
    return table(
        ("tokens per second change by", *(shape.upper().removeprefix("QWEN3-") for shape in shapes)),
        lines,
        "Steps of 128 sequences, two rounds in one process, the second in reverse order. "
        f"{source(_WAYS)} {files(_WAYS)}",
    )


def _change(shape: str, first: str, second: str, key: str) -> str | None:
    """How much more one way's mean is than another's on the first machine with both; None where none had."""
    for lease in (0, 1):
        found = [
            [row[key] for row in rows(_WAYS, shape=shape, lease=lease, way=way)] for way in (first, second)
        ]
        if all(found):
            return f"{100 * (fmean(found[0]) / fmean(found[1]) - 1):+.1f} %"
    return None


def _of(name: str | None, /, **where: object) -> list[Row]:
    return [] if name is None else rows(name, engine="qerl", **where)


def _tokens_s(found: list[Row]) -> str | None:
    return f"{found[0]['decode_tok_s']:.0f}" if found else None


def _decoded(name: str) -> int:
    """Tokens that each sequence of a result decoded."""
    (tokens,) = {row["decode_tokens"] for row in rows(name)}
    return int(tokens)
