"""MXFP4 written as NVFP4 is the same matrix."""

import pytest
import torch

from qerl.errors import QeRLError
from qerl.fp4.format import MXFP4, NVFP4, dequantize
from qerl.fp4.rounding import quantize
from qerl.fp4.storage import as_nvfp4, fits_nvfp4, from_nvfp4


@pytest.mark.parametrize("size", [1e-37, 1e-3, 1.0, 1e30])
def test_every_element_is_equal(size):
    weight = torch.randn(48, 128) * size * torch.exp2(torch.randint(-8, 8, (48, 1)).float())
    weight[3] = 0.0
    weight[5, 32:64] = 0.0
    packed = quantize(weight, MXFP4, "rtn")
    written = as_nvfp4(packed)
    assert written.format is NVFP4
    assert written.codes.data_ptr() == packed.codes.data_ptr()
    assert torch.equal(dequantize(written), dequantize(packed))
    assert dequantize(packed).abs().max() > 0


def test_and_back():
    weight = torch.randn(48, 128) * torch.exp2(torch.randint(-8, 8, (48, 1)).float())
    packed = quantize(weight, MXFP4, "rtn")
    back = from_nvfp4(as_nvfp4(packed))
    assert torch.equal(back.scales, packed.scales)
    assert back.format is MXFP4


def test_a_matrix_of_zeros():
    packed = quantize(torch.zeros(16, 64), MXFP4, "rtn")
    assert torch.equal(dequantize(as_nvfp4(packed)), torch.zeros(16, 64))


def test_scales_too_far_apart_are_refused():
    weight = torch.ones(2, 32)
    weight[1] *= 2.0**-17
    assert fits_nvfp4(quantize(weight, MXFP4, "rtn"))
    weight[1] *= 0.5
    packed = quantize(weight, MXFP4, "rtn")
    assert not fits_nvfp4(packed)
    with pytest.raises(QeRLError, match="further apart"):
        as_nvfp4(packed)
