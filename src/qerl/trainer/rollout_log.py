"""What the engine reports of rollouts, kept until it is logged for all processes.

Legend: B samples, C completion columns.
"""

import torch
from accelerate import Accelerator

from qerl.errors import QeRLError
from qerl.rollout.engine import RolloutResult


class RolloutLog:
    """Counts over the engine's calls of one batch, and the entropies of its tokens."""

    def __init__(self) -> None:
        self._results: list[RolloutResult] = []
        self._of_others = 0
        self._turns = 0

    def add(self, result: RolloutResult, of_others: int = 0, turns: int = 0) -> None:
        """Count a call.

        Args:
            result: What came of it.
            of_others: Tokens of its completions that the policy did not draw.
            turns: Turns of all completions; 0 where each is one turn.
        """
        self._results.append(result)
        self._of_others += of_others
        self._turns += turns

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
        own = (
            sum(sum(c.entropies) for c in completions),
            sum(len(c.entropies) for c in completions) - self._of_others,
            sum(c.finish_reason == "error" for c in completions),
            sum(result.generated_tokens for result in self._results),
            len(completions),
            self._turns,
            sum(result.seconds for result in self._results),
        )
        self._results, self._of_others, self._turns = [], 0, 0
        ranks = accelerator.gather(torch.tensor([own], dtype=torch.double, device=accelerator.device))
        entropy, tokens, errors, generated, samples, turns, _ = ranks.sum(dim=0).tolist()
        if 0 < samples == errors:
            raise QeRLError(
                f"The logits of all {samples:.0f} samples of a rollout were not finite: the weights hold NaN "
                "or, with noise or in this dtype, overflow; lower noise_sigma_start or set dtype: bfloat16."
            )
        slowest = float(ranks[:, -1].max())
        of_turns = {"rollout/turns": turns / samples} if turns else {}
        return of_turns | {
            "rollout/entropy": entropy / tokens if tokens else float("nan"),
            "rollout/errors": errors,
            "rollout/tokens_per_second": generated / slowest if slowest else float("nan"),
        }
