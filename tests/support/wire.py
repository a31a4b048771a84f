"""A backend without a model, whose numbers follow from what it was told, and a server of it.

A model is one number w. A pass adds to its gradient the sum of the loss's weights or advantages, a step of
the optimizer subtracts learning rate times gradient, and every log-probability is -1 - w. So a gradient that
was added twice, or a step out of order, shows.
"""

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qerl.errors import QeRLError
from qerl.update.losses import Datum, LossOutput
from qerl_serve.command import listen
from qerl_serve.limits import Limits
from qerl_serve.names import SCHEME, split_path
from qerl_serve.owners import Keys
from qerl_serve.server import Server
from qerl_serve.types import (
    AdamParams,
    Arrivals,
    Checkpoint,
    LoraParams,
    ModelInfo,
    Notes,
    NotSavedError,
    Overdue,
    SampledSequence,
    SampleRequest,
    SampleResult,
    WeightsInfo,
)

BASE = "tests/tiny"
KEY = "tml-of-the-tests-0123456789"
BAD_TOKEN, DEFECT_TOKEN = 666, 667
"""Tokens for which a pass or a request for samples fails, by the user's fault and by the server's."""
PATIENCE_S = 20.0
"""Nothing takes as long, unless something is wrong."""


@dataclass
class Weight:
    """A model: its number, gradient, and how many steps it made."""

    lora: LoraParams
    w: float = 0.0
    gradient: float = 0.0
    steps: int = 0


@dataclass
class FakeBackend:
    """Counts what it is told to do; `seconds` is how long each piece of work takes."""

    folder: Path
    seconds: float = 0.0
    context: int = 64
    weights: dict[str, Weight] = field(default_factory=dict)
    samplers: dict[str, list[float]] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    closed: bool = False
    reader: None = None

    def __post_init__(self) -> None:
        self.models = [ModelInfo(BASE, self.context, BASE)]
        self._thread: int | None = None
        self._snapshots = 0

    def _work(self, model_id: str, what: str) -> None:
        assert self._thread in (None, threading.get_ident()), "the backend is called from two threads"
        self._thread = threading.get_ident()
        self.log.append((model_id, what))
        if self.seconds:
            time.sleep(self.seconds)

    def _weight(self, model_id: str) -> Weight:
        if model_id not in self.weights:
            raise QeRLError(f"There is no model {model_id}.")
        return self.weights[model_id]

    def create_model(self, model_id: str, lora: LoraParams) -> None:
        self._work(model_id, "create")
        assert model_id not in self.weights
        self.weights[model_id] = Weight(lora)

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> LossOutput:
        self._work(model_id, "forward" if forward_only else "forward_backward")
        weight = self._weight(model_id)
        if loss not in ("cross_entropy", "importance_sampling", "ppo"):
            raise QeRLError(f"The loss {loss!r} is unknown.")
        gradient, logprobs = 0.0, []
        for datum in data:
            if BAD_TOKEN in datum.tokens:
                raise QeRLError(f"The token {BAD_TOKEN} is not in the vocabulary.")
            if DEFECT_TOKEN in datum.tokens:
                raise RuntimeError("out of luck")
            factor = "weights" if loss == "cross_entropy" else "advantages"
            if factor not in datum.inputs:
                raise QeRLError(f"{loss} needs {factor}.")
            gradient += datum.inputs[factor].sum().item()
            logprobs.append(torch.full(datum.inputs["target_tokens"].shape, -1.0 - weight.w))
        if not forward_only:
            weight.gradient += gradient
        return LossOutput(logprobs, {"loss:sum": gradient * (1 + weight.w)})

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        self._work(model_id, "optim_step")
        weight = self._weight(model_id)
        metrics = {"gradient": weight.gradient}
        weight.w -= adam.learning_rate * weight.gradient
        weight.gradient, weight.steps = 0.0, weight.steps + 1
        return metrics

    def drop_gradients(self, model_id: str) -> bool:
        weight = self.weights.get(model_id, Weight(LoraParams(1)))
        dropped, weight.gradient = weight.gradient != 0, 0.0
        return dropped

    def _save(self, model_id: str, kind: str, name: str, notes: Notes, overwrite: bool = False) -> str:
        self._work(model_id, f"save {kind}")
        weight = self._weight(model_id)
        folder = self.folder / model_id / kind / name
        if folder.exists() and not overwrite:
            raise QeRLError(f"{name} is saved already.")
        folder.mkdir(parents=True, exist_ok=True)
        state = {"w": weight.w, "steps": weight.steps, "rank": weight.lora.rank, "notes": asdict(notes)}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "other.bin").write_bytes(bytes(700))
        return f"{SCHEME}{model_id}/{kind}/{name}"

    def _read(self, path: str) -> dict:
        file = self.folder.joinpath(*split_path(path)) / "state.json"
        if not file.exists():
            raise NotSavedError(f"Nothing is saved at {path}.")
        return json.loads(file.read_text())

    def save_state(self, model_id: str, name: str, overwrite: bool, notes: Notes) -> str:
        return self._save(model_id, "weights", name, notes, overwrite)

    def save_for_sampler(self, model_id: str, name: str | None, notes: Notes) -> str:
        if name is not None:
            return self._save(model_id, "sampler_weights", name, notes)
        self._work(model_id, "snapshot")
        self._snapshots += 1
        return self._sampler(f"{model_id}@{self._snapshots}", self._weight(model_id).w)

    def save_external(self, model_id: str, name: str, notes: Notes) -> str:
        return self._save(model_id, "external_weights", name, notes)

    def _sampler(self, key: str, w: float) -> str:
        self.samplers.setdefault(key, []).append(w)
        return key

    def load_state(self, model_id: str, path: str, with_optimizer: bool) -> None:
        self._work(model_id, "load")
        state = self._read(path)
        weight = self.weights.setdefault(model_id, Weight(LoraParams(state["rank"])))
        weight.w, weight.steps = state["w"], state["steps"] if with_optimizer else 0

    def sampler(self, path_or_base: str, base: str | None = None) -> str:
        return self._sampler(path_or_base, 0.0 if path_or_base == BASE else self._read(path_or_base)["w"])

    def sample(
        self, requests: Sequence[SampleRequest], arrived: Arrivals, overdue: Overdue
    ) -> Iterator[tuple[int, SampleResult | QeRLError]]:
        waiting, number, answered = list(requests), 0, 0
        while waiting:
            self._work("", "sample")
            if any(DEFECT_TOKEN in request.prompt for request in waiting):
                raise RuntimeError("out of luck")
            for request in waiting:
                yield number, self._answer(request)
                number += 1
            answered += len(waiting)
            waiting = list(arrived())
            if (work := overdue()) is not None:
                work()
        self.batches.append(answered)

    def _answer(self, request: SampleRequest) -> SampleResult | QeRLError:
        if BAD_TOKEN in request.prompt:
            return QeRLError(f"The token {BAD_TOKEN} is not in the vocabulary.")
        if request.sampler not in self.samplers:
            return QeRLError(f"There is no sampler {request.sampler}.")
        w, length = self.samplers[request.sampler][0], request.max_tokens or 4
        sequences = [
            SampledSequence(
                [(request.seed + number + place) % 50 for place in range(length)],
                [-1.0 - w] * length,
                "length",
            )
            for number in range(request.num_samples)
        ]
        return SampleResult(
            sequences,
            [float("nan")] + [-1.0 - w] * (len(request.prompt) - 1) if request.prompt_logprobs else None,
            [[]] + [[(token, -1.0 - w)] for token in request.prompt[1:]]
            if request.topk_prompt_logprobs
            else None,
        )

    def model_info(self, model_id: str) -> WeightsInfo:
        return WeightsInfo(BASE, self._weight(model_id).lora.rank, True, True, False)

    def weights_info(self, path: str) -> WeightsInfo:
        return WeightsInfo(BASE, self._read(path)["rank"], True, True, False)

    def checkpoints(self) -> list[Checkpoint]:
        folders = sorted(self.folder.glob("*/*/*"), key=lambda folder: folder.stat().st_mtime_ns)
        return [self.checkpoint(SCHEME + "/".join(folder.parts[-3:])) for folder in folders]

    def checkpoint(self, path: str) -> Checkpoint:
        notes = Notes(**self._read(path)["notes"])
        folder = self.folder.joinpath(*split_path(path))
        return Checkpoint(path, folder, 1, folder.stat().st_mtime, notes)

    def delete_checkpoint(self, path: str) -> None:
        self._read(path)
        shutil.rmtree(self.folder.joinpath(*split_path(path)))

    def expire_checkpoint(self, path: str, expires: float | None) -> None:
        state = self._read(path)
        state["notes"]["expires"] = expires
        (self.folder.joinpath(*split_path(path)) / "state.json").write_text(json.dumps(state))

    def delete_expired(self) -> None:
        for checkpoint in self.checkpoints():
            if checkpoint.notes.expires is not None and checkpoint.notes.expires <= time.time():
                self.delete_checkpoint(checkpoint.path)

    def drop(self, model_id: str) -> None:
        self._work(model_id, "drop")
        del self.weights[model_id]

    def drop_sampler(self, key: str) -> None:
        self.samplers[key].pop()
        if not self.samplers[key]:
            del self.samplers[key]

    def gauges(self) -> dict[str, float]:
        return {"fake_memory_bytes": 1.0}

    def close(self) -> None:
        self.closed = True


def limits(**changes: float) -> Limits:
    """Limits of a test: small, and without patience."""
    values = {"context": 64, "max_models": 4, "max_rank": 16, "gather_s": 0.0, "poll_s": 5.0}
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


class RunningServer:
    """A server as the command runs it, on a port of its own in a thread of this process.

    Attributes:
        server, backend: What runs.
        address, url: Where it listens.
        thread: Which runs it.
        ended: What it raised, once it has ended.
    """

    def __init__(self, backend: Any, **changes: float) -> None:
        self.backend, self.ended = backend, None
        self.server = Server(backend, limits(**changes), Keys(KEY, {}))
        self._socket = listen("127.0.0.1", 0)
        self.address = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "RunningServer":
        self.thread.start()
        self.ask("client/config")  # answered once it runs
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive():
            self.server.end()
            self.thread.join(PATIENCE_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            self.server.run(self._socket)
        except QeRLError as error:
            self.ended = error

    def ask(self, path: str, **body: Any) -> Any:
        url, headers = f"{self.url}/api/v1/{path}", {"X-API-Key": KEY}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def session(self) -> tuple[str, str]:
        """A session, and a sampler of the base."""
        session = self.ask("create_session", sdk_version="0")["session_id"]
        return session, self.ask("create_sampling_session", session_id=session, base_model=BASE)[
            "sampling_session_id"
        ]

    def sample(self, sampler: str) -> str:
        prompt = {"chunks": [{"tokens": [1]}]}
        return self.ask("asample", sampling_session_id=sampler, prompt=prompt)["request_id"]
