"""FlashAttention-4 in the update: against float64, against FlashAttention-2, and what it compiles when."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.kernels.flash import choice, flash_for, why_not_flash4
from qerl.kernels.flash.flash2 import Flash2
from qerl.update import attention
from qerl.update.attention import branch_attention
from qerl.update.driver import LossDriver
from qerl.update.joined_row import Branches, RowBuilder
from tests.update.test_loss_driver import VOCABULARY, samples

GPU = torch.device("cuda", 0)
WHY_NOT = why_not_flash4(128, torch.bfloat16, GPU)
needs_flash4 = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
HEADS = [(28, 4), (8, 8), (8, 2)]
"""Heads of queries and of keys: of 7B, one for one, and four for one."""


def stretches_of(groups: list[tuple[int, list[int]]]) -> Branches:
    """A joined row of groups: (tokens that all share, tokens of each branch)."""
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
    return stretches_of([*groups, (0, [1, 129]), (64, [63, 65])])


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
        """The same in float64, stretch by stretch."""
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


def takes_flash4(inputs: Inputs) -> bool:
    return not isinstance(
        flash_for(inputs.qkv[0, :, : inputs.widths[0]], attention._extents(inputs.branches)), Flash2
    )


def only_flash2(monkeypatch) -> None:
    monkeypatch.setattr(attention, "flash_for", lambda q_LHE, extents: Flash2())


@needs_flash4
@pytest.mark.parametrize("heads", HEADS)
def test_gradients_against_fp64_and_their_bits(monkeypatch, heads) -> None:
    inputs = Inputs(heads, drawn())
    assert takes_flash4(inputs)
    first, truth = inputs.run(), inputs.exact()
    for _ in range(4):
        assert all(torch.equal(one, two) for one, two in zip(first, inputs.run(), strict=True))
    only_flash2(monkeypatch)
    for name, found, other, wanted in zip("odkv", first, inputs.run(), truth, strict=True):
        gaps = error(found, wanted), error(other, wanted)
        print(f"{heads} {name}: {gaps[0]:.2e}, FlashAttention-2 {gaps[1]:.2e}")
        assert gaps[0] < (5e-3 if name == "o" else 1e-2) and gaps[0] < 1.05 * gaps[1]


@needs_flash4
def test_one_sample_of_131072_tokens_equals_flash_attention_2(monkeypatch) -> None:
    inputs = Inputs((28, 4), stretches_of([(255, [131072])]))
    assert takes_flash4(inputs)
    found = inputs.run()
    only_flash2(monkeypatch)
    gaps = [error(one, two) for one, two in zip(found, inputs.run(), strict=True)]
    print("131072 tokens:", *(f"{gap:.2e}" for gap in gaps))
    assert max(gaps) < 1e-2


@needs_flash4
@pytest.mark.parametrize("heads", HEADS)
def test_backward_takes_no_more_memory_than_that_of_flash_attention_2(monkeypatch, heads) -> None:
    """The plan counts on it (`qerl.plan.parts.Activations.backward`)."""
    inputs, peaks = Inputs(heads, drawn()), []
    for _ in range(2):
        inputs.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs.run()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 1e6)
        only_flash2(monkeypatch)
    print(f"{heads}: {peaks[0]:.0f} MB, FlashAttention-2 {peaks[1]:.0f}")
    assert peaks[0] <= peaks[1]


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 448, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 128,
}  # fmt: skip
LONG = ((200, (800,) * 14),)


def gradients(driver: LossDriver, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    driver.forward_backward(samples("cross_entropy", LONG), "cross_entropy")
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compiled() -> list[int]:
    """How many kernels each part of the package has compiled."""
    from flash_attn.cute import interface

    parts = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
    return [len(getattr(interface, part).compile_cache.cache) for part in parts]


@needs_flash4
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_of_a_model_compiles_nothing(nvfp4_llama, monkeypatch, recomputed: bool) -> None:
    """Nor does one of other lengths; gradients have the same bits twice, and are FlashAttention-2's."""
    from flash_attn.cute import interface

    for part in ("_flash_attn_fwd", "_flash_attn_bwd"):
        getattr(interface, part).compile_cache.clear()
    model = nvfp4_llama(**SIZES)
    if recomputed:
        model.gradient_checkpointing_enable()
    driver = LossDriver(model)
    assert "attention kernel FlashAttention-4 (" in driver.update_path.sentence()
    before = compiled()
    assert before[:2] == [1, 1]
    found, again = gradients(driver, model), gradients(driver, model)
    assert compiled() == before
    assert all(torch.equal(found[name], again[name]) for name in found)
    only_flash2(monkeypatch)
    plain = gradients(driver, model)
    assert any(not torch.equal(found[name], plain[name]) for name in found), "FlashAttention-4 was not called"
    worst = max(error(found[name], plain[name]) for name in found)
    print(f"gradients {worst:.1e} apart")
    assert worst < 5e-2


def test_without_the_package_a_long_row_gets_flash_attention_2(monkeypatch) -> None:
    why_not_flash4.cache_clear()
    monkeypatch.setattr(choice, "why_not_installed", lambda: "flash-attn-4 is not installed")
    try:
        inputs = Inputs((8, 2), drawn())
        assert not takes_flash4(inputs)
        for found, wanted in zip(inputs.run(), inputs.exact(), strict=True):
            assert error(found, wanted) < 1e-2
    finally:
        why_not_flash4.cache_clear()
