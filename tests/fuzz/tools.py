"""Random tools that raise, hang, return a lot or nonsense: each costs its own row, and nothing stays behind.

Batches of trajectories with random budgets and limits, by turns on the paged engine's session, scheduler and
blocks, with few blocks and texts from a script, and on the portable engine with a tiny model, whose turns are
taken for calls whatever it writes. A finding is an AssertionError: a trajectory that breaks its bounds or has
no end, a sequence that was not finished, a block or keys and values that are still held, a batch that takes
too long, or a thread or process that is still there at the end, when everything that hung has been let go.
"""

import asyncio
import contextlib
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.trajectory import Trajectory
from qerl.agents.world import TextWorld, ToolWorld, World
from qerl.calls.beside import AT_ONCE, Beside
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from tests.fuzz._print import run_and_print
from tests.support.agents import call, tool_tokenizer
from tests.support.books import SayingPages, blocks_of
from tests.support.calling import CallingTemplate
from tests.support.models import make_tiny_model

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


Played = tuple[Any, list[int], int, TurnTemplate]
"""A session, a prompt, the tokens that its trajectories may have, and a template that finds their calls."""


class Engines:
    """The two engines, in sessions that must have given back everything when they end."""

    def __init__(self) -> None:
        self.tokenizer = tool_tokenizer()
        self.texts, self.tools = TurnTemplate(self.tokenizer), TurnTemplate(self.tokenizer, tools=True)
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 700}
        self.model = make_tiny_model("llama", **sizes)

    @contextlib.contextmanager
    def paged(self, draw: random.Random, case: str) -> Iterator[Played]:
        """Texts of a script, and blocks for one sequence or a few."""

        def say(row, so_far):
            own = random.Random(f"{case}/{row.sample}/{len(so_far)}")
            if own.random() < 0.2:
                return own.choice(_NONSENSE)
            calls = [own.choice(_OFTEN).__name__ for _ in range(own.choice([1, 1, 1, 2, 3]))]
            return "\n".join(
                call(name, n=own.randint(0, 30)) for name in [*calls, *["nobody"] * (own.random() < 0.1)]
            )

        prompt, most = [5] * draw.randint(1, 800), draw.randint(1, 1500)
        positions = draw.choice([700, 4000])
        blocks = blocks_of(len(prompt), most) + draw.randint(0, 100)
        engine = SayingPages(self.tokenizer, say, blocks, draw.choice([1, 3, 8, ROWS]), positions)
        with engine.session(SamplingParams(most)) as session:
            yield session, prompt, most, self.tools
        scheduler = session._scheduler
        assert not scheduler.busy and not scheduler.idle, case
        assert scheduler.memory.free == scheduler.memory.count == blocks, f"{case}: a block is held"

    @contextlib.contextmanager
    def portable(self, draw: random.Random, case: str) -> Iterator[Played]:
        """A model that writes at random, and room to keep all keys and values, some or none."""

        def calls(token_ids, before):
            own = random.Random(f"{case}/{before}/{sum(token_ids)}")
            names = [own.choice(_OFTEN).__name__ for _ in range(own.choice([0, 1, 1, 1, 2, 3]))]
            return [(name, {"n": own.randint(0, 30)}) for name in names]

        prompt, most = [5] * draw.randint(1, 200), draw.randint(1, 300)
        kept = draw.choice([0, 200_000, 1 << 30])
        engine = PortableEngine(self.model, 0, draw.choice([1, 7, ROWS]), kept)
        params = SamplingParams(most, seed=draw.randint(0, 99), stop_token_ids=tuple(range(1, 128, 8)))
        with engine.session(params) as session:
            yield session, prompt, most, CallingTemplate(calls)
        assert not session._kept and not session._uniforms, f"{case}: keys and values are held"
        assert not session._joining and not session._waves, case


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of how trajectories ended; a defect is an AssertionError that names its batch."""
    _RELEASE.clear()
    engines = Engines()
    before = set(threading.enumerate())
    pool = ToolPool(TIMEOUT, output_limit=50, beside=Beside(stuck=STUCK))
    ends: dict[str, int] = {}
    try:
        for batch in range(-(-count // ROWS)):
            draw = random.Random(f"{seed}/{batch}")
            start = time.monotonic()
            engine = (engines.paged, engines.portable)[batch % 2]
            for found in _play(draw, pool, engines.texts, engine, f"batch {seed}/{batch}"):
                ends[str(found.end)] = ends.get(str(found.end), 0) + 1
            assert time.monotonic() - start < SECONDS, f"batch {seed}/{batch} took too long"
            extra = len(set(threading.enumerate()) - before)
            assert extra <= STUCK + 2 * AT_ONCE + 1, f"batch {seed}/{batch}: {extra} threads"
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
    draw: random.Random, pool: ToolPool, texts: TurnTemplate, engine: Callable, case: str
) -> list[Trajectory]:
    limits = Limits(draw.choice([None, 1, 2, 5]), draw.choice(["text", "text", "end"]))
    with engine(draw, case) as (session, prompt, most, calling):
        worlds: list[World] = [
            TextWorld(texts, Talking()) if draw.random() < 0.3 else ToolWorld(calling, TOOLS)
            for _ in range(ROWS)
        ]
        found = run_trajectories(session, [prompt], ROWS, worlds, pool, limits)
        assert not session.busy and not pool.pending, case
        assert not session._sequences, case
    for trajectory in found:
        _check(trajectory, most, limits.iterations, case)
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
