"""Drafts of the paged engine on a GPU.

In steps of one size a position has the same bits whether it is verified behind a draft or is its row's first.
Steps of other sizes cut sums differently, so where the engine chooses sizes, drafts may change last bits as
another batch size does; there each token is the one that its own number asks for, and log-probabilities are
as near to those of FP32 as without drafts.
"""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged import decode
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.pace import Pace
from qerl.rollout.stops import Stop
from tests.support.paged import from_uniforms, random_model, score
from tests.support.sessions import check_against, play
from tests.support.speculation import drop_drafts
from tests.support.stops import StopTokens

PROMPTS = [[5, 6, 7, 8] * 20, [7, 7, 7], list(range(100, 229))]
SHARP = {"temperature": 0.5, "top_k": 3}
"""Few tokens in turn, so that drafts are made and some are accepted."""
ONE_SIZE = Pace(small_rows=64)
"""Whoever ends earlier by drafts leaves others in a step of the same size."""


class OthersEnd(Stop):
    """Ends each turn after so many tokens, but those that answer one prompt."""

    def __init__(self, prompt_ids, tokens):
        self._prompt_ids, self._tokens = list(prompt_ids), tokens

    def end(self, prompt_ids, token_ids, start, checked):
        ends = len(token_ids) >= self._tokens > checked and list(prompt_ids) != self._prompt_ids
        return self._tokens if ends else None


@pytest.mark.parametrize(
    ("family", "drafted", "samples"),
    [("llama", 1, 1), ("llama", 3, 1), ("llama", 7, 1), ("llama", 3, 4), ("qwen2", 3, 1), ("qwen3", 3, 1)],
)
@pytest.mark.parametrize("packed", ["", "nvfp4"])
def test_a_verified_position_has_the_bits_of_a_first_one(
    monkeypatch, step_sizes, packed, family, drafted, samples
):
    stops = (OthersEnd(PROMPTS[1], 40),) if samples > 1 else ()  # so that few rows are left
    params = SamplingParams(max_tokens=150, seed=3, stops=stops, **SHARP)

    def drawn():  # a four-bit model belongs to its first engine
        engine = PagedEngine(random_model(family, packed), 0, pace=ONE_SIZE, speculative_tokens=drafted)
        result = engine.generate(PROMPTS, samples, params)
        engine.release()
        return result

    result = drawn()
    sizes = list(dict.fromkeys(step_sizes))
    step_sizes.clear()
    drop_drafts(monkeypatch, decode)
    wanted = drawn()
    print(f"{result.accepted_tokens} of {result.drafted_tokens}, {result.generated_tokens} drawn, {sizes}")
    assert sizes == list(dict.fromkeys(step_sizes)) and sizes[-1] == 4
    assert result.completions == wanted.completions
    assert 0 < result.accepted_tokens < result.drafted_tokens
    assert wanted.accepted_tokens == 0


@pytest.mark.parametrize("packed", ["", "nvfp4"])
@pytest.mark.parametrize("drafted", [1, 7])
@torch.no_grad()
def test_log_probabilities_are_as_near_to_fp32_as_without_drafts(packed, drafted):
    """At the engine's own sizes. Drafts cut sums as another batch size does, which moves a mean by some
    percent; a key that is stale or a place that is another's moves it many times over."""
    params, errors = SamplingParams(max_tokens=300, seed=3, **SHARP), []
    for each in (0, drafted):
        model = random_model("llama", packed)
        result = PagedEngine(model, 0, speculative_tokens=each).generate(PROMPTS, 1, params)
        exact = copy.deepcopy(model).float()
        pairs = zip(PROMPTS, result.completions, strict=True)
        truth = torch.cat([score(exact, prompt, c.token_ids, SHARP["temperature"]) for prompt, c in pairs])
        found = torch.tensor([value for c in result.completions for value in c.logprobs], device="cuda")
        errors.append(float((found - truth).abs().mean()))
    print(
        f"mean error {errors[0]:.1e} without drafts, {errors[1]:.1e} with {result.accepted_tokens} accepted"
    )
    assert result.accepted_tokens > 10
    assert errors[1] < 1.5 * errors[0]


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
    engine = PagedEngine(model, 0, pace=ONE_SIZE, speculative_tokens=3)
    whole = engine.generate(PROMPTS, 1, params).completions
    ends = [StopTokens(each.token_ids[20:21]) for each in whole]
    with engine.session(params) as session:
        session.start(PROMPTS, 1, stops=[(each,) for each in ends])
        check_against(play(session, whole, 0), whole, bound=0.1)
        assert session.accepted_tokens > 0
