"""A reward function that fails costs its sample a zero, and nothing else."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from qerl.tasks.guard import call_within, guarded

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
    return "not a number"  # type: ignore[return-value]


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
        lambda: math.nan,
        lambda: math.inf,
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
    assert logged == [("rewards/reward/failed", 1.0)] * 2
    assert len(caplog.records) == 1  # said once, counted each time
    assert "'reward' failed on 1 of 4 samples" in caplog.text
    assert reward.__name__ == "reward"


@pytest.mark.parametrize("length", [0, 3, 5])
def test_wrong_length_costs_the_batch_zeros(length: int) -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [1.0] * length

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [0.0] * 4


def test_wrong_length_for_the_batch_alone_costs_nothing() -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        return [float(len(completions[0]))]  # forgets the rest of a batch

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [1.0, 1.0, 3.0, 1.0]


def test_no_list_at_all_costs_the_batch_zeros() -> None:
    def reward(prompts: list, completions: list, **columns: Any) -> None:
        return None

    assert guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS) == [0.0] * 4  # type: ignore[arg-type]


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
    assert ["runs without time limit" in text for text in said] == [True, False]
    assert ["failed on 1 of 4 samples" in text for text in said] == [False, True]


def test_keyboard_interrupt_ends_the_run() -> None:
    def reward(prompts: list, completions: list) -> list[float | None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(reward, LIMIT_S)(prompts=PROMPTS, completions=COMPLETIONS)


def test_async_functions_are_refused() -> None:
    async def reward(prompts: list, completions: list) -> list[float | None]:
        return []

    with pytest.raises(QeRLError, match="'reward' is async; write it as a plain function"):
        guarded(reward)  # type: ignore[arg-type]


def test_a_timer_that_ran_before_goes_on_with_the_time_passed_taken_off() -> None:
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"no result within 0\.1 s"):
            call_within(0.1, lambda: time.sleep(60))
        time.sleep(0.4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
    assert len(rung) == 1
    assert rung[0] - started == pytest.approx(0.3, abs=0.1)


def test_a_completion_that_is_slow_to_compare_costs_itself_alone() -> None:
    task = get_task("arithmetic", train_size=1, test_size=1)
    accuracy = guarded(task.rewards[0], timeout_s=1.0)
    tower = "#### " + "^".join(["9"] * 12) + "!"
    rewards = accuracy(prompts=PROMPTS[:3], completions=["#### 7", tower, "#### 7"], answer=["7", "7", "7"])
    assert rewards == [1.0, 0.0, 1.0]
