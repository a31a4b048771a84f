"""Attention of a packed row: its segments, with a dense kernel, and what the kernels of a GPU are told."""

import threading
from itertools import pairwise

import pytest
import torch

from qerl.kernels.flash import _deterministic, segments_in_backward
from qerl.update import attention
from qerl.update.packed_row import RowBuilder


def copies(segments: int, heads: int, cores: int = 132) -> int:
    """FP32 copies of the queries' gradient that FlashAttention's deterministic backward makes."""
    return -(-cores // (segments * heads))


@pytest.mark.parametrize("heads", [1, 8, 9, 28, 64])
@pytest.mark.parametrize("blocks", [1, 3, 6, 128])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_copies_that_nothing_is_written_to_are_left_out(count, heads, blocks):
    """As many blocks are computed side by side as before, in no more memory."""
    told = segments_in_backward(count, heads, blocks, 132)
    before, after = copies(count, heads), copies(told, heads)
    assert min(after, blocks) == min(before, blocks)
    most = next((n for n in range(200, 0, -1) if copies(n, heads) >= blocks), 1)
    assert after == min(before, copies(most, heads))
    rows = blocks * 128  # of queries; each segment is padded by 128
    assert after * (rows + 128 * told) <= before * (rows + 128 * count)


class Dense:
    """FlashAttention's calls, each segment by itself and dense."""

    def forward(self, q_LHE, k_MGE, v_MGE, extents, scale):
        ends, outs = [pairwise(x) for x in (o.tolist() for o in extents[:2])], []
        for (a, b), (c, d) in zip(*ends, strict=True):
            group = q_LHE.shape[1] // k_MGE.shape[1]
            k, v = (x[c:d].repeat_interleave(group, dim=1) for x in (k_MGE, v_MGE))
            scores = torch.einsum("lhe,mhe->hlm", q_LHE[a:b], k) * scale
            unseen = torch.ones(b - a, d - c, dtype=torch.bool).triu(1 + (d - c) - (b - a))
            outs.append(torch.einsum("hlm,mhe->lhe", scores.masked_fill(unseen, -torch.inf).softmax(-1), v))
        return (torch.cat(outs),)

    def backward(self, dout_LHE, inputs, outputs, extents, scale):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            (out_LHE,) = self.forward(*leaves, extents, scale)
        assert torch.equal(out_LHE, outputs[0])
        return torch.autograd.grad(out_LHE, leaves, dout_LHE)


def test_threads_do_not_undo_each_others_switch():
    """A second backward pass begins while a first one runs, and ends after it."""
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def first():
        with _deterministic():
            inside.set()
            go_on.wait(10)
            seen.append(torch.are_deterministic_algorithms_enabled())

    def second():
        with _deterministic():
            inside.set()
            seen.append(torch.are_deterministic_algorithms_enabled())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    inside.clear()
    threads[1].start()
    assert not inside.wait(0.1)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert seen == [True, True] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("scale", [None, 0.3])
def test_segments_against_the_dense_mask(monkeypatch, scale):
    monkeypatch.setattr(attention.flash, "forward", Dense().forward)
    monkeypatch.setattr(attention.flash, "backward", Dense().backward)
    builder = RowBuilder()
    for shared, branches in ((5, [4, 1, 7]), (0, [3, 2]), (2, [6])):
        builder.begin_group(torch.ones(shared, dtype=torch.long))
        for sample, length in enumerate(branches):
            builder.add_branch(sample, *torch.ones(2, length, dtype=torch.long))
    row = builder.finish(torch.device("cpu"))
    length = row.input_ids_1L.shape[1]
    q, k, v = (
        torch.randn(1, heads, length, 16, dtype=torch.double, requires_grad=True) for heads in (6, 2, 2)
    )
    out, _ = attention.branch_attention(
        torch.nn.Module(), q, k, v, None, branches=row.branches, scaling=scale
    )
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    index = torch.arange(length)
    seen = row.mask_function(lambda _b, _h, query, key: key <= query)(0, 0, index[:, None], index[None, :])
    truth = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, truth)
    for one, other in zip(found, torch.autograd.grad(truth, (q, k, v), dout), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)  # copies of a prompt meet in FP32
