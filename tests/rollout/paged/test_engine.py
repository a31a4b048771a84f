"""The paged engine in Triton's interpreter: the same completions as the portable engine, without a GPU.

What cannot run here is left out: CUDA graphs and memory that is mapped and unmapped, for which the machine
`Replaying` stands in, and the NVFP4 kernel, so weights are dense, or NF4 by bitsandbytes' CPU build, and the
rest is FP32.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the engine itself", allow_module_level=True)

from qerl.errors import QeRLError
from qerl.kernels.decode import attend as attention
from qerl.kernels.weights.nf4 import NF4Stack
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged import decode, prefill
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import ROW_TOKEN_BYTES, KVGeometry, Pages, state_bytes
from qerl.rollout.paged.scheduler import Pace, Span
from qerl.rollout.portable.engine import PortableEngine
from tests.support.captures import Replaying, Replays
from tests.support.models import move_adapter

PROMPTS = [list(range(3, 8)), [9]]
PACE = Pace(round_steps=2, prefill_tokens=(8, 80))
BLOCK_BYTES = KVGeometry((None,), (Pages(0, 2, 16, 4),) * 2).bytes((1,))


def paged(model, blocks=12, pace=PACE, **settings):
    """The engine on a machine without a GPU whose cache has so many blocks at most."""
    return PagedEngine(model, 0, machine=Replaying(blocks * BLOCK_BYTES), pace=pace, **settings)


@pytest.fixture
def adapted(tiny_model):
    """A tiny model with an adapter whose B is not zero, ``prepared`` before."""

    def build(family, prepared=lambda model: model, rank=4):
        torch.manual_seed(0)
        model = add_lora(prepared(tiny_model(family, vocab_size=61)), rank=rank, alpha=2 * rank, dropout=0.0)
        return move_adapter(model, 0.4 / rank**0.5).eval()

    return build


def close(found, wanted):
    for a, b in zip(found.completions, wanted.completions, strict=True):
        assert a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert a.entropies == pytest.approx(b.entropies, abs=1e-5)


def drawn(engine, prompts, samples, params):
    """Completions of one session, in order, each with parameters of its own."""
    completions = {}
    with engine.session(params[0]) as session:
        session.start(prompts, samples, params)
        while session.busy:
            completions |= {turn.index: turn.completion for turn in session.next()}
    return SimpleNamespace(completions=[completions[i] for i in range(len(params))])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_engines_sample_the_same(adapted, family):
    model = adapted(family)
    noise = {
        f"model.layers.{i}.{name}": torch.randn(64) * 0.1
        for i in range(2)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    params = SamplingParams(max_tokens=4, seed=1)
    wanted = PortableEngine(model, 0).generate(PROMPTS, 2, params, noise)
    close(paged(model).generate(PROMPTS, 2, params, noise), wanted)


def test_prompts_in_a_launch_of_their_own_change_no_sample(adapted, monkeypatch):
    monkeypatch.setattr(decode, "APART", [(2, 0)])
    model, params = adapted("llama"), SamplingParams(max_tokens=4, seed=1)
    samples = 9  # of a prompt, one more than a small tile holds
    wanted = PortableEngine(model, 0).generate(PROMPTS, samples, params)
    engine = paged(model, 40)
    close(engine.generate(PROMPTS, samples, params), wanted)
    steps = engine.graphs.steps.values()
    assert {kind.prompts.rows for step in steps for kind in step.forward._attending} == {64}


def test_a_step_cuts_contexts_further_while_they_are_very_long(adapted, monkeypatch):
    """The second of two sequences has a long prompt and ends first."""
    monkeypatch.setattr(decode, "VERY_LONG", 2)
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    model, params, plain = adapted("llama"), SamplingParams(max_tokens=12, seed=1), decode.DecodeStep.decode
    prompts, splits = [[5] * 9, [7] * 90], []
    each = [params, dataclasses.replace(params, max_tokens=3)]

    def noted(step, steps):
        splits.append(step.forward._attending[0].own.splits)
        plain(step, steps)

    monkeypatch.setattr(decode.DecodeStep, "decode", noted)
    monkeypatch.setattr(decode, "MOST_SPLITS", 1)
    wanted = drawn(PortableEngine(model, 0), prompts, 1, each)
    close(drawn(paged(model, 40), prompts, 1, each), wanted)
    assert splits[0] == 2 and splits[-1] == 1


def test_rows_with_far_more_tokens_than_most_are_cut_into_parts_and_change_no_sample(adapted, monkeypatch):
    changes = {"UNEVEN": -1, "LEAST_PAGES": 1, "multiprocessors": lambda device: 1}
    for name, value in changes.items():
        monkeypatch.setattr(decode, name, value)
    model, params, plain = adapted("llama"), SamplingParams(max_tokens=72, seed=2), decode.DecodeStep.decode
    prompts, ways = [[5] * 9, [7] * 9, [8] * 9], []
    each = [params, *[dataclasses.replace(params, max_tokens=most) for most in (9, 2)]]

    def noted(step, steps):
        ways.append(step.forward._attending[0].own.splits)
        plain(step, steps)

    monkeypatch.setattr(decode.DecodeStep, "decode", noted)
    wanted = drawn(PortableEngine(model, 0), prompts, 1, each)
    close(drawn(paged(model, 40), prompts, 1, each), wanted)
    assert ways[0] == 1 and ways[-1] == 2  # of the longest row, with one page and with two


def test_a_step_reads_prompts_apart_while_their_groups_are_large(adapted, monkeypatch):
    """Of two groups of nine one ends in two parts, so that groups are small in the mean between them. Its
    prompt shares nothing; a small tile holds eight samples of the other one."""
    monkeypatch.setattr(decode, "APART", [(24, 0)])  # rows of the step, of which not all run
    model, pace = adapted("llama"), dataclasses.replace(PACE, small_rows=32)
    params, rounds, plain = SamplingParams(max_tokens=10, seed=5), [], decode.DecodeStep.decode
    each = [dataclasses.replace(params, max_tokens=most) for most in [10] * 9 + [3] * 4 + [6] * 5]

    def noted(step, steps):
        items = step.rows.inputs.items[0][0][: step.rows.count, 1]
        apart = step.forward._attending[0].prompts.rows == 64
        rounds.append((step.rows.count, apart, items[items > 0].tolist()))
        plain(step, steps)

    monkeypatch.setattr(decode.DecodeStep, "decode", noted)
    wanted = drawn(PortableEngine(model, 0), PROMPTS, 9, each)
    close(drawn(paged(model, 40, pace), PROMPTS, 9, each), wanted)
    large, small = (24, True, [9]), (24, False, [8, 1])
    assert rounds == [large, large, small, large, large]


def test_fp8_keys_are_refused_where_keys_have_a_bias(tiny_model):
    for family, changes in (("qwen2", {}), ("llama", {"attention_bias": True})):
        with pytest.raises(QeRLError, match="too large for E4M3; set kv_cache_dtype: auto"):
            paged(tiny_model(family, **changes), kv_cache_dtype="fp8")
    for family, changes in (("llama", {}), ("qwen3", {"attention_bias": True})):
        assert paged(tiny_model(family, **changes), kv_cache_dtype="fp8")


@pytest.mark.slow
def test_nf4_weights(adapted, to_nf4):
    model = adapted("qwen2", to_nf4)
    params = SamplingParams(max_tokens=4, seed=1)
    wanted = PortableEngine(model, 0).generate(PROMPTS, 2, params)
    engine = paged(model)
    assert isinstance(engine.decoder.layers[0].mlp.gate_up.weight, NF4Stack)
    close(engine.generate(PROMPTS, 2, params), wanted)
    close(PortableEngine(model, 0).generate(PROMPTS, 2, params), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [40, 256])  # padded to 64, and in parts; others on a GPU
def test_any_rank(adapted, rank):
    model = adapted("llama", rank=rank)
    params = SamplingParams(max_tokens=2, seed=1)
    prompts = PROMPTS[:1]
    wanted = PortableEngine(model, 0).generate(prompts, 1, params)
    close(paged(model).generate(prompts, 1, params), wanted)
    with model.disable_adapter():
        without = PortableEngine(model, 0).generate(prompts, 1, params)
    assert without.completions[0].logprobs != pytest.approx(wanted.completions[0].logprobs, abs=1e-3)


def test_short_passes_are_captured_once_and_kept_while_the_model_trains(adapted, monkeypatch):
    captured = []

    def capture(graphs, run, device):
        captured.append(run.__self__)
        return run

    monkeypatch.setattr(Replays, "capture", capture)
    monkeypatch.setattr(prefill, "CAPTURED_TOKENS", 8)
    model, params = adapted("llama"), SamplingParams(max_tokens=2, seed=1)
    engine = paged(model, 40)
    long, kept = [[4] * 20, [6, 7]], []
    for prompts in (long, [[3] * 9], [[8, 9, 3, 4]], long):
        wanted = PortableEngine(model, 0).generate(prompts, 2, params)
        close(engine.generate(prompts, 2, params), wanted)
        engine.release()
        kept.append(list(engine.prefill.passes))
    assert kept == [[], [8], [8], [8]]
    assert sum(isinstance(each, prefill.Pass) for each in captured) == 1


def test_a_captured_pass_has_room_for_so_many_pieces(adapted):
    """24 prompts, of which two tokens each are prefilled, would fit into a pass of 80 tokens, which takes 20
    pieces if it is captured; launched, as many as there are."""
    model, params = adapted("llama"), SamplingParams(max_tokens=2, seed=1)
    prompts = [[token, token + 1, 5] for token in range(24)]
    wanted, run = PortableEngine(model, 0).generate(prompts, 1, params), prefill.Pass.run
    for captured, expected in ((80, [20, 4]), (0, [24])):
        passes = []

        def noted(each, pieces, passes=passes):
            passes.append(len(pieces))
            run(each, pieces)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill, "CAPTURED_TOKENS", captured)
            patch.setattr(prefill.Pass, "run", noted)
            close(paged(model, 60).generate(prompts, 1, params), wanted)
        assert passes == expected


def test_what_is_captured_is_dropped_with_what_it_reads(adapted):
    """Replays see changed weights, and nothing is replayed behind a longer cache, another adapter or a reset;
    `Replaying` would see it read what is gone."""
    model, params = adapted("llama"), SamplingParams(max_tokens=2, seed=1)
    engine = paged(model, 60)

    def check(*lengths):
        prompts = [list(range(3, 3 + length)) for length in lengths]
        wanted = PortableEngine(model, 0).generate(prompts, 2, params)
        close(engine.generate(prompts, 2, params), wanted)

    check(30, 4)
    engine.release()
    move_adapter(model, 0.1)  # larger ones amplify the rounding of FP32 beyond the bound of `close`
    check(20, 7)
    held = {*engine.graphs.steps.values(), *engine.prefill.passes.values()}
    check(50, 50, 50, 50, 9)  # more blocks, and wider tables
    check(30, 4)
    model.add_adapter("other", LoraConfig(r=18, target_modules=["q_proj", "down_proj"]))
    model.set_adapter("other")
    move_adapter(model, 0.2, "other").eval()
    check(30, 4)
    engine.reset()
    assert not engine.prefill.passes
    check(40, 8)
    now = {*engine.graphs.steps.values(), *engine.prefill.passes.values()}
    assert held and not now & held


def test_a_short_pass_writes_no_key_of_a_longer_one_before(adapted):
    """What a captured pass has no token for is not written, whatever was there in the pass before."""
    engine = paged(adapted("llama"), 60)
    engine.generate([[5] * 60], 2, SamplingParams(max_tokens=2))  # makes room
    keys, values = engine.cache.layers[0]
    with torch.no_grad():
        engine.prefill.run([Span(list(range(9)), 0, {0: [1]}), Span(list(range(40)), 0, {0: [0]})])
        assert keys[0].any() and values[0].any()
        keys[0], values[0] = 7.0, 7.0
        engine.prefill.run([Span(list(range(9)), 0, {0: [1]})])
    assert list(engine.prefill.passes) == [80] and keys[1].any()
    assert (keys[0] == 7.0).all() and (values[0] == 7.0).all()


@pytest.mark.slow
def test_a_pass_that_was_cut_off_leaves_nothing(adapted, monkeypatch):
    model, params = adapted("llama"), SamplingParams(max_tokens=1, seed=1)
    engine = paged(model)
    wanted = engine.generate([[9, 4]], 1, params)
    combine, calls = attention.combine_splits, []

    def cut_off(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        combine(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "combine_splits", cut_off)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[9, 4]], 1, params)
    passes = [*engine.prefill.passes.values(), *engine.graphs.steps.values()]
    for forward in (each.forward for each in passes):
        for left in (each for sums in forward._sums for each in sums):
            left.parts_PTR.fill_(torch.nan)
            left.sum_TR.fill_(torch.nan)
    assert engine.generate([[9, 4]], 1, params).completions == wanted.completions


LONG = list(range(60)) + list(range(1, 7))  # two blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompts, samples, blocks, stops, expected",
    [
        pytest.param([[9]], 9, 12, range(0, 61, 5), [12, 8, 4, 1], id="fewer and fewer are left"),
        pytest.param(
            [LONG, [9], [2]], 3, 6, (11, 12, 13), [4, 8, 2], id="more fit when the long prompt is gone"
        ),
    ],
)
def test_the_step_changes_its_size(adapted, step_sizes, prompts, samples, blocks, stops, expected):
    pace = dataclasses.replace(PACE, small_rows=1, spare_rounds=0)
    model = adapted("llama")
    params = SamplingParams(max_tokens=10, seed=5, stop_token_ids=tuple(stops))
    wanted = PortableEngine(model, 0).generate(prompts, samples, params)
    close(paged(model, blocks, pace).generate(prompts, samples, params), wanted)
    assert list(dict.fromkeys(step_sizes)) == expected, step_sizes


@pytest.mark.slow
def test_all_settings_share_steps_whose_state_is_what_the_plan_counts(adapted):
    model, pace = adapted("llama"), dataclasses.replace(PACE, small_rows=1)
    engine = paged(model, pace=pace)
    for temperature in (1.0, 0.6):
        params = SamplingParams(4, temperature, seed=5, stop_token_ids=tuple(range(0, 61, 4)))
        close(engine.generate([[9]], 4, params), PortableEngine(model, 0).generate([[9]], 4, params))
    steps = engine.graphs.steps
    assert len(steps) > 1, steps
    states = [step.rows.state for step in steps.values()]
    held = sum(x.nbytes for each in states for x in (each.uniform_TM, each.out_token_TM, each.out_stats_2TM))
    assert held == ROW_TOKEN_BYTES * 4 * sum(steps)
    assert state_bytes(3, 4) == ROW_TOKEN_BYTES * 4 * (1 + 2 + 4)


@pytest.mark.slow
def test_rows_are_refilled_and_a_changed_adapter_is_seen(adapted):
    """Six sequences in two rows, a prompt longer than a page, top-p, stop tokens; then again after a step."""
    model = adapted("qwen3")
    engine, reference = paged(model, max_sequences=2), PortableEngine(model, 0)
    prompts = [[5, *range(60), 7, 11, 13, 17, 19, 23], [9, 4, 7], [2]]
    stops = tuple(range(0, 61, 4))
    params = SamplingParams(max_tokens=4, seed=3, temperature=0.8, top_p=0.7, stop_token_ids=stops)
    first = engine.generate(prompts, 2, params)
    close(first, reference.generate(prompts, 2, params))
    assert {c.finish_reason for c in first.completions} == {"stop", "length"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter *= -2
    second = engine.generate(prompts[1:], 1, params)
    assert {tuple(c.logprobs) for c in second.completions}.isdisjoint(
        tuple(c.logprobs) for c in first.completions
    )
    close(second, reference.generate(prompts[1:], 1, params))
