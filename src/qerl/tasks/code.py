"""Programming problems with tests, from a file with one JSON object per line (``code:PATH``).

A line states a problem as in :mod:`qerl.tasks.jsonl`, with the program's tests in place of the answer::

    {"question": "Print the sum of two numbers.", "tests": [{"stdin": "3 4", "stdout": "7"}]}
    {"question": "Write add(a, b).", "tests": ["assert add(3, 4) == 7", "assert add(0, 0) == 0"]}

The program is the last block of the completion between three backticks. It runs in the sandbox
(:mod:`qerl.rewards.sandbox`) or not at all: a machine without a sandbox cannot run this task.

``accuracy`` is 1 for a program that passes all its tests. With ``share_of_tests`` the reward is the share of
passed tests, and is called ``tests_passed``, because a program that passes some is not right.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from qerl.errors import QeRLError
from qerl.host_memory import host_bytes
from qerl.rewards import sandbox
from qerl.rewards.code_tests import read_tests, share_passed
from qerl.rewards.sandbox import Limits
from qerl.rewards.text import Completion, completion_text
from qerl.tasks.formats import get_format
from qerl.tasks.guard import RewardFunction, judges_outside
from qerl.tasks.jsonl import Jsonl

_DEFAULTS = Limits()


class Code(Jsonl):
    """Programming problems from a file.

    Args:
        path, test_size, test_path: As in :class:`qerl.tasks.jsonl.Jsonl`.
        share_of_tests: True if the reward is the share of passed tests; else all or nothing.
        seconds, memory_mb: Limits of a program in one test.

    Raises:
        QeRLError: An option is wrong, or this machine has no sandbox.
    """

    def __init__(
        self,
        path: str,
        test_size: int = 0,
        test_path: str | None = None,
        share_of_tests: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 512,
    ) -> None:
        super().__init__(path, test_size, test_path)
        self.name, self.format = f"code:{path}", get_format("code")
        if not isinstance(share_of_tests, bool):
            raise QeRLError(f"share_of_tests is {share_of_tests!r}; it must be true or false.")
        self._passes = passes_tests(share_of_tests, Limits(seconds, memory_mb), self.extract)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """``accuracy`` or ``tests_passed``, and the format; see :attr:`qerl.tasks.base.Task.rewards`."""
        return [self._passes, super().rewards[1]]

    def _solution(self, row: dict[str, Any]) -> dict[str, Any]:
        answer = row.get("answer") or ""
        if not isinstance(answer, str):
            raise ValueError("the column answer, which may hold a right program, must be text")
        return {"answer": answer, "tests": [vars(test) for test in read_tests(row.get("tests"))]}


def passes_tests(
    share: bool = False,
    limits: Limits = _DEFAULTS,
    extract: Callable[[Completion], str | None] | None = None,
) -> RewardFunction:
    """A reward function that runs the program of each completion on the tests in the column ``tests``.

    The number of concurrent programs is limited by the cores of this process and by the free memory.

    Args:
        share: True if the reward is the share of passed tests (``tests_passed``); else 1 for all of them and
            0 otherwise (``accuracy``).
        limits: Limits of a program in one test.
        extract: Extracts the program from a completion; None takes the last block between three backticks.

    Raises:
        QeRLError: This machine has no sandbox.
    """
    obstacle = sandbox.obstacle()
    if obstacle is not None:
        raise QeRLError(obstacle)
    program_of = extract or (lambda completion: get_format("code").extract(completion_text(completion)))
    workers = ThreadPoolExecutor(_at_once(limits), "sandbox")

    async def accuracy(completions: list[Completion], tests: list[Any], **_: Any) -> list[float | None]:
        async def judge(program: str | None, value: Any) -> float:
            if program is None:
                return 0.0
            work = partial(share_passed, program, read_tests(value), limits, only_all=not share)
            return await asyncio.get_running_loop().run_in_executor(workers, work)

        pairs = zip(map(program_of, completions), tests, strict=True)
        return list(await asyncio.gather(*(judge(program, value) for program, value in pairs)))

    if share:
        accuracy.__name__ = "tests_passed"
    return judges_outside(accuracy)


def _at_once(limits: Limits) -> int:
    """Number of programs that may run at a time, at least one."""
    cores, left = len(os.sched_getaffinity(0)), host_bytes(1)
    return cores if left is None else max(1, min(cores, int(left / 2**20 / limits.most_mb)))
