"""Evaluation while training: what its metrics are called, and which of them chooses the best checkpoint.

An evaluation samples and scores, and computes no loss: GRPO's loss on fresh samples is near zero at the
policy that drew them, whatever their rewards, so it would cost a forward pass and choose nothing. The best
checkpoint is the one with the highest `eval_reward`. Scripts that look for `eval_loss`, or choose by it, find
minus that reward under the name.
"""

import math
from typing import Any

from qerl.errors import QeRLError


def check_metric(metric: str | None, eval_sets: Any) -> None:
    """Refuse a choice of the best checkpoint that names none of several evaluation sets.

    Args:
        metric: `metric_for_best_model`.
        eval_sets: What the trainer is given as `eval_dataset`.

    Raises:
        QeRLError: The sets have names, and the metric begins with none of them.
    """
    if metric is None or not isinstance(eval_sets, dict):
        return
    if not any(metric.removeprefix("eval_").startswith(f"{name}_") for name in eval_sets):
        choices = ", ".join(f"eval_{name}_reward" for name in eval_sets)
        raise QeRLError(
            f"metric_for_best_model is {metric}, but there are several evaluation sets; choose one "
            f"of {choices}."
        )


def name_metrics(metrics: dict[str, list[float]], prefix: str) -> None:
    """Put the name of an evaluation set in front of its metrics, which TRL calls the same for every set.

    Args:
        metrics: What an evaluation has collected; changed in place.
        prefix: transformers' prefix, `eval` or `eval_NAME`.
    """
    name = prefix.removeprefix("eval").removeprefix("_")
    if name:
        for key in list(metrics):
            metrics[f"{name}_{key}"] = metrics.pop(key)


def mean(values: list[float]) -> float | None:
    """The mean of a metric as TRL logs it: without what is not a number, and None of nothing."""
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else None
