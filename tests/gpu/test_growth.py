"""Sequences that come while others are decoded: what was captured serves them, and all draw what they would
have drawn."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import KVGeometry, Pages
from qerl.rollout.paged.machine import Cuda
from tests.support.paged import from_uniforms, random_model

PROMPTS = [list(range(5, 75)), [7], list(range(100, 229))]
JOINS = [(0, 8, 150), (1, 1, 60), (2, 2, 90), (0, 4, 200), (1, 1, 256), (2, 3, 20)]
"""Prompt, samples and tokens of each; 19 sequences of up to 129 and 256 tokens."""


def play(engine):
    """Start one of the joins before each round; gives the completions in the order of the sequences."""
    found, joins = {}, list(JOINS)
    with engine.session(SamplingParams(max_tokens=1000), growing=True) as session:
        while session.busy or joins:
            if joins:
                prompt, samples, limit = joins.pop(0)
                first = sum(one[1] for one in JOINS[: -len(joins) - 1])
                seeds = list(range(first, first + samples))
                session.start([PROMPTS[prompt]], samples, [SamplingParams(limit)] * samples, seeds)
            for ended in session.next(one_round=True):
                found[ended.index] = ended.completion
                session.finish(ended.index)
        assert session._scheduler.memory.free == session._scheduler.memory.count
    return [found[index] for index in sorted(found)]


def check_draws(model, completions, joins=JOINS):
    """Each has its length, and each token is the one that the uniform number of its place asks for."""
    asked = [(PROMPTS[prompt], limit) for prompt, samples, limit in joins for _ in range(samples)]
    assert [len(one.token_ids) for one in completions] == [limit for _, limit in asked]
    away = torch.cat(
        [
            from_uniforms(model, prompt, one.token_ids, (seed, 0, 0), list(range(limit)))
            for seed, ((prompt, limit), one) in enumerate(zip(asked, completions, strict=True))
        ]
    )
    print(f"{len(away)} tokens drawn, at most {away.max():.1e} away from their uniform numbers")
    assert away.mean() < 1e-3 and away.max() < 2e-2


@pytest.fixture
def reserved(monkeypatch):
    """Blocks of each cache that was made."""
    found, reserve = [], KVCache.reserve
    monkeypatch.setattr(KVCache, "reserve", lambda *given: found.append(given[1]) or reserve(*given))
    return found


def test_joins_neither_capture_anew_nor_change_tokens(monkeypatch, reserved):
    captured, capture = [], DecodeStep.capture

    def noted(step):
        captured.append((step, step.way))
        return capture(step)

    monkeypatch.setattr(DecodeStep, "capture", noted)
    model = random_model("qwen2", "")
    engine = PagedEngine(model, pad_token_id=0)
    with engine.session(SamplingParams(max_tokens=1000), growing=True) as session:
        session.start(PROMPTS[2:], 19, [SamplingParams(200)] * 19)
    found = [play(engine) for _ in range(3)]
    assert len(reserved) == 1
    assert len(captured) == len(set(captured)), "each size and way to attend is captured once"
    assert {step for step, _ in captured} == {*engine.graphs.steps.values()}
    assert found[0] == found[1] == found[2]
    check_draws(model, found[0])


def test_a_cache_that_is_replaced_leaves_the_tokens_as_they_are(reserved):
    """The same sequences where nothing was there, so that several joins replace cache and steps."""
    model = random_model("qwen2", "")
    completions = play(PagedEngine(model, pad_token_id=0))
    assert len(reserved) > 1
    check_draws(model, completions)


class TenBlocks(Cuda):
    """The GPU, with room for ten blocks of keys and values of `random_model`'s model."""

    def cache_bytes(self, model, freed=0):
        return 10 * KVGeometry((None,), (Pages(0, 2, 64, 2),) * 3).bytes((1,))


def test_a_join_that_does_not_fit_leaves_the_others_their_memory(reserved):
    """Two fill 2 + 3 + 3 blocks, and one that comes while they are decoded would fill 2 + 11."""
    model, found = random_model("qwen2", ""), {}
    engine = PagedEngine(model, pad_token_id=0, machine=TenBlocks())
    with engine.session(SamplingParams(max_tokens=1000), growing=True) as session:
        session.start(PROMPTS[:1], 2, [SamplingParams(150)] * 2, [0, 1])
        session.next(one_round=True)
        address, step = engine.cache.layers[0][0].data_ptr(), session._step
        with pytest.raises(QeRLError, match="one sequence needs"):
            session.start(PROMPTS[2:], 1, [SamplingParams(700)])
        assert engine.cache.layers[0][0].data_ptr() == address and session._step is step
        while session.busy:
            for ended in session.next():
                found[ended.index] = ended.completion
                session.finish(ended.index)
        assert session.prefilled_tokens == 70
    assert len(reserved) == 1 and len(engine.graphs.steps) == 1
    check_draws(model, [found[0], found[1]], [(0, 2, 150)])
