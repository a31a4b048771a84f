"""Drafts that would have been accepted, counted on paper."""

import random

import pytest

from bench.acceptance import ALONE, SOURCES, Group, decode


@pytest.mark.parametrize("sources", SOURCES)
def test_every_token_is_given_once_and_nothing_that_is_not_known_is_drafted(sources):
    rng = random.Random(1)
    lengths = [1, 7, 30, 30]
    group = Group([1, 2], [[0] * 9], [[rng.randrange(3) for _ in range(length)] for length in lengths], [])
    count = decode(group, sources, 3, 1)
    assert count.tokens == sum(lengths)
    assert count.tokens <= count.passes + count.accepted  # a row's last draft may reach its end
    assert count.accepted <= count.drafted <= 3 * count.drafts


def test_a_row_that_repeats_itself_is_decoded_in_leaps_and_a_new_one_is_not():
    alike = decode(Group([1], [], [[5] * 41], []), "own", 4, 1)
    assert alike.tokens == 41 and alike.passes == 22  # where it stood last, one token is known behind it
    new = decode(Group([1], [], [list(range(2, 40))], []), "own", 4, 1)
    assert (new.passes, new.drafts) == (38, 0)


def test_what_an_earlier_epoch_wrote_is_drafted_from_it_alone():
    sample = list(range(10, 50))
    group = Group([1, 2], [sample], [sample], [])
    assert decode(group, SOURCES[1], 3, 2).accepted == 0
    again = decode(group, SOURCES[-1], 3, 2)
    assert again.passes == 10 and again.accepted == 30


def test_samples_that_are_drawn_one_after_another_have_whole_siblings_to_draft_from():
    sample = list(range(10, 50))
    group = Group([1, 2], [], [sample, sample, sample], [])
    assert decode(group, SOURCES[1], 3, 2).accepted == 0
    alone = decode(group, ALONE, 3, 2)
    assert (alone.passes, alone.accepted) == (40 + 2 * 10, 2 * 30)
    assert (alone.last_passes, alone.last_tokens) == (60, 120)


def test_the_last_row_of_a_group_is_counted_for_itself():
    count = decode(Group([1], [], [[5, 6], list(range(10, 30))], []), SOURCES[1], 3, 1)
    assert (count.passes, count.last_passes, count.last_tokens) == (22, 18, 18)
