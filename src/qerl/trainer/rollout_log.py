"""What the engine reports of rollouts, kept until it is logged for all processes.

Legend: B samples, C completion columns.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from qerl.agents.trajectory import Trajectory
from qerl.errors import QeRLError
from qerl.rollout.engine import RolloutResult


class RolloutLog:
    """Counts over the engine's calls of one batch, and the entropies of its tokens.

    Args:
        turns: Whether completions have several turns, which are counted.
        thinking: Whether there is a budget of thinking.
    """

    def __init__(self, turns: bool = False, thinking: bool = False) -> None:
        self._results: list[RolloutResult] = []
        self._trajectories: list[Trajectory] = []
        self._counts_turns, self._thinking = turns, thinking

    def add(self, result: RolloutResult, trajectories: Sequence[Trajectory] = ()) -> None:
        """Count a call.

        Args:
            result: What came of it.
            trajectories: Its completions as trajectories, where they are any.
        """
        self._results.append(result)
        self._trajectories += trajectories

    def entropies(self, ids_BC: torch.Tensor) -> torch.Tensor:
        """The sampler's entropies [B, C] in nats of the tokens of these completions, zero behind them.

        NaN where a completion is not what the engine returned: somebody else made it (`rollout_func`).
        """
        entropy_BC = torch.full(ids_BC.shape, torch.nan)
        if len(self._results) == 1 and len(self._results[0].completions) == len(ids_BC):
            for row_C, ids, completion in zip(
                entropy_BC, ids_BC.tolist(), self._results[0].completions, strict=True
            ):
                length = len(completion.token_ids)
                if ids[:length] == completion.token_ids:
                    row_C.zero_()[:length] = torch.tensor(completion.entropies)
        return entropy_BC.to(ids_BC.device)

    def report(self, accelerator: Accelerator) -> dict[str, float]:
        """The metrics of all processes, each of which must call this; the next batch begins empty.

        Raises:
            QeRLError: No sample of any process got through to its end, because logits were not finite.
        """
        completions = [c for result in self._results for c in result.completions]
        found = self._trajectories
        own = (
            sum(sum(c.entropies) for c in completions),
            sum(len(c.entropies) for c in completions) - sum(t.written.count(0) for t in found),
            sum(c.finish_reason == "error" for c in completions),
            sum(result.generated_tokens for result in self._results),
            len(completions),
            sum(t.turns for t in found),
            *(sum(t.thoughts == by for t in found) for by in ("model", "budget")),
            sum(result.seconds for result in self._results),
        )
        self._results, self._trajectories = [], []
        ranks = accelerator.gather(torch.tensor([own], dtype=torch.double, device=accelerator.device))
        entropy, tokens, errors, generated, samples, turns, *closed, _ = ranks.sum(dim=0).tolist()
        if 0 < samples == errors:
            raise QeRLError(
                f"The logits of all {samples:.0f} samples of a rollout were not finite: the weights hold NaN "
                "or, with noise or in this dtype, overflow; lower noise_sigma_start or set dtype: bfloat16."
            )
        slowest = float(ranks[:, -1].max())
        more = {"rollout/turns": turns / samples} if self._counts_turns else {}
        if self._thinking:
            by_model, by_budget = (count / samples for count in closed)
            more |= {"thinking/closed_by_model": by_model, "thinking/closed_by_budget": by_budget}
        return more | {
            "rollout/entropy": entropy / tokens if tokens else float("nan"),
            "rollout/errors": errors,
            "rollout/tokens_per_second": generated / slowest if slowest else float("nan"),
        }
