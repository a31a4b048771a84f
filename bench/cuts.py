# ruff: noqa: E501
"""Products of few tokens with parts of the kernel left out: what bounds them. Results of cuts are wrong.

python -m bench cuts --shape 7b --tokens 8 --out cuts.json
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.kernels import time_packed
from bench.random_weights import random_tiles
from bench.result import write_result
from qerl.families.sizes import Sizes
from qerl.kernels.weights import packed_gemm
from qerl.kernels.weights.packed_gemm import Tiling

CUTS: dict[str, list[tuple[str, str, str]]] = {
    "whole": [],
    "no decoding": [
        ("fragment.cuh", "  a[0] = mul2_low(r_lo, scale);\n  a[1] = mul2_high(s_lo, scale);\n"
         "  a[2] = mul2_low(r_hi, scale);\n  a[3] = mul2_high(s_hi, scale);\n",
         "  a[0] = codes; a[1] = scale_word; a[2] = codes ^ scale_word; a[3] = codes;\n"),
    ],
    "no products": [
        ("warp_math.cuh", '  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, '
         '{%0,%1,%2,%3};"\n      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])\n'
         '      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));',
         "  d[0] += __uint_as_float(a[0] ^ b0); d[1] += __uint_as_float(a[1] ^ b1);"
         " d[2] += __uint_as_float(a[2]); d[3] += __uint_as_float(a[3]);"),
    ],
    "loads alone": [
        ("packed_gemm.cu", "      for (int i = 0; i < TOGETHER; i++) multiply_tile(acc, at, stage, t + i * K_GROUPS);", "      for (int i = 0; i < 0; i++);"),
        ("packed_gemm.cu", "      multiply_tile(acc, at, stage, t);\n", "      acc[0] += at.codes[stage * STAGE_BYTES];\n"),
    ],
    "no weight": [
        ("bulk_loads.cuh", "codes + tile * CODE_BYTES, p.count * CODE_BYTES, full", "codes + tile * CODE_BYTES, 16, full"),
        ("bulk_loads.cuh", "scales + tile * SCALE_BYTES,\n         p.count * SCALE_BYTES, full", "scales + tile * SCALE_BYTES,\n         16, full"),
        ("bulk_loads.cuh", "p.count * (STAGE_BYTES / TILES)", "p.count * X_BYTES + ROW_GROUPS * 32"),
    ],
}  # fmt: skip
TILINGS = {
    "old": Tiling(2, 2, 8, 4),
    "sets": Tiling(2, 2, 8, 4, sets=2),
    "together": Tiling(2, 2, 8, 8),
    "both": Tiling(2, 2, 8, 8, sets=2),
    "sevens": Tiling(2, 2, 7, 7, sets=2),
    "fives": Tiling(2, 2, 5, 5, sets=2),
    "four teams": Tiling(4, 2, 8, 4, sets=2),
    "four by 16": Tiling(4, 2, 16, 8, 215_000, sets=2),
    "wide": Tiling(4, 4, 4, 4, sets=2),
    "wide, 8": Tiling(4, 4, 8, 8, 215_000, sets=2),
    "three": Tiling(3, 3, 8, 8, 215_000, sets=2),
}


@contextmanager
def cut(name: str) -> Iterator[None]:
    """The kernel with these parts replaced."""
    folder = packed_gemm.SOURCE.parent
    with tempfile.TemporaryDirectory() as copy:
        texts = {file.name: file.read_text() for file in (*folder.glob("*.cuh"), packed_gemm.SOURCE)}
        for file, old, new in CUTS[name]:
            assert old in texts[file], f"{name}: {file} has no longer: {old}"
            texts[file] = texts[file].replace(old, new)
        for file, text in texts.items():
            (Path(copy) / file).write_text(text)
        packed_gemm._compiled.cache_clear()
        with patch.object(packed_gemm, "SOURCE", Path(copy) / packed_gemm.SOURCE.name):
            yield
        packed_gemm._compiled.cache_clear()


def main(arguments: list[str]) -> None:
    """Runs `python -m bench cuts` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench cuts", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--matrix", nargs="+", default=["gate_up", "down", "qkv", "o"])
    parser.add_argument("--cuts", nargs="+", default=list(CUTS), choices=tuple(CUTS))
    parser.add_argument("--tilings", nargs="+", default=["old", "both"], choices=tuple(TILINGS))
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    sizes, rows = Sizes.by_name(args.shape), []
    for product in dict.fromkeys(each for run in sizes.runs for each in run.spec.products):
        if product.name not in args.matrix:
            continue
        bytes_each = product.outputs * product.inputs * 9 / 16
        copies = [random_tiles(product.outputs, product.inputs) for _ in range(int(200e6 / bytes_each) + 2)]
        x_TK = torch.randn(args.tokens, product.inputs, device="cuda").bfloat16()
        for name in args.cuts:
            for tiling in args.tilings:
                with cut(name):
                    times = [time_packed(x_TK, copies, TILINGS[tiling]) for _ in range(3)]
                row: dict[str, Any] = {
                    "matrix": product.name, "cut": name, "tiling": tiling, "us": sorted(times)[1],
                    "spread": (max(times) - min(times)) / min(times), "gb_s": bytes_each / sorted(times)[1] / 1e3,
                }  # fmt: skip
                rows.append(row)
                print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        del copies
        if args.out:
            write_result(args.out, " ".join(["cuts", *arguments]), rows, shape=args.shape, tokens=args.tokens)
