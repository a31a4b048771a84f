"""What losses report is put together once a step for all processes, and is what TRL puts together in each."""

import math

import pytest
import torch
from trl.trainer.utils import nanmax, nanmin

from qerl.update.policy_loss import Metric, gathered

NAN, STEPS = float("nan"), 2
VALUES = [[[1.25, 3.0], [0.1, 0.5]], [[0.7, 4.0], [0.2, 2.0]]]  # of processes, of losses
COUNTED = [[[1, 0], [0, 0]], [[1, 1], [0, 0]]]
SHARES = [[[0.5, NAN, 0.25], [NAN, NAN]], [[0.75, 1.0, NAN], [NAN, NAN]]]


def reported(rank, loss):
    values, counted = torch.tensor(VALUES[rank][loss]), torch.tensor(COUNTED[rank][loss])
    shares = torch.tensor(SHARES[rank][loss])
    return {
        "mean": Metric.mean(values, counted),
        "mean or nothing": Metric.mean(values, counted, of_nothing=NAN),
        "sum": Metric.sum(values),
        "least": Metric.least(shares, ~shares.isnan()),
        "largest": Metric.largest(shares, ~shares.isnan()),
    }


def by_trl(loss):
    """The numbers of a loss from what both processes know."""
    values, counted = (torch.cat([torch.tensor(rank[loss]) for rank in each]) for each in (VALUES, COUNTED))
    shares = torch.cat([torch.tensor(rank[loss]) for rank in SHARES])
    mean = ((values * counted).sum() / counted.sum().clamp(min=1.0)).item()
    return {
        "mean": mean,
        "mean or nothing": mean if counted.any() else NAN,
        "sum": values.sum().item(),
        "least": nanmin(shares).item(),
        "largest": nanmax(shares).item(),
    }


def test_two_processes_meet_once_for_all_losses_of_a_step():
    ranks = [[reported(rank, loss) for loss in range(STEPS)] for rank in range(2)]
    sent: list[torch.Tensor] = []
    for losses in ranks:
        gathered(losses, lambda own: sent.append(own) or torch.cat([own, own]))
    assert len(sent) == 2, "one message of each process"
    for losses in ranks:
        found = gathered(losses, lambda own: torch.cat(sent))
        for name in by_trl(0):
            wanted = [by_trl(loss)[name] for loss in range(STEPS)]
            assert found[name] == pytest.approx(wanted, nan_ok=True, rel=1e-6), name
    assert math.isnan(found["least"][1]) and math.isnan(found["mean or nothing"][1])


def test_without_a_loss_nobody_is_asked():
    assert gathered([], lambda own: pytest.fail("a message of nothing")) == {}


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_a_mean_stays_infinite(infinite):
    values = torch.tensor([infinite, NAN, 1.0])
    metric = Metric.mean(values, ~values.isnan())
    assert gathered([{"policy_loss": metric}], lambda own: own) == {"policy_loss": [infinite]}


def test_an_infinite_extreme_is_not_one_of_nothing():
    values, all_of_them = torch.tensor([1.0, math.inf, -math.inf]), torch.tensor([True] * 3)
    for metric, expected in (
        (Metric.largest(values, all_of_them), math.inf),
        (Metric.least(values, all_of_them), -math.inf),
        (Metric.largest(torch.tensor([1.0, NAN]), all_of_them[:2]), NAN),
        (Metric.least(values, ~all_of_them), NAN),
    ):
        assert metric.value(metric.parts[None]) == pytest.approx(expected, nan_ok=True)
