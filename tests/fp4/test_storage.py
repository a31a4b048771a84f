"""The orders in which a packed weight may lie: tiles are the rows again, on a CPU."""

import pytest
import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.fp4.format import BLOCK_FORMATS, MXFP4, NVFP4, PackedRows, dequantize
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.fp4.storage import PackedTiles, stack_tiles, why_no_tiles
from qerl.kernels.weights.tiles import Tiles

FORMATS = pytest.mark.parametrize("format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS.keys())


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_tiles_are_a_permutation_of_the_bytes():
    codes = torch.randint(0, 256, (192, 96), dtype=torch.uint8)
    scales = torch.randint(0, 127, (192, 12), dtype=torch.uint8)
    tiles = Tiles.from_rows(codes, scales)
    assert tiles.shape == (256, 192)
    found = tiles.rows()
    assert torch.equal(found[0][:192], codes)
    assert torch.equal(found[1][:192], scales)
    assert not found[0][192:].any()


@FORMATS
def test_stacked_weights_are_views_and_the_same_weights(format):
    weights = [quantize(torch.randn(n, 128) * 10.0 ** (n // 64), format, "rtn") for n in (192, 64, 128)]
    stack, parts = stack_tiles(weights)
    assert stack.shape == (384, 128)
    for weight, part in zip(weights, parts, strict=True):
        assert isinstance(part, PackedTiles) and part.format is format and part.shape == weight.shape
        assert part.tiles.codes.untyped_storage().data_ptr() == stack.codes.untyped_storage().data_ptr()
        rows = part.to_rows()
        assert rows.format is format
        assert rows.tensors().keys() == weight.tensors().keys()
        assert all(same(rows.tensors()[name], tensor) for name, tensor in weight.tensors().items())
        place = torch.full((weight.shape[0], 128 + 8), 7.0)
        part.write_dense(place[:, :128])
        assert torch.equal(place[:, :128], dequantize(weight)) and (place[:, 128:] == 7.0).all()


@FORMATS
def test_a_layer_takes_any_order_of_the_same_weight(format):
    weight = quantize(torch.randn(128, 64), format, "rtn")
    layer = PackedLinear.of(weight, nn.Parameter(torch.randn(128)))
    x = torch.randn(3, 64, requires_grad=True)

    def run():
        y = layer(x)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    before = run()
    _, (tiled,) = stack_tiles([layer.storage])
    layer.use(tiled)
    assert isinstance(layer.storage, PackedTiles)
    assert all(torch.equal(one, other) for one, other in zip(run(), before, strict=True))
    layer.to(torch.bfloat16)  # casts the bias and not the weight
    assert torch.equal(layer.dense(), dequantize(weight))
    layer.use(layer.storage.to_rows())
    assert isinstance(layer.storage, PackedRows)
    assert layer.storage.tensors().keys() == weight.tensors().keys()
    assert torch.equal(layer.dense(), dequantize(weight))


@FORMATS
def test_the_transpose_in_e4m3_is_the_matrix_rounded_to_it(format):
    weights = [quantize(torch.randn(n, 128), format, "rtn") for n in (64, 128)]
    place = torch.zeros(128, 64 + 128, dtype=torch.float8_e4m3fn)
    for part, columns in zip(stack_tiles(weights)[1], place.split([64, 128], dim=1), strict=True):
        part.write_transposed_e4m3(1 / 8, columns)
        exact = dequantize(part.to_rows()).double().T * part.global_scale.double() / 8
        assert exact.abs().max() > 100, "the range of E4M3 is used"
        off = (columns.double() - exact).abs()
        assert (off <= exact.abs() / 16 + 1e-9).all()
        if format is MXFP4:  # a power of two adds no significant bit
            assert off.max() < 1e-6 * exact.abs().max()
        else:
            assert 0.01 < off.norm() / exact.norm() < 0.03


def test_what_cannot_be_tiled():
    assert why_no_tiles(quantize(torch.randn(64, 64), NVFP4, "rtn")) is None
    assert why_no_tiles(quantize(torch.randn(64, 96), NVFP4, "rtn")) == "is 64 x 96, which 64 does not divide"
    assert why_no_tiles(quantize(torch.randn(48, 64), NVFP4, "rtn")) == "is 48 x 64, which 64 does not divide"
    wide = torch.randn(64, 64)
    wide[0] *= 2.0**30
    assert "further apart than 2^17" in (why_no_tiles(quantize(wide, MXFP4, "rtn")) or "")


def test_tiles_belong_to_one_stack():
    weight = quantize(torch.randn(64, 64), NVFP4, "rtn")
    _, parts = stack_tiles([weight, weight])
    with pytest.raises(QeRLError, match="already belongs to a paged engine"):
        stack_tiles(parts)
