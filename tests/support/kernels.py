"""Where kernels are tested, random inputs, and errors relative to float64."""

import pytest
import torch

from qerl.kernels.cards import card_of
from qerl.kernels.weights.packed_gemm import sums_dtype

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


def poison(*shape, dtype=torch.float32):
    """NaN, which whoever forgets to write leaves."""
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def partial_sums(splits, tokens, columns, dtype=None):
    """A GEMM's output in which 64 columns have 1 to ``splits`` parts and the others are poisoned; in the
    dtype of so many tokens unless one is given."""
    counts = torch.randint(1, splits + 1, (-(-columns // 64),), device=DEVICE, dtype=torch.int32)
    counts[-1] = splits
    used = torch.arange(splits, device=DEVICE)[:, None] < counts.repeat_interleave(64)[None, :columns]
    gemm = torch.randn(splits, tokens, columns, device=DEVICE).to(dtype or sums_dtype(tokens))
    poisoned = torch.where(used[:, None], gemm, float("nan"))
    return poisoned, torch.where(used[:, None], gemm, 0.0).double().sum(0), counts


def as_rows(flat, tokens, width, padded):
    """[T, width] of an operand: as it is, or from the order of the small GEMM."""
    if not padded:
        return flat
    x = (
        flat.view(width // 64, padded // 8, 4, 2, 8, 8)
        .permute(1, 4, 0, 2, 3, 5)
        .reshape(padded, width // 16, 16)
    )
    slots = torch.tensor([0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15], device=DEVICE)
    assert not x[tokens:].any()
    return x[:, :, slots].reshape(padded, width)[:tokens]
