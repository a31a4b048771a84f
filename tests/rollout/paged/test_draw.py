"""The kernel that draws, in Triton's interpreter: adversarial weights and targets, and filters in pieces.

Shapes: T rows, V vocabulary, M tokens a row may generate.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)


from qerl.kernels.decode import draw as kernel
from qerl.kernels.decode import filters as filter_kernels
from qerl.kernels.decode.draw import RowState
from qerl.kernels.decode.filters import NEVER, RowSettings, apply_filters
from qerl.kernels.limits import STOP_TOKENS
from qerl.rollout.engine import SamplingParams, truncate
from qerl.rollout.paged import rows as placing
from qerl.rollout.session import Prompt, Sequence

BLOCK = 16


def rows_of(uniform_T):
    """Rows that may generate one token each."""
    rows = len(uniform_T)

    def integers(*shape, value=0):
        return torch.full(shape, value, dtype=torch.int32)

    return RowState(
        token_T=integers(rows), position_T=integers(rows), limit_2T=integers(2, rows),
        generated_T=integers(rows), max_new_T=integers(rows, value=1),
        done_T=integers(rows), uniform_TM=uniform_T[:, None].contiguous(),
        out_token_TM=integers(rows, 1, value=-1), out_stats_2TM=torch.zeros(2, rows, 1),
    )  # fmt: skip


def settings_of(*params):
    """Settings of one row for each of these."""
    settings = RowSettings.free(len(params), "cpu")
    placing.write_settings(settings, torch.arange(len(params)), params)
    return settings


def drawn_by(settings, logits_TV, uniform_T, squares_PT=None, width=1, eps=0.0):
    """The state of rows that have drawn one token."""
    rows, vocabulary = logits_TV.shape
    state = rows_of(uniform_T)
    kernel.draw_token(
        logits_TV.clone(), torch.ones(1, rows) if squares_PT is None else squares_PT,
        torch.empty(3, rows, -(-vocabulary // kernel.BLOCK_V)), state, settings,
        width=width, eps=eps,
    )  # fmt: skip
    return state


def draw(logits_TV, uniform_T):
    state = drawn_by(RowSettings.free(len(logits_TV), "cpu"), logits_TV, uniform_T)
    return state.out_token_TM[:, 0].long(), state.out_stats_2TM[:, :, 0]


def left_out(logits_TV, params, squares_PT=None, width=1, eps=0.0):
    """What filters make of logits, and the entropies before them."""
    rows = len(logits_TV)
    found_TV, squares_PT = logits_TV.clone(), torch.ones(1, rows) if squares_PT is None else squares_PT
    running_T = torch.zeros(rows, dtype=torch.int32)
    entropy_T = apply_filters(
        found_TV, squares_PT, running_T, settings_of(*[params] * rows), width=width, eps=eps
    )
    return found_TV, entropy_T


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


@pytest.mark.slow
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
    rows = placing.Rows(count=1, max_new=3, table_width=1, pools=1, kinds=1, device=torch.device("cpu"))
    rows.place(
        [Sequence(0, Prompt(0, [5], blocks=[]), 0, SamplingParams(2), max_tokens=2, blocks=[0], row=0)]
    )
    logits_TV = torch.full((1, 9000), -34.0)
    logits_TV[0, 1] = 0.0  # all tokens behind it weigh 2e-11 together
    drawn_T, _ = draw(logits_TV, rows.state.uniform_TM[:, 0])
    assert rows.state.uniform_TM.max() == 1 - 2.0**-24 and drawn_T.tolist() == [1]


FILTERS = [
    {"top_p": 0.7}, {"top_p": 0.02}, {"top_p": 0.999}, {"min_p": 0.2}, {"min_p": 1.0},
    {"top_p": 0.9, "min_p": 0.05}, {"top_k": 1}, {"top_k": 7}, {"top_k": 500}, {"top_k": 40, "top_p": 0.6},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.01},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.5, 2.0, 20.0])
def test_the_same_tokens_are_left_out_as_by_a_sort(monkeypatch, filters, spread):
    """In FP64 by a sort, in FP32 by a search, over flat rows and peaked ones, in several blocks."""
    monkeypatch.setattr(filter_kernels, "BLOCK_V", 64)
    rows, vocabulary, temperature, eps = 3, 1000, 0.8, 1e-5
    generator = torch.Generator().manual_seed(2)
    logits_TV = spread * torch.randn(rows, vocabulary, generator=generator)
    squares_PT = 32 * torch.rand(2, rows, generator=generator) + 1
    rms_T1 = torch.rsqrt(squares_PT.double().sum(0) / 64 + eps)[:, None]
    full_TV = (logits_TV.double() * rms_T1 / temperature).log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=temperature, **filters)
    wanted_TV = truncate(full_TV, params)
    found_TV, entropy_T = left_out(logits_TV, params, squares_PT, width=64, eps=eps)
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
        found_TV, _ = left_out(logits_TV, SamplingParams(1, top_p=limit))
        assert (found_TV[0] > NEVER).tolist() == [True] + [i > 64 - kept for i in range(1, 64)]


def test_equal_logits_are_kept_together():
    logits_TV = torch.tensor([[1.0, 0.0, 0.0, 0.0, -3.0]])
    p = logits_TV.softmax(-1)[0]
    for filters in ({"top_p": float(p[0] + p[1] / 2)}, {"top_k": 2}):  # a sort would keep one of the three
        found_TV, _ = left_out(logits_TV, SamplingParams(1, **filters))
        assert (found_TV[0] > NEVER).tolist() == [True, True, True, True, False]


def test_top_k_above_the_vocabulary_leaves_nothing_out():
    for most in (5, 6, 2**40):
        found_TV, _ = left_out(torch.arange(5.0)[None], SamplingParams(1, top_k=most))
        assert (found_TV > NEVER).all()


KINDS = [
    {}, {"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.1}, {"top_k": 5},
    {"top_p": 0.7}, {"temperature": 1.3, "min_p": 0.2}, {"temperature": 0.8, "top_k": 9, "top_p": 0.5},
    {"stop_token_ids": tuple(range(0, 61, 2))},
]  # fmt: skip


def test_every_row_draws_by_its_own_settings_what_it_draws_among_its_like():
    """Bit for bit; log-probability and entropy are those before the filters, of a greedy row at temperature
    1; a row of NaN ends with a reason."""
    generator = torch.Generator().manual_seed(1)
    rows, vocabulary, width = 4 * len(KINDS), 61, 64
    logits_TV = 2 * torch.randn(rows, vocabulary, generator=generator)
    logits_TV[[3, 3 + len(KINDS)], 7] = float("nan")
    uniform_T, squares_PT = torch.rand(rows, generator=generator), torch.full((1, rows), 64.0)
    params = [SamplingParams(max_tokens=1, **kind) for kind in KINDS] * 4
    mixed = drawn_by(settings_of(*params), logits_TV, uniform_T, squares_PT, width)
    each = [
        drawn_by(settings_of(*[own] * rows), logits_TV, uniform_T, squares_PT, width)
        for own in params[: len(KINDS)]
    ]
    for place, own in enumerate(params):
        alike = each[place % len(KINDS)]
        assert mixed.done_T[place] == alike.done_T[place]
        assert mixed.out_token_TM[place] == alike.out_token_TM[place]
        assert torch.equal(mixed.out_stats_2TM[:, place], alike.out_stats_2TM[:, place])
        if place in (3, 3 + len(KINDS)):
            assert mixed.done_T[place] == 3
            continue
        token = int(mixed.out_token_TM[place])
        assert mixed.done_T[place] == (1 if token in own.stop_token_ids[:STOP_TOKENS] else 2)
        full_V = (logits_TV[place].double() / (own.temperature or 1.0)).log_softmax(-1)
        assert truncate(full_V[None], own)[0, token].isfinite()
        if own.temperature == 0:
            assert token == full_V.argmax()
        logprob, entropy = mixed.out_stats_2TM[:, place, 0].double()
        torch.testing.assert_close(logprob, full_V[token], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, -(full_V.exp() @ full_V), atol=1e-5, rtol=0)


def test_a_row_that_filters_and_has_ended_is_left_as_it_is():
    logits_TV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found_TV = logits_TV.clone()
    settings = settings_of(*[SamplingParams(1, top_k=2)] * 3)
    done_T = torch.tensor([0, 1, 2], dtype=torch.int32)
    apply_filters(found_TV, torch.ones(1, 3), done_T, settings, width=1, eps=0.0)
    assert (found_TV[0] > NEVER).sum() == 2 and torch.equal(found_TV[1:], logits_TV[1:])
