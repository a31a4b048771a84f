"""Drafts of the paged engine on a GPU: bit for bit what the same steps draw when no draft is accepted."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged import decode
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.stops import StopTokens
from tests.support.paged import from_uniforms, random_model
from tests.support.sessions import check_against, play

PROMPTS = [[5, 6, 7, 8] * 20, [7, 7, 7], list(range(100, 229))]
SHARP = {"temperature": 0.5, "top_k": 3}
"""Few tokens in turn, so that drafts are made and some are accepted."""


@pytest.fixture
def alone(monkeypatch):
    """``alone()``: steps captured from now on give up every draft before they are computed."""
    propose = decode.propose

    def nothing(rows, lanes, *, page):
        propose(rows, lanes, page=page)
        count = len(lanes.drafts_R)
        lanes.drafts_R.zero_()
        lanes.tokens.done_T.view(count, -1)[:, 1:] = 1
        lanes.tokens.slot_T.view(count, -1)[:, 1:] = -1

    return lambda: monkeypatch.setattr(decode, "propose", nothing)


@pytest.mark.parametrize("packed", ["", "nvfp4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("drafted", "samples"), [(1, 1), (3, 1), (7, 1), (3, 6)])
def test_what_is_drawn_does_not_depend_on_drafts(alone, family, packed, drafted, samples):
    model = random_model(family, packed)
    stops = tuple(range(0, 1000, 53)) if samples > 1 else ()  # so that few rows are left
    params = SamplingParams(max_tokens=150, seed=3, stop_token_ids=stops, **SHARP)
    result = PagedEngine(model, 0, speculative_tokens=drafted).generate(PROMPTS, samples, params)
    alone()
    wanted = PagedEngine(model, 0, speculative_tokens=drafted).generate(PROMPTS, samples, params)
    print(f"{result.accepted_tokens} of {result.drafted_tokens}, {result.generated_tokens} drawn")
    assert result.completions == wanted.completions
    assert 0 < result.accepted_tokens < result.drafted_tokens
    assert wanted.accepted_tokens == 0


@pytest.mark.parametrize("packed", ["", "nvfp4"])
def test_each_token_is_the_one_that_its_own_number_asks_for(packed):
    model = random_model("llama", packed)
    params = SamplingParams(max_tokens=200, seed=3)
    result = PagedEngine(model, 0, speculative_tokens=3).generate(PROMPTS, 1, params)
    assert result.drafted_tokens > 0
    for number, completion in enumerate(result.completions):
        places = list(range(len(completion.token_ids)))
        off = from_uniforms(model, PROMPTS[number], completion.token_ids, (3, number, 0), places)
        assert float(off.mean()) < 0.01


def test_turns_draw_what_one_turn_would_have_drawn():
    model, params = random_model("llama", "nvfp4"), SamplingParams(max_tokens=150, seed=3, **SHARP)
    engine = PagedEngine(model, 0, speculative_tokens=3)
    whole = engine.generate(PROMPTS, 1, params).completions
    ends = [StopTokens(each.token_ids[20:21]) for each in whole]
    with engine.session(params) as session:
        session.start(PROMPTS, 1, stops=[(each,) for each in ends])
        check_against(play(session, whole, 0), whole, bound=0.1)
        assert session.accepted_tokens > 0
