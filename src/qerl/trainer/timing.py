"""Where the seconds of an optimizer step go, and how long trainings and evaluations take."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

_PARTS = ("rollout", "reward", "logprob")
HIDDEN = "reward_hidden"
"""Seconds of rewards beside a rollout, in which they are counted already."""


class StepClock:
    """Seconds of an optimizer step: its rollout, rewards, old log-probabilities and update.

    The update is what the whole step takes beside the other parts, the optimizer included: the clock runs on
    after the last microbatch until the step is reported.

    Args:
        hides: Whether rewards begin while samples are decoded, which `HIDDEN` seconds are reported of.

    Attributes:
        running: Whether a microbatch was counted since the last report.
    """

    def __init__(self, hides: bool = False) -> None:
        self._hides = hides
        self._seconds: dict[str, float] = defaultdict(float)
        self._total = 0.0
        self._last_microbatch = 0.0
        self.running = False

    def add(self, part: str, seconds: float) -> None:
        """Count seconds of a part that was timed elsewhere, or `HIDDEN` ones."""
        self._seconds[part] += seconds

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block as part of the step: rollout, reward or logprob."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Count the block, which holds all of a microbatch, and what follows it until the report."""
        start, self.running = time.perf_counter(), True
        try:
            yield
        finally:
            self._last_microbatch = time.perf_counter()
            self._total += self._last_microbatch - start

    def clear(self) -> None:
        """Forget what was counted so far, which belongs to no step."""
        self._seconds.clear()
        self._total, self.running = 0.0, False

    def report(self) -> dict[str, float]:
        """The seconds of the step that ends here, by the name under which they are logged."""
        total = self._total + time.perf_counter() - self._last_microbatch
        parts = {name: self._seconds.pop(name, 0.0) for name in _PARTS}
        parts["update"] = total - sum(parts.values())
        if self._hides:
            parts[HIDDEN] = self._seconds.pop(HIDDEN, 0.0)
        self._total, self.running = 0.0, False
        return {"step_time": total} | {f"time/{name}": seconds for name, seconds in parts.items()}


class Runtimes:
    """Seconds of a training and of evaluations, by a clock that nobody sets.

    transformers reads theirs from the time of day: where that is set back meanwhile, they are negative.
    """

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def begin(self, split: str) -> None:
        """A training or an evaluation begins; `split` is how its metrics begin, such as ``eval``."""
        self._began[split] = time.monotonic()

    def put_into(self, metrics: dict[str, float]) -> None:
        """Replace transformers' runtime, if these metrics have it, and the rates that follow from it."""
        for split, began in self._began.items():
            if (theirs := metrics.get(f"{split}_runtime")) is None:
                continue
            seconds = time.monotonic() - began
            metrics[f"{split}_runtime"] = round(seconds, 4)
            for name in (f"{split}_samples_per_second", f"{split}_steps_per_second"):
                if name in metrics:
                    metrics[name] = round(metrics[name] * theirs / seconds, 3)
