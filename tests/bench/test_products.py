"""What other packages are given in `python -m bench kernels`; the packages themselves need a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bench.products import bitsandbytes, dequantised, humming
from bench.random_weights import random_tiles
from qerl.fp4.format import NVFP4, PackedRows, dequantize
from qerl.kernels.weights import nf4


class FakeLayer:
    """Takes compressed-tensors' names and computes densely."""

    def __init__(self, shape_n, shape_k, weight_config, torch_dtype):
        assert weight_config["format"] == "nvfp4-pack-quantized" and torch_dtype is torch.bfloat16
        self.shape = (shape_n, shape_k)

    def load_from_tensors(self, tensors):
        codes, scales = tensors["weight_packed"], tensors["weight_scale"]
        weight = PackedRows(codes, scales, 1 / tensors["weight_global_scale"], NVFP4)
        self.dense_NK = dequantize(weight)

    def transform(self):
        assert self.dense_NK.shape == self.shape

    def __call__(self, x_TK):
        return x_TK @ self.dense_NK.to(x_TK.dtype).T


def test_humming_is_given_the_same_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=FakeLayer))
    torch.manual_seed(0)
    tiles = random_tiles(128, 192, device="cpu")
    x_TK = torch.randn(3, 192, dtype=torch.float64)
    torch.testing.assert_close(humming(tiles).multiply(x_TK), x_TK @ dequantised(tiles).T)


def test_bitsandbytes_is_compared_with_its_own_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    table = functional.get_4bit_type("nf4", device="cpu").double()

    def gemm(weight, x_TK):
        codes = torch.cat([weight.codes >> 4, weight.codes & 15], dim=1)  # the lower column in the high half
        dense = table[codes.long()].view(-1, nf4.BLOCK) * weight.absmax[:, None]
        return x_TK @ dense.view(weight.shape).T

    monkeypatch.setattr(nf4.NF4Stack, "gemm", gemm)
    torch.manual_seed(0)
    rival = bitsandbytes(random_tiles(128, 192, device="cpu"))
    x_TK = torch.randn(3, 192, dtype=torch.float64)
    expected = x_TK @ rival.dense_NK().T
    torch.testing.assert_close(rival.multiply(x_TK), expected, rtol=1e-6, atol=1e-6)
