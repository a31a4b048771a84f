"""NVFP4 products of many tokens where quack-kernels has no kernel: the weight is dequantised first."""

import pytest
import torch

from bench.products import dequantised
from bench.random_weights import random_tiles
from qerl.kernels.cards import CARDS
from qerl.kernels.weights import nvfp4
from qerl.kernels.weights.packed_gemm import MAX_TOKENS
from qerl.kernels.weights.tiles import TILE


@pytest.fixture
def without_quack(monkeypatch):
    """No package for many tokens, and the GPU's dequantisation on the CPU."""

    def dequantize_tiles(tiles, global_scale, out_NK):
        out_NK.copy_(dequantised(tiles) / global_scale)

    monkeypatch.setattr(nvfp4, "quack_runs", lambda device: False)
    monkeypatch.setattr(nvfp4, "dequantize_tiles", dequantize_tiles)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_many_tokens_are_multiplied_without_quack(without_quack, monkeypatch, capability):
    card = CARDS[capability]
    monkeypatch.setattr(nvfp4, "card_of", lambda device: card)
    torch.manual_seed(0)
    stack = nvfp4.NVFP4Stack(random_tiles(128, 192, device="cpu"), torch.tensor([0.5, 3.0]))
    most = MAX_TOKENS[card.math]
    assert stack.padded_tokens(most) == most and stack.padded_tokens(most + 1) == 0
    tokens = most + 2
    x_TK = torch.randn(tokens, 192).bfloat16()
    scratch = torch.empty(stack.scratch_bytes(tokens), dtype=torch.uint8)
    product = stack.multiply(x_TK, tokens, scratch)
    assert product.out_STN.shape == (1, tokens, 128) and product.partials_G is None
    scale_N = product.scale_L.repeat_interleave(TILE)
    expected = x_TK.double() @ dequantised(stack.tiles).T * scale_N
    torch.testing.assert_close(product.out_STN[0].double() * scale_N, expected, rtol=1e-2, atol=1e-1)


def test_a_card_that_quack_knows_is_told_once_that_it_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(nvfp4, "has_module", lambda name: False)
    device, other = torch.device("cuda", 14), torch.device("cuda", 15)
    cards = {device: CARDS[9, 0], other: CARDS[8, 0]}
    monkeypatch.setattr(nvfp4, "card_of", cards.get)
    nvfp4.quack_runs.cache_clear()
    assert not any(nvfp4.quack_runs(each) for each in (device, device, other))
    assert ["passes of more than 512 tokens" in record.message for record in caplog.records] == [True]
    nvfp4.quack_runs.cache_clear()
