"""Tools for a policy that writes random text: every turn that it ends is taken for a call."""

import time
from collections.abc import Callable, Sequence

from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.trajectory import Message, Trajectory
from qerl.agents.world import ToolWorld
from qerl.rollout.engine import RolloutEngine, SamplingParams
from tests.support.agents import tool_tokenizer

Made = list[tuple[str, dict]]


class CallingTemplate(TurnTemplate):
    """A template with tools that finds calls in any text.

    Args:
        calls: Names and arguments of the calls in a turn, given its tokens and how many were before it.
    """

    def __init__(self, calls: Callable[[Sequence[int], int], Made]) -> None:
        super().__init__(tool_tokenizer(), tools=True)
        self._calls = calls

    def parse(self, token_ids, prefix_ids, tools) -> Message:
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in self._calls(token_ids, len(prefix_ids))
        ]
        return {"role": "assistant", "content": self.text(token_ids), "tool_calls": calls}


def late(n: int) -> str:
    """Answer after so many milliseconds.

    Args:
        n: How many.
    """
    time.sleep(n / 1000)
    return f"{n} ms"


LATE = CallingTemplate(lambda token_ids, before: [("late", {"n": (sum(token_ids) + before) % 40})])
"""Calls `late` in every turn, with a number that follows from what was written."""


def play_late(
    engine: RolloutEngine, prompts: Sequence[list[int]], samples: int, params: SamplingParams
) -> tuple[list[Trajectory], object, int]:
    """Trajectories whose tools answer while others decode.

    Returns:
        The trajectories, the session, and how often the engine decoded while calls were out.
    """
    pool = ToolPool(timeout=10.0, output_limit=50, patience=0.0)
    worlds = [ToolWorld(LATE, [late]) for _ in range(len(prompts) * samples)]
    beside = 0
    with engine.session(params) as session:
        decode = session.next

        def counted(*one_round):
            nonlocal beside
            beside += pool.pending > 0
            return decode(*one_round)

        session.next = counted
        found = run_trajectories(session, prompts, samples, worlds, pool, Limits())
    pool.close()
    return found, session, beside


def check_masks(trajectory: Trajectory) -> None:
    """What is marked as others' is what the template writes of the answers, and all else was drawn."""
    assert trajectory.end is not None and trajectory.failures == 0
    tokens, place = trajectory.token_ids, 0
    heard = [message for message in trajectory.messages if message["role"] == "tool"]
    for message in heard:
        place = trajectory.written.index(0, place)
        suffix = LATE.suffix_ids([message])
        assert tokens[place : place + len(suffix)] == suffix
        assert trajectory.written[place : place + len(suffix)] == [0] * len(suffix)
        place += len(suffix)
    assert 0 not in trajectory.written[place:]
    columns = (trajectory.written, trajectory.logprobs, trajectory.entropies)
    assert {len(column) for column in columns} == {len(tokens)}
    for written, logprob, entropy in zip(*columns, strict=True):
        assert (logprob < 0 and entropy > 0) if written else logprob == entropy == 0
