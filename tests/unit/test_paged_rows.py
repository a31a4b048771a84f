"""What the rows of a decode step tell attention to read."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.rollout.paged.rows import Rows
from qerl.rollout.paged.scheduler import Prompt, Sequence


def sequence(row: int, prompt: Prompt, blocks: list[int]) -> Sequence:
    return Sequence(row, prompt, 0, max_tokens=200, blocks=blocks, row=row)


def test_a_groups_samples_read_their_prompt_together_and_their_own_tokens_alone():
    rows = Rows(count=4, max_new=8, table_width=3, tile_tokens=2, device=torch.device("cpu"))
    long, short = Prompt(0, [5, 6, 7], blocks=[11]), Prompt(1, [5], blocks=[])  # short has nothing cached
    running = {
        3: sequence(3, long, [1, 2]),
        0: sequence(0, short, [3]),
        1: sequence(1, long, [4]),
        2: sequence(2, long, [5, 6, 7]),
    }
    rows.attend(running)
    assert rows.inputs.tables_GB.tolist() == [
        [11, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0],
        [3, 0, 0], [4, 0, 0], [5, 6, 7], [1, 2, 0],
    ]  # fmt: skip
    assert rows.inputs.order.tolist() == [3, 1, 2, 0, 0, 1, 2, 3]
    assert rows.inputs.item_4.tolist() == [
        [0, 2, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0],
        [4, 1, 4, 1], [5, 1, 5, 1], [6, 1, 6, 1], [7, 1, 7, 1],
    ]  # fmt: skip
    del running[2], running[0]
    rows.attend(running)
    assert rows.inputs.tables_GB[0].tolist() == [11, 0, 0] and not rows.inputs.tables_GB[4].any()
    assert rows.inputs.order.tolist()[:2] == [3, 1]
    assert [count for _, count, *_ in rows.inputs.item_4.tolist()] == [2, 0, 0, 0, 0, 1, 0, 1]
