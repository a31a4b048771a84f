"""Asynchronous reward functions wait at the same time, within their limits."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from qerl.tasks.guard import GuardedReward, judges_alone, judges_outside
from qerl.tasks.mixture import Mixture, Part
from qerl.tasks.registry import get_task
from qerl.tasks.together import Together, guarded

LIMIT_S = 0.4


@pytest.fixture(autouse=True)
def leaves_no_timer() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is handler


def call(guard: GuardedReward, completions: list[str], **columns: Any) -> list[float | None]:
    return guard(prompts=["p"] * len(completions), completions=completions, **columns)


def sleeping(seconds: float, name: str) -> Any:
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(seconds)
        return [float(text) for text in completions]

    reward.__name__ = name
    return reward


def test_functions_of_a_run_wait_at_the_same_time_and_are_called_once():
    together = Together()
    guards = [guarded(sleeping(0.3, name), 5.0, together) for name in ("a", "b", "c")]
    started = time.perf_counter()
    for _ in range(2):
        completions = ["1", "2"]
        assert [call(guard, completions) for guard in guards] == [[1.0, 2.0]] * 3
    assert time.perf_counter() - started < 2 * 0.3 + 0.25


def test_each_batch_is_judged_anew_even_if_one_function_was_not_asked_for_the_last():
    together = Together()
    first, second = (guarded(sleeping(0, name), LIMIT_S, together) for name in "ab")
    assert call(first, ["1"]) == [1.0]
    assert call(second, ["2"]) == [2.0]
    assert call(first, ["3"]) == [3.0]
    assert call(second, ["4"]) == [4.0]


@pytest.mark.slow
def test_a_function_that_fails_costs_the_others_nothing():
    async def raising(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def hanging(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(60)
        return []

    async def blocking(completions: list[str], **columns: Any) -> list[float | None]:
        time.sleep(60)
        return []

    together = Together()
    functions = (raising, hanging, blocking, sleeping(0.05, "good"))
    guards = [guarded(function, LIMIT_S, together) for function in functions]
    completions = ["1", "2"]
    started = time.perf_counter()
    assert [call(guard, completions) for guard in guards] == [[0.0, 0.0]] * 3 + [[1.0, 2.0]]
    assert [guard.last.failed for guard in guards] == [2, 2, 2, 0]
    assert "ValueError" in repr(guards[0].last.first)
    assert "no result within 0.4 s" in str(guards[1].last.first)
    assert "nothing was awaited" in str(guards[2].last.first)
    assert time.perf_counter() - started < 5


def test_samples_that_are_called_by_themselves_wait_at_the_same_time():
    @judges_alone
    async def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
        assert len(completions) == len(answer) == 1
        await asyncio.sleep(0.2 if completions[0] != "bad" else 60)
        return [float(completions == answer)]

    guard = guarded(reward, LIMIT_S)
    started = time.perf_counter()
    assert (
        call(guard, ["1", "2", "bad", "4"] * 4, answer=["1", "0", "bad", "4"] * 4) == [1.0, 0.0, 0.0, 1.0] * 4
    )
    assert guard.last.failed == 4
    assert time.perf_counter() - started < LIMIT_S + 0.4


def test_a_batch_that_fails_is_judged_sample_by_sample_at_the_same_time(caplog):
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        if len(completions) > 1:
            raise ValueError("too many")
        await asyncio.sleep(0.2)
        return [float(completions[0])]

    started = time.perf_counter()
    assert call(guarded(reward, LIMIT_S), ["1"] * 12) == [1.0] * 12
    assert time.perf_counter() - started < 0.2 + 0.4
    assert "failed on a batch of 12 (ValueError: too many) and was called sample by sample" in caplog.text


def test_a_function_that_asks_outside_has_no_limit_of_ours_and_gives_nothing_where_it_fails(caplog):
    at_once, most = 0, 0

    @judges_outside
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.3)
        at_once -= 1
        if completions[0] == "bad":
            raise ValueError("no score")
        return [1.0]

    guard = guarded(reward, 0.1)
    assert call(guard, ["1"] * 30 + ["bad"]) == [1.0] * 30 + [None]
    assert most == 31, "how many wait is for the function to say"
    assert (
        "failed on 1 of 31 samples, which have no reward (first failure: ValueError: no score)" in caplog.text
    )


def test_a_function_that_computes_between_its_waits_does_not_count_as_stuck():
    @judges_outside
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        for _ in range(30):
            time.sleep(0.02)
            await asyncio.sleep(0)
        return [1.0]

    assert call(guarded(reward, 0.2), ["1"]) == [1.0]


@pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError("late")])
def test_a_server_that_cannot_be_reached_is_not_asked_for_every_sample(error):
    tried = 0

    @judges_outside
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        nonlocal tried
        await asyncio.sleep(0.3 * (int(completions[0]) >= 20))  # twenty at once, the others long behind them
        tried += 1
        raise error

    guard = guarded(reward, LIMIT_S)
    assert call(guard, [str(i) for i in range(300)]) == [None] * 300
    assert (guard.last.failed, len(guard.last.rewards), str(guard.last.first)) == (300, 300, str(error))
    assert tried == 20


@pytest.mark.slow
def test_a_task_that_asks_outside_does_not_take_the_limit_from_the_others_of_a_mixture():
    @judges_outside
    async def accuracy(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(2 * LIMIT_S)
        return [1.0] * len(completions)

    @judges_alone
    def slow(completions: list[str], **columns: Any) -> list[float | None]:
        while True:
            pass

    slow.__name__ = "accuracy"
    outside, inside = (get_task("arithmetic", train_size=4, test_size=4) for _ in range(2))
    outside.rewards, inside.rewards = [accuracy], [slow]
    mixture = Mixture({"a": Part(outside), "b": Part(inside)})
    guard = guarded(mixture.rewards[0], LIMIT_S)
    assert call(guard, ["1", "2"], task=["a", "b"]) == [1.0, None]
    assert guard.last.failed == 1


def test_in_a_thread_coroutines_keep_their_limit():
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(60)
        return []

    results = []
    thread = threading.Thread(target=lambda: results.append(call(guarded(reward, 0.1), ["1"])))
    thread.start()
    thread.join(timeout=10)
    assert results == [[0.0]]


def test_a_function_that_would_end_the_process_fails_on_its_sample_alone():
    async def reward(completions: list[str], **columns: Any) -> list[float | None]:
        if "3" in completions:
            raise SystemExit(0)
        return [float(completion) for completion in completions]

    guard = guarded(reward, 5.0)
    assert call(guard, ["1", "3"]) == [1.0, 0.0]
    assert "SystemExit (0)" in str(guard.last.first)


def test_keyboard_interrupt_ends_the_run():
    ended = []

    async def interrupted(completions: list[str], **columns: Any) -> list[float | None]:
        await asyncio.sleep(0.01)
        raise KeyboardInterrupt

    async def waiting(completions: list[str], **columns: Any) -> list[float | None]:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return []

    together = Together()
    guard, _ = (guarded(function, 5.0, together) for function in (interrupted, waiting))
    with pytest.raises(KeyboardInterrupt):
        call(guard, ["1"])
    assert ended == [True], "no coroutine is left behind"


def test_extra_columns_stand_in_the_order_of_the_samples_whoever_ends_first():
    extra = {}

    @judges_alone
    async def reward(completions, log_extra, **_):
        await asyncio.sleep(float(completions[0]))
        log_extra("waited", [completions[0]])
        return [1.0]

    call(guarded(reward, 5.0), ["0.2", "0.1", "0.0"], log_extra=extra.__setitem__)
    assert extra == {"waited": ["0.2", "0.1", "0.0"]}
