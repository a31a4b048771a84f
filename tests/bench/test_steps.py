"""What `bench step` and `bench context` do, on a tiny model and the CPU: everything but the GPU's clocks."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the benchmarks themselves measure a GPU", allow_module_level=True)

from bench import clock, context, step
from qerl.families.sizes import Sizes
from qerl.lora.adapter import add_lora
from qerl.measure.random_model import random_policy
from qerl.measure.random_task import random_rewards
from qerl.plan.phases import make_plan
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.portable.engine import PortableEngine
from qerl.update.chunks import MemoryRetry
from tests.support.machine import Eager
from tests.support.plan import GB80, work

pytestmark = pytest.mark.slow

TINY = Sizes.uniform(64, 96, 2, 4, 2, 16, vocabulary=1003, positions=512, qk_norm=True)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Nothing is asked of a GPU, and 3 GB of one are in use."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_reserved", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    for module in (clock, step, context):
        monkeypatch.setattr(module, "used_bytes", lambda _: 3_000_000_000)
    monkeypatch.setattr(context, "keep_within_limit", lambda _: None)
    monkeypatch.setattr(context, "random_policy", lambda *given: random_policy(*given, device="cpu"))
    monkeypatch.setattr(context, "DRAWN", 4)


@pytest.fixture
def passes(monkeypatch):
    """Tokens of each forward pass of an update."""
    seen = []
    noted = MemoryRetry.note_forward

    def note(self, rows, lengths):
        seen.append(lengths.tokens(rows))
        return noted(self, rows, lengths)

    monkeypatch.setattr(MemoryRetry, "note_forward", note)
    return seen


@pytest.mark.parametrize("lengths", [[6] * 8, [1, 6, 3, 2, 5, 4, 6, 1]])
def test_a_step_samples_what_it_is_told(lengths):
    policy = random_policy(TINY, "bf16", 4, 64, device="cpu")
    rows = step.measure(
        policy, PortableEngine(policy, 0), TINY, samples=4, prompts=2, microbatch=4, tokens_per_forward=40,
        checkpointing={"every_n_layers": 2}, prompt_tokens=5, tokens=6, lengths=lengths, steps=2,
    ).steps  # fmt: skip
    assert len(rows) == 3
    assert all(row["tokens"] == sum(lengths) for row in rows[1:])
    assert all(row["total_s"] > row["rollout_s"] > 0 and row["update_gb"] == 3.0 for row in rows)
    assert all(row["loss"] == row["loss"] and row["grad_norm"] > 0 for row in rows[1:])


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_profile_is_of_the_update_of_a_step_that_is_not_counted(monkeypatch, max_staleness):
    """Its kernels are sorted by their time; a CPU has none, so a stand-in records the operations."""
    policy = random_policy(TINY, "bf16", 4, 64, device="cpu")
    whole, begun = torch.profiler.profile, []

    class OnCPU(whole):
        def __init__(self, **_):
            super().__init__(activities=[torch.profiler.ProfilerActivity.CPU])
            begun.append(len(timed))

        def key_averages(self, *given, **named):
            return [
                SimpleNamespace(key=e.key, count=e.count, self_device_time_total=e.self_cpu_time_total)
                for e in super().key_averages(*given, **named)
            ]

    timed, ended = [], clock.Clock.on_step_end

    def counted(self, *given, **named):
        ended(self, *given, **named)
        timed.append(len(self.rows))

    monkeypatch.setattr(torch.profiler, "profile", OnCPU)
    monkeypatch.setattr(clock.Clock, "on_step_end", counted)
    seen = step.measure(
        policy, PortableEngine(policy, 0), TINY, samples=4, prompts=2, microbatch=4, tokens_per_forward=40,
        checkpointing={"every_n_layers": 2}, prompt_tokens=5, tokens=6, lengths=[6] * 8, steps=2,
        max_staleness=max_staleness, profile=True,
    )  # fmt: skip
    assert len(seen.steps) == 3 and begun == [len(timed) - 1] and len(timed) == 3 + max(1, 2 * max_staleness)
    names, times = ([kernel[key] for kernel in seen.kernels] for key in ("name", "ms"))
    assert times == sorted(times, reverse=True) and sum(times) <= seen.kernels_ms + 0.1
    assert "aten::mm" in names and all(kernel["calls"] > 0 for kernel in seen.kernels)


def test_groups_without_signal_are_replaced_by_groups_of_their_own_lengths(monkeypatch):
    """Every sample of the groups that may enter has its length, by the order in which they start."""
    policy = random_policy(TINY, "bf16", 4, 64, device="cpu")
    lengths, drawn = [1 + (5 * i) % 6 for i in range(2 * 4 * 4)], {}
    made = step.make_trainer

    def watched(*given, **settings):
        trainer = made(*given, **settings)
        trainer.rollouts.sampler.prepare = lambda group, _: drawn.update(
            {tuple(sample.prompt): [len(each.tokens) for each in group.samples] for sample in group.samples}
        )
        return trainer

    monkeypatch.setattr(step, "make_trainer", watched)
    rows = step.measure(
        policy, PortableEngine(policy, 0), TINY, samples=4, prompts=2, microbatch=4, tokens_per_forward=40,
        checkpointing={"every_n_layers": 2}, prompt_tokens=5, tokens=6, lengths=lengths, steps=2, dead=0.6,
    ).steps  # fmt: skip
    started = [row["dynamic_sampling/started_groups"] for row in rows]
    assert max(started) > 2 and all(2 <= count <= 8 for count in started)
    groups = {tuple(lengths[at : at + 4]) for at in range(0, len(lengths), 4)}
    assert len(drawn) > 6 and all(tuple(found) in groups for found in drawn.values())
    assert all(0 < row["tokens"] <= sum(lengths) for row in rows)


def test_steps_whose_rows_are_refilled_are_counted_behind_the_first_and_ahead_of_the_last():
    """Every sample has its length, that of its place in a step; of the counted steps each leaves some."""
    policy = random_policy(TINY, "bf16", 4, 64, device="cpu")
    lengths = [1 + (5 * i) % 19 for i in range(2 * 4)]
    rows = step.measure(
        policy, PortableEngine(policy, 0), TINY, samples=4, prompts=2, microbatch=4, tokens_per_forward=40,
        checkpointing={"every_n_layers": 2}, prompt_tokens=5, tokens=20, lengths=lengths, steps=4,
        max_staleness=1,
    ).steps  # fmt: skip
    assert len(rows) == 1 + 4
    assert all(row["staleness/samples_under_way"] > 0 for row in rows)
    assert all(row["staleness/max"] == 1 for row in rows[1:])
    # What a step draws ahead the step before has drawn for it, give or take who ends where.
    assert sum(row["tokens"] for row in rows[1:]) == pytest.approx(4 * sum(lengths), rel=0.3)


def test_a_share_of_groups_is_dead_whenever_their_prompts_are_sampled():
    prompts = [f"w{i} w{i + 1}" for i in range(400) for _ in range(2)]
    for dead, number in ((0.5, 200), (0.3, 120)):
        reward = random_rewards(dead)
        one, other = (reward(prompts, prompts) for _ in range(2))
        lives = [value > 0 for value in one]
        assert lives == [value > 0 for value in other] and one != other
        assert lives[::2] == lives[1::2] and lives.count(False) == 2 * number
        assert lives[:20].count(False) == number // 20, "there is no chance in it"
    assert all(random_rewards()(prompts, prompts))


def test_the_longest_completion_is_given_to_the_update_and_drawn_at_its_end(monkeypatch, passes):
    """It is a pass by itself, on gradients, in the second step alone; then the rollout follows."""
    held = []
    monkeypatch.setattr(context, "SHORT", 8)
    drawn, made = [], []

    class Engine(PortableEngine):
        def __init__(self, policy, pad, rows):
            made.append(policy)
            super().__init__(policy, pad, rows)

        def session(self, *given):
            drawn.append(super().session(*given))
            return drawn[-1]

    monkeypatch.setattr(context, "PagedEngine", Engine)
    asked = work(
        weights="bf16", rank=4, prompt_tokens=6, completion_tokens=100, group=4, microbatch=4,
        microbatches=2, sequences=4, tokens_per_forward=105,
    )  # fmt: skip
    plan = SimpleNamespace(sizes=TINY, work=asked, sequences=2, plan=make_plan(TINY, asked, GB80))
    note = MemoryRetry.note_forward

    def with_gradients(self, rows, lengths):
        (policy,) = made
        held.append(all(p.grad is not None for p in policy.parameters() if p.requires_grad))
        return note(self, rows, lengths)

    monkeypatch.setattr(MemoryRetry, "note_forward", with_gradients)
    update, rollout = context.measure(plan)
    short = 5 + 4 * 8
    assert passes == [2 * short, 5 + 100, short + 5 + 3 * 8]
    assert held == [True] * 3
    assert update["update_gb"] == rollout["rollout_gb"] == 3.0
    assert update["update_s"] > 0 and rollout["prefill_s"] > 0 and rollout["step_ms"] > 0
    assert len(drawn) == 1


def test_both_engines_end_turns_where_the_benchmark_needs_it(tiny_model):
    model = add_lora(tiny_model("qwen3", vocab_size=1003), rank=4, alpha=8, dropout=0.0).eval()
    eager = PagedEngine(model, 0, 4, machine=Eager(), pace=Pace(round_steps=2, prefill_tokens=(8, 80)))
    prefilled = []
    for engine in (PortableEngine(model, 0), eager):
        session = engine.session

        def kept(*given, session=session):
            opened = session(*given)

            class Kept:
                def __enter__(self):
                    prefilled.append(opened.__enter__())
                    return prefilled[-1]

                def __exit__(self, *raised):
                    return opened.__exit__(*raised)

            return Kept()

        engine.session = kept
        context.measure_rollout(engine, prompt=5, group=4, tokens=90, rows=2)
    for session in prefilled:
        lengths = {index: len(sequence.token_ids) for index, sequence in session._sequences.items()}
        assert lengths == {0: 90, 1: 90}  # the others were finished
        assert session.prefilled_tokens >= 2 * (90 - 4 - 2)
