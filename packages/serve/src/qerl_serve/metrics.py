"""Metrics of a running server, in Prometheus' format."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from qerl_serve.futures import Answer, Failure
from qerl_serve.types import SampleResult

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counts the worker's work; gauges are read on demand.

    Attributes:
        watched: Returns the numbers given to `watch`.
    """

    watched: Callable[[], Mapping[str, float]] = dict

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ran = Counter(
            "qerl_requests", "Requests that ran.", ("kind", "outcome"), registry=self.registry
        )
        self._seconds = Histogram(
            "qerl_request_seconds",
            "Seconds of a request: of samples from its arrival on, of others as they ran.",
            ("kind",), buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._batch = Histogram(
            "qerl_sample_batch_requests", "Requests that were sampled together.",
            buckets=_REQUESTS, registry=self.registry,
        )  # fmt: skip
        self._sampling = Counter("qerl_sampling_seconds", "Seconds spent on samples.", registry=self.registry)
        self._pauses = Counter(
            "qerl_sampling_pauses", "Times that samples were paused for updates.", registry=self.registry
        )
        self._sampled = Counter("qerl_sampled_tokens", "Tokens that were drawn.", registry=self.registry)
        self._prompt = Counter("qerl_prompt_tokens", "Tokens of prompts.", registry=self.registry)

    def ran(self, kind: str, seconds: float, outcome: Answer | Failure) -> None:
        """Count a request and its seconds."""
        self._ran.labels(kind, outcome.category if isinstance(outcome, Failure) else "done").inc()
        self._seconds.labels(kind).observe(seconds)

    def batch(self, requests: int, seconds: float) -> None:
        """Count requests that were sampled together."""
        self._batch.observe(requests)
        self._sampling.inc(seconds)

    def paused(self) -> None:
        """Count a pause of samples."""
        self._pauses.inc()

    def sampled(self, prompt: int, result: SampleResult) -> None:
        """Count the tokens of an answer."""
        self._prompt.inc(prompt)
        self._sampled.inc(sum(len(sequence.tokens) for sequence in result.sequences))

    def watch(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Report these numbers as gauges by name, read on demand."""
        self.watched = read
        self.registry.register(_Gauges(read))

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield one gauge per number."""
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"qerl_{name}", name.replace("_", " ").capitalize() + ".", value=value)
