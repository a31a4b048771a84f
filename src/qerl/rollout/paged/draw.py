"""From the head's logits to the next token of every row, filtered by top-k, top-p and min-p if asked for.

Without filters one kernel draws. With top-p and min-p another one in front of it leaves tokens out, and with
top-k, whose candidates are few, torch does.

Shapes: T rows, V vocabulary, P partial sums of squares, K stop tokens.
"""

from dataclasses import dataclass

import torch

from qerl.kernels.decode.draw import RowState, draw_token
from qerl.kernels.decode.leave_out import NEVER, leave_out
from qerl.kernels.limits import PAGE
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.limits import SORTED_AT_ONCE
from qerl.rollout.sampling import truncate


@dataclass
class Draw:
    """How tokens are drawn.

    Attributes:
        params: Temperature and filters; seed, max_tokens and stops play no part.
        width: Hidden size of the final norm.
        eps: Added to the mean square, as the final norm does.
        stop_K: int32 stop tokens.
        stats_3TB: fp32 scratch, see :func:`qerl.kernels.decode.draw.draw_token`.
        sorted_at_once: Logits of which top-k is taken at a time.
    """

    params: SamplingParams
    width: int
    eps: float
    stop_K: torch.Tensor
    stats_3TB: torch.Tensor
    sorted_at_once: int = SORTED_AT_ONCE

    def __call__(self, logits_TV: torch.Tensor, squares_PT: torch.Tensor, rows: RowState) -> None:
        """Draw a token for every row that has not ended.

        Args:
            logits_TV: fp32, before the final norm's 1/rms; overwritten where tokens are filtered.
            squares_PT: Partial sums of squares of the final norm's input.
            rows: State of the rows, advanced by one token.
        """
        if self.params.filtered:
            entropy_T = self._left_out(logits_TV, squares_PT)
            ones_1T = torch.ones_like(entropy_T)[None]  # the logits are normalised already
            draw_token(
                logits_TV, ones_1T, self.stats_3TB, self.stop_K, rows, page=PAGE, width=1, eps=0.0,
                temperature=1.0, entropy_T=entropy_T,
            )  # fmt: skip
        else:
            draw_token(
                logits_TV, squares_PT, self.stats_3TB, self.stop_K, rows, page=PAGE, width=self.width,
                eps=self.eps, temperature=self.params.temperature,
            )  # fmt: skip

    def _left_out(self, logits_TV: torch.Tensor, squares_PT: torch.Tensor) -> torch.Tensor:
        """Turn logits into log-probabilities in place, those that are left out into `NEVER`; return the
        entropies before that."""
        params = self.params
        if params.top_k > 0:
            return self._filter(logits_TV, squares_PT)
        return leave_out(
            logits_TV, squares_PT, width=self.width, eps=self.eps, temperature=params.temperature,
            top_p=params.top_p, min_p=params.min_p,
        )  # fmt: skip

    def _filter(self, logits_TV: torch.Tensor, squares_PT: torch.Tensor) -> torch.Tensor:
        """`_left_out` by torch, a few rows at a time: all of 512 x 152,064 logits would want 3 GB besides."""
        mean_square_T = squares_PT.sum(0) / self.width
        scale_T1 = (torch.rsqrt(mean_square_T + self.eps) / self.params.temperature)[:, None]
        entropy_T = torch.empty_like(mean_square_T)
        step = max(1, self.sorted_at_once // logits_TV.shape[1])
        for first in range(0, len(logits_TV), step):
            rows = slice(first, first + step)
            full_TV = torch.log_softmax(logits_TV[rows] * scale_T1[rows], dim=-1)
            entropy_T[rows] = -torch.linalg.vecdot(full_TV.exp(), full_TV)
            left_TV = truncate(full_TV, self.params)  # NaN stays, and ends its sequence
            logits_TV[rows] = torch.where(left_TV == -torch.inf, NEVER, left_TV)
        return entropy_T
