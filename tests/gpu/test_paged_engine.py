"""The paged engine on a GPU: same policy as the trainer, samples independent of the batch, preemption
invisible."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams, truncate
from qerl.rollout.paged import prefill
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import KVGeometry, Pages
from qerl.rollout.paged.machine import Cuda
from qerl.rollout.paged.scheduler import Pace, Scheduler
from qerl.rollout.session import whole_completions
from qerl.rollout.stops import StopTokens
from tests.support.paged import from_uniforms, random_model, score
from tests.support.sessions import play

PROMPTS = [list(range(5, 75)), [7], list(range(100, 229))]


@torch.no_grad()
def gaps(model, prompts, samples, result):
    """Mean |difference| of engine and trainer, of engine and fp32 truth, of trainer and fp32 truth."""
    exact = copy.deepcopy(model).float()
    found = [torch.tensor(c.logprobs, device="cuda") for c in result.completions]
    pairs = [(prompts[i // samples], c.token_ids) for i, c in enumerate(result.completions)]
    trainer = torch.cat([score(model, *pair) for pair in pairs])
    truth = torch.cat([score(exact, *pair) for pair in pairs])
    engine = torch.cat(found)
    return tuple(
        float((a - b).abs().mean()) for a, b in ((engine, trainer), (engine, truth), (trainer, truth))
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("packed", ["", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("samples", [2, 20])
def test_sampler_is_the_trainer(family, packed, samples):
    model = random_model(family, packed)
    engine = PagedEngine(model, pad_token_id=0)
    result = engine.generate(PROMPTS, samples, SamplingParams(max_tokens=70, seed=3))
    to_trainer, engine_error, trainer_error = gaps(model, PROMPTS, samples, result)
    print(
        f"{family} {packed} samples={samples}: mean |difference| {to_trainer:.1e}, from fp32: engine "
        f"{engine_error:.1e}, trainer {trainer_error:.1e}"
    )
    assert engine_error < 1.2 * trainer_error
    assert to_trainer < 2 * trainer_error
    assert all(len(c.token_ids) == 70 and c.finish_reason == "length" for c in result.completions)


def test_samples_do_not_depend_on_who_shares_the_batch():
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0)
    params = SamplingParams(max_tokens=40, seed=3)
    first = engine.generate([PROMPTS[0], PROMPTS[1]], 2, params).completions[:2]
    second = engine.generate([PROMPTS[0], PROMPTS[2]], 2, params).completions[:2]
    assert first == second


@pytest.mark.parametrize("captured", [0, 64])
def test_the_host_does_not_wait_for_a_pass_of_prefill(monkeypatch, captured):
    """Of several passes: what the next one reads is uploaded while the one before runs."""
    monkeypatch.setattr(prefill, "CAPTURED_TOKENS", captured)
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0, pace=Pace(prefill_tokens=(64,)))
    params, run, passes = SamplingParams(max_tokens=4, seed=3), prefill.Prefill.run, []
    engine.generate(PROMPTS, 2, params)

    def watched(self, spans):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(self, spans)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        passes.append(sum(len(span.token_ids) for span in spans) / 64)

    monkeypatch.setattr(prefill.Prefill, "run", watched)
    engine.generate(PROMPTS, 2, params)
    assert max(passes) > 2


@pytest.mark.parametrize("packed", ["", "nvfp4"])
def test_a_replayed_pass_computes_what_a_launched_one_does(monkeypatch, packed):
    """The second call's prompts have other lengths, and the third begins after the memory was given up."""
    calls = [PROMPTS, [list(range(9, 400)), [3, 4]], [list(range(40, 60)), *PROMPTS]]
    found = []
    for captured in (0, 512):
        monkeypatch.setattr(prefill, "CAPTURED_TOKENS", captured)
        engine = PagedEngine(random_model("qwen2", packed), pad_token_id=0)
        params, completions = SamplingParams(max_tokens=4, seed=3), []
        for prompts in calls:
            completions += engine.generate(prompts, 2, params).completions
            engine.release()
        found.append(completions)
        of_passes = {tokens: each.captured for tokens, each in engine.prefill.passes.items()}
        assert of_passes == ({256: True, 512: True} if captured else {})
    assert found[0] == found[1]


class NineBlocks(Cuda):
    """The GPU, with room for nine blocks of keys and values of `random_model`'s model."""

    def cache_bytes(self, model, freed=0):
        return 9 * KVGeometry((None,), (Pages(0, 2, 64, 2),) * 3).bytes((1,))


def test_preemption_is_invisible_and_rows_are_refilled(monkeypatch):
    params, pace = SamplingParams(max_tokens=100, seed=5), Pace(spare_rounds=0)
    plenty, scarce = (
        PagedEngine(random_model("qwen2", ""), pad_token_id=0, max_sequences=4, machine=machine, pace=pace)
        for machine in (Cuda(), NineBlocks())
    )
    wanted = plenty.generate(PROMPTS, 3, params).completions
    next_round, preempted = Scheduler.next_round, []

    def spied(self):
        found = next_round(self)
        preempted.extend(found.preempted)
        return found

    monkeypatch.setattr(Scheduler, "next_round", spied)
    found = scarce.generate(PROMPTS, 3, params).completions
    same = sum(a.token_ids == b.token_ids for a, b in zip(wanted, found, strict=True))
    assert preempted, "nine blocks are too few for four sequences of up to five"
    # Recomputed keys differ in the last bit, so a draw may fall on the other side of a boundary.
    assert same >= 7
    assert all(len(c.token_ids) == 100 for c in found)


def check_uniforms(model, samples, seed, found):
    """Each token of (token ids, log-probabilities, None where others wrote) is the one that the uniform
    number of its place asks for, but for rounding."""
    away = torch.cat(
        [
            from_uniforms(
                model, PROMPTS[index // samples], tokens, (seed, index // samples, index % samples),
                [place for place, value in enumerate(logprobs) if value is not None],
            )
            for index, (tokens, logprobs) in enumerate(found)
        ]
    )  # fmt: skip
    print(f"{len(away)} tokens drawn, at most {away.max():.1e} away from their uniform numbers")
    assert away.mean() < 1e-3 and away.max() < 2e-2


@pytest.mark.parametrize("machine", [Cuda(), NineBlocks()], ids=["plenty", "scarce"])
def test_turns_draw_by_the_numbers_of_one_turn(machine):
    """Others write between turns; keys are kept, or given up where memory is short."""
    model = random_model("qwen2", "")
    engine = PagedEngine(
        model, pad_token_id=0, max_sequences=4, machine=machine, pace=Pace(spare_rounds=0)
    )  # fmt: skip
    whole = engine.generate(PROMPTS, 3, SamplingParams(max_tokens=100, seed=5)).completions
    stops = tuple(range(0, 1000, 20))
    with engine.session(SamplingParams(max_tokens=100, seed=5, stop_token_ids=stops)) as session:
        session.start(PROMPTS, 3)
        found = play(session, whole, 7)
    assert max(turns for *_, turns in found.values()) > 3
    check_uniforms(model, 3, 5, [found[index][:2] for index in range(9)])
    assert not session._scheduler.idle
    assert session._scheduler.memory.free == session._scheduler.memory.count


def test_stops_of_the_host_and_stop_tokens_end_the_same_turns():
    """To the bit: what a round draws behind a stop leaves no trace, in this turn and in those that follow."""
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0)
    stops = tuple(range(0, 1000, 40))
    whole = engine.generate(PROMPTS, 3, SamplingParams(max_tokens=100, seed=5)).completions
    played = []
    for ended_by in ({"stop_token_ids": stops}, {"stops": (StopTokens(stops),)}):
        with engine.session(SamplingParams(max_tokens=100, seed=5, **ended_by)) as session:
            session.start(PROMPTS, 3)
            played.append(play(session, whole, 7))
            assert session._scheduler.memory.free == session._scheduler.memory.count
    assert played[0] == played[1]
    assert sum(turns for *_, turns in played[0].values()) > 18


KINDS = [
    {}, {"temperature": 0.0}, {"temperature": 0.6, "max_tokens": 30}, {"top_k": 20},
    {"top_p": 0.8, "seed": 8}, {"temperature": 1.3, "min_p": 0.05}, {"top_k": 50, "top_p": 0.9},
    {"stop_token_ids": tuple(range(0, 1000, 30))},
]  # fmt: skip


def test_each_of_a_mixed_batch_draws_to_the_bit_what_it_draws_among_its_like():
    """In steps of one size, which were captured once for all settings."""
    mixed = [
        SamplingParams(**{"max_tokens": 60, "seed": 5} | KINDS[place % len(KINDS)]) for place in range(60)
    ]
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0, pace=Pace(small_rows=64))
    samples = len(mixed) // len(PROMPTS)
    found = whole_completions(engine.session(mixed[0]), PROMPTS, samples, mixed).completions
    steps = dict(engine.graphs.steps)
    assert len(steps) == 1
    for kind, params in enumerate(mixed[: len(KINDS)]):
        alone = engine.generate(PROMPTS, samples, params).completions
        assert found[kind :: len(KINDS)] == alone[kind :: len(KINDS)]
    assert engine.graphs.steps == steps


def test_a_seed_of_its_own_stands_for_that_of_a_session():
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0)
    alone = engine.generate(PROMPTS[1:2], 1, SamplingParams(max_tokens=50, seed=9)).completions[0]
    with engine.session(SamplingParams(max_tokens=50, seed=5)) as session:
        session.start(PROMPTS[1:2], 1, seeds=[9])
        assert session.next()[0].completion == alone


def test_a_smaller_step_goes_on_with_the_same_samples(step_sizes):
    model = random_model("qwen2", "")
    engine = PagedEngine(model, pad_token_id=0)
    params = SamplingParams(max_tokens=200, seed=5, stop_token_ids=tuple(range(0, 1000, 40)))
    shrinking = engine.generate(PROMPTS, 20, params).completions
    assert step_sizes[0] == 64 and step_sizes[-1] < 16
    check_uniforms(model, 20, 5, [(c.token_ids, c.logprobs) for c in shrinking])
    engine = PagedEngine(model, pad_token_id=0, pace=Pace(small_rows=64))
    step_sizes.clear()
    fixed = engine.generate(PROMPTS, 20, params).completions
    assert set(step_sizes) == {64}
    again = engine.generate(PROMPTS, 20, params).completions
    assert again == fixed


def test_a_cache_that_took_all_it_may_is_kept():
    """Where not all sequences fit, the next call finds cache and graphs as they were."""
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0, machine=Cuda(cache_share=1e-4))
    params = SamplingParams(max_tokens=100, seed=5)
    first = engine.generate(PROMPTS, 100, params)
    address, steps = engine.cache.layers[0][0].data_ptr(), dict(engine.graphs.steps)
    assert engine.cache.is_limited
    engine.release()
    second = engine.generate(PROMPTS, 100, params)
    assert engine.cache.layers[0][0].data_ptr() == address and engine.graphs.steps == steps
    assert first.generated_tokens == second.generated_tokens == 30000


def test_noise_and_a_changed_adapter_are_seen_without_a_new_engine():
    model = random_model("qwen2", "")
    engine = PagedEngine(model, pad_token_id=0)
    params = SamplingParams(max_tokens=8, seed=1)
    clean = engine.generate(PROMPTS[:1], 1, params)
    name = "model.layers.1.input_layernorm"
    noisy = engine.generate(PROMPTS[:1], 1, params, {name: torch.full((384,), 0.5)})
    assert clean.completions != noisy.completions
    assert engine.generate(PROMPTS[:1], 1, params).completions == clean.completions
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            parameter.data *= -3
    changed = engine.generate(PROMPTS[:1], 1, params)
    assert changed.completions != clean.completions
    to_trainer, _, trainer_error = gaps(model, PROMPTS[:1], 1, changed)
    assert to_trainer < 3 * trainer_error


def test_stop_tokens_end_a_completion():
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0)
    free = engine.generate(PROMPTS, 2, SamplingParams(max_tokens=30, seed=2)).completions
    stop = free[0].token_ids[11]
    result = engine.generate(PROMPTS, 2, SamplingParams(max_tokens=30, seed=2, stop_token_ids=(stop,)))
    for whole, cut in zip(free, result.completions, strict=True):
        if stop in whole.token_ids:
            assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
            assert cut.finish_reason == "stop"
        else:
            assert cut == whole
    assert result.completions[0].finish_reason == "stop"


def test_nan_weights_end_a_sequence_with_a_reason():
    model = random_model("qwen2", "")
    model.get_base_model().model.embed_tokens.weight.data[7] = float("nan")
    engine = PagedEngine(model, pad_token_id=3)
    result = engine.generate([PROMPTS[0], [7]], 1, SamplingParams(max_tokens=5, seed=2))
    assert [c.finish_reason for c in result.completions] == ["length", "error"]
    assert result.completions[1].token_ids == [3]


def test_sampling_frequencies_match_the_probabilities():
    model = random_model("qwen2", "")
    engine = PagedEngine(model, pad_token_id=0, max_sequences=512)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0]], device="cuda")).logits[0, -1].float()
    probabilities = (logits / 0.7).softmax(-1).double().cpu()
    draws = torch.zeros(1000, dtype=torch.float64)
    for seed in range(4):
        result = engine.generate([PROMPTS[0]], 4096, SamplingParams(max_tokens=1, temperature=0.7, seed=seed))
        for completion in result.completions:
            draws[completion.token_ids[0]] += 1
    expected = probabilities * draws.sum()
    used = expected > 8
    observed = torch.cat([draws[used], draws[~used].sum()[None]])
    wanted = torch.cat([expected[used], expected[~used].sum()[None]])
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_what_it_cannot_run_is_refused():
    with pytest.raises(QeRLError, match="float32"):
        PagedEngine(random_model("qwen2", "", lora=False).float(), pad_token_id=0)
    engine = PagedEngine(random_model("qwen2", ""), pad_token_id=0)
    with pytest.raises(QeRLError, match="positions"):
        engine.generate(PROMPTS, 1, SamplingParams(max_tokens=2000))


@pytest.mark.parametrize("kind", ["top_k", "top_p", "min_p"])
def test_filters_draw_from_what_they_leave(kind):
    model = random_model("qwen2", "")
    engine = PagedEngine(model, pad_token_id=0, max_sequences=512)
    reference = copy.deepcopy(model).float()
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([PROMPTS[0]], device="cuda")).logits[0, -1].double()
    full = (logits / 0.7).log_softmax(-1)
    # The limit lies where neighbours differ most, so that rounding leaves the same tokens on both sides.
    p = full.exp().sort(descending=True).values
    kept = 5 + int((p[4:40] / p[5:41]).argmax())
    filters = {
        "top_k": kept,
        "top_p": float(p[:kept].sum() - p[kept - 1] / 2),
        "min_p": float((p[kept - 1] * p[kept]).sqrt() / p[0]),
    }
    params = SamplingParams(max_tokens=2, temperature=0.7, **{kind: filters[kind]})
    wanted = truncate(full[None], params)[0]
    assert int((wanted > -torch.inf).sum()) == kept
    result = engine.generate([PROMPTS[0]], 2048, params)
    drawn = torch.tensor([c.token_ids[0] for c in result.completions])
    assert set(drawn.tolist()) <= set((wanted > -torch.inf).nonzero().flatten().tolist())
    entropy = float(-(full.exp() * full).sum())
    assert all(abs(c.entropies[0] - entropy) < 0.02 for c in result.completions)
    assert max(abs(c.logprobs[0] - float(full[c.token_ids[0]])) for c in result.completions) < 0.05
    share = torch.bincount(drawn, minlength=1000).double() / len(drawn)
    assert (share - wanted.softmax(-1).cpu()).abs().max() < 0.05
