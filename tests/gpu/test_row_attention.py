"""Attention of the update along the segments of a packed row, against float64."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.kernels import flash
from qerl.update import attention
from qerl.update.attention import branch_attention
from qerl.update.packed_row import Branches, RowBuilder

GPU = torch.device("cuda", 0)
HEADS = [(28, 4), (8, 8), (8, 2)]
"""Heads of queries and of keys: of 7B, one for one, and four for one."""


def segments_of(groups: list[tuple[int, list[int]]]) -> Branches:
    """A packed row of groups: (tokens that all share, tokens of each branch)."""
    builder = RowBuilder()
    for shared, branches in groups:
        builder.begin_group(torch.ones(shared, dtype=torch.long))
        for sample, length in enumerate(branches):
            builder.add_branch(sample, *torch.ones(2, length, dtype=torch.long))
    return builder.finish(GPU).branches


def drawn() -> Branches:
    """Three prompts with samples of drawn lengths, some at the edges of blocks, and one without a prompt."""
    draw = lambda low, high, count: torch.randint(low, high, (count,)).tolist()  # noqa: E731
    groups = [(shared, draw(700, 1300, 6)) for shared in draw(100, 500, 3)]
    return segments_of([*groups, (0, [1, 129]), (64, [63, 65])])


class Inputs:
    """Fresh random queries, keys, values and output gradient; q, k and v are one tensor, as in a layer."""

    def __init__(self, heads: tuple[int, int], branches: Branches) -> None:
        self.branches, length = branches, int(branches.query_offsets_N[-1])
        make = lambda count: torch.randn(1, length, count, 128, device=GPU, dtype=torch.bfloat16)  # noqa: E731
        queries, keys = heads
        self.widths = queries, keys, keys
        self.qkv, self.dout = make(sum(self.widths)), make(queries)

    def run(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients of q, k and v, each [L, heads, 128]."""
        leaf = self.qkv.clone().requires_grad_()
        rows = (x.transpose(1, 2) for x in leaf.split(self.widths, dim=2))
        out, _ = branch_attention(torch.nn.Module(), *rows, None, branches=self.branches, scaling=0.1)
        out.backward(self.dout)
        return (out.detach()[0], *leaf.grad[0].split(self.widths, dim=1))

    def exact(self) -> tuple[torch.Tensor, ...]:
        """The same in float64, segment by segment."""
        q, k, v = (x[0].double() for x in self.qkv.split(self.widths, dim=2))
        dout = self.dout[0].double()
        out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
        group, b = q.shape[1] // k.shape[1], self.branches
        ends = zip(pairwise(b.query_offsets_N.tolist()), pairwise(b.key_offsets_N.tolist()), strict=True)
        for (start, stop), (first, last) in ends:
            keys = b.keys_M[first:last]
            leaves = [x.requires_grad_() for x in (q[start:stop].clone(), k[keys], v[keys])]
            wide = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
            scores = 0.1 * torch.einsum("lhe,mhe->hlm", leaves[0], next(wide))
            n, m = scores.shape[1:]
            unseen = torch.ones(n, m, dtype=torch.bool, device=GPU).triu(1 + m - n)
            weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            out_LHE = torch.einsum("hlm,mhe->lhe", weights, next(wide))
            out[start:stop] = out_LHE.detach()
            dq[start:stop], of_keys, of_values = torch.autograd.grad(out_LHE, leaves, dout[start:stop])
            dk.index_add_(0, keys, of_keys)
            dv.index_add_(0, keys, of_values)
        return out, dq, dk, dv


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    assert truth.norm() > 0
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.fixture(params=["FlashAttention-2", "FlashAttention-4"])
def kernel(request, monkeypatch):
    """Each of the kernels for long rows; that of the package where it may be used."""
    if request.param == "FlashAttention-2":
        monkeypatch.setattr(flash, "takes_flash4", lambda q_LHE, extents: False)
    elif why_not := flash.why_not_flash4(GPU):
        pytest.skip(why_not)
    return request.param


@pytest.mark.parametrize("heads", HEADS)
def test_gradients_against_fp64_and_their_bits(heads, kernel) -> None:
    inputs = Inputs(heads, drawn())
    extents = attention._extents(inputs.branches)
    queries_LHE = inputs.qkv[0, :, : inputs.widths[0]]
    assert flash.takes_flash4(queries_LHE, extents) == (kernel == "FlashAttention-4")
    first, truth = inputs.run(), inputs.exact()
    for _ in range(4):
        assert all(torch.equal(one, two) for one, two in zip(first, inputs.run(), strict=True))
    for name, found, wanted in zip("odkv", first, truth, strict=True):
        gap = error(found, wanted)
        print(f"{heads} {name}: {gap:.2e}")
        assert gap < (5e-3 if name == "o" else 1e-2)
