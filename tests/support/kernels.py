"""Where kernels are tested, random inputs, and errors relative to float64."""

import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter multiplies bf16 wrongly, so there the kernels run in fp32.
HALF = torch.bfloat16 if GPU else torch.float32
EPS = 1e-6


def half(*shape, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(HALF)


def error(found, truth):
    truth = truth.double()
    assert truth.abs().max() > 0
    return float((found.double() - truth).norm() / truth.norm())
