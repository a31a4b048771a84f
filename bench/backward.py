"""Gradients through a layer's frozen weights: times and errors of products in 16 bits and in FP8.

    python -m bench backward --shape 7b --tokens 16896

For each fused product of a layer the gradient of its input is computed from random gradients of its output
as in the update, in bf16 and in FP8, including the time to write the dequantized weight. They alternate, so
that both run at the same clocks. Two parts of the FP8 time, rounding the gradients and writing the transposed
weight, are also timed alone. Errors are relative, in the Frobenius norm, over about a thousand tokens,
against products in FP64; the sizes of the tokens' gradients span a factor of 10^4.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.random_weights import random_tiles
from bench.result import write_result
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.fp4.format import NVFP4
from qerl.fp4.linear import PackedLinear, gradient_in_fp8, scaled_product
from qerl.fp4.storage import PackedTiles
from qerl.kernels.cards import card_of, why_no_fp8
from qerl.kernels.update.fp8 import quantize_rows
from qerl.kernels.workspace import workspace
from qerl.measure.gauge import gauge
from qerl.measure.model_config import shape_of, sizes_of

_CALLS, _TURNS, _COMPARED = 5, 7, 1024


def layers_of(sizes: Sizes) -> dict[str, PackedLinear]:
    """Return a linear layer with random weights per fused product of a model's first layer, by name."""
    found = {}
    for product in sizes.specs[0].products:
        rows = sum(each.outputs for each in product.linears)
        tiles = random_tiles(rows, product.linears[0].inputs)
        scale = torch.full((1,), 3000.0, device="cuda")
        found[product.name] = PackedLinear.of(PackedTiles(tiles, scale, NVFP4))
    return found


def in_16_bits(dy_TN: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Return the gradient of a layer's input as `qerl.lora.product` computes it without FP8."""
    weight, factor = layer.exact()
    dense_NK = workspace(weight.shape, dy_TN)
    weight.write_dense(dense_NK)
    return scaled_product(dy_TN, dense_NK, factor)


def transposed(q_TN: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Return the layer's weight transposed and in FP8."""
    out_KN = workspace((layer.in_features, layer.out_features), q_TN)
    layer.tiles()[0].write_transposed_e4m3(1 / 8, out_KN)
    return out_KN


def measure(layer: PackedLinear, tokens: int) -> dict[str, float]:
    """Return milliseconds and errors of one layer."""
    n = layer.out_features
    dy_TN = torch.randn(tokens, n, device="cuda") * torch.logspace(-4, 0, tokens, device="cuda")[:, None]
    dy_TN = dy_TN.bfloat16()
    q_TN, _ = quantize_rows(dy_TN)
    ways: dict[str, Callable[[], Any]] = {
        "bf16": lambda: in_16_bits(dy_TN, layer),
        "fp8": lambda: gradient_in_fp8(dy_TN, [layer]),
        "quantize_rows": lambda: quantize_rows(dy_TN),
        "transpose_e4m3": lambda: transposed(q_TN, layer),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_TURNS + 1):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(_CALLS):
                way()
            end.record()
            end.synchronize()
            if turn:  # the first turn compiles and tunes
                times[name].append(start.elapsed_time(end) / _CALLS)
    some = torch.arange(0, tokens, max(1, tokens // _COMPARED), device="cuda")
    exact = dy_TN[some].double() @ layer.dense().double()
    errors = {
        f"{name}_error": float((ways[name]()[some] - exact).norm() / exact.norm()) for name in ("bf16", "fp8")
    }
    product = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
    flop = 2 * tokens * n * layer.in_features
    return product | errors | {"fp8_tflops": flop / product["fp8_ms"] / 1e9}


def main(arguments: list[str]) -> None:
    """Run `python -m bench backward` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench backward", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["7b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16896], help="tokens per pass")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    if reason := why_no_fp8(card_of(torch.device("cuda", 0))):
        raise QeRLError(f"{reason}, so there is nothing to compare.")
    rows: list[dict[str, Any]] = []
    with gauge() as state:
        for shape in args.shape:
            for name, layer in layers_of(sizes_of(shape_of(shape))).items():
                for tokens in args.tokens:
                    found = measure(layer, tokens)
                    given = {"shape": shape, "product": name, "tokens": tokens}
                    given |= {"outputs": layer.out_features, "inputs": layer.in_features}
                    rows.append(given | found | {"gpu_state": state.take()})
                    print(
                        f"{shape} {name} {layer.out_features} x {layer.in_features}, {tokens} tokens: "
                        f"bf16 {found['bf16_ms']:.2f} ms, FP8 {found['fp8_ms']:.2f} ms, of it rounding "
                        f"{found['quantize_rows_ms']:.2f} and weight {found['transpose_e4m3_ms']:.2f} ms; "
                        f"errors {found['bf16_error']:.4f}, {found['fp8_error']:.4f}",
                        flush=True,
                    )
                    if args.out:
                        write_result(args.out, " ".join(["backward", *arguments]), rows)
