"""Rewards that are asked for while the rollout decodes are the same, fail alike, and are hidden by it."""

import asyncio
import threading
import time
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.chat_template_utils import add_response_schema, parse_response

from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.tasks.guard import judges_alone, judges_outside
from qerl.tasks.mixture import Mixture, Part
from qerl.tasks.registry import get_task
from qerl.tasks.together import Together, begins_early, guarded
from qerl.trainer import sampler
from qerl.trainer.grpo import QeRLTrainer
from tests.support.agents import tool_tokenizer
from tests.support.models import move_adapter
from tests.support.tools import make_trainer, sampled
from tests.support.trainer import DATA, GROUP, ScriptedEngine, logged, rollout_of, settings, sum_reward

WAIT_S = 60  # for what comes at once; a test that waits so long fails


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def made(rewards, data=DATA, tokenizer=tiny_tokenizer, **changes):
        torch.manual_seed(1)
        model = get_peft_model(tiny_model("llama", vocab_size=len(tiny_tokenizer)), LoraConfig(r=4))
        config = QeRLConfig(**settings(tmp_path, **{"max_completion_length": 12} | changes))
        engine = PortableEngine(move_adapter(model), tiny_tokenizer.pad_token_id, max_sequences=6)
        return QeRLTrainer(model, rewards, config, data, data, engine=engine, processing_class=tokenizer)

    return made


def scores(mark=judges_outside):
    """An asynchronous and a plain function that ask outside, and one that computes here; those three see all
    that a function is called with, and end in an order of their own."""

    @mark
    async def waits(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        (ids,) = completion_ids
        await asyncio.sleep(0.002 * (sum(ids) % 5))
        log_extra("ends", [completions[0][-3:]])
        log_metric("weight", float(ids[0]))
        return [float(sum(ids) % 7) + len(prompts[0]) / 100 + trainer_state.global_step]

    @mark
    def blocks(completions, level, **columns):
        time.sleep(0.001)
        return [len(completions[0]) * level[0] if "e" in completions[0] else None]

    return [waits, blocks, sum_reward]


LEVELS = DATA.add_column("level", [0.1, 0.2, 0.3, 0.4])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"stop_strings": [*"aeiou"], "mask_truncated_completions": True}, id="stop strings"),
        pytest.param(
            {"signal": "reward", "dynamic_sampling_batches": 1, "max_completion_length": 2},
            id="sampled again",
        ),
        pytest.param({"noise": True, "noise_stages": 2}, id="noise"),
        pytest.param({"num_iterations": 2}, id="rollouts used twice"),
    ],
)
def test_a_run_is_the_same_with_rewards_that_begin_early(make, changes):
    found = []
    for mark in (judges_alone, judges_outside):
        trainer = make(scores(mark), LEVELS, max_steps=2, **changes)
        trainer.train()
        scored = trainer.evaluate()
        adapter = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
        tables = [record.rewards | record.extra for record in trainer._log.records]
        timeless = {name: value for name, value in scored.items() if "_per_second" not in name}
        timeless = {name: value for name, value in timeless.items() if "time" not in name}
        found.append((logged(trainer), repr(timeless), repr(tables), adapter))
    rows = [[{k: v for k, v in row.items() if "_per_second" not in k} for row in each[0]] for each in found]
    assert rows[0] == rows[1] and "weight" in rows[0][0] and rows[0][-1]["grad_norm"] > 0
    assert found[0][1] == found[1][1] and found[0][2] == found[1][2]
    for name, tensor in found[0][3].items():
        assert tensor.equal(found[1][3][name]), name


@pytest.mark.parametrize("parsed", [False, True])
def test_messages_are_those_that_trl_makes(make, tiny_tokenizer, parsed, monkeypatch):
    """The reward of a sample is refused if TRL comes to another completion than was judged."""
    seen = []

    @judges_outside
    async def keeps(completions, **_):
        seen.extend(completions)
        return [float(len(completions[0][0]["content"]))]

    tokenizer = tool_tokenizer()
    chat = DATA.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make([keeps], chat, tokenizer=add_response_schema(tokenizer) if parsed else tokenizer)
    made = []
    monkeypatch.setattr(sampler, "parse_response", lambda *a, **k: made.append(1) or parse_response(*a, **k))
    rows = [row for row in trainer.train_dataset for _ in range(4)]
    rollout_of(trainer, rows)
    assert len(seen) == len(rows) and len(made) == 2 * len(rows) * parsed  # early, and with all others
    assert {message["role"] for message, *_ in seen} == {"assistant"}


class Late(PortableEngine):
    """Its last completion is finished only when the rewards of all before it are there."""

    def __init__(self, *args, judged: threading.Semaphore) -> None:
        super().__init__(*args)
        self._judged = judged

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None, ended=None):
        told = []

        def wait(place, completion):
            if len(told) == len(prompts) * samples_per_prompt - 1:
                for _ in told:
                    assert self._judged.acquire(timeout=WAIT_S), "a reward has not begun while others decode"
            told.append(place)
            ended(place, completion)

        return super().generate(prompts, samples_per_prompt, params, norm_offsets, seeds, wait)


@pytest.mark.parametrize("plain", [False, True])
def test_rewards_are_called_while_others_are_decoded(tiny_model, tiny_tokenizer, tmp_path, plain):
    judged = threading.Semaphore(0)

    @judges_outside
    async def waits(completions, **_):
        await asyncio.sleep(0.1)
        judged.release()
        return [float(len(completions[0]) % 3)]

    @judges_outside
    def blocks(completions, **_):
        time.sleep(0.1)
        judged.release()
        return [float(len(completions[0]) % 3)]

    config = QeRLConfig(
        **settings(tmp_path, tuning="full", weights="bf16", max_steps=1, num_generations=2)
        | {"per_device_train_batch_size": 4}
    )
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    engine = Late(model, tiny_tokenizer.pad_token_id, judged=judged)
    reward = blocks if plain else waits
    trainer = QeRLTrainer(model, reward, config, DATA, engine=engine, processing_class=tiny_tokenizer)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["time/reward_hidden"] >= (0.3 if plain else 0.1)  # those of a plain one follow each other
    assert row["step_time"] > row["time/reward_hidden"]


def test_what_is_waited_for_in_an_open_call_is_not_hidden(make):
    """All groups end at once, and nothing is decoded while their rewards are waited for."""

    async def reward(completions, **_):
        await asyncio.sleep(0.3)
        return [float(len(text) % 3) for text in completions]

    trainer = make(
        [reward], max_steps=1, signal="reward", dynamic_sampling_batches=1, max_completion_length=2
    )
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["time/reward"] > 0.3 and row["time/reward_hidden"] < 0.1


def test_the_engine_tells_each_completion_once(tiny_model, tiny_tokenizer):
    engine = PortableEngine(tiny_model("llama"), tiny_tokenizer.pad_token_id, max_sequences=3)
    told = {}
    params = SamplingParams(max_tokens=9, stop_token_ids=tuple(range(5, 40)), seed=3)
    result = engine.generate([[5, 6], [7], [8, 9]], 3, params, ended=lambda i, c: told.update({i: c}))
    assert list(told) != sorted(told), "in the order in which they end"
    assert [told[place] for place in range(9)] == result.completions


# Without a trainer


def begun(guard, calls, completions, **columns):
    """Rewards of a batch of which all samples but the last have been asked about before, the last of them
    first."""
    batch = {"prompts": ["p"] * len(completions), "completions": completions, **columns}
    batch["completion_ids"] = [[i] for i in range(len(completions))]
    calls.abandon()  # as a rollout does
    asked = [None] * len(completions)
    for place in reversed(range(len(completions) - 1)):
        one = {name: [value[place]] if isinstance(value, list) else value for name, value in batch.items()}
        asked[place] = calls.begin(one)
    calls.start(batch, asked)
    return guard(**batch)


def early(function):
    calls = Together()
    return guarded(function, 0.1, calls), calls


def test_what_calls_log_stands_in_the_order_of_the_samples():
    @judges_outside
    async def reward(completions, log_extra, log_metric, **_):
        await asyncio.sleep(float(completions[0]))
        log_extra("waited", [completions[0]])
        log_metric("seconds", float(completions[0]))
        return [1.0]

    extra, metrics = {}, []
    guard, calls = early(reward)
    logs = {"log_extra": extra.__setitem__, "log_metric": lambda *each: metrics.append(each)}
    assert begun(guard, calls, ["0.2", "0.1", "0.0"], **logs) == [1.0] * 3
    assert extra == {"waited": ["0.2", "0.1", "0.0"]}
    assert metrics == [*(("seconds", each) for each in (0.2, 0.1, 0.0)), ("rewards/reward/failed", 0.0)]


@pytest.mark.parametrize("plain", [False, True])
def test_samples_on_which_a_function_fails_have_no_reward(plain):
    def judge(completions):
        if completions[0] == "many":
            return [1.0, 2.0]
        if completions[0] == "stop":
            raise StopIteration
        return [float(completions[0])]

    async def reward(completions, **_):
        await asyncio.sleep(0)
        return judge(completions)

    guard, calls = early(judges_outside((lambda completions, **_: judge(completions)) if plain else reward))
    for _ in range(2):
        assert begun(guard, calls, ["1", "x", "many", "stop", "2"]) == [1.0, None, None, None, 2.0]
        assert (guard.last.failed, len(guard.last.rewards)) == (3, 5)
        assert "could not convert string to float: 'x'" in str(guard.last.first)


def test_a_server_that_cannot_be_reached_is_not_asked_for_every_sample():
    tried = []

    @judges_outside
    async def reward(completions, **_):
        await asyncio.sleep(0.0 if int(completions[0]) >= 280 else WAIT_S)
        tried.append(completions[0])
        raise ConnectionError("refused")

    guard, calls = early(reward)
    started = time.perf_counter()
    assert begun(guard, calls, [str(i) for i in range(300)]) == [None] * 300
    assert (guard.last.failed, len(guard.last.rewards), str(guard.last.first)) == (300, 300, "refused")
    assert len(tried) <= 20 and time.perf_counter() - started < WAIT_S
    tried.clear()
    assert begun(guard, calls, ["290"] * 3) == [None] * 3 and len(tried) == 3, "the next batch is asked again"


@pytest.mark.parametrize("waits", [False, True])
def test_a_function_that_would_end_the_process_fails_on_its_sample_alone(waits):
    def plain(completions, **_):
        if "3" in completions:
            raise SystemExit(0)
        return [1.0]

    async def waiting(completions, **_):
        return plain(completions)

    guard, calls = early(judges_outside(waiting if waits else plain))
    assert begun(guard, calls, ["1", "3"]) == [1.0, None]
    assert "SystemExit (0)" in str(guard.last.first)


def test_keyboard_interrupt_ends_the_run():
    @judges_outside
    async def reward(completions, **_):
        raise KeyboardInterrupt

    guard, calls = early(reward)
    with pytest.raises(KeyboardInterrupt):
        begun(guard, calls, ["1", "2"])


@pytest.mark.slow
def test_calls_that_began_on_a_loop_that_was_left_behind_are_made_again():
    @judges_outside
    async def blocks(completions, **_):
        time.sleep(1.5)  # longer than the limit of 0.1 s and its grace
        return [1.0]

    @judges_outside
    async def waits(completions, **_):
        return [float(completions[0])]

    calls = Together()
    first, second = (guarded(function, 0.1, calls) for function in (blocks, waits))
    assert begun(first, calls, batch := ["1", "2", "3"]) == [None] * 3
    ids = [[0], [1], [2]]
    assert "nothing was awaited" in str(first.last.first)
    assert second(prompts=["p"] * 3, completions=batch, completion_ids=ids) == [1.0, 2.0, 3.0]


def test_calls_of_a_rollout_that_fails_are_given_up_and_the_next_is_judged_anew():
    ended = threading.Event()

    @judges_outside
    async def reward(completions, **_):
        if completions[0] == "hangs":
            try:
                await asyncio.sleep(WAIT_S)
            finally:
                ended.set()
        return [float(completions[0])]

    guard, calls = early(reward)
    calls.begin({"prompts": ["p"], "completions": ["hangs"], "completion_ids": [[1]]})
    while not calls._running:
        time.sleep(0.001)
    calls.abandon()
    assert ended.wait(WAIT_S)
    assert begun(guard, calls, ["1", "2"]) == [1.0, 2.0]


def test_a_completion_that_was_changed_afterwards_gets_no_reward_of_another():
    _, calls = early(judges_outside(lambda completions, **_: [1.0]))
    asked = calls.begin({"prompts": ["p"], "completions": ["as sampled"], "completion_ids": [[1]]})
    with pytest.raises(
        QeRLError, match=r"The reward of sample 0 was requested with other completions than it"
    ):
        calls.start({"prompts": ["p"], "completions": ["changed"], "completion_ids": [[1]]}, [asked])


@pytest.mark.parametrize("wrap", [guarded, partial, lambda function: guarded(partial(function))])
def test_marks_are_seen_through_wrappers(make, wrap):
    """A function that is guarded already, or a partial, begins early as what it wraps does."""
    threads = set()

    @judges_outside
    def blocks(completions, **_):
        threads.add(threading.current_thread().name)
        return [float(len(completions[0]))]

    @judges_alone
    def here(completions, **_):
        return [0.0] * len(completions)

    assert begins_early(wrap(blocks)) and not begins_early(wrap(here))
    trainer = make([wrap(blocks)], max_steps=1)
    trainer.train()
    assert threads == {"qerl-call"}
    assert "rewards/blocks/mean" in logged(trainer)[0]


# What cannot


def test_an_engine_that_does_not_tell_what_is_finished_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    config = QeRLConfig(**settings(tmp_path, tuning="full", weights="bf16"))
    silent = ScriptedEngine(len(tiny_tokenizer))
    said = r"`generate` of ScriptedEngine lacks the argument `ended` that reports ends; add it"
    with pytest.raises(QeRLError, match=said):
        QeRLTrainer(
            tiny_model("llama"), scores(), config, LEVELS, processing_class=tiny_tokenizer, engine=silent
        )


def test_a_mixture_of_tasks_of_which_one_computes_here_is_called_after_the_rollout():
    tasks = [get_task("arithmetic", train_size=4, test_size=4) for _ in range(2)]
    for task in tasks:
        task.rewards = [judges_outside(lambda completions, **_: [1.0] * len(completions))]
        task.rewards[0].__name__ = "accuracy"
    both = Mixture({"a": Part(tasks[0]), "b": Part(tasks[1])})
    assert begins_early(both.rewards[0])
    tasks[1].rewards = [judges_alone(sum_reward.__class__(sum_reward.__code__, {}, "accuracy"))]
    assert not begins_early(Mixture({"a": Part(tasks[0]), "b": Part(tasks[1])}).rewards[0])


def test_rows_that_are_refilled_are_judged_in_the_step_that_they_train_in(make):
    """A sample may end steps before, and a function may read which step it is."""
    steps = []

    @judges_outside
    async def reward(completion_ids, trainer_state, **_):
        steps.append(trainer_state.global_step)
        return [float(len(completion_ids[0]))]

    trainer = make([reward], max_staleness=1, max_steps=3)
    trainer.train()
    assert steps == [step for step in range(3) for _ in range(4 * GROUP)]


@pytest.mark.slow
def test_conversations_are_judged_behind_their_last_turn(tmp_path):
    judged = []

    @judges_outside
    async def reward(completions, **_):
        judged.extend(completions)
        return [float(len(str(completions[0])) % 3)]

    trainer = make_trainer(tmp_path, rewards=[reward], dynamic_sampling_batches=1, signal="reward")
    sampled(trainer)
    assert {record.completion[-1]["role"] for record in trainer._log.records} == {"assistant"}
    assert all(record.completion in judged for record in trainer._log.records)
    assert any(message["role"] == "tool" for said in judged for message in said)
