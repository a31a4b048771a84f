"""Draw a token for each row: on a GPU with the paged engine's kernel, elsewhere as the portable engine does.

The kernel reads a row of logits once and one block of it a second time. torch makes some thirty passes over
all logits, most of them in FP64.

Legend: B rows, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from qerl.rollout.engine import Drawn, SamplingParams, draw_tokens

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Drawn]
"""`draw(logits [B, V] fp32, uniforms [B] fp64, temperatures [B])` -> a token for each row."""


def drawing(rows: int, vocabulary: int, greedy: bool, device: torch.device) -> Draw:
    """Return the function that draws a token for each of a number of rows.

    Args:
        rows: B.
        vocabulary: V.
        greedy: Whether to take the most probable token.
        device: Device of the logits.
    """
    if device.type == "cuda":
        return by_kernel(rows, vocabulary, greedy, device)
    params = SamplingParams(max_tokens=1, temperature=0.0 if greedy else 1.0)

    def draw(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, temperature_B: torch.Tensor) -> Drawn:
        return draw_tokens(logits_BV / temperature_B[:, None], uniforms_B, params)

    return draw


def by_kernel(rows: int, vocabulary: int, greedy: bool, device: torch.device) -> Draw:
    """As `drawing`, with the kernel; its row state is that of rows that generate one token."""
    from qerl.kernels.decode.draw import BLOCK_V, RowState, draw_token, uniforms_of_rows
    from qerl.kernels.decode.filters import GREEDY, RowSettings

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    settings = RowSettings.free(rows, device)
    if greedy:
        settings.mode_T.fill_(GREEDY.value)
    numbers: dict[str, Any] = {"dtype": torch.float32}
    state = RowState(
        token_T=zeros(rows), position_T=zeros(rows), limit_2T=zeros(2, rows), generated_T=zeros(rows),
        max_new_T=zeros(rows) + 1, done_T=zeros(rows), uniform_TM=zeros(rows, 1, **numbers),
        out_token_TM=zeros(rows, 1), out_stats_2TM=zeros(2, rows, 1, **numbers),
    )  # fmt: skip
    stats_3TB = zeros(3, rows, -(-vocabulary // BLOCK_V), **numbers)
    unit_1B = zeros(1, rows, **numbers) + 1  # the final norm has been applied to the logits already

    def draw(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, temperature_B: torch.Tensor) -> Drawn:
        state.generated_T.zero_()
        state.done_T.zero_()
        state.uniform_TM.copy_(uniforms_of_rows(uniforms_B)[:, None])
        torch.reciprocal(temperature_B, out=settings.inverse_temperature_T)
        draw_token(logits_BV, unit_1B, stats_3TB, state, settings, width=1, eps=0.0)
        logprobs_B, entropies_B = state.out_stats_2TM[..., 0].clone()
        finite_B = state.done_T != 3  # see `RowState.done_T`
        return Drawn(state.out_token_TM[:, 0].long(), logprobs_B, entropies_B, finite_B)

    return draw
