"""Random tools that raise, hang, return a lot or nonsense: each costs its own row, and nothing stays behind.

Batches of trajectories with random budgets and limits on a scripted engine. A finding is an AssertionError:
a trajectory that breaks its bounds or has no end, a sequence that was not finished, a batch that takes too
long, or a thread or process that is still there at the end, when everything that hung has been let go.
"""

import asyncio
import contextlib
import multiprocessing
import random
import threading
import time
from pathlib import Path

from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import THREADS, ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.trajectory import Trajectory
from qerl.agents.world import TextWorld, ToolWorld, World
from qerl.rollout.engine import SamplingParams
from tests.fuzz._print import run_and_print
from tests.support.agents import SayingEngine, call, tool_tokenizer

ROWS = 20
TIMEOUT = 0.05
STUCK = 16
SECONDS = 20.0
"""Longest that a batch may take."""

_RELEASE = threading.Event()
"""Lets go of what hangs."""


class _Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class _Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def quick(n: int = 3) -> object:
    """Return something at once."""
    return [n, "text", {"a": 1}, None, _Unprintable(), "\U0001f600\x00", 1e300, b"bytes"][n % 8]


def raising(n: int = 0) -> None:
    """Raise something."""
    raise [ValueError("no"), KeyError(), _Unsayable(), SystemExit(1), KeyboardInterrupt(), TimeoutError()][
        n % 6
    ]


def big(n: int = 0) -> str:
    """Return a megabyte."""
    return chr(97 + n % 26) * 2**20


def sleeping(n: int = 0) -> None:
    """Hang where Python cannot be interrupted, for a while or until it is let go."""
    _RELEASE.wait(None if n % 8 == 0 else TIMEOUT * (n % 8))


def spinning(n: int = 0) -> None:
    """Hang in Python."""
    while n >= 0:
        pass


async def awaiting(n: int = 0) -> str:
    """Hang politely, or not."""
    await asyncio.sleep(TIMEOUT * (n % 3))
    return "awaited"


async def stubborn(n: int = 0) -> None:
    """Swallow being cancelled, for a while."""
    for _ in range(n % 4):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(4 * TIMEOUT)


TOOLS = [quick, raising, big, sleeping, spinning, awaiting, stubborn]
_OFTEN = [quick, quick, quick, quick, raising, raising, big, awaiting, sleeping, spinning, stubborn]
_NONSENSE = ["", "so it is", "<tool_call>", "</tool_call>\n<tool_call>{", "<tool_call>\n[[[[\n</tool_call>",
             '<tool_call>\n{"name": "quick", "arguments": 3}\n</tool_call>',
             '<tool_call>\n{"name": "", "arguments": {"": null}}\n</tool_call>']  # fmt: skip


class Talking:
    """A text environment whose answers are as random as the tools'."""

    def respond(self, text: str) -> object:
        number = sum(map(ord, text))
        tool = _OFTEN[number % len(_OFTEN)]
        return tool(number) if tool not in (awaiting, stubborn) else None


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of how trajectories ended; a defect is an AssertionError that names its batch."""
    _RELEASE.clear()
    tokenizer = tool_tokenizer()
    templates = TurnTemplate(tokenizer, tools=True), TurnTemplate(tokenizer)
    before = set(threading.enumerate())
    pool = ToolPool(TIMEOUT, output_limit=50, stuck=STUCK)
    ends: dict[str, int] = {}
    try:
        for batch in range(-(-count // ROWS)):
            draw = random.Random(f"{seed}/{batch}")
            start = time.monotonic()
            for found in _play(draw, pool, tokenizer, *templates, f"batch {seed}/{batch}"):
                ends[str(found.end)] = ends.get(str(found.end), 0) + 1
            assert time.monotonic() - start < SECONDS, f"batch {seed}/{batch} took too long"
            extra = len(set(threading.enumerate()) - before)
            assert extra <= STUCK + 2 * THREADS + 1, f"batch {seed}/{batch}: {extra} threads"
    finally:
        _RELEASE.set()
        pool.close()
    until = time.monotonic() + SECONDS
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    left = set(threading.enumerate()) - before
    assert not left, f"threads are left: {left}"
    assert not multiprocessing.active_children(), "processes are left"
    return ends


def _play(
    draw: random.Random, pool: ToolPool, tokenizer, tools: TurnTemplate, texts: TurnTemplate, case: str
) -> list[Trajectory]:
    most, iterations = draw.randint(1, 1500), draw.choice([None, 1, 2, 5])
    limits = Limits(iterations, draw.choice(["text", "text", "end"]))

    def say(row, so_far):
        own = random.Random(f"{case}/{row.sample}/{len(so_far)}")
        if own.random() < 0.2:
            return own.choice(_NONSENSE)
        calls = [own.choice(_OFTEN).__name__ for _ in range(own.choice([1, 1, 1, 2, 3]))]
        return "\n".join(
            call(name, n=own.randint(0, 30)) for name in [*calls, *["nobody"] * (own.random() < 0.1)]
        )

    worlds: list[World] = [
        TextWorld(texts, Talking()) if draw.random() < 0.3 else ToolWorld(tools, TOOLS) for _ in range(ROWS)
    ]
    engine = SayingEngine(tokenizer, say, positions=draw.choice([None, 700]))
    with engine.session(SamplingParams(most)) as session:
        found = run_trajectories(session, [[5] * draw.randint(1, 800)], ROWS, worlds, pool, limits)
        assert not session.busy and not pool.pending, case
        assert all(sequence.stage == "finished" for sequence in session._sequences), case
    for trajectory in found:
        _check(trajectory, most, iterations, case)
    return found


def _check(found: Trajectory, most: int, iterations: int | None, case: str) -> None:
    length = len(found.token_ids)
    assert found.end is not None and length <= most, case
    assert length == len(found.written) == len(found.logprobs) == len(found.entropies), case
    for wrote, logprob in zip(found.written, found.logprobs, strict=True):
        assert wrote == (logprob < 0), case
    assert length == 0 or (found.written[0] and found.written[-1]), case
    assert iterations is None or found.turns <= iterations + 1, case
    assert sum(message["role"] == "assistant" for message in found.messages) == found.turns, case
    assert found.failures <= found.calls, case
    assert all(len(str(message["content"])) < 5000 for message in found.messages), case


def main(arguments: list[str]) -> int:
    return run_and_print("tools", run, arguments)
