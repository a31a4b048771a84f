"""Attention of the update along the segments of a packed row, against float64: each kernel, with windows and
sinks, and heads of other sizes."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.kernels import flash
from qerl.update import attention
from qerl.update.attention import branch_attention
from qerl.update.packed_row import Branches, RowBuilder
from tests.support import segments

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

    def __init__(self, heads: tuple[int, int], branches: Branches, size: int = 128, **settings) -> None:
        self.branches, length = branches, int(branches.query_offsets_N[-1])
        make = lambda count: torch.randn(1, length, count, size, device=GPU, dtype=torch.bfloat16)  # noqa: E731
        queries, keys = heads
        self.widths, self.settings = (queries, keys, keys), {"scaling": 0.1, **settings}
        self.qkv, self.dout = make(sum(self.widths)), make(queries)

    def run(self, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        """Output and gradients of q, k and v, each [L, heads, size]."""
        leaf = self.qkv.to(dtype, copy=True).requires_grad_()
        rows = (x.transpose(1, 2) for x in leaf.split(self.widths, dim=2))
        out, _ = branch_attention(torch.nn.Module(), *rows, None, branches=self.branches, **self.settings)
        out.backward(self.dout.to(dtype))
        return (out.detach()[0], *leaf.grad[0].split(self.widths, dim=1))

    def exact(self, monkeypatch) -> tuple[torch.Tensor, ...]:
        """The same in float64, segment by segment and dense."""
        with monkeypatch.context() as dense:
            segments.use_dense_segments(dense)
            return self.run(torch.float64)

    def check(self, monkeypatch, label: object) -> None:
        """The output, and gradients that are the same bits each time."""
        first, truth = self.run(), self.exact(monkeypatch)
        for _ in range(4):
            assert all(torch.equal(one, two) for one, two in zip(first, self.run(), strict=True))
        for name, found, wanted in zip("odkv", first, truth, strict=True):
            gap = error(found, wanted)
            print(f"{label} {name}: {gap:.2e}")
            assert gap < (5e-3 if name == "o" else 1e-2)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    assert truth.norm() > 0
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@pytest.fixture(params=["FlashAttention-2", "FlashAttention-4"])
def kernel(request, monkeypatch):
    """Each of the kernels for long rows; that of the package where it may be used."""
    if request.param == "FlashAttention-2":
        monkeypatch.setattr(flash, "takes_flash4", lambda q_LHE, extents, scoring: False)
    elif why_not := flash.why_not_flash4(GPU):
        pytest.skip(why_not)
    return request.param


@pytest.mark.parametrize("heads", HEADS)
def test_gradients_against_fp64_and_their_bits(heads, kernel, monkeypatch) -> None:
    inputs = Inputs(heads, drawn())
    extents, queries_LHE = attention._extents(inputs.branches), inputs.qkv[0, :, : inputs.widths[0]]
    found = flash.takes_flash4(queries_LHE, extents, flash.Scoring(0.1))
    assert found == (kernel == "FlashAttention-4")
    inputs.check(monkeypatch, heads)


SHORT = [(70, [200, 33, 1, 130]), (0, [65, 64, 5]), (300, [20])]


@pytest.mark.parametrize("window", [None, 1, 2, 40, 64, 129, 1024])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 128), ((20, 4), 128), ((4, 1), 256), ((8, 8), 64)])
def test_windows_and_sinks(window, sinks, heads, size, monkeypatch) -> None:
    """Windows that end in branches, in their prompts, and that reach all; in short rows and in long ones."""
    if window == 1 and not sinks:
        pytest.skip("queries and keys have no gradient")
    s_aux = torch.randn(heads[0], device=GPU).bfloat16() if sinks else None
    rows = [segments_of(SHORT), segments_of([(2, [90])])] + [drawn()] * (window in (64, 1024))
    for branches in rows:
        inputs = Inputs(heads, branches, size, sliding_window=window, s_aux=s_aux)
        inputs.check(monkeypatch, (window, sinks, heads, size))


def test_long_rows_with_windows_or_sinks_stay_with_flash_attention_2() -> None:
    q, extents = torch.empty(16384, 8, 128, dtype=torch.bfloat16), attention._extents(segments_of([(0, [9])]))
    for scoring in (flash.Scoring(0.1, window=4096), flash.Scoring(0.1, has_sinks=True)):
        assert not flash.takes_flash4(q, extents, scoring)


@pytest.mark.parametrize("heads", [(8, 1), (16, 2), (4, 4)])
@pytest.mark.parametrize("size", [512, 320])
def test_heads_above_256(heads, size, monkeypatch) -> None:
    for branches in (segments_of(SHORT), segments_of([(2, [90])]), segments_of([(0, [1, 5])])):
        Inputs(heads, branches, size).check(monkeypatch, (heads, size))
