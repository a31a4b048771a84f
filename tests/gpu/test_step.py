"""A pass over the decoder on NVFP4 weights against the same pass on the same weights in bf16.

The values of a packed weight without its global scale are exact in bf16, so both passes multiply with the
same numbers; what differs is the kernel, its layouts and who adds partial sums.
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.products import dequantised
from qerl.families.sizes import Sizes
from qerl.kernels.weights.dense import DenseStack
from qerl.measure.decode import fill_rows
from qerl.measure.random_model import random_decoder
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import Units
from tests.support.machine import NoGraphs

SIZES = Sizes.uniform(384, 448, 3, 6, 2, 64, 1000, qkv_bias=True)


def dense(stack):
    return DenseStack(dequantised(stack.tiles).bfloat16(), stack.scale_L)


def as_dense(layer, names=("qkv", "o", "gate_up", "down")):
    def part(weights):
        packed = {name: getattr(weights, name) for name in names if hasattr(weights, name)}
        plain = {name: dataclasses.replace(each, weight=dense(each.weight)) for name, each in packed.items()}
        return dataclasses.replace(weights, **plain)

    return dataclasses.replace(layer, mixer=part(layer.mixer), mlp=part(layer.mlp))


def output(decoder, rows, passes=1):
    """The last pass's output; every pass computes the same token."""
    torch.manual_seed(1)
    cache = KVCache.of_blocks(decoder, Units([4 * rows]))
    for layer in (each for pair in cache.layers for each in pair):
        layer.normal_()
    step = DecodeStep(decoder, cache, rows, 4, 2, NoGraphs())
    fill_rows(step, cache, 70, 8, 4)
    for _ in range(passes):
        found = step.forward(cache, step.rows.inputs).clone()
    return found.double()


@pytest.mark.parametrize("rows", [1, 8, 20, 64, 100, 200])
@pytest.mark.parametrize("rank", [0, 16])
def test_packed_pass_is_the_dense_pass(rows, rank):
    torch.manual_seed(0)
    packed = random_decoder(SIZES, "nvfp4", rank, 128)
    plain = dataclasses.replace(packed, layers=[as_dense(layer) for layer in packed.layers])
    truth = output(plain, rows)
    assert torch.isfinite(truth).all()
    found = output(packed, rows)
    assert float((found - truth).norm() / truth.norm()) < 2e-2
    # A second pass finds every sum cleared and every buffer fit for use, whatever order it was left in.
    assert torch.equal(output(packed, rows, passes=2), found)


def test_layers_may_be_packed_and_dense():
    torch.manual_seed(0)
    packed = random_decoder(SIZES, "nvfp4", 16, 128)
    truth = output(dataclasses.replace(packed, layers=[as_dense(each) for each in packed.layers]), 8)
    first, second, third = packed.layers
    mixed = [as_dense(first), as_dense(second, ("o", "gate_up")), third]
    found = output(dataclasses.replace(packed, layers=mixed), 8)
    assert float((found - truth).norm() / truth.norm()) < 2e-2
