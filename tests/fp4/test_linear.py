"""Packed linear layers: gradients, what autograd keeps, casts and moves, the `dense_weights_kept` block."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qerl.fp4.format import BLOCK_FORMATS, MXFP4, NVFP4, dequantize
from qerl.fp4.linear import PackedLinear, dense_weights_kept, gradient_in_fp8
from qerl.fp4.rounding import quantize
from qerl.fp4.storage import stack_tiles
from qerl.kernels.workspace import workspace
from tests.support.e4m3 import use_exact_e4m3

FORMAT_NAMES = sorted(BLOCK_FORMATS)


def packed_layer(name: str, n: int = 48, k: int = 96, bias: bool = True) -> PackedLinear:
    packed = quantize(torch.randn(n, k), BLOCK_FORMATS[name], "rtn")
    return PackedLinear.of(packed, nn.Parameter(torch.randn(n)) if bias else None)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_gradients_against_fp64(name: str, bias: bool) -> None:
    layer = packed_layer(name, bias=bias)
    x = torch.randn(3, 5, 96, requires_grad=True)
    dy = torch.randn(3, 5, 48)
    y = layer(x)
    y.backward(dy)
    weight = dequantize(layer.storage.to_rows()).double()
    exact_y = x.detach().double() @ weight.T
    if layer.bias is not None:
        exact_y = exact_y + layer.bias.detach().double()
        assert layer.bias.grad is not None
        torch.testing.assert_close(layer.bias.grad.double(), dy.double().sum((0, 1)), rtol=1e-6, atol=1e-5)
    assert x.grad is not None
    # A dense fp32 product of this size is off by about 1e-6 of the largest output.
    for value, exact in ((y.detach(), exact_y), (x.grad, dy.double() @ weight)):
        assert (value.double() - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_to_a_dense_layer_of_the_dequantised_weight(dtype: torch.dtype) -> None:
    layer = packed_layer("nvfp4")
    weight = dequantize(layer.storage.to_rows(), dtype)
    x, dense_x = (torch.randn(7, 96).to(dtype).requires_grad_() for _ in range(2))
    dense_x.data.copy_(x.data)
    y, dense_y = layer(x), F.linear(dense_x, weight, layer.bias.detach().to(dtype))
    dy = torch.randn_like(y)
    y.backward(dy)
    dense_y.backward(dy)
    assert y.dtype == dtype and torch.equal(y, dense_y)
    assert torch.equal(x.grad, dense_x.grad)
    with torch.no_grad():
        assert torch.equal(layer(x), dense_y)


def test_autograd_keeps_packed_tensors_only() -> None:
    layer = packed_layer("nvfp4", n=256, k=512)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        y = layer(torch.randn(2, 512, requires_grad=True))
    assert saved == []
    kept, factor, in_fp8 = vars(y.grad_fn).values()
    assert factor == 1 and in_fp8 is None
    assert kept.tensors().keys() == dict(layer.named_buffers()).keys()
    assert all(tensor is layer.get_buffer(name) for name, tensor in kept.tensors().items())


@pytest.mark.parametrize("tiles", [False, True])
def test_sixteen_bits_hold_the_weight_over_its_factor(tiles: bool) -> None:
    """Against code times scale in FP64: whatever the global scale is, no bit is rounded away."""
    packed = quantize(0.03 * torch.randn(64, 128), NVFP4, "mse")
    packed.scales.view(torch.uint8)[:, ::3].random_(1, 0x7F)  # every scale, subnormal included
    layer = PackedLinear.of(stack_tiles([packed])[1][0] if tiles else packed)
    values = dequantize(dataclasses.replace(packed, global_scale=torch.ones(1))).double()
    for scale in (float(packed.global_scale), 3e-4, 2.0**20, 2.0**-4, 1.9 * 2.0**110):
        layer.weight_global_scale.fill_(scale)
        weight, factor = layer.exact()
        dense = torch.empty(64, 128, dtype=torch.bfloat16)
        weight.write_dense(dense)
        exact = values / layer.weight_global_scale.double()
        torch.testing.assert_close(factor * dense.double(), exact, rtol=1e-15, atol=0)
        assert 0.5 < factor <= 1 and (factor == 1) == (scale in (2.0**20, 2.0**-4))
    assert PackedLinear.of(quantize(torch.randn(64, 128), MXFP4, "rtn")).exact()[1] == 1


def test_frozen_weight_is_no_parameter() -> None:
    layer = packed_layer("nvfp4", bias=False)
    assert list(layer.parameters()) == []
    assert not hasattr(layer, "weight")
    assert layer.qweight is layer.weight_packed


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double()]
)
def test_casts_change_the_bias_and_no_byte_of_the_weight(name: str, cast) -> None:
    model = nn.Sequential(packed_layer(name))
    before = copy.deepcopy(model.state_dict())
    after = cast(model).state_dict()
    assert after["0.bias"].dtype != torch.float32
    for key, value in before.items():
        if not key.endswith("bias"):
            assert after[key].dtype == value.dtype
            assert torch.equal(after[key].view(torch.uint8), value.view(torch.uint8))


def test_moves_follow_the_device() -> None:
    layer = packed_layer("nvfp4").to("meta", torch.bfloat16)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    assert layer.weight_scale.dtype == torch.float8_e4m3fn
    assert layer.weight_global_scale.shape == (1,)
    assert layer.to_empty(device="cpu").weight_scale.dtype == torch.float8_e4m3fn


def test_empty_layer_has_the_buffers_of_a_packed_one() -> None:
    for name in FORMAT_NAMES:
        full, empty = (
            packed_layer(name),
            PackedLinear(96, 48, BLOCK_FORMATS[name], bias=True, dtype=torch.float32),
        )
        assert {k: (v.shape, v.dtype) for k, v in full.state_dict().items()} == {
            k: (v.shape, v.dtype) for k, v in empty.state_dict().items()
        }


def test_autocast_computes_in_its_dtype() -> None:
    layer = packed_layer("nvfp4")
    x = torch.randn(4, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16), dense_weights_kept(layer):
        layer(x)
        assert layer._dense_NK is not None and layer._dense_NK.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_unpacked_keeps_dense_weights_within_the_block_only() -> None:
    model = nn.Sequential(packed_layer("nvfp4", 64, 96), packed_layer("mxfp4", 48, 64))
    x = torch.randn(5, 96)
    with torch.no_grad():
        reference = model(x)
        with dense_weights_kept(model):
            assert torch.equal(model(x), reference)
            kept = [layer.dense() for layer in model]
            with dense_weights_kept(model):
                assert torch.equal(model(x), reference)
            assert all(layer.dense() is held for layer, held in zip(model, kept, strict=True))
            assert model(x.bfloat16()).dtype == torch.bfloat16
    assert all(layer._dense_NK is None for layer in model)
    assert all(layer.dense() is not layer.dense() for layer in model)


def test_unpacked_ends_with_an_exception() -> None:
    layer = packed_layer("nvfp4")
    with pytest.raises(KeyError), dense_weights_kept(layer):
        layer(torch.randn(1, 96))
        assert layer._dense_NK is not None
        raise KeyError
    assert layer._dense_NK is None and layer._blocks_open == 0


def test_unpacked_weight_of_a_rollout_serves_a_training_step() -> None:
    layer = packed_layer("nvfp4")
    x = torch.randn(4, 96, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with dense_weights_kept(layer):
        with torch.inference_mode():
            layer(torch.randn(1, 96))
        layer(x).square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_move_within_an_unpacked_block_does_not_leave_the_old_device_behind() -> None:
    layer = packed_layer("nvfp4")
    with dense_weights_kept(layer):
        layer(torch.randn(1, 96))
        layer.to("meta")
        assert layer.dense().device.type == "meta"


def test_dense_weight_is_written_where_it_is_wanted() -> None:
    layer = packed_layer("nvfp4")
    place = workspace((48, 96 + 8), torch.empty(0))
    place.fill_(7.0)
    layer.storage.write_dense(place[:, :96])
    assert torch.equal(place[:, :96], layer.dense())
    assert (place[:, 96:] == 7.0).all()


def test_workspace_is_one_place_that_grows() -> None:
    like = torch.empty(0, dtype=torch.float64)
    small, other = workspace((2, 3), like), workspace((3, 2), like)
    assert small.data_ptr() == other.data_ptr() and small.dtype == torch.float64
    large = workspace((100, 3), like)
    assert large.shape == (100, 3) and workspace((1, 1), like).data_ptr() == large.data_ptr()
    assert workspace((2, 3), like.float()).data_ptr() != large.data_ptr()


def test_repr_names_the_format() -> None:
    assert (
        repr(PackedLinear(32, 16, NVFP4))
        == "PackedLinear(nvfp4, in_features=32, out_features=16, bias=False)"
    )


@pytest.fixture
def exact_e4m3(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    use_exact_e4m3(monkeypatch)


@pytest.mark.parametrize("amax", [6.0, None], ids=["one global scale", "two global scales"])
def test_the_gradient_in_fp8_is_near_that_of_the_dequantised_weights(exact_e4m3, amax):
    torch.manual_seed(0)
    weights = [quantize(torch.randn(64, 128) * size, NVFP4, "mse", amax) for size in (1.0, 0.3)]
    layers = [PackedLinear.of(part) for part in stack_tiles(weights)[1]]
    dy = torch.randn(200, 128) * torch.logspace(-6, 2, 200)[:, None]
    exact = dy.double() @ torch.cat([layer.dense().double() for layer in layers])
    found = gradient_in_fp8(dy, layers).double()
    off = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0.01 < off.mean() < 0.05 and off.max() < 0.08, "of every token, however small its gradient"
    along = (found * exact).sum(dim=1) / (exact * exact).sum(dim=1)
    assert 0.99 < along.mean() < 1, "codes are rounded down more than up, which layers may add up"


def test_a_layer_gives_its_input_that_gradient_and_the_same_output(exact_e4m3):
    torch.manual_seed(0)
    layer = PackedLinear.of(stack_tiles([quantize(torch.randn(64, 128), NVFP4, "mse")])[1][0])
    x, dy = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 64)
    y = layer(x)
    (exact,) = torch.autograd.grad(y, x, dy)
    layer.fp8_gradients = True
    (found,) = torch.autograd.grad(again := layer(x), x, dy)
    assert torch.equal(y, again)
    assert torch.equal(found, gradient_in_fp8(dy.view(10, 64), [layer]).view_as(x))
    assert not torch.equal(found, exact)
