"""A reward function that fails costs its sample a zero, and nothing else."""

import asyncio
import functools
import inspect
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from qerl.errors import QeRLError
from qerl.tasks import get_task
from qerl.tasks.guard import judges_alone
from qerl.tasks.together import guarded

LIMIT_S = 0.15
PROMPTS = ["p0", "p1", "p2", "p3"]
COMPLETIONS = ["1", "2", "bad", "4"]
ANSWERS = ["1", "0", "3", "4"]


def per_sample(fail: Callable[[], float]) -> Callable[..., list[float | None]]:
    """A reward that is the completion as a number, and ``fail()`` for the completion "bad"."""

    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [fail() if completion == "bad" else float(completion) for completion in completions]

    return reward


def fail_raising() -> float:
    raise ValueError("no such thing")


def fail_looping() -> float:
    while True:
        pass


def fail_looping_through_exceptions() -> float:
    while True:
        try:
            while True:
                pass
        except Exception:
            continue


def fail_sleeping() -> float:
    time.sleep(60)
    return 1.0


def fail_returning_text() -> float:
    return "1.0"  # type: ignore[return-value]


def fail_sleeping_in_a_loop_of_its_own() -> float:
    return asyncio.run(asyncio.sleep(60, 1.0))


@pytest.fixture(autouse=True)
def leaves_no_timer() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGALRM)
    yield
    left = signal.getitimer(signal.ITIMER_REAL)
    assert signal.getsignal(signal.SIGALRM) is handler
    # pytest-timeout may run a timer of its own; the guard's repeats every LIMIT_S.
    assert left[1] != LIMIT_S


@pytest.mark.parametrize(
    "fail",
    [
        fail_raising,
        fail_looping,
        fail_looping_through_exceptions,
        fail_sleeping,
        fail_returning_text,
        fail_sleeping_in_a_loop_of_its_own,
        lambda: math.nan,
        lambda: math.inf,
        lambda: 1e39,  # infinite in FP32
        lambda: 1j,  # type: ignore[return-value]
        lambda: np.zeros(2),  # type: ignore[return-value]
    ],
)
def test_failure_costs_its_sample_a_counted_zero(fail: Callable[[], float], caplog) -> None:
    logged: list[tuple[str, float]] = []
    reward = guarded(per_sample(fail), LIMIT_S)
    started = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rewards = reward(
                prompts=PROMPTS,
                completions=COMPLETIONS,
                answer=ANSWERS,
                log_metric=lambda name, value: logged.append((name, value)),
            )
            assert rewards == [1.0, 2.0, 0.0, 4.0]
    assert time.perf_counter() - started < 4 * LIMIT_S + 1
    assert logged == [("rewards/reward/failed", 0.25)] * 2  # the share
    assert len(caplog.records) == 1  # said once, counted each time
    assert "'reward' failed on 1 of 4 samples" in caplog.text
    assert reward.__name__ == "reward"


@pytest.mark.parametrize("length", [0, 3, 5])
def test_wrong_length_costs_the_batch_zeros(length: int) -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [1.0] * length

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [0.0] * 4


def test_wrong_length_for_the_batch_alone_costs_nothing_and_is_said(caplog) -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [float(len(completions[0]))]  # forgets the rest of a batch

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [1.0, 1.0, 3.0, 1.0]
    assert "failed on a batch of 4 (ValueError: 1 rewards for 4 completions) and was called" in caplog.text


def test_no_list_at_all_costs_the_batch_zeros() -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> None:
        return None

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [0.0] * 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rewards",
    ["1111", b"1111", {0: 1.0, 1: 2.0, 2: 0.0, 3: 4.0}, {1.0, 2.0, 3.0, 4.0}, 1.0, ["1", "2", "3", "4"]],
)
def test_what_is_no_list_of_numbers_is_not_taken_for_one(rewards: Any) -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> Any:
        return rewards if len(completions) == 4 else rewards[:1]

    guard = guarded(reward, LIMIT_S)
    assert guard(prompts=PROMPTS, completions=COMPLETIONS) == [0.0] * 4
    assert guard.last.failed == 4


@pytest.mark.parametrize(
    "rewards",
    [
        (1, 2, None, 4),
        np.array([1, 2, 3, 4], dtype=np.int8),
        torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16),
        torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        [True, Fraction(1, 2), np.float32(0.5), torch.tensor(2)],
    ],
)
def test_numbers_of_any_kind_become_floats(rewards: Any) -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> Any:
        return rewards

    given = guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS)
    assert given == [None if value is None else float(value) for value in rewards]
    assert {type(value) for value in given} <= {float, type(None)}


def test_a_generator_works_within_the_limit() -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> Any:
        for completion in completions:
            yield float(completion) if completion != "bad" else fail_looping()

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [1.0, 2.0, 0.0, 4.0]


# Limits


def test_a_batch_may_take_longer_than_a_sample_and_is_called_once() -> None:
    calls = []

    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        calls.append(len(completions))
        time.sleep(0.0008 * len(completions))  # below a hundredth of the limit for each
        return [1.0] * len(completions)

    assert guarded(reward, 0.1)(prompts=["p"] * 400, completions=["c"] * 400) == [1.0] * 400
    assert calls == [400]


@pytest.mark.slow
def test_a_slow_function_is_measured_once_and_given_its_time() -> None:
    calls = []

    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        calls.append(len(completions))
        time.sleep(0.05 * len(completions))
        return [1.0] * len(completions)

    guard = guarded(reward, 0.2)
    for _ in range(2):
        assert guard(prompts=["p"] * 8, completions=["c"] * 8) == [1.0] * 8
    assert calls == [8, *[1] * 8, 8]


def test_a_function_that_hangs_on_everything_is_not_tried_on_every_sample() -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [fail_sleeping()]

    guard = guarded(reward, 0.02)
    started = time.perf_counter()
    assert guard(prompts=["p"] * 500, completions=["c"] * 500) == [0.0] * 500
    assert time.perf_counter() - started < 0.02 + 5 * 0.02 + 16 * 0.02 + 0.5
    assert (guard.last.failed, len(guard.last.rewards)) == (500, 500)


def test_a_function_that_judges_alone_is_never_called_twice_for_a_sample() -> None:
    seen = []

    @judges_alone
    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        seen.extend(completions)
        return [float(c) if c != "bad" else fail_sleeping() for c in completions]

    started = time.perf_counter()
    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [1.0, 2.0, 0.0, 4.0]
    assert time.perf_counter() - started < 2 * LIMIT_S
    assert seen == COMPLETIONS


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, "10", None, True])
def test_a_limit_is_a_positive_number_of_seconds(limit: Any) -> None:
    with pytest.raises(QeRLError, match=r"reward_timeout is .*; it must be a number of seconds"):
        guarded(per_sample(fail_raising), limit)


def test_good_functions_are_called_once_and_pass_through(caplog) -> None:
    calls = []
    logged: list[tuple[str, float]] = []

    def reward(prompts: list, completions: list, answer: list, **columns: Any) -> list[float | None]:
        calls.append((prompts, completions, answer))
        return [None, 1, 0.5, -2.0]

    rewards = guarded(reward, LIMIT_S)(
        prompts=PROMPTS,
        completions=COMPLETIONS,
        answer=ANSWERS,
        log_metric=lambda name, value: logged.append((name, value)),
    )
    assert rewards == [None, 1.0, 0.5, -2.0]
    assert calls == [(PROMPTS, COMPLETIONS, ANSWERS)]
    assert logged == [("rewards/reward/failed", 0.0)]
    assert caplog.records == []


def test_samples_keep_their_own_columns_and_log_extra_columns_once() -> None:
    seen, extra = [], []

    def reward(prompts: list, completions: list, answer: list, trainer_state: str, log_extra: Any) -> list:
        log_extra("right", answer)
        seen.append((prompts, completions, answer, trainer_state))
        if len(completions) > 1:
            raise ValueError("after it logged")
        return [float(completions[0] == answer[0])]

    rewards = guarded(reward, LIMIT_S)(
        prompts=PROMPTS,
        completions=COMPLETIONS,
        answer=ANSWERS,
        trainer_state="state",
        log_extra=lambda name, values: extra.append(values),
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0]
    assert seen[1:] == [
        ([p], [c], [a], "state") for p, c, a in zip(PROMPTS, COMPLETIONS, ANSWERS, strict=True)
    ]
    assert extra == [ANSWERS]


def test_extra_columns_of_single_calls_have_a_value_for_every_sample() -> None:
    extra = {}

    @judges_alone
    def reward(completions: list, log_extra: Any, **_: Any) -> list:
        if completions[0] == COMPLETIONS[1]:
            raise ValueError("before it logged")
        log_extra("said", [completions[0].upper()])
        return [1.0]

    guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS, log_extra=extra.__setitem__)
    upper = [completion.upper() for completion in COMPLETIONS]
    assert extra == {"said": [upper[0], None, *upper[2:]]}


def test_in_a_thread_it_works_without_limit_and_says_so_once(caplog) -> None:
    results: list[list[float | None]] = []
    reward = guarded(per_sample(fail_raising), LIMIT_S)

    def work() -> None:
        for _ in range(2):
            results.append(reward(prompts=PROMPTS, completions=COMPLETIONS, answer=ANSWERS))

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=10)
    assert results == [[1.0, 2.0, 0.0, 4.0]] * 2
    said = [record.getMessage() for record in caplog.records]
    assert ["runs without a time limit" in text for text in said] == [True, False]
    assert ["failed on 1 of 4 samples" in text for text in said] == [False, True]


def test_a_function_that_would_end_the_process_fails_on_its_sample_alone() -> None:
    def reward(prompts: list, completions: list) -> list[float | None]:
        if "3" in completions:
            raise SystemExit(0)
        return [float(completion) for completion in completions]

    guard = guarded(reward, LIMIT_S)
    assert guard(prompts=PROMPTS, completions=["1", "2", "3", "4"]) == [1.0, 2.0, 0.0, 4.0]
    assert guard.last.failed == 1 and "SystemExit (0)" in str(guard.last.first)


def test_keyboard_interrupt_ends_the_run() -> None:
    def reward(prompts: list, completions: list) -> list[float | None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS)


async def judge(prompts: list, completions: list, **columns: Any) -> list[float | None]:
    if "bad" in completions:
        await asyncio.sleep(60)
    return [float(completion) for completion in completions]


class Judge:
    """Keeps what belongs to an event loop from one call to the next, as clients of servers do."""

    def __init__(self) -> None:
        self.lock: asyncio.Lock | None = None
        self.loops: set[int] = set()

    async def __call__(self, prompts: list, completions: list, **columns: Any) -> list[float | None]:
        self.loops.add(id(asyncio.get_running_loop()))
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            pass
        return await judge(prompts, completions)


@pytest.mark.parametrize("function", [judge, functools.partial(judge), Judge()])
def test_asynchronous_functions_have_their_limit_too(function: Any) -> None:
    guard = guarded(function, LIMIT_S)
    assert not inspect.iscoroutinefunction(guard.__call__)
    for _ in range(2):
        assert guard(prompts=PROMPTS, completions=COMPLETIONS) == [1.0, 2.0, 0.0, 4.0]
    assert "no result within 0.15 s" in str(guard.last.first)
    assert guard.__name__ == ("Judge" if isinstance(function, Judge) else "judge")
    if isinstance(function, Judge):
        assert len(function.loops) == 1


@pytest.mark.slow
def test_an_asynchronous_function_that_never_awaits_is_interrupted() -> None:
    async def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [float(c) if c != "bad" else fail_looping() for c in completions]

    guard = guarded(reward, LIMIT_S)  # type: ignore[arg-type]
    for _ in range(2):
        assert guard(prompts=PROMPTS, completions=COMPLETIONS) == [1.0, 2.0, 0.0, 4.0]


def test_what_is_guarded_is_not_guarded_again() -> None:
    guard = guarded(per_sample(fail_raising), LIMIT_S)
    assert guarded(guard, 1.0) is guard


@pytest.mark.slow
def test_a_completion_that_is_slow_to_compare_costs_itself_alone() -> None:
    task = get_task("arithmetic", train_size=1, test_size=1)
    accuracy = guarded(task.rewards[0], timeout_s=1.0)
    tower = "#### " + "^".join(["9"] * 12) + "!"
    rewards = accuracy(prompts=PROMPTS[:3], completions=["#### 7", tower, "#### 7"], answer=["7", "7", "7"])
    assert rewards == [1.0, 0.0, 1.0]
