"""Groups that are noisy in part: order of the samples, and what the two parts tell, by hand."""

import math

import pytest
import torch

from qerl.rollout.engine import Completion, RolloutResult
from qerl.trainer.noisy_share import compare, is_noisy, side_by_side

NAN = math.nan


def test_noisy_samples_come_first_in_each_group():
    assert is_noisy(8, 4, 1).tolist() == [True, False, False, False] * 2
    assert not is_noisy(8, 4, 0).any()


def test_rollouts_of_the_same_prompts_side_by_side():
    def result(first, count):
        completions = [Completion([first + i], [0.0], [0.0], "stop") for i in range(count)]
        return RolloutResult(completions, prompt_tokens=7, generated_tokens=count, seconds=0.5)

    both = side_by_side([result(0, 2), result(10, 6)], prompts=2)
    assert [c.token_ids[0] for c in both.completions] == [0, 10, 11, 12, 1, 13, 14, 15]
    assert (both.prompt_tokens, both.generated_tokens, both.seconds) == (14, 8, 1.0)
    alone = result(0, 4)
    assert side_by_side([alone], prompts=2) is alone


def test_what_noise_finds():
    """Of four prompts noise alone solves the first, clean samples alone the second, both or none the rest."""
    right = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 0], [0, 0, NAN, 0]])
    found = compare(2 * right.flatten(), right.flatten(), group_size=4, noisy=2)
    assert found["noise/only_noisy_solves"] == found["noise/only_clean_solves"] == 0.25
    assert found["noise/success_gain"] == pytest.approx((0.5 - 1.0 + 0.5 + 0.0) / 4)
    assert found["noise/reward_gain"] == pytest.approx(0.0)
    assert compare(right.flatten(), None, 4, 2).keys() == {"noise/reward_gain"}


def test_a_part_without_rewards_is_in_no_mean():
    total = torch.tensor([NAN, NAN, 1.0, 1.0, 3.0, 1.0, NAN, 1.0])
    assert compare(total, None, 4, 2) == {"noise/reward_gain": 1.0}
