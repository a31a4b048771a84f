"""The kernel that draws, in Triton's interpreter: adversarial weights and targets, and filters in pieces.

Shapes: T rows, V vocabulary, M tokens a row may generate.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

from qerl.rollout.paged.draw import Draw

from qerl.kernels.decode import draw as kernel
from qerl.kernels.decode import leave_out as leaving
from qerl.kernels.decode.draw import RowState
from qerl.kernels.decode.leave_out import NEVER, leave_out
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged import rows as placing
from qerl.rollout.sampling import truncate
from qerl.rollout.sequence import Prompt, Sequence

BLOCK = 16


def rows_of(uniform_T):
    """Rows that may generate one token each."""
    rows = len(uniform_T)

    def integers(*shape, value=0):
        return torch.full(shape, value, dtype=torch.int32)

    return RowState(
        token_T=integers(rows), position_T=integers(rows), slot_T=integers(rows), limit_2T=integers(2, rows),
        own_table_TB=integers(rows, 1), generated_T=integers(rows), max_new_T=integers(rows, value=1),
        done_T=integers(rows), uniform_TM=uniform_T[:, None].contiguous(),
        out_token_TM=integers(rows, 1, value=-1), out_stats_2TM=torch.zeros(2, rows, 1),
    )  # fmt: skip


def draw(logits_TV, uniform_T, **filtered):
    rows, vocabulary = logits_TV.shape
    state = rows_of(uniform_T)
    kernel.draw_token(
        logits_TV, torch.ones(1, rows), torch.empty(3, rows, -(-vocabulary // kernel.BLOCK_V)),
        torch.empty(0, dtype=torch.int32), state, page=64, width=1, eps=0.0, temperature=1.0, **filtered,
    )  # fmt: skip
    return state.out_token_TM[:, 0].long(), state.out_stats_2TM[:, :, 0]


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch):
    """Targets between the two orders of summation: a scan says one block, a sum goes below zero in it."""
    monkeypatch.setattr(kernel, "BLOCK_V", BLOCK)
    blocks = 32
    logits_BC = torch.full((blocks, BLOCK), NEVER)
    logits_BC[:, 5] = torch.randn(blocks, generator=torch.Generator().manual_seed(0))
    logits_BC[::7] = NEVER
    weights = np.exp((logits_BC[:, 5] - logits_BC.max()).numpy())
    scan, total = np.cumsum(weights), np.sum(weights)
    sums = np.stack([np.sum(np.where(np.arange(blocks) <= block, weights, 0)) for block in range(blocks)])
    near = scan / total
    candidates = np.concatenate([near, np.nextafter(near, 0), np.nextafter(near, 2), [0.0, 1.0]])
    candidates = candidates.astype(np.float32)
    targets = candidates * total
    negative = ((scan <= targets[:, None]) & (sums > targets[:, None])).any(1) & (candidates < 1)
    assert negative.any()
    uniform_T = torch.tensor([*candidates[negative][:2], 1.0])
    drawn_T, stats_2T = draw(logits_BC.flatten().repeat(len(uniform_T), 1), uniform_T)
    assert (logits_BC.flatten()[drawn_T] > NEVER).all()
    assert (stats_2T[0] > -100).all()
    ends = torch.from_numpy(near)[drawn_T // BLOCK]
    assert (
        (ends + 1e-6 >= uniform_T)
        & (ends - torch.from_numpy(weights / total)[drawn_T // BLOCK] - 1e-6 <= uniform_T)
    ).all()


def test_rounding_draws_no_token_that_weighs_next_to_nothing(monkeypatch):
    """By uniforms at the ends of blocks, where a scan in FP32 steps to a token of 1e-15, and just below 1."""
    monkeypatch.setattr(kernel, "BLOCK_V", 64)
    generator = torch.Generator().manual_seed(1)
    logits_V = 8 * torch.randn(761, generator=generator)
    p_V = logits_V.double().softmax(0)
    ends = p_V.cumsum(0)[63::64].numpy().astype(np.float32)
    steps = np.arange(-3, 4) * np.spacing(ends)[:, None]
    uniform_T = torch.from_numpy(np.append(ends[:, None] + steps, 1 - np.float32([2, 1]) * 2**-24))
    uniform_T = uniform_T[uniform_T < 1].float()
    drawn_T, _ = draw(logits_V.repeat(len(uniform_T), 1), uniform_T)
    assert p_V[drawn_T].min() > 1e-11
    before_T, after_T = (p_V.cumsum(0) - p_V)[drawn_T], p_V.cumsum(0)[drawn_T]
    assert ((before_T - 1e-6 <= uniform_T) & (uniform_T <= after_T + 1e-6)).all()


def test_a_uniform_just_below_one_stays_below_it_in_fp32(monkeypatch):
    near = torch.full((1, 2), 1 - 2.0**-26, dtype=torch.float64)
    monkeypatch.setattr(placing, "uniform_streams", lambda *_: near)
    rows = placing.Rows(count=1, max_new=3, table_width=1, tile_tokens=1, device=torch.device("cpu"))
    rows.place([Sequence(0, Prompt(0, [5], blocks=[]), 0, max_tokens=2, blocks=[0], row=0)])
    logits_TV = torch.full((1, 9000), -34.0)
    logits_TV[0, 1] = 0.0  # all tokens behind it weigh 2e-11 together
    drawn_T, _ = draw(logits_TV, rows.state.uniform_TM[:, 0])
    assert rows.state.uniform_TM.max() == 1 - 2.0**-24 and drawn_T.tolist() == [1]


FILTERS = [
    {"top_p": 0.7}, {"top_p": 0.02}, {"top_p": 0.999}, {"min_p": 0.2}, {"min_p": 1.0},
    {"top_p": 0.9, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.5, 2.0, 20.0])
def test_the_same_tokens_are_left_out_as_by_a_sort(monkeypatch, filters, spread):
    """In FP64 by a sort, in FP32 by a search, over flat rows and peaked ones, in several blocks."""
    monkeypatch.setattr(leaving, "BLOCK_V", 64)
    rows, vocabulary, temperature, eps = 6, 1000, 0.8, 1e-5
    generator = torch.Generator().manual_seed(2)
    logits_TV = spread * torch.randn(rows, vocabulary, generator=generator)
    squares_PT = 32 * torch.rand(2, rows, generator=generator) + 1
    rms_T1 = torch.rsqrt(squares_PT.double().sum(0) / 64 + eps)[:, None]
    full_TV = (logits_TV.double() * rms_T1 / temperature).log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=temperature, **filters)
    wanted_TV = truncate(full_TV, params)
    found_TV = logits_TV.clone()
    limits = {"top_p": params.top_p, "min_p": params.min_p}
    entropy_T = leave_out(found_TV, squares_PT, width=64, eps=eps, temperature=temperature, **limits)
    kept_TV = wanted_TV > -torch.inf
    assert torch.equal(found_TV > NEVER, kept_TV)
    assert 0 < kept_TV.sum() < rows * vocabulary
    torch.testing.assert_close(found_TV[kept_TV].double(), wanted_TV[kept_TV], rtol=1e-5, atol=1e-5)
    truth = -torch.linalg.vecdot(full_TV.exp(), full_TV)
    torch.testing.assert_close(entropy_T.double(), truth, rtol=1e-5, atol=1e-5)


def test_the_search_tells_neighbouring_numbers_apart():
    """Distances of 8 from the largest logit that differ in their last bit."""
    logits_TV = 8.0 + torch.arange(64.0)[None] * 2**-20
    logits_TV[0, 0] = 16.0
    p = logits_TV.double().softmax(-1)[0]
    for kept in (1, 2, 33, 64):
        limit = float(1 - p[1 : 65 - kept].sum() - p[1] / 2)
        found_TV = logits_TV.clone()
        leave_out(found_TV, torch.ones(1, 1), width=1, eps=0.0, temperature=1.0, top_p=limit, min_p=0.0)
        assert (found_TV[0] > NEVER).tolist() == [True] + [i > 64 - kept for i in range(1, 64)]


def test_equal_logits_are_kept_together():
    logits_TV = torch.tensor([[1.0, 0.0, 0.0, 0.0, -3.0]])
    p = logits_TV.softmax(-1)[0]
    limit = float(p[0] + p[1] / 2)  # a sort would keep one of the three
    leave_out(logits_TV, torch.ones(1, 1), width=1, eps=0.0, temperature=1.0, top_p=limit, min_p=0.0)
    assert (logits_TV[0] > NEVER).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5}]
)
def test_filters_take_a_few_rows_at_a_time(filters):
    """Log-probability and entropy are those before the filters; a row of NaN ends with a reason."""
    generator = torch.Generator().manual_seed(1)
    rows, vocabulary = 5, 61
    logits_TV = 2 * torch.randn(rows, vocabulary, generator=generator)
    logits_TV[3, 7] = float("nan")
    params = SamplingParams(max_tokens=1, temperature=0.8, **filters)
    state = rows_of(torch.rand(rows, generator=generator))
    none = torch.empty(0, dtype=torch.int32)
    draw_next = Draw(
        params, 64, 0.0, none, torch.empty(3, rows, 1), sorted_at_once=130
    )  # two, two and one row
    full_TV = (logits_TV.double() / 0.8).log_softmax(-1)
    left_TV = truncate(full_TV, params)
    draw_next(logits_TV.clone(), torch.full((1, rows), 64.0), state)
    assert state.done_T.tolist() == [2, 2, 2, 3, 2]
    good = torch.tensor([0, 1, 2, 4])
    drawn = state.out_token_TM[good].long()
    assert left_TV[good].gather(1, drawn).isfinite().all()
    logprob, entropy = state.out_stats_2TM[:, good, 0]
    torch.testing.assert_close(logprob.double(), full_TV[good].gather(1, drawn)[:, 0], atol=1e-5, rtol=0)
    truth = -torch.linalg.vecdot(full_TV.exp(), full_TV)[good]
    torch.testing.assert_close(entropy.double(), truth, atol=1e-5, rtol=0)
