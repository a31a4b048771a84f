"""The GPU's clocks, power and temperature during a measurement.

A card at its power limit lowers its clocks, so the same kernels take longer on a warm day. Clocks are not
locked here, as users do not lock them either; the readings of the busy GPU are recorded with each row.
"""

import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qerl.measure.provenance import nvidia_smi

_QUERY = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "celsius": "temperature.gpu",
}
_UTILIZATION = "utilization.gpu"
_BUSY = 50  # percent of the time; a model that is being made or read from disk leaves the GPU idle
_EVERY_MS = 500

State = dict[str, dict[str, float]]


class Gauge:
    """Readings of the current GPU since the last `take`, twice per second; made by `gauge`."""

    def __init__(self, readings: Any) -> None:
        self._readings = readings
        self._rest = ""

    def take(self) -> State | None:
        """Return minimum, median and maximum of each quantity while the GPU was busy since the last call;
        None if it was not busy, there is no GPU, or nvidia-smi gives no readings."""
        if self._readings is None:
            return None
        *lines, self._rest = (self._rest + self._readings.read()).split("\n")
        rows = [numbers for busy, *numbers in filter(None, map(_numbers, lines)) if busy >= _BUSY]
        if not rows:
            return None
        return {
            name: {"min": min(column), "median": statistics.median(column), "max": max(column)}
            for name, column in zip(_QUERY, zip(*rows, strict=True), strict=True)
        }


@contextmanager
def gauge() -> Iterator[Gauge]:
    """Read the state of the GPU within this block."""
    if not torch.cuda.is_available():
        yield Gauge(None)
        return
    command = [*nvidia_smi(",".join([_UTILIZATION, *_QUERY.values()])), f"--loop-ms={_EVERY_MS}"]
    with tempfile.NamedTemporaryFile("r+") as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL
            )
        except OSError:
            yield Gauge(None)
            return
        try:
            with Path(file.name).open() as readings:
                yield Gauge(readings)
        finally:
            process.terminate()
            process.wait()


def _numbers(line: str) -> list[float]:
    """Parse the numbers of a reading; empty if the line is no reading or lacks a number."""
    try:
        found = [float(field) for field in line.split(",")]
    except ValueError:
        return []
    return found if len(found) == 1 + len(_QUERY) else []
