"""How attention is cut: how many splits it takes, against what was measured, tiles of prompts, and parts."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from bench.result import read_rows
from qerl.families.sizes import SIZES, Sizes
from qerl.kernels.cards import CARDS
from qerl.kernels.decode import attend
from qerl.kernels.decode.attend import Cut
from qerl.kernels.limits import PAGE, WHOLE_PARTS
from qerl.measure.random_model import random_decoder
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged import decode
from qerl.rollout.paged.decode import (
    LONG,
    VERY_LONG,
    Way,
    attention_cuts,
    attention_splits,
    kinds_apart,
    way_to_attend,
)
from qerl.rollout.paged.forward import Forward
from qerl.rollout.paged.limits import BlockDemand
from qerl.rollout.paged.weights import Kind
from qerl.rollout.session import new_sequences

MEASURED = read_rows("attention-splits-7b-h200")


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['rows']} rows behind {row['prompt_tokens']}")
def test_no_other_number_of_splits_was_faster_by_more_than_one_percent(row):
    pages = BlockDemand(row["prompt_tokens"], row["decode_tokens"], row["group"]).table_width
    kv_heads = SIZES[row["shape"]].spec.mixer.kv_heads
    taken = attention_splits(row["rows"], kv_heads, 132, pages)
    step_ms = {int(splits): min(found) for splits, found in row["step_ms"].items()}
    assert step_ms[taken] <= 1.01 * min(step_ms.values())


APART = 96
SEVEN = Kind(None, heads=28, kv_heads=4, head_size=128)


TOGETHER, READ_APART, IN_LONG = Way(False, False), Way(True, False), Way(False, True)


@pytest.mark.parametrize(
    ("tokens", "kind", "pages", "way", "prompts", "own"),
    [
        (64, SEVEN, 6, TOGETHER, Cut(16, 1), Cut(16, 1)),
        (APART, SEVEN, 6, TOGETHER, Cut(16, 1), Cut(16, 1)),
        (APART, SEVEN, 6, READ_APART, Cut(64, 1), Cut(16, 1)),
        (APART, SEVEN, 15, READ_APART, Cut(64, 1), Cut(16, 1)),
        (APART, SEVEN, 128, READ_APART, Cut(64, 2), Cut(16, 1)),
        (128, SEVEN, 513, READ_APART, Cut(64, 2), Cut(16, 1)),
        (256, SEVEN, 128, READ_APART, Cut(64, 1), Cut(16, 1)),
        (8, SEVEN, 129, READ_APART, Cut(64, 16), Cut(16, 8)),
        (8, SEVEN, 513, READ_APART, Cut(64, 32), Cut(16, 8)),
        (64, SEVEN, 513, READ_APART, Cut(64, 8), Cut(16, 1)),
        (32, SEVEN, 18, READ_APART, Cut(64, 2), Cut(16, 1)),
        (32, SEVEN, 15, READ_APART, Cut(16, 1), Cut(16, 1)),
        (8, SEVEN, 18, READ_APART, Cut(16, 4), Cut(16, 4)),
        (8, SEVEN, 63, TOGETHER, Cut(16, 4), Cut(16, 4)),
        (8, SEVEN, 64, TOGETHER, Cut(16, 8), Cut(16, 8)),
        (16, SEVEN, 100, TOGETHER, Cut(16, 2), Cut(16, 2)),
        (1, SEVEN, 513, TOGETHER, Cut(16, 8), Cut(16, 8)),
        (1, SEVEN, 127, IN_LONG, Cut(16, 8), Cut(16, 8)),
        (1, SEVEN, 128, IN_LONG, Cut(16, 32), Cut(16, 32)),
        (4, SEVEN, 131, IN_LONG, Cut(16, 16), Cut(16, 16)),
        (16, SEVEN, 127, IN_LONG, Cut(16, 2), Cut(16, 2)),
        (16, SEVEN, 128, IN_LONG, Cut(16, 4), Cut(16, 4)),
        (32, SEVEN, 131, IN_LONG, Cut(16, 2), Cut(16, 2)),
        (48, SEVEN._replace(heads=14, kv_heads=2), 131, IN_LONG, Cut(16, 1), Cut(16, 1)),
        (32, SEVEN, 131, READ_APART, Cut(64, 8), Cut(16, 1)),
        (32, SEVEN, 131, Way(True, True), Cut(64, 8), Cut(16, 2)),
        (8, SEVEN._replace(head_size=256), 513, READ_APART, Cut(16, 8), Cut(16, 8)),
        (1, SEVEN._replace(head_size=256), 513, IN_LONG, Cut(16, 32), Cut(16, 32)),
        (1, SEVEN._replace(head_size=512), 513, IN_LONG, Cut(16, 8), Cut(16, 8)),
        (1, SEVEN._replace(window=1024), 513, IN_LONG, Cut(16, 8), Cut(16, 8)),
        (64, SEVEN._replace(window=959), 513, READ_APART, Cut(16, 1), Cut(16, 1)),
        (64, SEVEN._replace(window=960), 513, READ_APART, Cut(64, 2), Cut(16, 1)),
        (APART, SEVEN._replace(window=1024), 513, READ_APART, Cut(64, 2), Cut(16, 1)),
        (256, SEVEN._replace(head_size=256), 6, READ_APART, Cut(16, 1), Cut(16, 1)),
        (256, SEVEN._replace(heads=256), 6, READ_APART, Cut(64, 1), Cut(64, 1)),
        (128, SEVEN, 20, Way(True, False, 4), Cut(64, 2), Cut(16, 4, 4)),
        (128, SEVEN, 131, Way(True, False, 8), Cut(64, 2), Cut(16, 8, 4)),
        (256, SEVEN, 131, Way(True, False, 8), Cut(64, 1), Cut(16, 4, 4)),
        (512, SEVEN, 131, Way(True, False, 8), Cut(64, 1), Cut(16, 2, 4)),
        (512, SEVEN._replace(kv_heads=8), 131, Way(False, False, 8), Cut(16, 1), Cut(16, 1)),
        (64, SEVEN._replace(kv_heads=8), 131, Way(False, False, 8), Cut(16, 8, 4), Cut(16, 8, 4)),
        (16, SEVEN, 33, Way(False, False, 8), Cut(16, 8, 4), Cut(16, 8, 4)),
        (8, SEVEN, 33, Way(False, False, 4), Cut(16, 4), Cut(16, 4)),
        (32, SEVEN, 131, Way(True, True, 8), Cut(64, 8), Cut(16, 8, 4)),
        (4, SEVEN, 131, Way(False, True, 8), Cut(16, 16), Cut(16, 16)),
        (17, SEVEN, 33, Way(False, False, 8), Cut(16, 8, 4), Cut(16, 8, 4)),
        (64, SEVEN._replace(head_size=256), 33, Way(False, False, 8), Cut(16, 8, 4), Cut(16, 8, 4)),
        (64, SEVEN._replace(head_size=512), 33, Way(False, False, 8), Cut(16, 1), Cut(16, 1)),
        (64, SEVEN._replace(window=1024), 513, Way(False, False, 8), Cut(16, 1), Cut(16, 1)),
    ],
)
def test_items_are_cut_by_the_way_to_attend(monkeypatch, tokens, kind, pages, way, prompts, own):
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    assert attention_cuts(kind, tokens, pages, way, torch.device("cpu")) == (prompts, own)


def running_of(prompts, samples):
    return new_sequences(prompts, [SamplingParams(1)] * (len(prompts) * samples))


@pytest.mark.parametrize(
    ("rows", "prompts", "samples", "tokens", "apart"),
    [
        (64, 8, 8, 256, False),
        (APART, 12, 8, 256, True),
        (256, 256, 1, 256, False),
        (256, 128, 2, 256, False),
        (256, 86, 3, 256, True),
        (64, 8, 8, 961, False),  # its last token is decoded
        (64, 8, 8, 962, True),
        (32, 4, 8, 1024, True),
        (24, 3, 8, 1024, False),
        (8, 1, 8, (LONG - 1) * PAGE + 1, False),
        (8, 1, 8, (LONG - 1) * PAGE + 2, True),
        (64, 64, 1, LONG * PAGE + 1, False),
        (4, 1, 4, LONG * PAGE + 1, False),
    ],
)
def test_prompts_are_read_apart_where_groups_share_many_tokens(rows, prompts, samples, tokens, apart):
    running = running_of([[0] * tokens] * prompts, samples)[:rows]
    assert way_to_attend([SEVEN, SEVEN._replace(window=64)], rows, running).apart is apart


def test_one_long_prompt_among_others_is_enough_if_it_is_shared():
    prompts = [[0] * (LONG * PAGE + 1), [0] * 9]
    running = running_of(prompts, 8)
    assert way_to_attend([SEVEN], 16, running).apart
    running[0].prompt.aligned_to = 2 * LONG * PAGE  # all of it lies in each sequence's own blocks
    assert not way_to_attend([SEVEN], 16, running).apart


def test_tiles_that_hold_a_group_are_not_enlarged():
    running = running_of([[0] * 9] * 12, 8)
    assert not way_to_attend([SEVEN._replace(heads=4)], 96, running).apart
    assert way_to_attend([SEVEN._replace(heads=4), SEVEN], 96, running).apart


@pytest.mark.parametrize(("rows", "long"), [(1, True), (32, True), (48, False)])
def test_contexts_are_very_long_by_what_few_rows_read(rows, long):
    edge = (VERY_LONG - 1) * PAGE
    assert not way_to_attend([], rows, running_of([[0] * (edge + 1)] * rows, 1)).long
    assert way_to_attend([], rows, running_of([[0] * (edge + 2)] * rows, 1)).long is long
    short = running_of([[0] * 9] * rows, 1)
    short[0].generated += edge - short[0].own_tokens
    assert not way_to_attend([], rows, short).long
    short[0].generated += 1
    assert way_to_attend([], rows, short).long is long


def test_a_long_prompt_that_is_read_apart_is_none_of_the_own_tokens():
    running = running_of([[0] * (VERY_LONG * PAGE)], 8)
    assert way_to_attend([SEVEN], 8, running) == Way(True, False)
    running[3].generated = VERY_LONG * PAGE
    assert way_to_attend([SEVEN], 8, running) == Way(True, True, 8)


@pytest.mark.parametrize(("own", "parts"), [(7, 1), (8, 2), (15, 2), (16, 4), (31, 4), (32, 8), (99, 8)])
def test_a_row_with_far_more_tokens_than_most_is_worth_parts_of_four_pages(own, parts):
    running = running_of([[0] * 2] * 40, 1)  # the prompt's last token is an own one
    running[0].generated += own * PAGE - running[0].own_tokens
    assert way_to_attend([], 64, running).parts == parts


def test_rows_of_one_age_and_rows_that_share_a_long_prompt_are_even():
    running = running_of([[0] * 2] * 4, 1)
    for sequence in running:
        sequence.generated = 40 * PAGE
    assert way_to_attend([], 64, running).parts == 1
    running[0].generated = 48 * PAGE - running[0].prompt.tail  # six pages above the mean
    assert way_to_attend([], 64, running).parts == 8
    running[0].generated -= PAGE
    assert way_to_attend([], 64, running).parts == 1
    prompts = [[0] * 5000, *[[0] * 2] * 30]
    assert way_to_attend([], 64, running_of(prompts, 2)).parts == 8
    assert way_to_attend([SEVEN], 96, running_of(prompts, 3)).parts == 1  # read apart


def test_no_step_has_a_second_launch_without_large_tiles(monkeypatch):
    sizes, cpu = Sizes.uniform(64, 128, 1, 4, 2, 16, 100), torch.device("cpu")
    assert kinds_apart(sizes, cpu) == [Kind(None, 4, 2, 16)]
    monkeypatch.setattr(attend, "card_of", lambda device: CARDS[8, 0])
    assert kinds_apart(sizes, cpu) == []
    assert not way_to_attend([], 512, running_of([[0] * 9], 512)).apart


class Noted:
    """Takes the place of a kernel, and notes what each launch is made of."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append(
            {name: constants[name] for name in ("LAUNCH", "ROWS", "KEYS", "LEAST", "num_stages")}
        )


ALONE, AHEAD, BESIDE = ({"LAUNCH": which, "num_stages": 5, "LEAST": 1} for which in range(3))


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "prompts", "own", "launches"),
    [
        (99, 4, Cut(16, 1), Cut(16, 1), [ALONE | {"ROWS": 16, "KEYS": PAGE}]),
        (100, 4, Cut(16, 1), Cut(16, 1), [ALONE | {"ROWS": 16, "KEYS": PAGE // 2}]),
        (64, 8, Cut(16, 1), Cut(16, 1), [ALONE | {"ROWS": 16, "KEYS": PAGE // 2}]),
        (64, 4, Cut(16, 2), Cut(16, 2), [ALONE | {"ROWS": 16, "KEYS": PAGE // 2}]),
        (100, 4, Cut(64, 1), Cut(64, 1), [ALONE | {"ROWS": 64, "KEYS": PAGE, "num_stages": 3}]),
        (
            8, 4, Cut(64, 16), Cut(16, 8),
            [AHEAD | {"ROWS": 64, "KEYS": PAGE // 2}, BESIDE | {"ROWS": 16, "KEYS": PAGE // 2}],
        ),
        (
            128, 4, Cut(64, 2), Cut(16, 4, 4),
            [AHEAD | {"ROWS": 64, "KEYS": PAGE // 2}, BESIDE | {"ROWS": 16, "KEYS": PAGE // 2, "LEAST": 8}],
        ),
        (24, 4, Cut(16, 4, 4), Cut(16, 4, 4), [ALONE | {"ROWS": 16, "KEYS": PAGE, "LEAST": 4}]),
    ],
)  # fmt: skip
def test_programs_that_are_many_ask_for_half_a_page(monkeypatch, tokens, kv_heads, prompts, own, launches):
    """A multiprocessor holds three that ask for whole ones, so a card of 132 holds 396."""
    kernel = Noted()
    monkeypatch.setattr(attend, "_attend", kernel)
    monkeypatch.setattr(attend, "multiprocessors", lambda device: 132)
    integers, splits = torch.zeros(2 * tokens, 4, dtype=torch.int32), prompts.splits + own.splits
    keys, heads = torch.zeros(1, kv_heads, PAGE, 16), (tokens, 2 * kv_heads)
    attend.attend(
        torch.zeros(*heads, 16), keys, keys, integers, integers, integers[:, 0].contiguous(),
        integers[:2, :1].expand(2, tokens).contiguous(), torch.zeros(splits, *heads, 16),
        torch.zeros(splits, *heads), prompts=prompts, own=own,
    )  # fmt: skip
    assert kernel.launches == launches


def test_programs_with_little_shared_memory_ask_for_no_page_ahead():
    few = {"KEYS": PAGE, "num_warps": 4, "num_stages": 3}
    assert attend._pipeline(attend.ALONE, True, 16, 128, PAGE, WHOLE_PARTS - 1) == few


def test_ways_to_attend_share_the_memory_of_the_one_with_most_splits():
    decoder = random_decoder(Sizes.uniform(64, 128, 1, 4, 2, 16, 100), "bf16", 0, 64, device="cpu")
    forward = Forward(decoder, 8, [(Cut(16, 2), Cut(16, 2))], [(Cut(64, 5), Cut(16, 2))])
    (together,) = forward._attending
    forward.cut_as(1)
    (apart,) = forward._attending
    assert [each.out_ZTHE.shape for each in (together, apart)] == [(4, 8, 4, 16), (7, 8, 4, 16)]
    assert apart.out_ZTHE.data_ptr() == together.out_ZTHE.data_ptr()
    assert apart.lse_ZTH.isneginf().all() and apart.lse_ZTH.data_ptr() != together.lse_ZTH.data_ptr()


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(48, torch.float32), (64, torch.bfloat16), (2048, torch.bfloat16)]
)
def test_parts_are_in_16_bits_from_64_tokens_on(tokens, dtype):
    decoder = random_decoder(Sizes.uniform(64, 128, 1, 4, 2, 16, 100), "bf16", 0, 64, device="cpu")
    forward = Forward(decoder, tokens, [(Cut(16, 2), Cut(16, 2))])
    assert [each.out_ZTHE.dtype for each in forward._attending] == [dtype]
    assert forward._attending[0].lse_ZTH.dtype == torch.float32
