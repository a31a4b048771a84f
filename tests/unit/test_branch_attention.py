"""Attention of a joined row: what its kernel is told, as far as a CPU can tell."""

import pytest

from qerl.update.attention import stretches_in_backward


def copies(stretches: int, heads: int, cores: int = 132) -> int:
    """FP32 copies of the queries' gradient that FlashAttention's deterministic backward makes."""
    return -(-cores // (stretches * heads))


@pytest.mark.parametrize("heads", [1, 8, 9, 28, 64])
@pytest.mark.parametrize("blocks", [1, 3, 6, 128])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_copies_that_nothing_is_written_to_are_left_out(count, heads, blocks):
    """As many blocks are computed side by side as before, in no more memory."""
    told = stretches_in_backward(count, heads, blocks, 132)
    before, after = copies(count, heads), copies(told, heads)
    assert min(after, blocks) == min(before, blocks)
    most = next((n for n in range(200, 0, -1) if copies(n, heads) >= blocks), 1)
    assert after == min(before, copies(most, heads))
    rows = blocks * 128  # of queries; each stretch is padded by 128
    assert after * (rows + 128 * told) <= before * (rows + 128 * count)
