"""The loop over many concurrent trajectories, without a barrier between turns.

The engine decodes in this thread. As soon as a turn has ended, the pool makes its calls while other rows
decode. Each time that turns have ended, the answers that have arrived are appended to their trajectories,
which resume at once. The loop waits for answers only when nothing is left to decode.

Nothing that a policy writes or a tool does raises here: a trajectory that has no room or no turns left, or
whose call failed (with ``tool_errors: end``), ends with that reason.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qerl.agents.pool import Answer, ToolPool
from qerl.agents.thinking import ThinkingBudget
from qerl.agents.trajectory import EndReason, Trajectory
from qerl.agents.world import World
from qerl.rollout.engine import Ended, Session

ToolErrors = Literal["text", "end"]

_PAUSE = 0.01  # seconds


@dataclass(frozen=True)
class Limits:
    """Limits of a trajectory besides its number of tokens.

    Attributes:
        iterations: Maximum number of turns whose calls are made; None for no limit but the tokens.
        tool_errors: The policy reads the error of a failed call (``text``), or its trajectory ends (``end``).
        thinking: The thinking budget, one of the session's stops; None for no budget.
        texts_end_turns: True if a turn may end without the template's stop token, which is then appended.
    """

    iterations: int | None = None
    tool_errors: ToolErrors = "text"
    texts_end_turns: bool = False
    thinking: ThinkingBudget | None = None


def run_trajectories(
    session: Session,
    prompts: Sequence[Sequence[int]],
    samples_per_prompt: int,
    worlds: Sequence[World],
    pool: ToolPool,
    limits: Limits,
    seeds: Sequence[int] | None = None,
) -> list[Trajectory]:
    """Sample trajectories to their ends, and return them in the order of the worlds.

    Args:
        session: A session of the engine; nothing else is started in it.
        prompts: Token ids of each prompt.
        samples_per_prompt: Number of trajectories per prompt.
        worlds: The world of each trajectory, the samples of a prompt next to each other.
        pool: Makes the calls.
        limits: Limits of each trajectory.
        seeds: See `Session.start`.
    """
    loop = Trajectories(session, pool, limits)
    try:
        indices, found = loop.start(prompts, samples_per_prompt, worlds, seeds), dict[int, Trajectory]()
        while loop.busy:
            found |= loop.next()
        return [found[index] for index in indices]
    finally:
        pool.abandon()


class Trajectories:
    """The trajectories of a session; more may be started while others are sampled.

    Args:
        session: A session of the engine; nothing else is started in it.
        pool: Makes the calls; a caller that stops before the end has to call `ToolPool.abandon`.
        limits: Limits of each trajectory.
    """

    def __init__(self, session: Session, pool: ToolPool, limits: Limits) -> None:
        self._session, self._pool, self._limits = session, pool, limits
        self._of: dict[int, tuple[Trajectory, World]] = {}
        self._ended: dict[int, Trajectory] = {}

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        worlds: Sequence[World],
        seeds: Sequence[int] | None = None,
    ) -> list[int]:
        """Start trajectories and return their numbers; the arguments are those of `run_trajectories`."""
        indices = self._session.start(prompts, samples, seeds=seeds)
        trajectories = [Trajectory(prompt) for prompt in prompts for _ in range(samples)]
        self._of |= zip(indices, zip(trajectories, worlds, strict=True), strict=True)
        return indices

    @property
    def busy(self) -> bool:
        """True while any trajectory is running."""
        return self._session.busy or self._pool.pending > 0

    def next(self, one_round: bool = False) -> dict[int, Trajectory]:
        """Return the trajectories that have ended since the last call, by number.

        Args:
            one_round: See `Session.next`. Without it, at least one is returned if any is running.
        """
        while self.busy:
            for ended in self._session.next(one_round) if self._session.busy else ():
                self._turn(ended)
            wait = not (self._session.busy or self._ended or one_round)
            for index, answers in self._pool.collect(wait):
                self._answered(index, answers)
            if self._ended or one_round:
                if not (self._ended or self._session.busy):
                    time.sleep(_PAUSE)  # a caller with `one_round` calls again at once
                break
        ended_now, self._ended = self._ended, {}
        return ended_now

    def _turn(self, ended: Ended) -> None:
        """Append a turn of the policy, and submit its calls or end the trajectory."""
        trajectory, world = self._of[ended.index]
        reason = ended.completion.finish_reason
        if not ended.completion.token_ids:
            self._end(ended.index, "length")
            return
        trajectory.write(ended.completion)
        if reason == "pause":
            if self._close_thoughts(ended.index, trajectory):
                return
            reason = "length"
        before = [*trajectory.prompt_ids, *trajectory.token_ids[: trajectory.turn_start]]
        self._see_thoughts(trajectory, before)
        message, calls = world.read(trajectory.turn, before)
        trajectory.end_turn(message)
        if reason != "stop":
            self._end(ended.index, reason)  # calls in a truncated turn are not made
        elif not calls:
            self._end(ended.index, "stop")
        elif self._limits.iterations is not None and trajectory.turns > self._limits.iterations:
            self._end(ended.index, "turns")
        else:
            trajectory.calls += len(calls)
            self._pool.submit(ended.index, calls)

    def _see_thoughts(self, trajectory: Trajectory, before: Sequence[int]) -> None:
        """Record whether the policy itself closed a thinking block in the turn that has ended."""
        thinking = self._limits.thinking
        if thinking is None or trajectory.thoughts is not None:
            return
        written = trajectory.written[trajectory.turn_start :]
        if thinking.closed_by_policy(before, trajectory.turn, written):
            trajectory.thoughts = "model"

    def _close_thoughts(self, index: int, trajectory: Trajectory) -> bool:
        """Close the thinking block of a paused turn and resume it; return False if there is no room."""
        assert self._limits.thinking is not None, "nothing else pauses a turn"
        closing_ids = self._limits.thinking.closing_ids
        if len(closing_ids) >= self._session.room(index):
            return False
        trajectory.insert(closing_ids)
        trajectory.thoughts = "budget"
        self._session.go_on(index, closing_ids)
        return True

    def _answered(self, index: int, answers: Sequence[Answer]) -> None:
        """Append the answers to the trajectory, and start its next turn or end it."""
        trajectory, world = self._of[index]
        failures = sum(answer.failed for answer in answers)
        trajectory.failures += failures
        world.hangs |= any(answer.hangs for answer in answers)
        if failures and self._limits.tool_errors == "end":
            self._end(index, "tool")
            return
        messages = world.reply(answers)
        if messages is None:
            self._end(index, "stop")
            return
        if world.hears_last_turn and trajectory.turns == self._limits.iterations:
            self._end(index, "turns")
            return
        last = trajectory.token_ids[-1] if self._limits.texts_end_turns else None
        token_ids = world.template.suffix_ids(messages, last)
        if len(token_ids) >= self._session.room(index):
            self._end(index, "length")
            return
        trajectory.hear(token_ids, messages)
        self._session.go_on(index, token_ids)

    def _end(self, index: int, reason: EndReason) -> None:
        trajectory, _ = self._of.pop(index)
        trajectory.end = reason
        self._ended[index] = trajectory
        self._session.finish(index)
