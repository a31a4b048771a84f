"""What other packages are given in `qerl bench kernels`; the packages themselves need a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from qerl.bench.decoder import random_blob
from qerl.bench.kernels import dequantised
from qerl.bench.products import humming
from qerl.nvfp4.format import NVFP4, PackedWeight, dequantize


class FakeLayer:
    """Takes compressed-tensors' names and computes densely."""

    def __init__(self, shape_n, shape_k, weight_config, torch_dtype):
        assert weight_config["format"] == "nvfp4-pack-quantized" and torch_dtype is torch.bfloat16
        self.shape = (shape_n, shape_k)

    def load_from_tensors(self, tensors):
        codes, scales = tensors["weight_packed"], tensors["weight_scale"]
        weight = PackedWeight(codes, scales, 1 / tensors["weight_global_scale"], NVFP4)
        self.dense_NK = dequantize(weight)

    def transform(self):
        assert self.dense_NK.shape == self.shape

    def __call__(self, x_TK):
        return x_TK @ self.dense_NK.to(x_TK.dtype).T


def test_humming_is_given_the_same_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=FakeLayer))
    torch.manual_seed(0)
    blob = random_blob(128, 192, device="cpu")
    x_TK = torch.randn(3, 192, dtype=torch.float64)
    torch.testing.assert_close(humming(blob)(x_TK), x_TK @ dequantised(blob).T)
