"""The four-bit formats against compressed-tensors (bit for bit), hand-computed values and fp64."""

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qerl.errors import QeRLError
from qerl.fp4 import format as format_module
from qerl.fp4 import rounding as rounding_module
from qerl.fp4.format import E2M1_VALUES, MXFP4, NVFP4, BlockFormat, PackedRows, dequantize
from qerl.fp4.rounding import error_sums, quantize, relative_error

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda format: format.name)
ORACLE = {"nvfp4": (NVFP4A16, NVFP4PackedCompressor), "mxfp4": (MXFP4A16, MXFP4PackedCompressor)}


def oracle(weight: torch.Tensor, format: BlockFormat, amax: float | None = None):
    """What compressed-tensors stores for a weight in fp32, and what it reads back (bf16)."""
    preset, compressor = ORACLE[format.name]
    scheme = QuantizationScheme(targets=["Linear"], **preset)
    weight = weight.float()
    blocks = weight.unflatten(1, (-1, format.block_size))
    state = {"weight": weight}
    if format.has_global_scale:
        reach = weight.abs().max() if amax is None else torch.tensor(amax)
        state["weight_global_scale"] = generate_gparam(-reach, reach)
    state["weight_scale"], _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=state.get("weight_global_scale")
    )
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def assert_equals_oracle(weight: torch.Tensor, format: BlockFormat, amax: float | None = None) -> None:
    packed = quantize(weight, format, "rtn", amax=amax)
    stored, read_back = oracle(weight, format, amax)
    assert torch.equal(packed.codes, stored["weight_packed"])
    assert torch.equal(packed.scales.view(torch.uint8), stored["weight_scale"].view(torch.uint8))
    if format.has_global_scale:
        assert torch.equal(packed.global_scale, stored["weight_global_scale"])
    assert torch.equal(dequantize(packed, torch.bfloat16).view(torch.int16), read_back.view(torch.int16))


@FORMATS
@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("blocks", [1, 3, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_equal_compressed_tensors(format, n, blocks, dtype):
    torch.manual_seed(n * 100 + blocks)
    assert_equals_oracle((torch.randn(n, blocks * format.block_size) * 0.05).to(dtype), format)


@FORMATS
@pytest.mark.parametrize("magnitude", [1e-44, 1e-39, 1e-36, 1e-20, 1e-3, 1e5, 1e30])
def test_bytes_equal_compressed_tensors_for_any_magnitude(format, magnitude):
    torch.manual_seed(0)
    weight = torch.randn(9, 96) * magnitude
    weight[0, :32] = 0.0
    weight[1, ::2] = -0.0
    weight[2] *= torch.logspace(0, -12, 96)
    weight[3] *= 1e-7  # blocks whose scale rounds to zero
    weight[8, 95] *= 200
    assert_equals_oracle(weight, format)


@FORMATS
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_matrix_of_zeros(format, zero):
    weight = torch.full((3, 64), zero)
    assert_equals_oracle(weight, format)
    rtn, mse = quantize(weight, format, "rtn"), quantize(weight, format, "mse")
    assert not mse.codes.any()
    assert torch.equal(mse.scales.view(torch.uint8), rtn.scales.view(torch.uint8))
    assert relative_error(error_sums(weight, quantize(weight, format, "rtn"))) == 0


@FORMATS
def test_bytes_equal_compressed_tensors_on_ties(format):
    # Block maximum 6 or 1.5 and a scale of exactly 1 or 1/4; multiples of 1/8 of it include all midpoints.
    grid = torch.arange(-48, 48) / 8
    grid[::16] = 6.0
    weight = torch.stack([grid, grid / 4])
    weight[0, 0] = 448 * 6 if format.has_global_scale else 6.0  # global scale 1
    assert_equals_oracle(weight, format)


def test_bytes_equal_compressed_tensors_on_ties_of_the_scale():
    # With global scale 1, six times the middle of two E4M3 numbers makes a tie of its block's scale.
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    weight = torch.randn(125, 16).clamp(-1, 1) * 2**-10
    weight[:, 5] = 6 * (e4m3[:-1] + e4m3[1:]) / 2
    assert_equals_oracle(weight, NVFP4, amax=6 * 448.0)


@pytest.mark.parametrize(
    ("amax", "block_amax"),
    [(1.1794095039367676, 0.48440030217170715), (1.4132347106933594, 0.8580353856086731)],
)
def test_order_of_operations_of_the_scale(amax, block_amax):
    # Found by search: (global * max) / 6 and global * (max * (1/6)) round to another E4M3 number here.
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = amax, block_amax
    assert_equals_oracle(weight, NVFP4)


def test_rounding_is_to_nearest_ties_to_even_code():
    # amax = 6 * 448 makes the global scale 1; a block maximum of 6 makes the block scale 1.
    inputs = [0.25, 0.26, 0.75, 0.74, 1.25, 1.26, 1.75, 1.74, 2.5, 2.51, 3.5, 3.49, 5.0, 5.01, -0.1, 6.0]
    codes = [0, 1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 7, 8, 7]
    packed = quantize(torch.tensor([inputs]), NVFP4, "rtn", amax=6 * 448)
    assert packed.global_scale.item() == 1
    assert packed.scales.float().item() == 1
    assert torch.stack([packed.codes & 15, packed.codes >> 4], -1).flatten().tolist() == codes


def test_even_column_is_in_the_low_nibble():
    weight = torch.tensor([[6.0, -0.5] + [0.0] * 14])
    assert quantize(weight, NVFP4, "rtn", amax=6 * 448).codes[0, 0].item() == 0x97


@FORMATS
def test_every_byte_dequantizes_to_its_two_values(format):
    values = [sign * value for sign in (1, -1) for value in E2M1_VALUES]
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    one = torch.ones(1, 32) if format is NVFP4 else torch.full((1, 16), 127)
    packed = PackedRows(
        codes, one.to(format.scale_dtype), torch.ones(1) if format.has_global_scale else None, format
    )
    expected = [values[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert dequantize(packed).flatten().tolist() == expected


def test_dequantized_value_is_the_product_of_its_parts():
    torch.manual_seed(1)
    packed = quantize(torch.randn(64, 256) * 0.03, NVFP4, "rtn")
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], -1).flatten(1).long()
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    elements = torch.cat([magnitudes, -magnitudes])[codes]
    scales = packed.scales.double().repeat_interleave(16, dim=1)
    exact = elements * scales / packed.global_scale.double()
    # Two FP32 roundings: the division and the product.
    assert ((dequantize(packed).double() - exact).abs() <= exact.abs() * 2**-23).all()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(packed, dtype), dequantize(packed).to(dtype))


def test_e8m0_scales_span_the_whole_exponent_range():
    exponents = torch.arange(255, dtype=torch.uint8).reshape(255, 1)
    packed = PackedRows(torch.full((255, 16), 0x22, dtype=torch.uint8), exponents, None, MXFP4)
    expected = torch.tensor([[2.0 ** (e - 127)] for e in range(255)]).expand(255, 32)
    assert torch.equal(dequantize(packed), expected)


def test_shared_amax_gives_a_group_one_global_scale():
    torch.manual_seed(2)
    members = [torch.randn(16, 64) * scale for scale in (0.01, 0.2, 3.0)]
    amax = max(float(member.abs().max()) for member in members)
    scales = {quantize(member, NVFP4, "rtn", amax=amax).global_scale.item() for member in members}
    assert len(scales) == 1
    assert scales.pop() == pytest.approx(448 * 6 / amax, rel=2**-23)
    for member in members:
        assert_equals_oracle(member, NVFP4, amax)


def block_errors(weight: torch.Tensor, packed: PackedRows) -> torch.Tensor:
    difference = weight.double() - dequantize(packed).double()
    return difference.square().unflatten(1, (-1, packed.format.block_size)).sum(-1)


@FORMATS
def test_mse_is_no_worse_than_rtn_in_any_block_and_near_the_best_scale_there_is(format):
    torch.manual_seed(3)
    weight = torch.distributions.StudentT(4.0).sample((64, 256)) * 0.02
    rtn, mse = quantize(weight, format, "rtn"), quantize(weight, format, "mse")
    mse_errors = block_errors(weight, mse)
    assert (mse_errors <= block_errors(weight, rtn) * (1 + 1e-5)).all()
    every_byte = range(1, 127) if format is NVFP4 else range(1, 254)
    best = torch.full_like(mse_errors, torch.inf)
    blocks = weight.unflatten(1, (-1, format.block_size))
    for byte in every_byte:
        scales = torch.full_like(mse.scales.view(torch.uint8), byte).view(format.scale_dtype)
        steps = format_module.block_steps(scales, mse.global_scale)
        codes = rounding_module._pack(rounding_module._encode(blocks, steps).flatten(1))
        best = best.minimum(block_errors(weight, PackedRows(codes, scales, mse.global_scale, format)))
    assert best.sum() < mse_errors.sum() * (1 + 1e-9)
    assert mse_errors.sum() < best.sum() * 1.001


@pytest.mark.parametrize("smaller", [4e5, 1e6, 2e6])
def test_mse_keeps_a_block_that_is_far_below_the_maximum(smaller):
    """Its rtn scale rounds to zero from 4.6e5 times smaller on, where the smallest E4M3 scale holds it."""
    torch.manual_seed(1)
    weight = torch.randn(1, 64).clamp(-1, 1)
    weight[0, 0], weight[0, 20] = 1.0, 1.0
    weight[0, 16:32] /= smaller
    assert block_errors(weight, quantize(weight, NVFP4, "mse"))[0, 1] < weight[0, 16:32].square().sum() / 2


@pytest.mark.parametrize("rounding", ["rtn", "mse"])
def test_mxfp4_stays_finite_up_to_the_end_of_fp32(rounding):
    weight = torch.full((2, 32), torch.finfo(torch.float32).max)
    weight[1] = 2.5e38
    assert relative_error(error_sums(weight, quantize(weight, MXFP4, rounding))) < 0.3


def test_mse_maps_a_block_to_four_where_that_is_exact():
    # 0.75 and 1 are 3 and 4 with a block scale of 1/4, but 4.5 and 6 with the rtn scale of 1/6.
    weight = torch.tensor([[1.0, 0.75] * 8])
    amax = 448 * 6 / 1024  # global scale 1024: 1/4 is stored as 256, which E4M3 has
    assert relative_error(error_sums(weight, quantize(weight, NVFP4, "mse", amax))) == 0
    assert relative_error(error_sums(weight, quantize(weight, NVFP4, "rtn", amax))) > 0.05


def test_mse_lowers_the_error_of_a_normal_matrix_as_documented():
    torch.manual_seed(4)
    weight = torch.randn(512, 512)
    assert relative_error(error_sums(weight, quantize(weight, NVFP4, "rtn"))) == pytest.approx(
        0.0952, abs=3e-4
    )
    assert relative_error(error_sums(weight, quantize(weight, NVFP4, "mse"))) == pytest.approx(
        0.0813, abs=3e-4
    )


@FORMATS
@pytest.mark.parametrize("rounding", ["rtn", "mse"])
def test_result_does_not_depend_on_chunks(format, rounding, monkeypatch):
    torch.manual_seed(5)
    weight = torch.randn(23, 96)
    whole = quantize(weight, format, rounding)
    whole_sums = error_sums(weight, whole)
    monkeypatch.setattr(rounding_module, "_CHUNK_ELEMENTS", 4 * 96 + 1)
    chunked = quantize(weight, format, rounding)
    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.scales.view(torch.uint8), chunked.scales.view(torch.uint8))
    torch.testing.assert_close(error_sums(weight, chunked), whole_sums, rtol=1e-12, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU's bytes with the CPU's")
@FORMATS
@pytest.mark.parametrize("rounding", ["rtn", "mse"])
def test_gpu_makes_the_same_bytes(format, rounding):
    torch.manual_seed(6)
    weight = torch.randn(515, 2080) * torch.logspace(-6, 2, 515).unsqueeze(1)
    weight[7], weight[8, :32], weight[9] = 0.0, -0.0, 1e-40
    cpu, gpu = quantize(weight, format, rounding), quantize(weight.cuda(), format, rounding)
    assert torch.equal(gpu.codes.cpu(), cpu.codes)
    assert torch.equal(gpu.scales.cpu().view(torch.uint8), cpu.scales.view(torch.uint8))
    assert torch.equal(dequantize(gpu).cpu(), dequantize(cpu))


def test_relative_error_by_hand():
    weight = torch.tensor([[5.5, 6.0] + [0.0] * 14])  # 5.5 becomes 6
    packed = quantize(weight, NVFP4, "rtn", amax=6 * 448)
    assert relative_error(error_sums(weight, packed)) == pytest.approx(0.5 / (5.5**2 + 36) ** 0.5, rel=1e-12)


def test_tables_made_in_inference_mode_serve_training_too():
    format_module._byte_table.cache_clear()
    format_module._code_table.cache_clear()
    packed = quantize(torch.randn(4, 16), NVFP4, "rtn")
    with torch.inference_mode():
        dequantize(packed)
    x = torch.randn(2, 16, requires_grad=True)
    (x @ dequantize(packed).T).sum().backward()
    torch.testing.assert_close(x.grad, dequantize(packed).sum(0).expand(2, 16))


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.ones(2, 24), {}, "input width 24 is not a multiple of 16"),
        (torch.ones(2, 2, 16), {}, "must be a floating-point matrix"),
        (torch.ones(0, 16), {}, "must be a floating-point matrix"),
        (torch.ones(2, 16, dtype=torch.int8), {}, "must be a floating-point matrix"),
        (torch.tensor([[float("nan")] + [1.0] * 15]), {}, "NaN or Inf"),
        (torch.tensor([[float("-inf")] + [1.0] * 15]), {}, "NaN or Inf"),
        (torch.ones(2, 16), {"amax": 0.5}, "pass the largest of the group"),
        (torch.ones(2, 16), {"rounding": "gptq"}, "choose one of rtn, mse"),
    ],
)
def test_refuses_what_cannot_be_quantized(weight, options, message):
    with pytest.raises(QeRLError, match=message):
        quantize(weight, NVFP4, **{"rounding": "rtn", **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(4, 16)}, "must be a uint8 matrix"),
        ({"scales": torch.zeros(4, 3).to(torch.float8_e4m3fn)}, r"4 x 32 needs \[4, 2\]"),
        ({"scales": torch.zeros(4, 2)}, "needs torch.float8_e4m3fn"),
        ({"global_scale": None}, "needs a global scale"),
        ({"global_scale": torch.ones(1, dtype=torch.bfloat16)}, "must be float32"),
        ({"format": MXFP4}, r"needs \[4, 1\]"),
    ],
)
def test_refuses_parts_that_do_not_fit(change, message):
    packed = quantize(torch.randn(4, 32), NVFP4, "rtn")
    with pytest.raises(QeRLError, match=message):
        PackedRows(**{**vars(packed), **change})
