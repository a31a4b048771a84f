"""Four-bit products of other packages, to be timed beside this package's own (`qerl bench kernels`)."""

from collections.abc import Callable

import torch

from qerl.bench.decoder import random_nf4
from qerl.kernels import nf4
from qerl.kernels.blob import Blob, from_blob

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [T, K] in bf16 to x w^T [T, N]."""


def humming(blob: Blob) -> Product:
    """The same NVFP4 weight, global scale 1, in humming's layout; a kernel is compiled for its shape."""
    from humming.layer import HummingLayer

    rows, width = blob.shape
    codes_NK, scales_NK = from_blob(blob)
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
    return layer


def bitsandbytes(blob: Blob) -> Product:
    """A random NF4 weight of the same shape; the kernel is bitsandbytes' choice."""
    weight = random_nf4(*blob.shape, device=str(blob.codes.device))
    return lambda x_TK: nf4.product(x_TK, weight)


PRODUCTS: dict[str, Callable[[Blob], Product]] = {"humming": humming, "bitsandbytes": bitsandbytes}
"""By the name of the package's module."""
