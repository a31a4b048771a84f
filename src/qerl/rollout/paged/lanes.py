"""The lanes of a decode step's rows (`qerl.kernels.decode.speculate`), and the texts that drafts come from.

Shapes: R rows, L lanes of each, T = R L, C tokens of a corpus.
"""

from collections import abc

import numpy as np
import torch

from qerl.kernels.decode.draw import RowState
from qerl.kernels.decode.speculate import LaneState
from qerl.rollout.sequence import Sequence

CORPUS = 8192
"""Tokens of a corpus at most, the last ones; a row's prompt stands at its end."""


def make_lanes(rows: int, each: int, table_width: int, device: torch.device) -> LaneState:
    """Lanes that nothing was written to.

    Args:
        rows: R.
        each: L.
        table_width: Blocks that a sequence may own.
        device: Where they are.
    """

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    tokens = rows * each
    state = RowState(
        token_T=integers(tokens),
        position_T=integers(tokens),
        slot_T=integers(tokens),
        limit_2T=integers(2, tokens),
        own_table_TB=integers(tokens, table_width + 1),  # the slot after the last one is asked for, not used
        generated_T=integers(tokens),
        max_new_T=integers(tokens).fill_(2),  # none ends by its length
        done_T=integers(tokens),
        uniform_TM=torch.zeros(tokens, 1, device=device),
        out_token_TM=integers(tokens, 1),
        out_stats_2TM=torch.zeros(2, tokens, 1, device=device),
    )
    return LaneState(
        state, integers(tokens), integers(rows), integers(rows, CORPUS), integers(rows), integers(2)
    )


def learn(lanes: LaneState, running: abc.Mapping[int, Sequence], session: abc.Iterable[Sequence]) -> None:
    """Write the corpora: completions of a row's siblings whose turns have ended, and its prompt.

    Args:
        lanes: Their lanes.
        running: Sequences by row.
        session: All that were not finished.
    """
    idle = [each for each in session if each.stage != "drawing"]
    corpus_RC = np.zeros(lanes.corpus_RC.shape, np.int32)
    known_R = np.zeros(len(corpus_RC), np.int32)
    for row, sequence in running.items():
        prompt = sequence.prompt
        texts = prompt.finished + [each.token_ids for each in idle if each.prompt is prompt]
        text = [token for each in texts for token in (*each, -1)] + prompt.token_ids
        text = text[-corpus_RC.shape[1] :]
        corpus_RC[row, : len(text)], known_R[row] = text, len(text)
    lanes.corpus_RC.copy_(torch.from_numpy(corpus_RC))
    lanes.known_R.copy_(torch.from_numpy(known_R))
