"""A forward pass of a joined row: what the model is called with, and which positions its output head sees.

Legend: L tokens of the joined row.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from qerl.update.attention import attention_kwargs
from qerl.update.joined_row import JoinedRow
from qerl.update.masks import masked_by_branch


@contextlib.contextmanager
def row_inputs(decoder: torch.nn.Module, row: JoinedRow, by_stretch: bool) -> Iterator[dict[str, Any]]:
    """Yields the arguments of a forward pass of a row; it must run inside the block.

    Args:
        decoder: The part of the model in front of its output head.
        row: The samples.
        by_stretch: Whether the model's attention reads stretches instead of a dense mask.

    Raises:
        QeRLError: The model's attention implementation makes no masks that a row could use.
    """
    stretches = contextlib.nullcontext(attention_kwargs(row.branches)) if by_stretch else None
    with stretches or masked_by_branch(decoder.config, row) as attention:
        yield {"input_ids": row.input_ids_1L, "position_ids": row.position_ids_1L, **attention}


@contextlib.contextmanager
def scored_only(decoder: torch.nn.Module, row: JoinedRow) -> Iterator[None]:
    """Inside the block the output head gets only scored positions: shared prompts may predict nothing."""

    def select(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, row.scored_S]
        return output

    handle = decoder.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
