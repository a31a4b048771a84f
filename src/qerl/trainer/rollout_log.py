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

    def add(self, result: RolloutResult) -> None:
        self._results.append(result)

    def entropies(self, mask_BC: torch.Tensor) -> torch.Tensor:
        """The sampler's entropies [B, C] in nats, zero behind a completion.

        NaN where tokens cannot be told apart, because several calls made one completion (tools) or none did.
        """
        entropy_BC = torch.full(mask_BC.shape, torch.nan)
        if len(self._results) == 1 and len(self._results[0].completions) == len(mask_BC):
            entropy_BC.zero_()
            for row_C, completion in zip(entropy_BC, self._results[0].completions, strict=True):
                row_C[: len(completion.entropies)] = torch.tensor(completion.entropies)
        return entropy_BC.to(mask_BC.device)

    def report(self, accelerator: Accelerator) -> dict[str, float]:
        """The metrics of all processes, each of which must call this; the next batch begins empty.

        Raises:
            QeRLError: No sample of any process got through to its end, because logits were not finite.
        """
        completions = [c for result in self._results for c in result.completions]
        own = (
            sum(sum(c.entropies) for c in completions),
            sum(len(c.entropies) for c in completions),
            sum(c.finish_reason == "error" for c in completions),
            sum(result.generated_tokens for result in self._results),
            len(completions),
            sum(result.seconds for result in self._results),
        )
        self._results = []
        ranks = accelerator.gather(torch.tensor([own], dtype=torch.double, device=accelerator.device))
        entropy, tokens, errors, generated, samples, _ = ranks.sum(dim=0).tolist()
        if 0 < samples == errors:
            raise QeRLError(
                f"The logits of all {samples:.0f} samples of a rollout were not finite: the weights hold NaN "
                "or, with noise or in this dtype, overflow; lower noise_sigma_start or set dtype: bfloat16."
            )
        slowest = float(ranks[:, -1].max())
        return {
            "rollout/entropy": entropy / tokens if tokens else float("nan"),
            "rollout/errors": errors,
            "rollout/tokens_per_second": generated / slowest if slowest else float("nan"),
        }
