"""Conversations as requests on a GPU, whose pages are found by what they hold: log-probabilities are as near
to the model's as those of requests that are computed anew."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.kernels.limits import PAGE
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from tests.support.paged import random_model, score

PROMPTS = [list(range(5, 75)), [7], list(range(20, 149))]
SAMPLES, TURNS, DRAWN, WRITTEN = 3, 4, 50, 11


def conversations(engine, policy):
    """Tokens that were prefilled, and prompt and completion of each request."""
    texts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
    computed, found = 0, []
    for turn in range(TURNS):
        params = SamplingParams(DRAWN, seed=turn)
        with engine.session(params, growing=True, policy=policy) as session:
            if turn:
                session.start(texts, 1)
            else:
                session.start(PROMPTS, SAMPLES)  # which share their prompt's last page by copies
            ended = {}
            while session.busy:
                ended |= {each.index: each.completion for each in session.next_finished()}
        computed += session.prefilled_tokens
        found += [(texts[index], ended[index]) for index in sorted(ended)]
        written = [(13 * turn + i) % 1000 for i in range(WRITTEN)]
        texts = [text + ended[index].token_ids + written for index, text in enumerate(texts)]
    return computed, found


@torch.no_grad()
def error(model, found):
    """Mean |difference| of what the engine says of its tokens from the model."""
    gaps = [
        (score(model, prompt, drawn.token_ids).cpu() - torch.tensor(drawn.logprobs)).abs()
        for prompt, drawn in found
    ]
    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("packed", ["", "nvfp4"])
def test_turns_behind_kept_pages_are_of_the_policy(packed, kv_cache_dtype):
    errors, counts = [], []
    for policy in (None, "it"):
        model = random_model("llama", packed)
        engine = PagedEngine(model, 0, kv_cache_dtype=kv_cache_dtype, pace=Pace(round_steps=8))
        with engine.session(SamplingParams(DRAWN)) as session:  # takes a cache that holds all turns
            session.start([[5] * 400] * 9, 1)
            session.next()
        computed, found = conversations(engine, policy)
        errors.append(error(copy.deepcopy(model).float(), found))
        counts.append(computed)
    print(f"{packed or 'bf16'}, keys {kv_cache_dtype}: from fp32 {errors}, tokens prefilled {counts}")
    assert errors[1] < 1.2 * errors[0]
    # Of later turns what is written, the last drawn token, and what lies in a page that was not full.
    most = sum(map(len, PROMPTS)) + (TURNS - 1) * len(PROMPTS) * SAMPLES * (WRITTEN + 1 + PAGE)
    assert counts[1] <= most < counts[0]
