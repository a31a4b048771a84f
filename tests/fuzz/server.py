"""Random clients of a server: parts of calls in any order, repeats, connections that break, clients that die.

Each client trains a model of its own with whole numbers as gradients, so the sum that a step of the optimizer
reports says whether each part counted once; every answer is checked. A finding is an AssertionError: another
gradient, a request that ran twice or never, an answer that does not come, or a server that at the end, when
all clients have been silent for long, still holds something of theirs.
"""

import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qerl_serve import descriptors as wire
from tests.fuzz._print import run_and_print
from tests.support.wire import BAD_TOKEN, KEY, FakeBackend, RunningServer

CLIENTS = 8
SILENCE_S = 10_000.0
"""Longer than the fuzzer takes: at the end the clocks of all sessions are put back by as much."""


@dataclass(frozen=True)
class Kind:
    """What is served, who asks it, and what a backend still holds, by name."""

    backend: Callable[[Path], Any]
    client: "type[RandomClient]"
    held: Callable[[Any], Mapping[str, float]]


class Died(Exception):
    """A client has died, in the middle of whatever it did."""


class RandomClient:
    """One client: a session, a model, and calls of several parts."""

    UNKNOWN_TOKEN = "vocabulary"
    """Part of what the backend says of `BAD_TOKEN`."""

    def __init__(self, port: int, base: str, rng: random.Random, counts: Counter) -> None:
        self._port, self._base, self._rng, self._counts = port, base, rng, counts
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._numbers = itertools.count(1)

    def live(self) -> None:
        """Train and sample until the work is done or the client dies."""
        try:
            self._live()
            if self._rng.random() < 0.5:
                self._say("POST", f"sessions/{self._session}/finish", b"{}")
                self._counts["ended"] += 1
        except Died:
            self._counts["died"] += 1
        self._connection.close()

    def _live(self) -> None:
        self._session = self._post("create_session", sdk_version="fuzz")["session_id"]
        lora = {"rank": 4}
        self._model = self._ask(
            "create_model", session_id=self._session, model_seq_id=0, base_model=self._base, lora_config=lora
        )["model_id"]
        for _ in range(self._rng.randint(1, 6)):
            self._step()
            if self._rng.random() < 0.4:
                self._sample()

    def _step(self) -> None:
        """One call in parts and the step after it, sent in any order and often twice."""
        rng = self._rng
        parts = {next(self._numbers): rng.randint(-9, 9) for _ in range(rng.randint(1, 8))}
        bad = rng.choice(list(parts)) if rng.random() < 0.1 else None
        step = next(self._numbers)
        sends = [number for number in [*parts, step] for _ in range(1 + (rng.random() < 0.3))]
        rng.shuffle(sends)
        for number in sends:
            if rng.random() < 0.01:
                raise Died
            if number == step:
                self._post("optim_step", model_id=self._model, seq_id=step, adam_params={"learning_rate": 0})
            else:
                self._send_part(number, parts[number], number == bad)
        found = [
            (number, self._result(f"{self._model}:{number}")) for number in rng.sample(sends, len(sends))
        ]
        outcomes = dict(found)
        assert all(outcomes[number] == outcome for number, outcome in found), "two answers to one request"
        for number, outcome in outcomes.items():
            failed = isinstance(outcome, dict) and "error" in outcome
            if bad is None or number < bad:
                assert not failed, outcome
            if number == bad:
                assert failed and self.UNKNOWN_TOKEN in outcome["error"], outcome
            if number == step:
                self._check_step(outcome, parts, bad)

    def _check_step(self, outcome: Any, parts: dict[int, int], bad: int | None) -> None:
        if bad is None:
            self._check_metrics(outcome["metrics"], list(parts.values()))
            self._counts["steps"] += 1
            return
        # The step may have been sent after the failure was told; else it was refused, and the rest is swept
        # by a step that is sent now, knowing of the failure.
        if "error" in outcome:
            assert "Not run" in outcome["error"], outcome
            self._counts["refused"] += 1
            swept = next(self._numbers)
            body = {"model_id": self._model, "seq_id": swept, "adam_params": {"learning_rate": 0}}
            outcome = self._ask("optim_step", **body)
        self._check_nothing_gathered(outcome)  # the failure took the gradients of the parts before it with it

    def _check_metrics(self, metrics: dict[str, float], parts: list[int]) -> None:
        assert metrics["gradient"] == sum(parts), (metrics, parts)

    def _check_nothing_gathered(self, outcome: dict) -> None:
        assert outcome["metrics"]["gradient"] == 0, outcome

    def _check_tokens(self, tokens: list[int]) -> None:
        assert tokens == [7, 8, 9]

    def _sample(self) -> None:
        rng, number = self._rng, next(self._numbers)
        saved = self._ask("save_weights_for_sampler", model_id=self._model, seq_id=number)
        requests = {}
        for seq_id in range(rng.randint(1, 12)):
            tokens = (
                [BAD_TOKEN] if rng.random() < 0.1 else [rng.randint(1, 9) for _ in range(rng.randint(1, 9))]
            )
            for _ in range(1 + (rng.random() < 0.2)):
                body = {
                    "sampling_session_id": saved["sampling_session_id"], "seq_id": seq_id,
                    "prompt": {"chunks": [{"tokens": tokens}]},
                    "sampling_params": {"max_tokens": 3, "seed": 7},
                }  # fmt: skip
                requests[self._post("asample", **body)["request_id"]] = tokens
        if rng.random() < 0.05:
            raise Died
        for request_id, tokens in requests.items():
            outcome = self._result(request_id)
            if tokens == [BAD_TOKEN]:
                assert self.UNKNOWN_TOKEN in outcome["error"], outcome
                continue
            (sequence,) = wire.SampleResponse.FromString(outcome).sequences
            self._check_tokens(np.frombuffer(sequence.tokens, "<i4").tolist())
            self._counts["samples"] += 1

    def _send_part(self, number: int, value: int, bad: bool) -> None:
        message = wire.ForwardBackwardRequest(model_id=self._model, seq_id=number, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray([BAD_TOKEN if bad else 1], "<i4").tobytes()
        for name, dtype, code, content in (
            ("weights", "<f4", wire.FLOAT32, value),
            ("target_tokens", "<i8", wire.INT64, 1),
        ):
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dtype, tensor.dense = code, np.asarray([content], dtype).tobytes()
        self._say("POST", "forward_backward", message.SerializeToString())

    def _post(self, path: str, /, **body: Any) -> dict:
        return json.loads(self._say("POST", path, json.dumps(body).encode())[1])

    def _ask(self, path: str, /, **body: Any) -> Any:
        return self._result(self._post(path, **body)["request_id"])

    def _result(self, request_id: str) -> Any:
        for _ in range(20):
            body = json.dumps({"request_id": request_id}).encode()
            status, content, kind = (*self._say("POST", "retrieve_future", body), self._kind)
            if status != 408:
                return content if "protobuf" in kind else json.loads(content)
        raise AssertionError(f"no answer to {request_id}")

    def _say(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; now and then the connection breaks before the answer, and it is sent again."""
        self._counts["requests"] += 1
        headers = {"X-API-Key": KEY}
        repeatable = path in ("forward_backward", "retrieve_future", "optim_step")
        if repeatable and self._rng.random() < 0.03:
            self._connection.request(method, f"/api/v1/{path}", body, headers)
            self._connection.close()
            self._counts["broken"] += 1
        self._connection.request(method, f"/api/v1/{path}", body, headers)
        answer = self._connection.getresponse()
        self._kind = answer.headers.get("content-type", "")
        content = answer.read()
        assert answer.status in (200, 204, 408), (path, answer.status, content)
        return answer.status, content


class ModelClient(RandomClient):
    """A client of a real model, of whose gradients it hears the norm alone.

    All parts are the same but for their weights, and no step changes the model, so the norm is as many times
    that of one part as the weights add up to.
    """

    UNKNOWN_TOKEN = str(BAD_TOKEN)
    _steps = 0
    _norm = 0.0

    def _check_metrics(self, metrics: dict[str, float], parts: list[int]) -> None:
        self._steps += 1
        assert metrics["optim_steps"] == self._steps, (metrics, self._steps)
        total = abs(sum(parts))
        if not self._norm and total:
            self._norm = metrics["grad_norm"] / total
        off = abs(metrics["grad_norm"] - total * self._norm)
        assert off <= 1e-3 * self._norm or not self._norm, (metrics, parts, self._norm)

    def _check_nothing_gathered(self, outcome: dict) -> None:
        assert "There are no gradients" in outcome["error"], outcome

    def _check_tokens(self, tokens: list[int]) -> None:
        assert 0 < len(tokens) <= 3


FAKE = Kind(
    FakeBackend,
    RandomClient,
    lambda backend: {"weights": len(backend.weights), "samplers": len(backend.samplers)},
)


def run(count: int, seed: int, folder: Path, kind: Kind = FAKE) -> dict[str, int]:
    """Let clients come and go until they have sent so many requests; returns what they did."""
    backend, counts = kind.backend(folder), Counter()
    problems: list[BaseException] = []
    changes = {"silence_s": SILENCE_S, "max_models": 10_000, "poll_s": 1.0, "snapshots": 2, "pause_s": 0.0}
    with RunningServer(backend, **changes) as running:
        port = int(running.url.rpartition(":")[2])

        def clients(number: int) -> None:
            rng = random.Random(f"{seed}:{number}")
            try:
                while counts["requests"] < count and not problems:
                    kind.client(port, backend.models[0].name, rng, counts).live()
                    counts["clients"] += 1
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=clients, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, repr(problems[0])
        if isinstance(backend, FakeBackend):
            _check_order(backend)
        _check_nothing_stays(running, kind)
    assert not isinstance(backend, FakeBackend) or backend.closed
    return dict(counts)


def _check_order(backend: FakeBackend) -> None:
    """No model was made twice, and none was touched after its end."""
    by_model: dict[str, list[str]] = {}
    for model_id, what in backend.log:
        by_model.setdefault(model_id, []).append(what)
    for model_id, did in by_model.items():
        if model_id:
            assert did.count("create") == 1 and did[0] == "create", (model_id, did[:3])
            assert "drop" not in did[:-1], (model_id, did[-3:])


def _check_nothing_stays(running: RunningServer, kind: Kind) -> None:
    clients = running.server.clients
    for session in list(clients.sessions.values()):
        session.seen -= 2 * SILENCE_S
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        clients.sweep()
        clients.futures.sweep(time.monotonic() + 2 * SILENCE_S)
        held = {
            **clients.gauges(),
            **{f"backend_{name}": n for name, n in kind.held(running.backend).items()},
        }
        if not any(held.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"still held: {held}")


def main(arguments: list[str]) -> int:
    return run_and_print("server", run, arguments)
