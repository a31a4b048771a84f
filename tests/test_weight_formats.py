"""The registry of weight formats: it agrees with what the formats' own modules say, and imports no torch."""

import subprocess
import sys

import pytest
import torch

from qerl.fp4.format import BLOCK_FORMATS
from qerl.fp4.rounding import quantize
from qerl.kernels.weights import nf4
from qerl.weight_formats import FORMATS, PACKED_FORMATS


def test_packed_formats_are_those_of_the_packer():
    assert set(PACKED_FORMATS) == set(BLOCK_FORMATS)


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_bytes_are_those_of_a_packed_weight(name):
    weight = torch.randn(64, 192)
    packed = quantize(weight, BLOCK_FORMATS[name], "rtn")
    tensors = [packed.codes, packed.scales, packed.global_scale]
    stored = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert stored == FORMATS[name].matrix_bytes(weight.numel())


def test_other_formats():
    assert FORMATS["nf4"].block_size == nf4.BLOCK
    assert FORMATS["bf16"].matrix_bytes(64 * 192) == torch.empty(64, 192, dtype=torch.bfloat16).nbytes


def test_the_engine_holds_a_format_that_it_can_multiply_with():
    assert {format.on_engine.name for format in FORMATS.values()} == {"nvfp4", "nf4", "bf16"}


def test_importing_the_registry_does_not_import_torch():
    code = "import sys, qerl.weight_formats; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
