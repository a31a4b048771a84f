"""Tests of a program.

A test is an input with its expected output, or Python statements that run after the program::

    {"stdin": "3 4\\n", "stdout": "7\\n"}
    "assert add(3, 4) == 7"

Each test is a run of its own in the sandbox, so no test sees what another one left. Outputs are compared
here, outside of the sandbox, without the spaces at the ends of lines and of the text. If a program times out
in one test, its remaining tests count as failed without being run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qerl.rewards.sandbox import Limits, run_python


@dataclass(frozen=True)
class CodeTest:
    """One test.

    Attributes:
        stdin: Input of the program.
        stdout: The expected output; None where there is a check.
        check: Statements that run after the program and raise nothing if it is right; empty for none.
    """

    stdin: str = ""
    stdout: str | None = None
    check: str = ""


def read_tests(value: Any) -> list[CodeTest]:
    """Parse the tests in a column.

    Args:
        value: A list of texts (statements) and of mappings with ``stdin`` and ``stdout`` or with ``check``.

    Raises:
        ValueError: The value is no list of tests; the message says what a test must be.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("tests must be a list with at least one test")
    return [_read(test) for test in value]


def _read(test: Any) -> CodeTest:
    if isinstance(test, str) and test.strip():
        return CodeTest(check=test)
    if isinstance(test, dict) and set(test) <= {"stdin", "stdout", "check"}:
        stdin, stdout, check = test.get("stdin") or "", test.get("stdout"), test.get("check") or ""
        texts = isinstance(stdin, str) and isinstance(check, str) and isinstance(stdout, str | None)
        if texts and (stdout is None) is bool(check.strip()):
            return CodeTest(stdin, stdout, check)
    raise ValueError("a test must be Python statements as text, or a mapping with stdin and stdout as text")


def share_passed(program: str, tests: Sequence[CodeTest], limits: Limits, only_all: bool) -> float:
    """The share of its tests that a program passes, 0 to 1.

    Args:
        program: The program; it runs in the sandbox.
        tests: At least one.
        limits: Limits of each test.
        only_all: True if the first failed test makes the share 0.

    Raises:
        QeRLError: This machine has no sandbox.
    """
    passed = 0
    for test in tests:
        ran = run_python(program, test.stdin, limits, test.check)
        if test.stdout is None:
            right = ran.checked
        else:
            right = ran.ended == "exit" and ran.exit_code == 0 and _lines(ran.stdout) == _lines(test.stdout)
        passed += right
        if ran.ended == "time" or (only_all and not right):
            break
    return float(passed == len(tests)) if only_all else passed / len(tests)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
