"""Sampling: what the filters leave, draws from it, and each sequence's own stream of uniforms."""

import pytest
import torch

from qerl.errors import QeRLError
from qerl.rollout import engine
from qerl.rollout.engine import SamplingParams, draw_tokens, truncate, uniform_streams


def params(**settings):
    return SamplingParams(max_tokens=1, **settings)


def reference_distribution(logits, settings):
    """fp64 probabilities of one row, filter by filter, token by token."""
    probs = torch.softmax(logits.double() / settings.temperature, dim=-1)
    order = sorted(range(len(probs)), key=lambda token: -probs[token].item())
    kept = order[: settings.top_k] if settings.top_k else order
    left = sum(probs[token].item() for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += probs[token].item() / left
        if mass >= settings.top_p:
            break
    nucleus = [token for token in nucleus if probs[token] >= settings.min_p * probs[order[0]]]
    result = torch.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


class TestTruncate:
    @pytest.mark.parametrize("settings", SETTINGS)
    @pytest.mark.parametrize("scale", [0.5, 3.0])
    def test_equals_the_plain_reference(self, settings, scale):
        settings = params(**settings)
        logits_BV = scale * torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
        full_BV = torch.log_softmax(logits_BV / settings.temperature, -1)
        got_BV = truncate(full_BV, settings)
        kept_BV = got_BV.isfinite()
        expected_BV = torch.stack([reference_distribution(row, settings) for row in logits_BV])
        assert torch.equal(kept_BV, expected_BV > 0)
        assert torch.equal(got_BV[kept_BV], full_BV[kept_BV]), "what stays is not renormalised"
        assert (got_BV.double().softmax(-1) - expected_BV).abs().max() < 1e-6

    @pytest.mark.parametrize("scale", [0.01, 3.0], ids=["flat: full sort", "peaked: candidates"])
    def test_candidates_find_the_nucleus_of_a_large_vocabulary(self, scale):
        logits_BV = scale * torch.randn(3, 5000, generator=torch.Generator().manual_seed(2))
        settings = params(top_p=0.9)
        kept_BV = truncate(torch.log_softmax(logits_BV, -1), settings).isfinite()
        expected_BV = torch.stack([reference_distribution(row, settings) for row in logits_BV]) > 0
        assert torch.equal(kept_BV, expected_BV)
        assert (kept_BV.sum(-1) > engine._CANDIDATES).all() == (scale == 0.01)

    def test_ties_do_not_keep_more_than_top_k(self):
        kept_BV = truncate(torch.log_softmax(torch.zeros(2, 9), -1), params(top_k=4)).isfinite()
        assert kept_BV.sum(-1).tolist() == [4, 4]

    def test_without_filters_nothing_is_copied(self):
        logprobs_BV = torch.log_softmax(torch.randn(2, 9), -1)
        assert truncate(logprobs_BV, params(temperature=0.5)) is logprobs_BV


class TestSample:
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_frequencies_pass_chi_square(self, settings):
        settings = params(**settings)
        draws, vocabulary = 40000, 12
        logits_V = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3))
        uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        tokens = draw_tokens(logits_V.expand(draws, -1), uniforms, settings).tokens_B
        expected_V = reference_distribution(logits_V, settings) * draws
        counts_V = torch.bincount(tokens, minlength=vocabulary).double()
        possible = expected_V > 0
        assert counts_V[~possible].sum() == 0
        statistic = ((counts_V - expected_V)[possible].square() / expected_V[possible]).sum().item()
        degrees = int(possible.sum()) - 1
        # Mean plus five standard deviations of a chi-square variable.
        assert statistic < degrees + 5 * (2 * degrees) ** 0.5 + 1e-6

    @pytest.mark.parametrize("settings", SETTINGS)
    def test_logprobs_and_entropies_against_fp64(self, settings):
        settings = params(**settings)
        generator = torch.Generator().manual_seed(5)
        logits_BV = 2 * torch.randn(64, 40, generator=generator)
        uniforms_B = torch.rand(64, generator=generator, dtype=torch.float64)
        sampled = draw_tokens(logits_BV, uniforms_B, settings)
        full_BV = torch.softmax(logits_BV.double() / settings.temperature, -1)
        expected_B = full_BV.gather(-1, sampled.tokens_B[:, None])[:, 0].log()
        assert (sampled.logprobs_B - expected_B).abs().max() < 1e-5
        assert (sampled.entropies_B + (full_BV * full_BV.log()).sum(-1)).abs().max() < 1e-5

    def test_uniform_picks_the_first_token_whose_cumulative_probability_exceeds_it(self):
        logits_BV = torch.tensor([0.25, 1e-30, 0.25, 0.5]).log().expand(7, -1)
        uniforms_B = torch.tensor(
            [0.0, 0.2499, 0.2501, 0.4999, 0.5001, 0.9999, 1 - 2**-53], dtype=torch.float64
        )
        tokens_B = draw_tokens(logits_BV, uniforms_B, params()).tokens_B
        assert tokens_B.tolist() == [0, 0, 2, 2, 3, 3, 3]

    def test_a_removed_token_is_never_drawn(self):
        logits_BV = torch.tensor([-5.0, 1.0, -5.0, 1.0, -5.0]).expand(3, -1)
        uniforms_B = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
        assert draw_tokens(logits_BV, uniforms_B, params(min_p=0.5)).tokens_B.tolist() == [1, 3, 3]

    @pytest.mark.parametrize("uniform", [0.0, 1.0])
    def test_nor_where_the_target_is_rounded_to_the_end(self, uniform):
        """A uniform that FP32 rounded up to one asks for the whole sum."""
        logits_BV = torch.tensor([-5.0, 1.0, -5.0, 1.0, -5.0, -5.0]).expand(2, -1)
        uniforms_B = torch.tensor([uniform, 0.4], dtype=torch.float64)
        drawn = draw_tokens(logits_BV, uniforms_B, params(min_p=0.5)).tokens_B.tolist()
        assert drawn == [3 if uniform else 1, 1]

    def test_nor_where_a_parallel_sum_grows_at_a_token_without_weight(self, monkeypatch):
        """As a scan on a GPU may, which adds each token's predecessors in an order of its own."""
        cumsum = torch.Tensor.cumsum
        jitter = torch.tensor([0, 0, 1e-16, 1e-16, 0, 0], dtype=torch.float64)
        monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) + jitter)
        logits_BV = torch.tensor([-99.0, 1.0, -99.0, -99.0, 1.0, -99.0])[None]
        target = torch.tensor([0.5], dtype=torch.float64)
        assert draw_tokens(logits_BV, target, params(min_p=0.5)).tokens_B.tolist() == [4]

    def test_greedy_takes_the_largest_and_scores_it_at_temperature_one(self):
        logits_BV = torch.randn(4, 30, generator=torch.Generator().manual_seed(6))
        sampled = draw_tokens(logits_BV, torch.zeros(4).double(), params(temperature=0, top_k=1, top_p=0.1))
        assert torch.equal(sampled.tokens_B, logits_BV.argmax(-1))
        expected_B = torch.log_softmax(logits_BV.double(), -1).amax(-1)
        assert (sampled.logprobs_B - expected_B).abs().max() < 1e-6
        assert (sampled.entropies_B > 0.5).all()

    @pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_bad_row_is_reported_and_changes_no_other(self, settings, bad):
        logits_BV = torch.randn(3, 20, generator=torch.Generator().manual_seed(7))
        uniforms_B = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
        clean = draw_tokens(logits_BV, uniforms_B, params(**settings))
        logits_BV[1, 4] = bad
        sampled = draw_tokens(logits_BV, uniforms_B, params(**settings))
        assert sampled.finite_B.tolist() == [True, False, True]
        for column, clean_column in zip(sampled[:3], clean[:3], strict=True):
            assert torch.equal(column[[0, 2]], clean_column[[0, 2]])
        assert 0 <= sampled.tokens_B[1] < 20

    def test_bf16_logits_are_computed_in_fp32(self):
        logits_BV = torch.randn(4, 300).bfloat16()
        uniforms_B = torch.full((4,), 0.5, dtype=torch.float64)
        got = draw_tokens(logits_BV, uniforms_B, params())
        expected = draw_tokens(logits_BV.float(), uniforms_B, params())
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert got.logprobs_B.dtype == torch.float32


class TestStreams:
    def test_a_stream_belongs_to_seed_prompt_and_sample(self):
        streams = uniform_streams([(3, 0, 0), (3, 0, 1), (3, 1, 0)], 5)
        assert torch.equal(streams[[2, 0]], uniform_streams([(3, 1, 0), (3, 0, 0)], 5))
        rows = torch.cat([streams, uniform_streams([(4, 0, 0)], 5)])
        assert len({tuple(row.tolist()) for row in rows}) == 4

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 1000])
    def test_a_longer_stream_begins_with_the_shorter(self, length):
        assert torch.equal(
            uniform_streams([(3, 0, 0)], 2000)[:, :length], uniform_streams([(3, 0, 0)], length)
        )

    def test_neighbouring_streams_are_uniform_and_uncorrelated(self):
        streams = uniform_streams([(0, prompt, 0) for prompt in range(200)], 200)
        assert abs(streams.mean() - 0.5) < 5 / (12 * streams.numel()) ** 0.5
        correlation = torch.corrcoef(streams)[torch.triu_indices(200, 200, 1).unbind()]
        assert correlation.abs().max() < 6 / 200**0.5


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 2}, {"max_tokens": 0}]
)
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(QeRLError, match=next(iter(bad))):
        SamplingParams(**({"max_tokens": 1} | bad))
