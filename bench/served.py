"""An HTTP server of a random model, and the memory that it uses, for `bench.serve`.

Backend and server are made as `qerl serve` makes them; only the weights are random. A thread polls the memory
in use, because the paged engine's KV cache is allocated and freed within a step.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.families.sizes import Sizes
from qerl.measure.random_model import random_policy
from qerl.measure.random_task import word_tokenizer
from qerl.trainer.step_log import used_bytes
from qerl.weight_formats import WeightFormatName
from qerl_serve.checkpoints import Store
from qerl_serve.command import listen
from qerl_serve.limits import Limits
from qerl_serve.open import BackendOptions, make_backend, make_base
from qerl_serve.owners import Keys
from qerl_serve.server import Server
from qerl_serve.types import ModelInfo
from qerl_serve.worker import Worker

KEY = "tml-of-the-benchmarks"
BASE = "random/model"
_READ_S = 0.02


@dataclass(frozen=True)
class Served:
    """Settings of the server and its model.

    Attributes:
        sizes: The model's shape.
        weights: Format of its linears.
        rank: Maximum rank of an adapter.
        adapters: Maximum number of adapters, all of which stay on the GPU.
        positions: Maximum tokens of a prompt and its completion together.
        tokens_per_forward, every_n_layers: Settings of the update, as in `qerl serve`.
    """

    sizes: Sizes
    weights: WeightFormatName
    rank: int
    adapters: int
    positions: int
    tokens_per_forward: int | None
    every_n_layers: int


class Peak:
    """Peak of the memory in use, polled by a thread until closed."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._peak, self._closed = device, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(_READ_S):
            self._peak = max(self._peak, used_bytes(self._device))

    def take(self) -> dict[str, float]:
        """Return the peak GB in use on the device, and in torch's tensors, since the last call."""
        found = {"peak_gb": max(self._peak, used_bytes(self._device)) / 1e9}
        self._peak = 0
        if self._device.type == "cuda":
            found["allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        return found

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()
        self._thread.join()


@dataclass(frozen=True)
class Serving:
    """A running server.

    Attributes:
        url: Its URL.
        peak: Peak memory on the device.
        worker: The server's worker, whose gauges have the current settings of the update.
    """

    url: str
    peak: Peak
    worker: Worker

    def held(self) -> dict[str, int | None]:
        """Return the settings of the last update; a retry after running out of memory changes them."""
        gauges = self.worker.gauges
        tokens = gauges.get("update_tokens_per_forward")
        return {
            "held_tokens_per_forward": None if tokens is None else int(tokens),
            "held_every_n_layers": int(gauges["update_every_n_layers"]),
        }


@contextmanager
def serving(served: Served) -> Iterator[Serving]:
    """Run a server until the context ends."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = random_policy(served.sizes, served.weights, 0, served.positions, str(device))
    if device.type == "cpu":
        model = model.float()
    with (
        tempfile.TemporaryDirectory() as folder,
        listen("127.0.0.1", 0) as listening,
    ):
        options = BackendOptions(
            BASE, Path(folder), max_rank=served.rank, max_models=served.adapters, resident=served.adapters,
            tokens_per_forward=served.tokens_per_forward, every_n_layers=served.every_n_layers,
        )  # fmt: skip
        base = make_base(
            options, model, word_tokenizer(served.sizes.vocabulary),
            names=[ModelInfo(BASE, served.positions, BASE)], end_token_ids=(0,),
        )  # fmt: skip
        backend = make_backend(options, base, Store(options.folder, {"base": BASE}, {"model": BASE}))
        limits = Limits(served.positions, max_rank=served.rank, max_models=served.adapters)
        server = Server(backend, limits, Keys(KEY, {}))
        thread = threading.Thread(target=server.run, args=(listening,), daemon=True)
        peak = Peak(device)
        thread.start()
        try:
            yield Serving(f"http://127.0.0.1:{listening.getsockname()[1]}", peak, server.worker)
        finally:
            server.end()
            thread.join()
            peak.close()
