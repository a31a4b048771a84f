"""Drafts of the paged engine in Triton's interpreter: what is drawn is what is drawn without them."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import KVGeometry
from qerl.rollout.paged.machine import Eager
from qerl.rollout.paged.pace import Pace
from qerl.rollout.portable.engine import PortableEngine
from tests.support.sessions import check_against, play

BLOCK_BYTES = KVGeometry(layers=1, kv_heads=2, head_size=16, item_bytes=4).block_bytes
CYCLE = [5, 7, 11, 5, 7, 11, 5, 7]


def paged(model, drafted, blocks=12):
    pace = Pace(round_steps=2, spare_rounds=0, prefill_tokens=(8, 72))
    machine = Eager(blocks * BLOCK_BYTES)
    return PagedEngine(model, 0, machine=machine, pace=pace, speculative_tokens=drafted)


@pytest.fixture
def model(tiny_model):
    return tiny_model("qwen3", vocab_size=61, num_hidden_layers=1)


def same(result, wanted):
    for a, b in zip(result.completions, wanted.completions, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.entropies == pytest.approx(b.entropies, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "samples", "settings"),
    [
        ([CYCLE], 1, {"temperature": 0}),
        ([CYCLE, [9]], 2, {"temperature": 0.7, "top_k": 3}),
        ([[3] * 70, CYCLE], 3, {"temperature": 0.7, "top_k": 3, "stop_token_ids": tuple(range(0, 61, 7))}),
    ],
)
def test_tokens_are_those_without_drafts(model, prompts, samples, settings):
    params = SamplingParams(max_tokens=12, seed=5, **settings)
    wanted = PortableEngine(model, 0).generate(prompts, samples, params)
    result = paged(model, 3).generate(prompts, samples, params)
    same(result, wanted)
    assert result.drafted_tokens > 0
    print(result.drafted_tokens, result.accepted_tokens)
