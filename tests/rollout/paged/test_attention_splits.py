"""How many splits attention takes, against what was measured."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from bench.result import read_rows
from qerl.families.sizes import SIZES
from qerl.rollout.paged.decode import attention_splits
from qerl.rollout.paged.limits import BlockDemand

MEASURED = read_rows("attention-splits-7b-h200")


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['rows']} rows behind {row['prompt_tokens']}")
def test_no_other_number_of_splits_was_faster_by_more_than_one_percent(row):
    pages = BlockDemand(row["prompt_tokens"], row["decode_tokens"], row["group"]).table_width
    kv_heads = SIZES[row["shape"]].spec.mixer.kv_heads
    taken = attention_splits(row["rows"], kv_heads, 132, pages)
    step_ms = {int(splits): min(found) for splits, found in row["step_ms"].items()}
    assert step_ms[taken] <= 1.01 * min(step_ms.values())
