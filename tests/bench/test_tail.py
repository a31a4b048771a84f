"""Which step a round takes, and what the tail of a rollout wastes by that."""

import pytest

from bench.tail import RULES, milliseconds, refilled, rounds, simulate, simulate_dapo, simulate_refilled
from qerl.rollout.paged.limits import MAX_ROWS, ROW_COUNTS, rows_of_step


def test_a_round_takes_the_fewest_rows_that_hold_what_runs():
    assert [rows_of_step(running, None, 8) for running in (1, 3, 9, 13, 65, 97, MAX_ROWS)] == [
        1, 4, 12, 16, 96, 128, 512,
    ]  # fmt: skip
    assert rows_of_step(97, 128, 8) == 128 and rows_of_step(96, 128, 8) == 96
    assert rows_of_step(97, 96, 8) == 128


def test_small_steps_are_not_exchanged_for_smaller_ones():
    assert rows_of_step(1, 128, 8) == 8 and rows_of_step(1, 8, 8) == 8 and rows_of_step(1, 4, 8) == 4
    assert rows_of_step(5, 4, 8) == 8


@pytest.mark.parametrize("small", [1, 8, 64])
def test_rows_always_hold_what_runs(small):
    for running in range(1, MAX_ROWS + 1):
        for present in (None, *ROW_COUNTS):
            rows = rows_of_step(running, present, small)
            assert rows >= running and rows in ROW_COUNTS
            assert rows_of_step(running, rows, small) == rows  # nothing moves twice


def test_the_tail_of_128_samples_wastes_a_third_of_what_it_did():
    """Lognormal lengths of mean 400, at most 1024: the numbers of the lab book."""
    before, powers, now = simulate("lognormal:400", 128, 1024, 8, {8: 2.8, 64: 4.1, 128: 6.3})
    assert before["tokens"] == now["tokens"]
    assert now["wasted"] < 0.4 * before["wasted"] and now["wasted"] < powers["wasted"]
    assert now["decode_s"] < 0.9 * before["decode_s"]


def test_equal_lengths_waste_nothing():
    for choose in RULES.values():
        assert rounds([64] * 32, 8, 32, choose) == [32] * 4


def test_steps_between_measured_ones_lie_on_a_line():
    measured = {8: 2.0, 64: 4.0, 128: 8.0}
    assert milliseconds(8, measured) == 2.0
    assert milliseconds(96, measured) == 6.0
    assert milliseconds(256, measured) == 16.0


def test_an_open_call_decodes_dapos_rollout_in_little_more_than_half_the_time_of_further_ones():
    """Half of 16 groups dead, lognormal lengths of mean 400: what `qerl.trainer.dynamic_sampling` says."""
    measured = {8: 2.8, 64: 4.1, 128: 6.3}
    rows = {row["rule"]: row for row in simulate_dapo("lognormal:400", 128, 1024, 8, measured, dead=0.5)}
    opened, after = rows["open call"], rows["further rollouts"]
    assert opened["needed_groups"] == after["needed_groups"] == after["started_groups"]
    assert opened["decode_s"] < 0.6 * after["decode_s"]
    assert opened["decode_s"] < min(row["decode_s"] for row in rows.values() if row is not opened)
    assert opened["started_groups"] < 1.4 * opened["needed_groups"]


def test_an_open_call_in_which_all_groups_have_a_signal_is_one_rollout():
    measured = {8: 2.8, 64: 4.1, 128: 6.3}
    for row in simulate_dapo("uniform", 64, 512, 8, measured, dead=0.0, draws=2):
        if row["rule"] != "rows always full":
            assert row["started_groups"] == row["needed_groups"] == 8


def test_rows_refilled_across_steps_shorten_what_a_step_decodes():
    """Lognormal lengths of mean 400: what docs/training.md says of it, with steps made up."""
    measured = {8: 2.8, 64: 4.1, 128: 6.3}
    rows = [simulate_refilled("lognormal:400", 128, 1024, 8, measured, early, steps=30) for early in range(4)]
    seconds = [row["decode_s"] for row in rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[2] < 0.7 * seconds[0]
    assert [row["max_age"] for row in rows] == [0, 1, 2, 3]
    ages = [row["mean_age"] for row in rows]
    assert ages[0] == 0 and all(0 < age < most for most, age in enumerate(ages[1:], 1))


def test_nothing_is_refilled_where_no_group_may_start_early():
    """Each step is a rollout by itself, as the engine's scheduler runs it."""
    lengths = [16 * (1 + 7 * i % 5) for i in range(3 * 16)]
    found = refilled(lengths, 4, 4, 0)
    alone = [rounds(lengths[at : at + 16], 4, 16, RULES["all sizes, at once"]) for at in (0, 16, 32)]
    assert [taken for taken, _ in found] == alone
    assert [ages for _, ages in found] == [[sum(lengths[at : at + 16])] for at in (0, 16, 32)]


def test_every_token_is_drawn_once_and_none_is_too_old():
    lengths = [1 + 37 * i % 200 for i in range(20 * 16)]
    for early in range(1, 5):
        found = refilled(lengths, 4, 4, early)
        assert [sum(ages) for _, ages in found] == [sum(lengths[at : at + 16]) for at in range(0, 320, 16)]
        assert all(len(ages) <= early + 1 for _, ages in found)
        assert all(rows <= 16 for taken, _ in found for rows in taken)
