"""Rows rounded to E4M3, in Triton's interpreter; tests/gpu/test_training.py has them on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)

from qerl.kernels.update.fp8 import E4M3, quantize_rows
from tests.support.e4m3 import use_exact_e4m3


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    use_exact_e4m3(monkeypatch)


@pytest.mark.parametrize("width", [64, 576, 9000])
def test_each_row_has_its_largest_number_at_the_end_of_the_range(in_bounds, width):
    x = torch.randn(5, width) * torch.tensor([1.0, 1e-6, 1e3, 0.0, 1.0])[:, None]
    x[4, : width - 1] *= 1e-3  # the last number is the largest
    x[4, width - 1] = -1.0
    q, scale = quantize_rows(x.bfloat16())
    x = x.bfloat16().double()
    assert q.dtype == E4M3 and scale.shape == (5, 1)
    most = x.abs().amax(1, keepdim=True)
    torch.testing.assert_close(448 * scale.double(), most, rtol=1e-6, atol=1e-27)
    assert (q.float().abs().amax(1) == torch.tensor([448.0, 448.0, 448.0, 0.0, 448.0])).all()
    off = (q.double() * scale.double() - x).abs()
    assert (off <= torch.maximum(x.abs() / 16, most / 448 * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
@pytest.mark.filterwarnings("ignore:invalid value")  # infinity times zero
def test_a_row_that_is_not_finite_is_one_of_nan(bad):
    x = torch.randn(3, 100)
    x[1, 57] = float(bad)
    q, scale = quantize_rows(x)
    assert (q.float() * scale).isnan().all(1).tolist() == [False, True, False]
