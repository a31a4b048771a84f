"""Seconds and memory of each training step, read in the same way for every trainer."""

import statistics
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from transformers import TrainerCallback

from qerl.trainer.step_log import used_bytes

_LOGGED = (
    "loss", "grad_norm", "time/logprob", "sampling/kl", "dynamic_sampling/started_groups", "staleness/mean",
    "staleness/max", "staleness/samples_under_way", "sampling/ratio/effective_sample_size",
)  # fmt: skip


class Rollout(Protocol):
    """Time, tokens and memory of a step's last rollout."""

    seconds: float
    tokens: int
    """Sampled tokens of all completions."""
    rollout_gb: float
    """Memory in use on the device at the rollout's end, in 10^9 bytes."""
    release_seconds: float
    """Seconds spent freeing memory for the update."""
    trace: torch.profiler.profile | None
    """Profiler that records the update's kernels, or None; stopped at the step's end."""


class Clock(TrainerCallback):
    """Callback that records wall-clock time and memory; ``rows`` has one dictionary per step.

    The peak of the update is read from torch's allocator, whose statistics the rollout resets at its end.

    Args:
        rollout: Read at the end of each step.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        total, rollout = time.perf_counter() - self.start, self.rollout
        if rollout.trace is not None:
            rollout.trace.stop()
        cached = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        self.rows.append(
            {
                "rollout_s": rollout.seconds,
                "update_s": total - rollout.seconds,
                "total_s": total,
                "release_s": rollout.release_seconds,
                "tokens": rollout.tokens,
                "tokens_per_s": rollout.tokens / total,
                "rollout_gb": rollout.rollout_gb,
                "update_gb": used_bytes(torch.device("cuda")) / 1e9 + cached / 1e9,
                "update_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            }
        )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any
    ) -> None:
        if self.rows and logs and "loss" in logs:
            self.rows[-1] |= {key: float(logs[key]) for key in _LOGGED if key in logs}


def of_all(rows_of_processes: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Combine the `Clock` rows of several processes that train together.

    Tokens are summed. Times and memory are the maximum over processes, and the update is the part of the step
    after the longest rollout, for which the other processes wait. Logged values are those of the first
    process.
    """
    steps = []
    for rows in zip(*rows_of_processes, strict=True):
        step = dict(rows[0])
        for key in ("rollout_s", "total_s", "release_s", "rollout_gb", "update_gb", "update_allocated_gb"):
            step[key] = max(row[key] for row in rows)
        step["update_s"] = step["total_s"] - step["rollout_s"]
        step["shortest_rollout_s"] = min(row["rollout_s"] for row in rows)
        step["tokens"] = sum(row["tokens"] for row in rows)
        step["tokens_per_s"] = step["tokens"] / step["total_s"]
        steps.append(step)
    return steps


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each field of `Clock` rows over the steps after the first."""
    return {key: statistics.median(row[key] for row in rows[1:]) for key in rows[1]}
