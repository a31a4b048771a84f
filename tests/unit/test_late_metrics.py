"""Metrics that are put together at the end of a step are those that TRL puts together in each loss."""

import math
from collections import defaultdict

import pytest
import torch
from trl.trainer.utils import nanmax, nanmin

from qerl.errors import QeRLError
from qerl.trainer.trl.late_metrics import LateMetric, metrics_later, settle

NAN, STEPS = float("nan"), 2
TOTALS = [[[1.25, 3.0], [0.1, 0.0]], [[0.7, 4.0], [0.2, 0.0]]]  # of ranks, of losses
SHARES = [[[0.5, NAN, 0.25], [NAN, NAN]], [[0.75, 1.0, NAN], [NAN, NAN]]]


class Sends:
    """What a loss uses of accelerate, in one of two processes."""

    def reduce(self, totals, reduction):
        raise AssertionError("a loss has met the other process")

    gather = reduce


class Trainer:
    def __init__(self):
        self.accelerator = Sends()
        self._metrics = {"train": defaultdict(list)}


def lose(trainer, totals, shares):
    """Logs as TRL's loss does."""
    metrics = trainer._metrics["train"]
    both = trainer.accelerator.reduce(torch.tensor(totals), reduction="sum")
    metrics["entropy"].append((both[0] / both[1].clamp(min=1.0)).item())
    gathered = trainer.accelerator.gather(torch.tensor(shares))
    metrics["clip_ratio/low_min"].append(nanmin(gathered).item())
    gathered = trainer.accelerator.gather(torch.tensor(shares))
    metrics["clip_ratio/high_max"].append(nanmax(gathered).item())


def by_trl(loss):
    """The numbers of a loss from what both processes send."""
    both = sum(torch.tensor(totals[loss]) for totals in TOTALS)
    shares = torch.cat([torch.tensor(each[loss]) for each in SHARES])
    return {
        "entropy": (both[0] / both[1].clamp(min=1.0)).item() if both[1] else 0.0,
        "clip_ratio/low_min": nanmin(shares).item(),
        "clip_ratio/high_max": nanmax(shares).item(),
    }


def test_two_processes_meet_once_for_all_losses_of_a_step():
    ranks = [Trainer(), Trainer()]
    for trainer, totals, shares in zip(ranks, TOTALS, SHARES, strict=True):
        trainer._metrics["train"]["reward"].append(0.5)
        for loss in range(STEPS):
            with metrics_later(trainer):
                lose(trainer, totals[loss], shares[loss])
    sent: list[torch.Tensor] = []
    for trainer in ranks:
        trainer.accelerator.gather = lambda own: sent.append(own) or torch.cat([own, own])
        settle(
            {name: list(values) for name, values in trainer._metrics["train"].items()}, trainer.accelerator
        )
    assert len(sent) == 2, "one message of each process"
    for trainer in ranks:
        trainer.accelerator.gather = lambda own: torch.cat(sent)
        settle(trainer._metrics["train"], trainer.accelerator)
        found = trainer._metrics["train"]
        assert found["reward"] == [0.5]
        for name in by_trl(0):
            assert found[name] == pytest.approx(
                [by_trl(loss)[name] for loss in range(STEPS)], nan_ok=True, abs=0
            )
    assert math.isnan(ranks[0]._metrics["train"]["clip_ratio/low_min"][1])


def test_a_mean_of_nothing_is_what_its_metric_says():
    nothing = torch.zeros(2, 2)
    assert LateMetric(nothing[0], "mean").value(nothing) == 0.0
    assert math.isnan(LateMetric(nothing[0], "mean", of_nothing=NAN).value(nothing))


def test_a_gathered_metric_of_an_unknown_name_is_refused():
    trainer = Trainer()
    with pytest.raises(QeRLError, match="'aux_loss'"), metrics_later(trainer):
        gathered = trainer.accelerator.gather(torch.ones(1))
        trainer._metrics["train"]["aux_loss"].append(gathered.mean().item())


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_the_mean_of_gathered_losses_stays_infinite(infinite):
    trainer = Trainer()
    with metrics_later(trainer):
        gathered = trainer.accelerator.gather(torch.tensor([infinite, NAN, 1.0]))
        trainer._metrics["train"]["policy_loss"].append(gathered.nanmean().item())
    trainer.accelerator.gather = lambda own: own
    settle(trainer._metrics["train"], trainer.accelerator)
    assert trainer._metrics["train"]["policy_loss"] == [infinite]


def test_a_loss_that_sends_more_than_it_logs_is_an_error():
    trainer = Trainer()
    with pytest.raises(ValueError, match="longer"), metrics_later(trainer):
        trainer.accelerator.reduce(torch.ones(2), reduction="sum")
    assert trainer.accelerator.gather.__self__ is trainer.accelerator, "what was replaced is back"
