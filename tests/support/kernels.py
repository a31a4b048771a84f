"""Where kernels are tested, random inputs, and errors relative to float64."""

import pytest
import torch

from qerl.kernels.cards import card_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter multiplies bf16 wrongly, so there the kernels run in fp32.
HALF = torch.bfloat16 if GPU else torch.float32
EPS = 1e-6
without_fp8 = pytest.mark.skipif(
    GPU and not card_of(torch.device("cuda", 0)).fp8, reason="the GPU does not convert to FP8"
)
"""Mark of a test, or of one of its parameters."""


def half(*shape, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(HALF)


def error(found, truth):
    truth = truth.double()
    assert truth.abs().max() > 0
    return float((found.double() - truth).norm() / truth.norm())
