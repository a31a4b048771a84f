"""A target of KL is met by the gain of sigma, whatever the model makes of sigma; a resume goes on exactly."""

import json
import math

import pytest

from lab.study.batched.target import KLTarget
from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule

SCHEDULE = NoiseSchedule(sigma_start=1e-2, sigma_end=1e-3, stages=5, total_steps=50)


def measured(target, step, c):
    """KL = c sigma^2 of the rollout of a step."""
    return c * (SCHEDULE.sigma(step) * target.gain_for_rollout(step)) ** 2


@pytest.mark.parametrize("kl_at_sigma_start", [0.003, 0.03, 3.0])
def test_converges_and_stays_when_the_stage_changes(kl_at_sigma_start):
    target = KLTarget(SCHEDULE, kl_start=0.03)
    for step in range(50):
        kl = measured(target, step, kl_at_sigma_start / 1e-4)
        if step == 20:
            assert kl == pytest.approx(target.at(step), rel=0.02)
        if step > 20:
            assert kl == pytest.approx(target.at(step), rel=0.02), "the schedule's own fall changes no gain"
        target.observe(kl)


def test_the_target_falls_with_the_square_of_the_schedule():
    target = KLTarget(SCHEDULE, kl_start=0.03)
    assert [target.at(step) for step in (0, 9)] == [0, 0]
    assert [target.at(step) for step in (10, 49)] == pytest.approx([0.03, 0.03 / 100])


def test_one_step_by_hand():
    """KL four times too high: the right gain is 1/2, and half of the way there is 1 / sqrt 2."""
    target = KLTarget(SCHEDULE, kl_start=0.03)
    assert target.gain_for_rollout(10) == 1.0
    target.observe(0.12)
    assert target.gain_for_rollout(11) == pytest.approx(1 / math.sqrt(2))


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0, 2.0), (1e-30, 2.0), (1e30, 0.5), (-1e-9, 2.0), (math.inf, 0.5)]
)
def test_an_outlier_moves_sigma_by_two_at_most_and_many_by_a_hundred(kl, factor):
    target = KLTarget(SCHEDULE, kl_start=0.03)
    target.gain_for_rollout(10)
    target.observe(kl)
    assert target.gain_for_rollout(11) == pytest.approx(factor)
    for step in range(12, 40):
        target.observe(kl)
        gain = target.gain_for_rollout(step)
    assert gain == pytest.approx(100.0 if factor > 1 else 0.01)


def test_several_steps_on_one_rollout_do_not_overshoot():
    target = KLTarget(SCHEDULE, kl_start=0.03)
    target.gain_for_rollout(10)
    for _ in range(30):
        target.observe(0.12)
    assert target.gain_for_rollout(11) == pytest.approx(0.5)


@pytest.mark.parametrize(("step", "kl"), [(0, 0.5), (9, 0.5), (10, math.nan)])
def test_nothing_is_learned_without_noise_or_without_a_number(step, kl):
    target = KLTarget(SCHEDULE, kl_start=0.03)
    target.gain_for_rollout(step)
    target.observe(kl)
    assert target.gain_for_rollout(10) == 1.0


def test_a_resume_goes_on_bit_for_bit():
    """Also in the middle of a rollout that serves several steps."""
    through, gains = KLTarget(SCHEDULE, 0.03), []
    for step in range(10, 40):
        if step % 2 == 0:
            gains.append(through.gain_for_rollout(step))
        if step == 23:
            state = json.loads(json.dumps(through.state()))
        through.observe(0.01 * (1 + step % 7))
    resumed = KLTarget(SCHEDULE, 0.03)
    resumed.restore(state)
    again = []
    for step in range(23, 40):
        if step % 2 == 0:
            again.append(resumed.gain_for_rollout(step))
        resumed.observe(0.01 * (1 + step % 7))
    assert again == gains[-len(again) :]
    assert resumed.state() == through.state()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_target_is_refused(bad):
    with pytest.raises(QeRLError, match="must be a positive number of nats"):
        KLTarget(SCHEDULE, bad)
