"""Four-bit products of other packages, timed beside the package's own by `python -m bench kernels`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.random_weights import random_nf4
from qerl.fp4.format import NVFP4, PackedRows, dequantize
from qerl.kernels.weights import nf4
from qerl.kernels.weights.tiles import Tiles


@dataclass(frozen=True)
class Rival:
    """A weight in another package's layout.

    Attributes:
        multiply: Maps x [T, K] in bf16 to x w^T [T, N].
        dense_NK: Returns the exact weight [N, K] that ``multiply`` should use, fp64.
    """

    multiply: Callable[[torch.Tensor], torch.Tensor]
    dense_NK: Callable[[], torch.Tensor]


def dequantised(tiles: Tiles) -> torch.Tensor:
    """Return the weight [N, K] of tiles with global scale 1, exact in fp64."""
    codes, scales = tiles.rows()
    one = torch.ones(1, device=codes.device)
    return dequantize(PackedRows(codes, scales.view(torch.float8_e4m3fn), one, NVFP4)).double()


def humming(tiles: Tiles) -> Rival:
    """Return the same NVFP4 weight, global scale 1, in humming's layout; compiles a kernel for its shape."""
    from humming.layer import HummingLayer

    rows, width = tiles.shape
    codes_NK, scales_NK = tiles.rows()
    config = {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "type": "float",
        "num_bits": 4, "strategy": "tensor_group", "group_size": 16,
    }  # fmt: skip
    with torch.device(codes_NK.device):
        layer = HummingLayer(shape_n=rows, shape_k=width, weight_config=config, torch_dtype=torch.bfloat16)
    layer.load_from_tensors(
        {
            "weight_packed": codes_NK,
            "weight_scale": scales_NK.view(torch.float8_e4m3fn),
            "weight_global_scale": torch.ones(1, device=codes_NK.device),
        }
    )
    layer.transform()
    return Rival(layer, lambda: dequantised(tiles))


def bitsandbytes(tiles: Tiles) -> Rival:
    """Return a random NF4 weight of the same shape; bitsandbytes chooses the kernel."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    device = tiles.codes.device
    weight = random_nf4(*tiles.shape, device=str(device))
    state = QuantState(
        weight.absmax, torch.Size(weight.shape), get_4bit_type("nf4", device), nf4.BLOCK, "nf4", torch.float32
    )

    def dense_NK() -> torch.Tensor:
        return dequantize_4bit(weight.codes, state).double()

    return Rival(weight.gemm, dense_NK)


RIVALS: dict[str, Callable[[Tiles], Rival]] = {"humming": humming, "bitsandbytes": bitsandbytes}
"""Constructors of rivals by the name of the package's module."""
