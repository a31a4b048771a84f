"""The paged engine in Triton's interpreter, over sessions that name their policy: the same samples, and pages
that are found where nothing has changed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from qerl.kernels.limits import PAGE
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.stops import StopTokens
from tests.support.families import DELTA_NETS, MIXTURE, tiny
from tests.support.machine import Forgetful
from tests.support.models import move_adapter

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=6, seed=5)
TEXT = [(7 * i) % 61 for i in range(70)]


@pytest.fixture
def make(tiny_model):
    def build():
        torch.manual_seed(0)
        made = tiny_model("qwen3", vocab_size=61, num_hidden_layers=1)
        return move_adapter(add_lora(made, rank=4, alpha=8, dropout=0.0)).eval()

    return build


@pytest.fixture
def model(make):
    return make()


def paged(model, **settings):
    pace = Pace(round_steps=2, spare_rounds=0, prefill_tokens=(8, 72))
    return PagedEngine(model, 0, 4, machine=Forgetful(), pace=pace, **settings)


def sample(engine, prompts, policy="it", samples=1, params=PARAMS, offsets=None):
    """Tokens that were computed otherwise than as they were drawn, and the completions."""
    with engine.session(params, offsets, growing=True, policy=policy) as session:
        session.start(prompts, samples)
        found = {}
        while session.busy:
            found |= {each.index: each.completion for each in session.next_finished()}
    return session.prefilled_tokens, [found[index] for index in range(len(found))]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.entropies == pytest.approx(other.entropies, abs=1e-5)


def test_turns_of_a_conversation_are_those_without(make):
    """The first page is the prompt's, the second the prompt's tail, drawn tokens and what was written."""
    with_pages, without = (paged(make()) for _ in range(2))
    text, params = [*TEXT, *TEXT[:50]], replace(PARAMS, max_tokens=12)
    sample(with_pages, [TEXT * 2], None, 2, params)  # takes a cache for all of it
    counts = [120, 120 + 12 + 4 - 2 * PAGE]
    for count in counts:
        # A stop that the host finds, behind what was drawn too much.
        stops = replace(params, stops=(StopTokens([59]),))
        computed, found = sample(with_pages, [text], "it", 2, stops)
        same(found, sample(without, [text], None, 2, stops)[1])
        if len(text) == 120:
            _, (whole,) = sample(with_pages, [text], "it", 1, params)
            text, params = [*text, *whole.token_ids, 5, 9, 11, 13], PARAMS
        assert computed == count


def test_two_prompts_of_a_round_that_begin_alike_compute_that_once(model):
    engine = paged(model)
    prompts = [[*TEXT, 1], [*TEXT, 2, 3], TEXT[:66]]
    computed, found = sample(engine, prompts)
    assert computed == 71 + (72 - PAGE) + (66 - PAGE)
    same(found, sample(engine, prompts, None)[1])


def test_each_policy_finds_its_own(model):
    """Adapter and noise change between the sessions of two names."""
    engine, adapter = paged(model), {n: p for n, p in model.named_parameters() if "lora_B" in n}
    norm = "model.layers.0.input_layernorm"
    offsets = {norm: torch.full((64,), 0.3)}
    expected, computed = {}, []
    for _ in range(2):
        for name in ("it", "moved", "noisy"):
            for parameter in adapter.values():
                parameter.data *= 2.0 if name == "moved" else 1.0
            count, found = sample(engine, [TEXT], name, offsets=offsets if name == "noisy" else None)
            computed.append(count)
            same(found, expected.setdefault(name, found))
            for parameter in adapter.values():
                parameter.data *= 0.5 if name == "moved" else 1.0
    assert computed == [70] * 3 + [70 - PAGE] * 3
    assert len({tuple(each.logprobs) for found in expected.values() for each in found}) == 3


@pytest.mark.parametrize("by", ["release", "reset", "error", "growth"])
def test_what_was_kept_is_forgotten(model, by):
    engine = paged(model)
    _, expected = sample(engine, [TEXT])
    assert engine.cache.known.blocks
    if by in ("release", "reset"):
        getattr(engine, by)()
    elif by == "error":
        with pytest.raises(KeyError), engine.session(PARAMS, policy="it"):
            raise KeyError
    else:
        sample(engine, [TEXT * 3], None, params=replace(PARAMS, max_tokens=1))  # which needs a larger cache
    assert not engine.cache.known.blocks
    computed, found = sample(engine, [TEXT])
    assert computed == 70
    same(found, expected)


@pytest.mark.parametrize("policy", ["it", "another", None])
def test_a_session_that_goes_on_keeps_and_takes_with_its_policy_alone(model, policy):
    engine = paged(model)
    with engine.session(PARAMS, growing=True, policy="it") as session:
        session.start([[9, 4]], 1)
        session.next(one_round=True)
    with engine.session(PARAMS, going_on=session, policy=policy):
        session.start([TEXT], 1)
        while session.busy:
            session.next_finished()
    assert sample(engine, [TEXT])[0] == (70 - PAGE if policy == "it" else 70)


def test_the_experts_of_all_tokens_are_there():
    engine = paged(tiny(MIXTURE))
    prompts, params = [TEXT, [*TEXT[:67], 3]], replace(PARAMS, max_tokens=3)
    _, expected = sample(engine, prompts, None, 1, params)
    for count in (70 + 68 - PAGE, 70 + 68 - 2 * PAGE):
        computed, found = sample(engine, prompts, "it", 1, params)
        assert computed == count
        same(found, expected)
        for one, other in zip(found, expected, strict=True):
            assert len(one.choices) > 69 and np.array_equal(one.choices, other.choices)


def test_nothing_is_kept_of_a_model_with_states():
    engine = paged(tiny(DELTA_NETS))
    assert not engine.keeps_prefixes
    assert [sample(engine, [TEXT[:12]], params=replace(PARAMS, max_tokens=2))[0] for _ in range(2)] == [
        12
    ] * 2
