"""How a server ends: told to, in the middle of samples, and by a fault of the GPU."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl.errors import QeRLError
from qerl_serve.futures import Future
from qerl_serve.line import Job
from tests.support.wire import BASE, PATIENCE_S, FakeBackend, RunningServer


class Broken(FakeBackend):
    """One whose passes, samples and calls fail."""

    error: Exception

    def forward_backward(self, *_: Any) -> Any:
        raise self.error

    def sample(self, requests: Any, arrived: Any, overdue: Any) -> Iterator[Any]:
        yield 0, self.error

    def delete_checkpoint(self, path: str) -> None:
        raise self.error


class Endless(FakeBackend):
    """One that samples until nobody waits, or for very long."""

    begun = threading.Event()

    def sample(self, requests: Any, arrived: Any, overdue: Any) -> Iterator[Any]:
        self.begun.set()
        until = time.monotonic() + PATIENCE_S
        while any(request.wanted() for request in requests) and time.monotonic() < until:
            time.sleep(0.01)
        yield from ((number, QeRLError("given up")) for number in range(len(requests)))


FAULT = "an illegal memory access was encountered\nmore"


@pytest.fixture(params=[torch.AcceleratorError(f"CUDA error: {FAULT}"), RuntimeError(f"Triton: {FAULT}")])
def lost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """What a kernel's fault comes as; from then on nothing can be computed on the GPU."""

    def synchronize() -> None:
        raise torch.AcceleratorError(f"CUDA error: {FAULT}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return request.param


@pytest.mark.parametrize("doing", ["samples", "passes", "calls"])
def test_a_fault_of_the_gpu_ends_the_server_and_everybody_hears_of_it(
    tmp_path: Path, lost: Exception, doing: str
):
    broken = Broken(tmp_path)
    broken.error = lost
    with RunningServer(broken) as server:
        session, sampler = server.session()
        model = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        model_id = server.ask("retrieve_future", **server.ask("create_model", **model))["model_id"]
        waits = server.ask("unload_model", model_id=model_id, seq_id=9)  # for ever, as 1 to 8 do not come
        backend = server.backend
        if doing == "samples":
            server.sample(sampler)
        elif doing == "passes":
            server.server.clients.queue.submit(model_id, 1, passing(server, model_id))
        else:
            server.server.clients.queue.call(lambda _: backend.delete_checkpoint("x"))
        said = server.ask("retrieve_future", **waits)
        assert said["category"] == "server"
        assert "The server ends" in said["error"] and "illegal memory access" in said["error"]
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive() and "start it again" in str(server.ended)
        assert backend.closed


def passing(server: RunningServer, model_id: str) -> Any:
    """Makes the job of a pass."""
    from qerl_serve.futures import Future
    from qerl_serve.line import Job

    def make(request_id: str, _: Any) -> Job:
        future = server.server.clients.futures.add(Future(request_id, "forward_backward", ""))
        return Job(future, lambda backend: backend.forward_backward(model_id))

    return make


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("said", ["CUDA error: out of memory", "CUDA error: invalid argument"])
def test_an_error_after_which_the_gpu_goes_on_ends_one_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, used: bool
):
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append(True))
    backend = Broken(tmp_path)
    backend.error = torch.AcceleratorError(said)
    with RunningServer(backend) as server:
        _, sampler = server.session()
        for _ in range(2):
            heard = server.ask("retrieve_future", request_id=server.sample(sampler))
            assert said in heard["error"]
        assert len(asked) == 2 * used
        assert server.server.worker.broken is None and server.server.worker.is_alive()
    assert server.ended is None


def test_a_mistake_of_a_client_does_not_ask_the_gpu(tmp_path: Path, lost: Exception):
    backend = Broken(tmp_path)
    backend.error = QeRLError("a mistake")
    with RunningServer(backend) as server:
        _, sampler = server.session()
        said = server.ask("retrieve_future", request_id=server.sample(sampler))
        assert said["error"] == "a mistake" and server.server.worker.broken is None
    assert server.ended is None


def test_a_worker_that_breaks_ends_the_server(tmp_path: Path):
    backend = FakeBackend(tmp_path)
    backend.gauges = lambda: 1 / 0  # type: ignore[method-assign]
    with RunningServer(backend) as server:
        server.server.clients.queue.call(lambda _: None)
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive() and "ZeroDivisionError" in str(server.ended)


def test_a_worker_that_breaks_in_a_pause_ends_the_server_and_tells_the_update(tmp_path: Path):
    """As the backend does that hides from the batch what its pause raised."""
    rounds, tried = threading.Event(), []

    class Hides(FakeBackend):
        def sample(self, requests, arrived, overdue):
            rounds.set()
            while (work := overdue()) is None:
                time.sleep(0.001)
            try:
                work()
            except Exception as error:
                tried.append(error)
            yield from enumerate(map(self._answer, requests))

        def drop_gradients(self, model_id):
            raise ZeroDivisionError("a defect")

    with RunningServer(Hides(tmp_path), pause_s=0.0) as server:
        model, sampler = server.session()
        server.sample(sampler)
        assert rounds.wait(PATIENCE_S)
        future = Future("m:0", "forward_backward", model)
        queue = server.server.clients.queue
        queue.add_line("m")

        def run(backend):
            raise QeRLError("a mistake")

        server.server.clients.futures.add(future)
        queue.submit("m", None, lambda request_id, line: Job(future, run))
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive() and "ZeroDivisionError" in str(server.ended)
        assert len(tried) == 1 and "ZeroDivisionError" in future.outcome.error


def test_a_server_that_is_told_to_end_does_not_wait_for_samples(tmp_path: Path):
    with RunningServer(Endless(tmp_path)) as server:
        _, sampler = server.session()
        request_id = server.sample(sampler)
        heard: list[Any] = []
        client = threading.Thread(
            target=lambda: heard.append(server.ask("retrieve_future", request_id=request_id))
        )
        client.start()
        assert Endless.begun.wait(PATIENCE_S)
        began = time.monotonic()
        server.server.end()
        server.thread.join(PATIENCE_S)
        client.join(PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S / 2
        assert "is shutting down" in heard[0]["error"]
    assert server.ended is None and server.backend.closed
