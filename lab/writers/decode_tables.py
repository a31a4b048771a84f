"""Tables of decoded tokens per second: by shape and number of sequences, and by choice of kernels."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from statistics import fmean

from bench.result import Row
from lab.writers.captions import files, rows, source, table

_H100 = {
    "7b": (("rollout-7b-h100", (1, 8, 64, 128, 256)), ("rollout-7b-512-h100", (512,))),
    "14b": (("rollout-14b-h100", (8, 64)),),
    "32b": (("rollout-32b-h100", (1, 8, 64, 128)),),
    "72b": (("rollout-72b-h100", (1, 8, 32)),),
}
_NF4 = "rollout-7b-nf4-h100"
BESIDE_VLLM = "rollout-7b-vllm-h200"
ON_H200 = {"7b": ("rollout-7b-all-h200", BESIDE_VLLM), "32b": ("rollout-32b-all-h200",)}
"""Files by shape, the newest first; a row is taken from the first file that has it."""
_WAYS = "decode-128-ways-h200"
_FEW, _FEW_PARTS = "ways-7b-few-h200", "ways-7b-few-parts-h200"
_TOGETHER = {
    "before": ("rollout-7b-unmerged-1-h200", "rollout-7b-unmerged-2-h200"),
    "after": ("rollout-7b-merged-1-h200", "rollout-7b-merged-2-h200"),
}
"""Results of alternating processes on one card, before and after the kernels for few and for many rows."""
_DECIDED = {
    "before": ("rollout-7b-before-decided-1-h200", "rollout-7b-before-decided-2-h200"),
    "after": ("rollout-7b-decided-1-h200", "rollout-7b-decided-2-h200"),
}
"""Results of alternating processes before and after the changes that `ways_tried` marks as taken."""
_MANY = {
    "ways-7b-products-h200": (
        ("quack-early", "with quack's products, LoRA's sums and 1/rms loaded early in act_mul"),
        ("packed-1x6", "own products, six stages of one 64-wide tile of K"),
        ("packed-2x3", "own products, three stages of two: taken"),
    ),
    "ways-7b-act-h200": (
        ("early-4", "act_mul loads early, four blocks of tokens in turn"),
        ("early-2", "two in turn: taken"),
        ("early-8", "eight in turn"),
    ),
    "ways-7b-norm-h200": (
        ("32x128", "residual_norm on 32 tokens rather than 16"),
        ("16x64", "on 64 columns rather than 128"),
    ),
    "ways-7b-attend-h200": (
        ("8x3", "attention with eight warps rather than four"),
        ("4x2", "with two stages rather than three"),
    ),
}
"""Ways for many rows by file, each with its difference from the first way of the file."""
_ATTEND = {name: f"ways-7b-attend-{name}-h200" for name in ("few", "apart", "halves")}
_BETWEEN = {name: f"ways-7b-between{name}-h200" for name in ("", "-few")}
_LAST = "ways-7b-last-h200"
_TRIED = (
    ("attention asks for a page ahead: taken", (_ATTEND["few"], "ahead"), (_ATTEND["apart"], "ahead")),
    ("for half a page", (_ATTEND["few"], "ahead-half")),
    ("for a page, and prompts have a launch of their own", (_ATTEND["apart"], "apart")),
    ("and splits are in 16 bits: taken from 96 on", (_ATTEND["apart"], "apart-half")),
    ("splits in 16 bits, against a page ahead: taken for 64", (_ATTEND["halves"], "half")),
    ("and prompts apart, against a page ahead", (_ATTEND["halves"], "apart-half")),
    ("act_mul walks along columns above 128 tokens", (_BETWEEN[""], "act")),
    ("and residual_norm fits one wave: taken", (_BETWEEN[""], "both"), (_BETWEEN["-few"], "now")),
    ("and warps that load add LoRA's sums: taken", (_BETWEEN[""], "adders")),
    ("act_mul walks above 64 tokens, the norms as above: taken", (_BETWEEN["-few"], "walk65")),
    ("above 32", (_BETWEEN["-few"], "walk33")),
    ("x A^T is computed in the product", (_LAST, "own")),
    ("and splits are combined by the one that ends last", (_LAST, "both")),
)
"""Words of a table's line, and its files and ways, each way against the first of its file."""

_PROMPTS = (
    ("ways-7b-apart-few-h200", "apart", "prompts apart"),
    ("ways-7b-prompts-1k-h200", "apart", "prompts apart"),
    ("ways-7b-prompts-3k-h200", "apart", "prompts apart"),
    ("ways-7b-long-prompts-h200", "splits-16", "up to 16 splits, twice those that fill the card"),
    ("ways-7b-long-prompts-h200", "apart", "prompts apart"),
    ("ways-7b-long-prompts-h200", "apart-16", "prompts apart, and the same"),
    (
        "ways-7b-prompts-8k-h200",
        "now",
        "prompts apart, up to 32 splits, against twice those that fill the card",
    ),
    ("ways-7b-longest-prompts-h200", "apart", "prompts apart"),
    ("ways-7b-longest-prompts-h200", "apart-32", "prompts apart, and the same up to 32"),
    ("ways-7b-own-prompts-h200", "together", "prompts not apart"),
    ("ways-7b-one-row-8k-h200", "splits-32", "up to 32 splits"),
    ("ways-7b-own-prompts-8k-h200", "twice", "twice the splits that fill the card"),
    ("ways-7b-one-row-32k-h200", "splits-32", "up to 32 splits"),
)
"""File, way, and words for the way."""


_USUAL, _POWER = "rollout-7b-all-h200", "rollout-7b-128-h200"  # the latter without profiles in its readings
_OWN_PROMPTS = "Llama 3 8B, prompts of 4096, each its own"
_FP8_KEYS = "the same, keys and values in FP8"
_CONFIGURATIONS = {
    "7B": _USUAL,
    "7B, rank 64": "rollout-7b-rank-64-h200",
    "7B, rank 128": "rollout-7b-rank-128-h200",
    "7B, rank 256": "rollout-7b-rank-256-h200",
    "7B, prompts of 8192": "rollout-7b-prompt-8k-h200",
    "7B, prompts of 32768": "rollout-7b-prompt-32k-h200",
    _OWN_PROMPTS: "rollout-llama3-8b-keys-h200",
    _FP8_KEYS: "rollout-llama3-8b-keys-fp8-h200",
    "32B": "rollout-32b-all-h200",
}
"""Measured ranks, prompts and KV cache dtypes, each with its file."""


def decode() -> str:
    """Return the table of decoded tokens per second by shape and batch."""
    lines = []
    for shape, parts in _H100.items():
        where = {batch: name for name, batches in parts for batch in batches}
        newest = ON_H200.get(shape, ())
        for batch in sorted({*where, *(row["batch"] for name in newest for row in _of(name))}):
            lines.append(
                (
                    f"{shape.upper()}, {batch}",
                    _tokens_s(_of(where.get(batch), batch=batch, weights="nvfp4")),
                    _tokens_s(_of(where.get(batch), batch=batch, weights="bf16")),
                    _tokens_s(_of(_NF4, batch=batch, weights="nf4")) if shape == "7b" else None,
                    _tokens_s(_first(newest, batch=batch, weights="nvfp4")),
                    _tokens_s(_first(newest, batch=batch, weights="bf16")),
                )
            )
    h100 = [*(name for parts in _H100.values() for name, _ in parts), _NF4]
    h200 = [name for names in ON_H200.values() for name in names]
    (usual,) = {_decoded(name) for name in h100}
    decoded = {shape.upper(): _decoded(names[0]) for shape, names in ON_H200.items()}
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


def beside_vllm() -> str:
    """Return the table of decoded tokens per second beside vLLM, all from one run."""
    name = BESIDE_VLLM
    found = {
        (row["engine"], row["weights"], row["batch"]): float(row["decode_tok_s"])
        for row in rows(name)
        if row["lora_rank"]
    }
    who = (("qerl", "nvfp4"), ("qerl", "bf16"), ("vllm-humming", "nvfp4"), ("vllm-bf16", "bf16"))
    lines = []
    for batch in sorted({batch for *_, batch in found}):
        ours, *others = (found[*each, batch] for each in who)
        best = max(others[1:])
        lines.append((batch, *(f"{each:.0f}" for each in (ours, *others)), f"{ours / best:.2f}"))
    (version,) = {row["version"].removesuffix(".0") for row in rows(name) if row["engine"] != "qerl"}
    vllm = version.replace("vllm", "vLLM")
    return table(
        ("7B, sequences", "NVFP4", "16-bit", f"{vllm}, NVFP4", f"{vllm}, 16-bit", "times vLLM's better"),
        lines,
        f"Tokens per second with LoRA of rank 32, {_decoded(name)} decoded behind prompts of 256, in groups "
        f"of 8. vLLM's NVFP4 product is humming's. {source(name)} {files(name)}",
    )


def configurations() -> str:
    """Return the table of decoded tokens per second by rank, prompt and KV dtype, and joules per 1000."""
    batches = sorted({row["batch"] for name in _CONFIGURATIONS.values() for row in rows(name)})
    lines: list[tuple[str | None, ...]] = []
    for what, name in _CONFIGURATIONS.items():
        found = (_tokens_s(_of(name, batch=batch)) for batch in batches)
        lines.append((what, str(_decoded(name)), *found))
        if name == _USUAL:
            joules = (_joules(_of(_POWER, batch=batch)) if batch >= 64 else None for batch in batches)
            lines.append(("joules for 1000 tokens", str(_decoded(_POWER)), *joules))
    names = [*_CONFIGURATIONS.values(), _POWER]
    return table(
        ("tokens per second: sequences", "tokens decoded", *map(str, batches)),
        lines,
        "NVFP4 with LoRA of rank 32 behind prompts of 256 in groups of 8, unless a line says otherwise. "
        "Joules are from the median of the card's power, where steps are long enough to read it. Empty cells "
        f"were not measured. {source(*names)} {files(*names)}",
    )


def ways_of_128() -> str:
    """Return the table of the effect of clusters and three warpgroups on steps of 128 sequences, by shape."""
    shapes = ("7b", "qwen3-8b", "14b", "32b")
    compared = (
        ("clusters, with two warpgroups", "pairs", "single", 1),
        ("clusters, with three for gate_up", "three", "none", 2),
        ("of these, those of gate_up alone", "three", "three-alone", 1),
        ("three warpgroups for gate_up, with clusters", "three", "pairs", 1),
        ("", "three", "pairs", 2),
        ("for down, too", "three-down", "three", 1),
        ("", "three-down", "three", 2),
        ("all of it", "three", "single", 1),
    )
    lines = []
    for what, first, second, machine in compared:
        changes = [_changes(shape, first, second, machine) for shape in shapes]
        lines.append((what, machine, *changes))
    apart = max(
        max(found) / min(found)
        for machine in (1, 2)
        for way in {row["way"] for row in rows(_WAYS, machine=machine)}
        for shape in shapes
        if (found := _values("decode_tok_s", shape, way, machine))
    )
    return table(
        ("change by", "machine", *(shape.upper().removeprefix("QWEN3-") for shape in shapes)),
        lines,
        "Tokens per second, and in brackets the clock, in steps of 128 sequences. All ways in turn in one "
        "process for a shape on each machine, twice, the second time in reverse order; the two times differ "
        f"by at most {100 * (apart - 1):.1f} %. {source(_WAYS)} {files(_WAYS)}",
    )


def ways_of_few() -> str:
    """Return the table of the effect of each change for few rows: of all, and of leaving out each one."""
    compared = (
        (_FEW, "new", "all of it, against none"),
        (_FEW_PARTS, "new-combine", "without a program for each head and token that combines splits"),
        (_FEW_PARTS, "new-together", "without eight tiles of K at once in a product"),
        (_FEW_PARTS, "new-sets", "without a second set of accumulators"),
        (_FEW_PARTS, "new-adder", "without a warp of its own for LoRA's sums"),
        (_FEW_PARTS, "new-tiles", "without blocks of 8 tokens between the products: taken so"),
    )
    lines = [
        (what, *(_percent(row["faster"]) for batch in (1, 8) for row in rows(name, way=way, batch=batch)))
        for name, way, what in compared
    ]
    apart = max(row["faster_most"] - row["faster_least"] for name in (_FEW, _FEW_PARTS) for row in rows(name))
    return table(
        ("Qwen2.5-7B, change of tokens per second", "1 sequence", "8 sequences"),
        lines,
        "All ways of a file in turn in one process, every second time in reverse order; medians of four "
        f"rounds (first line) and three, which differ by at most {100 * apart:.1f} percentage points. "
        f"{source(_FEW, _FEW_PARTS)} {files(_FEW, _FEW_PARTS)}",
    )


def ways_of_many() -> str:
    """Return the table of the effect of each choice for 256 and 512 rows."""
    found = {
        what: [_over_first(name, way, batch) for batch in (256, 512)]
        for name, ways in _MANY.items()
        for way, what in ways
    }
    lines = [(what, *(_percent(fmean(each)) for each in changes)) for what, changes in found.items()]
    apart = _apart(each for changes in found.values() for each in changes)
    return table(
        ("Qwen2.5-7B, change of tokens per second", "256 sequences", "512 sequences"),
        lines,
        "The first three are against quack's products, the next against loads one after another, the others "
        "against what is there. All ways of a file in turn in one process, twice, the second time in reverse "
        f"order; the two times differ by at most {100 * apart:.1f} percentage points. act_mul, residual_norm "
        f"and attention were compared beside the product of six stages. {source(*_MANY)} {files(*_MANY)}",
    )


def ways_tried() -> str:
    """Return the table of the effect of attention, kernels between products and fewer launches, by batch."""
    names = [*_ATTEND.values(), *_BETWEEN.values(), _LAST]
    batches = sorted({row["batch"] for name in names for row in rows(name)})
    found = {
        what: [
            next((_over_first(name, way, batch) for name, way in ways if rows(name, batch=batch)), None)
            for batch in batches
        ]
        for what, *ways in _TRIED
    }
    lines = [
        (what, *(each and _percent(fmean(each)).removesuffix(" %") for each in changes))
        for what, changes in found.items()
    ]
    apart = _apart(each for changes in found.values() for each in changes if each)
    return table(
        ("Qwen2.5-7B, % of tokens per second, by sequences", *map(str, batches)),
        lines,
        "Each against what there was before, or what it names; _and_ adds to the line above. All ways of a "
        "file in turn in one process, every second time in reverse order; means of two to four rounds, which "
        f"differ by at most {100 * apart:.1f} percentage points. {source(*names)} These are "
        f"patches that commit fce65ec holds. {files(*names)}",
    )


def long_prompts() -> str:
    """Return the table of the effect of a separate launch for prompts, by prompt, group and sequences."""
    names = list(dict.fromkeys(name for name, *_ in _PROMPTS))
    batches = sorted({row["batch"] for name in names for row in rows(name)})
    found = [
        (
            rows(name)[0]["prompt_tokens"],
            rows(name)[0]["group"],
            what,
            [_over_first(name, way, batch) if rows(name, batch=batch) else None for batch in batches],
        )
        for name, way, what in _PROMPTS
    ]
    lines = [
        (prompt, group, what, *(each and _percent(fmean(each)).removesuffix(" %") for each in changes))
        for prompt, group, what, changes in found
    ]
    apart = _apart(each for *_, changes in found for each in changes if each)
    return table(
        ("prompt", "group", "Qwen2.5-7B, % of tokens per second, by sequences", *map(str, batches)),
        lines,
        "Unless a line says otherwise, each against a rule that reads prompts apart from 96 sequences on and "
        "has at most 8 splits, twice those that fill the card only up to 8 sequences. All ways of a file in "
        "turn in one process, twice, the second time in reverse order; means of two that differ by at most "
        f"{100 * apart:.1f} percentage points. {source(*names)} {files(*names)}",
    )


def kernels_together() -> str:
    """Return the table of decoded tokens per second before and after all kernels for few and many rows."""
    return _before_after(_TOGETHER)


def kernels_decided() -> str:
    """Return the table of decoded tokens per second before and after all that `ways_tried` marks as taken."""
    return _before_after(_DECIDED)


def _before_after(processes: Mapping[str, tuple[str, ...]]) -> str:
    lines = []
    for batch in (row["batch"] for row in rows(processes["after"][0])):
        before, after = (
            fmean(row["decode_tok_s"] for name in names for row in rows(name, batch=batch))
            for names in processes.values()
        )
        lines.append((batch, f"{before:.0f}", f"{after:.0f}", _percent(after / before)))
    names = [name for pair in zip(*processes.values(), strict=True) for name in pair]
    return table(
        ("Qwen2.5-7B, sequences", "before", "after", "change"),
        lines,
        "Tokens per second, 128 decoded behind prompts of 256; means of two processes of each commit, by "
        f"turns on one card. {source(*names)} {files(*names)}",
    )


def _over_first(name: str, way: str, batch: int) -> list[float]:
    """Return the speed of a way over that of the first way of its file, per round."""
    speeds = [
        [row["decode_tok_s"] for row in sorted(rows(name, way=each, batch=batch), key=itemgetter("round"))]
        for each in (way, rows(name)[0]["way"])
    ]
    return [own / first for own, first in zip(*speeds, strict=True)]


def _apart(found: Iterable[list[float]]) -> float:
    """Return the largest difference between rounds."""
    return max(max(each) - min(each) for each in found)


def _percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"  # no -0.0


def long_prompts_faster(name: str, way: str, batch: int) -> str:
    """Format the speedup of a way over the first way of its file."""
    return _percent(fmean(_over_first(name, way, batch))).removeprefix("+")


def fp8_keys_faster(batch: int) -> str:
    """Format the speedup of Llama 3 8B's steps by keys and values in FP8 over those in 16 bits."""
    sixteen, eight = (
        rows(_CONFIGURATIONS[name], batch=batch)[0]["decode_tok_s"] for name in (_OWN_PROMPTS, _FP8_KEYS)
    )
    return _percent(eight / sixteen).removeprefix("+")


def _changes(shape: str, first: str, second: str, machine: int) -> str | None:
    if not all(_values("decode_tok_s", shape, way, machine) for way in (first, second)):
        return None
    speed, clock = (_change(key, shape, first, second, machine) for key in ("decode_tok_s", "sm_mhz"))
    return f"{speed} ({clock})"


def _change(key: str, shape: str, first: str, second: str, machine: int) -> str:
    means = [fmean(_values(key, shape, way, machine)) for way in (first, second)]
    return _percent(means[0] / means[1])


def _values(key: str, shape: str, way: str, machine: int) -> list[float]:
    return [row[key] for row in rows(_WAYS, shape=shape, way=way, machine=machine)]


def _of(name: str | None, /, **where: object) -> list[Row]:
    return [] if name is None else rows(name, engine="qerl", **where)


def _first(names: tuple[str, ...], /, **where: object) -> list[Row]:
    """Return the rows of the first of these files that has any."""
    return next((found for name in names if (found := _of(name, **where))), [])


def _joules(found: list[Row]) -> str:
    """Format the joules for 1000 tokens."""
    return f"{1000 * found[0]['gpu_state']['power_w']['median'] / found[0]['decode_tok_s']:.0f}"


def _tokens_s(found: list[Row]) -> str | None:
    return f"{found[0]['decode_tok_s']:.0f}" if found else None


def _decoded(name: str) -> int:
    """Return the number of tokens that each sequence of a result decoded."""
    (tokens,) = {row["decode_tokens"] for row in rows(name)}
    return int(tokens)
