"""The product of packed weights with few tokens, and the parts of x A^T that it adds, against float64.

Every case draws fresh random inputs. The product needs a GPU; parts are added in Triton's interpreter too.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench.kernels import packed_error, packed_tilings
from bench.random_weights import random_tiles
from qerl.kernels.cards import card_of
from qerl.kernels.needs import obstacles
from qerl.kernels.weights.add_parts import add_parts
from qerl.kernels.weights.nvfp4 import tiling_for
from qerl.kernels.weights.packed_gemm import (
    MAX_TOKENS,
    Ahead,
    Tiling,
    packed_gemm,
    padded_tokens,
    partial_sums,
    slices,
    sums_dtype,
    to_operand,
)
from qerl.kernels.weights.product import LoraSum
from tests.support.kernels import DEVICE, GPU, as_rows, error, half, poison


@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 50, 64, 65, 100, 128])
@pytest.mark.parametrize("rows,width", [(128, 64), (384, 192), (640, 2368), (2176, 512), (4160, 9216)])
def test_packed_gemm(tokens, rows, width):
    """Shapes with fewer tiles than multiprocessors, odd ones, row tiles that reach beyond the weight, and one
    of which each block uses its stages again."""
    if not GPU or obstacles():
        pytest.skip("needs a GPU on which the kernels run")
    weight, x = random_tiles(rows, width), torch.randn(tokens, width, device=DEVICE).bfloat16()
    assert torch.equal(as_rows(to_operand(x), tokens, width, padded_tokens(tokens)), x)
    card = card_of(weight.codes.device)
    room = card.shared_bytes - 1024
    if card.math == "wgmma":
        others = {Tiling(4, 1, 4, 2), Tiling(2, 2, 2, 2), Tiling(2, 2, 2, 2, cluster=2)}
        if tokens <= 16:
            others |= {Tiling(2, 2, 4, 4, sets=2), Tiling(4, 2, 4, 2, sets=4, adder=True)}
    else:  # teams of two and of four warps, that share K or do not
        others = {Tiling(2, 1, 2, 1, room)}
        if tokens > 16:
            others |= {Tiling(4, 2, 2, 1, room, 2), Tiling(2, 2, 1, 1, room, 2)}
    chosen = {tiling_for(tokens, card, shape) for shape in ((rows, width), (1 << 16, 1 << 16))}
    for tiling in chosen | others:
        if tiling in chosen or tokens <= 64 or tiling.teams == tiling.row_groups == 2:
            assert packed_error(x, weight, tiling) < 1e-5, tiling


@pytest.mark.parametrize("tokens", [129, 200, 256, 300, 512])
@pytest.mark.parametrize("rows,width", [(128, 64), (384, 192), (640, 2368), (2176, 512), (4160, 9216)])
def test_packed_gemm_of_many_tokens(tokens, rows, width):
    """A slice and two of them, with room beyond the tokens; sums are rounded to bf16."""
    if not GPU or obstacles():
        pytest.skip("needs a GPU on which the kernels run")
    card = card_of(torch.device(DEVICE))
    if tokens > MAX_TOKENS[card.math]:
        pytest.skip("products of so many tokens are those of another package here")
    weight, x = random_tiles(rows, width), torch.randn(tokens, width, device=DEVICE).bfloat16()
    assert torch.equal(as_rows(to_operand(x), tokens, width, padded_tokens(tokens)), x)
    for tiling in {tiling_for(tokens, card, (rows, width)), *packed_tilings(tokens, card)}:
        assert packed_error(x, weight, tiling) < 2.5e-3, tiling


@pytest.mark.parametrize("tokens", [8, 64])
def test_packed_gemm_with_something_ahead(tokens):
    """What is asked of the cache for later kernels, of other sizes, changes no number of this one."""
    if not GPU or obstacles():
        pytest.skip("needs a GPU on which the kernels run")
    weight, x = random_tiles(640, 2368), torch.randn(tokens, 2368, device=DEVICE).bfloat16()
    tiling = tiling_for(tokens, card_of(weight.codes.device), weight.shape)
    most, _ = partial_sums(tiling, weight.shape, weight.codes.device, slices(tokens))
    found = [torch.zeros(most, tokens, 640, device=DEVICE) for _ in range(2)]
    b, a = half(640, 16), half(33, 128)
    packed_gemm(to_operand(x), weight, found[0], tiling)
    packed_gemm(to_operand(x), weight, found[1], tiling, ahead=Ahead(b, a, random_tiles(2176, 512)))
    assert found[0].any() and torch.equal(*found)


@pytest.mark.parametrize("count,tokens,rank", [(1, 1, 16), (28, 8, 96), (148, 5, 32), (300, 3, 16)])
def test_parts_are_added(count, tokens, rank):
    parts, found = torch.randn(count, tokens, rank, device=DEVICE), poison(tokens, rank)
    add_parts(parts, found)
    assert error(found, parts.double().sum(0)) < 1e-6


@pytest.mark.parametrize(
    "count,tokens,rank",
    [(1, 1, 16), (28, 8, 96), (148, 64, 32), (56, 13, 768), (28, 128, 96), (148, 256, 32), (28, 512, 96)],
)
def test_a_product_adds_parts(count, tokens, rank):
    """With a weight for few blocks and with one for many; always the same sum, and the same product."""
    if not GPU or obstacles():
        pytest.skip("needs a GPU on which the kernels run")
    if tokens > MAX_TOKENS[card_of(torch.device(DEVICE)).math]:
        pytest.skip("products of so many tokens are those of another package here")
    parts = torch.randn(count, tokens, rank, device=DEVICE)
    for rows, width in ((128, 64), (2176, 512)):
        weight, x_TK = random_tiles(rows, width), torch.randn(tokens, width, device=DEVICE).bfloat16()
        x = to_operand(x_TK)
        tiling = tiling_for(tokens, card_of(weight.codes.device), (rows, width))
        most, _ = partial_sums(tiling, (rows, width), x.device, slices(tokens))
        shape, dtype = (most, tokens, rows), sums_dtype(tokens)
        plain, out, again = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(3))
        found, second = poison(tokens, rank), poison(tokens, rank)
        packed_gemm(x, weight, plain, tiling)
        packed_gemm(x, weight, out, tiling, LoraSum(parts, found))
        packed_gemm(x, weight, again, tiling, LoraSum(parts, second))
        assert error(found, parts.double().sum(0)) < 1e-6
        assert torch.equal(found, second) and torch.equal(out, plain) and torch.equal(again, plain)
