"""A client of the server over HTTP, without its package, and a server for it with a backend that counts."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient

from qerl.update.losses import Datum
from qerl_serve import descriptors as wire
from qerl_serve.owners import Keys, Owner
from qerl_serve.server import Server
from tests.support.wire import BASE, KEY, FakeBackend, limits


class Client:
    """What a client says, without its package."""

    def __init__(self, http: TestClient, server: Server, backend: Any) -> None:
        self.http, self.server, self.backend = http, server, backend
        self.session = self.post("create_session", tags=[], sdk_version="0.0", novelty=1)["session_id"]

    def raw(self, path: str, /, **body: Any) -> Any:
        return self.http.post(f"/api/v1/{path}", json=body)

    def post(self, path: str, /, **body: Any) -> dict:
        answer = self.raw(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, request_id: str) -> Any:
        while (answer := self.raw("retrieve_future", request_id=request_id)).status_code == 408:
            assert answer.json()["type"] == "try_again"
        if answer.headers["content-type"] == "application/x-protobuf":
            return answer.content
        return answer.json()

    def ask(self, path: str, /, **body: Any) -> Any:
        return self.result(self.post(path, **body)["request_id"])

    def model(self, number: int = 0, rank: int = 4, **fields: Any) -> str:
        base = self.backend.models[0].name
        made = self.ask(
            "create_model", session_id=self.session, model_seq_id=number, base_model=base,
            lora_config={"rank": rank, "novelty": 1}, **fields,
        )  # fmt: skip
        assert "error" not in made, made
        return made["model_id"]

    def send_pass(self, model_id: str, seq_id: int, tokens: list[int], loss: str = "cross_entropy") -> Any:
        ones = torch.ones(len(tokens))
        inputs = {"weights": ones, "target_tokens": ones.long()}
        return self.send_data(model_id, seq_id, [Datum(torch.tensor(tokens), inputs)], loss)

    def send_data(self, model_id: str, seq_id: int, data: Sequence[Datum], loss: str) -> Any:
        message = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
        for each in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = each.tokens.numpy().astype("<i4").tobytes()
            for name, value in each.inputs.items():
                tensor = datum.loss_fn_inputs.add(key=name).value
                tensor.dtype = wire.FLOAT32 if value.is_floating_point() else wire.INT64
                tensor.dense = value.numpy().tobytes()
        return self.http.post(
            "/api/v1/forward_backward",
            content=message.SerializeToString(),
            headers={"content-type": "application/x-protobuf"},
        )

    def sampler(self) -> str:
        opened = self.post(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=0, base_model=BASE
        )
        return opened["sampling_session_id"]


@contextlib.contextmanager
def connected(
    folder: Path, backend: Any = None, owners: dict[str, Owner] | None = None, **changes: float
) -> Iterator[Client]:
    """A client of a server that runs in this process, with these limits changed; by default its backend
    counts."""
    backend = FakeBackend(folder / "saved") if backend is None else backend
    server = Server(backend, limits(**changes), Keys(KEY, owners or {}))
    server.start()
    with TestClient(server.app, headers={"X-API-Key": KEY}, raise_server_exceptions=False) as http:
        yield Client(http, server, backend)
    server.stop()
