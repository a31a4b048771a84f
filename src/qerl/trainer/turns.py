"""Rollouts of several turns, or of one in which thoughts may be closed: who answers each row, and what TRL is
told of the trajectories.

TRL renders the prompts, resets the environments of its pool and scores what comes back; between that stands
`qerl.agents`, in the place of TRL's own loop over tools. TRL asks twice: for the completions of prompts,
which are the trajectories' first turns, and then for what came of the calls in them, which is done by then.

Legend: B rows of a rollout, the samples of a group side by side.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trl import GRPOTrainer

from qerl.agents.environment import is_text
from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.thinking import thinking_of
from qerl.agents.trajectory import Trajectory
from qerl.agents.world import SilentWorld, World, world_of
from qerl.calls.beside import Beside
from qerl.rollout.engine import Completion, NormOffsets, RolloutEngine, RolloutResult, SamplingParams
from qerl.rollout.stops import FinishReason

_REASONS: dict[str | None, FinishReason] = {"length": "length", "error": "error"}


class Turns:
    """The trajectories of a trainer with tools or environments, or with a budget of thinking.

    Args:
        trainer: Its tools and environments are read for each rollout.
        beside: Where tools are called.

    Attributes:
        trajectories: Those of the rollout at hand, by row.
    """

    def __init__(self, trainer: GRPOTrainer, beside: Beside) -> None:
        args = trainer.args
        self._trainer = trainer
        self._pad = trainer._tokenizer.pad_token_id
        self._pool = ToolPool(args.tool_timeout, args.tool_output_limit, beside)
        self._limits = Limits(args.max_tool_calling_iterations, args.tool_errors, bool(args.stop_strings))
        self._template: TurnTemplate | None = None
        if trainer.tools:
            self._template = self._make_template(trainer)
            # TRL has chosen one for tools, and not for texts.
            trainer.chat_template = self._template.chat_template
        self._worlds: list[World] = []
        self.trajectories: list[Trajectory] = []

    @staticmethod
    def _make_template(trainer: GRPOTrainer) -> TurnTemplate:
        pools = trainer._environment_pool.values() if trainer.environment_factories else ()
        texts = any(is_text(environment) for pool in pools for environment in pool)
        return TurnTemplate(trainer._tokenizer, trainer.chat_template_kwargs, tools=not texts)

    def _worlds_of(self, rows: int) -> list[World]:
        """The worlds of a rollout, whose environments TRL has reset."""
        if self._template is None:
            return [SilentWorld(self._trainer._tokenizer) for _ in range(rows)]
        environments = self._trainer.environments or [None] * rows
        tools = self._trainer._standalone_tools
        return [world_of(self._template, tools, environment) for environment in environments]

    def sample(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        norm_offsets: NormOffsets,
        prompts: Sequence[Sequence[int]],
        samples: int,
        seeds: Sequence[int] | None = None,
    ) -> RolloutResult:
        """Sample the trajectories of a rollout, the samples of a prompt next to each other.

        Args:
            engine, params, norm_offsets: Of the session.
            prompts: Token ids of each prompt.
            samples: Trajectories of each.
            seeds: As in `Session.start`.
        """
        start = time.perf_counter()
        self._worlds = self._worlds_of(len(prompts) * samples)
        limits = replace(self._limits, thinking=thinking_of(params.stops))
        with engine.session(params, norm_offsets) as session:
            found = run_trajectories(session, prompts, samples, self._worlds, self._pool, limits, seeds)
        for trajectory in found:
            if not trajectory.token_ids:  # its prompt has left no room; a token that nobody counts stands in
                trajectory.hear([self._pad], [{"role": "assistant", "content": ""}])
        self.trajectories = found
        return RolloutResult(
            completions=[
                Completion(t.token_ids, t.logprobs, t.entropies, _REASONS.get(t.end, "stop")) for t in found
            ],
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            generated_tokens=sum(sum(t.written) for t in found),
            seconds=time.perf_counter() - start,
        )

    def first_turns(self) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probabilities of each row's first turn."""
        cuts = [(t, t.first or len(t.token_ids)) for t in self.trajectories]
        return [t.token_ids[:cut] for t, cut in cuts], [t.logprobs[:cut] for t, cut in cuts]

    def for_trl(self) -> tuple[list[list[int]], list[list[Any]], list, list, int, int, list[list]]:
        """What TRL's loop over tools would return: masks, messages, ids and log-probabilities by row, calls
        made, calls failed, and the images of tools by row, of which there are none."""
        found = self.trajectories
        return (
            [t.written for t in found],
            [t.messages for t in found],
            [t.token_ids for t in found],
            [t.logprobs for t in found],
            sum(t.calls for t in found),
            sum(t.failures for t in found),
            [[] for _ in found],
        )

    def replace_hanging(self) -> None:
        """Put new environments in the place of those in which a call still runs."""
        owned = [world for world in self._worlds if world.environment is not None]
        hanging = {id(world.environment) for world in owned if world.hangs}
        pools = self._trainer._environment_pool if hanging else {}
        for name, pool in pools.items():
            make = self._trainer.environment_factories[name]
            pool[:] = [make() if id(environment) in hanging else environment for environment in pool]
