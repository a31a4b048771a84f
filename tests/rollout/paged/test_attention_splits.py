"""How attention is cut: how many splits it takes, against what was measured, tiles of prompts, and parts."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from bench.result import read_rows
from qerl.families.sizes import SIZES, Sizes
from qerl.kernels.decode.attend import APART, Cut
from qerl.measure.random_model import random_decoder
from qerl.rollout.paged import decode
from qerl.rollout.paged.decode import attention_cuts, attention_splits
from qerl.rollout.paged.forward import Forward
from qerl.rollout.paged.limits import BlockDemand
from qerl.rollout.paged.weights import Kind

MEASURED = read_rows("attention-splits-7b-h200")


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['rows']} rows behind {row['prompt_tokens']}")
def test_no_other_number_of_splits_was_faster_by_more_than_one_percent(row):
    pages = BlockDemand(row["prompt_tokens"], row["decode_tokens"], row["group"]).table_width
    kv_heads = SIZES[row["shape"]].spec.mixer.kv_heads
    taken = attention_splits(row["rows"], kv_heads, 132, pages)
    step_ms = {int(splits): min(found) for splits, found in row["step_ms"].items()}
    assert step_ms[taken] <= 1.01 * min(step_ms.values())


@pytest.mark.parametrize(
    ("tokens", "heads", "size", "pages", "prompts", "own"),
    [
        (64, 28, 128, 6, Cut(16, 1), Cut(16, 1)),
        (APART, 28, 128, 6, Cut(64, 1), Cut(16, 1)),
        (APART, 28, 128, 128, Cut(64, 2), Cut(16, 1)),
        (256, 28, 128, 128, Cut(64, 1), Cut(16, 1)),
        (256, 28, 256, 6, Cut(16, 1), Cut(16, 1)),
        (256, 256, 128, 6, Cut(64, 1), Cut(64, 1)),
    ],
)
def test_prompts_of_many_rows_are_cut_into_larger_tiles(
    monkeypatch, tokens, heads, size, pages, prompts, own
):
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    found = attention_cuts(Kind(None, heads, 4, size), tokens, pages, torch.device("cpu"))
    assert found == (prompts, own)


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(48, torch.float32), (64, torch.bfloat16), (2048, torch.bfloat16)]
)
def test_parts_are_in_16_bits_from_64_tokens_on(tokens, dtype):
    decoder = random_decoder(Sizes.uniform(64, 128, 1, 4, 2, 16, 100), "bf16", 0, 64, device="cpu")
    forward = Forward(decoder, tokens, [(Cut(16, 2), Cut(16, 2))])
    assert [each.out_ZTHE.dtype for each in forward._attending] == [dtype]
    assert forward._attending[0].lse_ZTH.dtype == torch.float32
