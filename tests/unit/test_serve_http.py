"""The server over HTTP, with a backend that counts: refusals, limits, keys, what no client should send."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("starlette", reason="needs the extra serve")

from starlette.testclient import TestClient

from qerl.serve import descriptors as wire
from qerl.serve.gate import Gate
from qerl.serve.server import Server
from tests.support.wire import BAD_TOKEN, BASE, KEY, FakeBackend, limits


class Client:
    """What a client says, without its package."""

    def __init__(self, http: TestClient, server: Server, backend: FakeBackend) -> None:
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
        made = self.ask(
            "create_model", session_id=self.session, model_seq_id=number, base_model=BASE,
            lora_config={"rank": rank, "novelty": 1}, **fields,
        )  # fmt: skip
        assert "error" not in made, made
        return made["model_id"]

    def send_pass(self, model_id: str, seq_id: int, tokens: list[int], loss: str = "cross_entropy") -> Any:
        message = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, dtype, code in (("weights", "<f4", wire.FLOAT32), ("target_tokens", "<i8", wire.INT64)):
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dtype, tensor.dense = code, np.ones(len(tokens), dtype).tobytes()
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


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    backend = FakeBackend(tmp_path / "saved")
    server = Server(backend, limits(body=20_000, waiting=200), KEY)
    server.start()
    with TestClient(server.app, headers={"X-API-Key": KEY}, raise_server_exceptions=False) as http:
        yield Client(http, server, backend)
    server.stop()


def test_a_key_is_asked_for(client: Client):
    for key in ("", "tml-wrong", "tml-tes"):
        answer = client.http.get("/api/v1/get_server_capabilities", headers={"X-API-Key": key})
        assert answer.status_code == 401 and "not this server's" in answer.json()["detail"]
    for path in ("/metrics", "/api/v1/healthz"):
        assert client.http.get(path, headers={"X-API-Key": ""}).status_code == 200
    assert client.http.get("/status", headers={"X-API-Key": ""}).status_code == 401


def test_flags_keep_new_behaviours_off(client: Client):
    flags = client.post("client/config", sdk_version="9.9")
    assert not flags["pjwt_auth_enabled"] and not flags["proto_compress_fwdbwd"]
    assert not flags["sample_use_retrieve_futures"] and not flags["custom_loss_server_side"]


def test_a_large_body_is_refused_before_it_is_read(client: Client):
    answer = client.http.post("/api/v1/optim_step", content=b"x" * 20_001)
    assert answer.status_code == 413 and "20000 bytes" in answer.json()["detail"]
    pieces = (b"x" * 1000 for _ in range(30))  # of a length that no header says
    assert client.http.post("/api/v1/optim_step", content=pieces).status_code == 413


def through_the_gate(
    path: str, headers: dict[str, str], *messages: dict
) -> tuple[list[bytes], list[int], int]:
    """Bodies that reached the application, states that the client got, and messages that nobody took."""
    bodies, states, waiting = [], [], [*messages]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])

    async def receive() -> dict:
        return waiting.pop(0)

    async def send(message: dict) -> None:
        states.append(message.get("status", 0))

    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": fields}
    asyncio.run(Gate(app, KEY, 20_000)(scope, receive, send))
    return bodies, [state for state in states if state], len(waiting)


def piece(body: bytes, more: bool = False) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_was_cut_off_is_not_run():
    key, gone = {"x-api-key": KEY}, {"type": "http.disconnect"}
    path = "/api/v1/optim_step"
    assert through_the_gate(path, key, piece(b"{", True), piece(b"}")) == ([b"{}"], [], 0)
    assert through_the_gate(path, key, piece(b"{}", True), gone) == ([], [400], 0)
    assert through_the_gate(path, key | {"content-length": "2"}, piece(b"{}")) == ([b"{}"], [], 0)
    assert through_the_gate(path, key | {"content-length": "3"}, piece(b"{}")) == ([], [400], 0)


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "x", "20001"])
def test_a_length_that_is_none_is_refused(length: str):
    headers = {"x-api-key": KEY, "content-length": length}
    assert through_the_gate("/api/v1/optim_step", headers, piece(b"{}")) == ([], [413], 1)


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/healthz", "/api/v1/download/a"])
def test_no_body_is_kept_on_paths_without_a_key(path: str):
    assert through_the_gate(path, {}, piece(b"x" * 20_000)) == ([b""], [], 1)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("optim_step", {"model_id": "a/../b", "adam_params": {}}, "model_id is 'a/../b'"),
        ("optim_step", {"model_id": "x"}, "adam_params: field required"),
        ("optim_step", {"model_id": "x", "adam_params": {"beta1": 2}}, "beta1: input should be less than 1"),
        ("optim_step", {"model_id": "x", "adam_params": {"learning_rate": "NaN"}}, "finite"),
        ("create_model", {"session_id": "none", "model_seq_id": 0, "base_model": "x"}, "no session none"),
        ("create_model", {"session_id": "n", "model_seq_id": -1, "base_model": "x"}, "model_seq_id"),
        ("create_sampling_session", {"session_id": "none"}, "no session none"),
        ("asample", {"prompt": {"chunks": []}}, "sampling_session_id is missing"),
        ("asample", {"prompt": 3, "sampling_session_id": "x"}, "prompt: "),
        ("weights_info", {"tinker_path": "tinker://a/weights/../b"}, "not the path of a checkpoint"),
        ("weights_info", {"tinker_path": "tinker://../weights/b"}, "The model id of a path is '..'"),
        ("weights_info", {"tinker_path": "tinker://a/weights/b"}, "Nothing is saved"),
        ("get_info", {"model_id": "none"}, "no model none"),
        ("load_weights", {"path": "x"}, "needs model_id and seq_id"),
    ],
)
def test_a_wrong_body_gets_a_sentence(client: Client, path: str, body: dict, said: str):
    answer = client.raw(path, **body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["detail"]


def test_what_is_no_json_gets_a_sentence(client: Client):
    for body in (b"{", b"[1]", b"\xff", b"[" * 9000):
        assert client.http.post("/api/v1/asample", content=body).status_code == 400
    assert client.http.post("/api/v1/forward_backward", content=b"\xff\xff").status_code == 400
    half = client.http.post("/api/v1/create_session", content=b'{"sdk_version": "\\ud800"}')
    assert half.status_code == 400 and client.http.get("/status").status_code == 200
    for limit in ("\u00b2", "9" * 5000):
        answer = client.http.get("/api/v1/checkpoints", params={"limit": limit})
        assert answer.status_code == 200 and answer.json()["cursor"]["limit"] == 100
    assert client.http.post("/api/v1/nowhere").status_code == 404
    answer = client.raw("retrieve_future", request_id="gone")
    assert answer.status_code == 404 and "fetched long ago" in answer.json()["detail"]
    assert client.raw("retrieve_future", request_id="s:sample:0:1").status_code == 410


def test_a_request_sent_again_runs_once(client: Client):
    model = client.model()
    for seq_id, tokens in ((2, [1, 1]), (1, [1]), (2, [1, 1]), (1, [1])):  # the later part first, and again
        assert client.send_pass(model, seq_id, tokens).json() == {"request_id": f"{model}:{seq_id}"}
    for _ in range(2):
        stepped = client.ask("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 0.5})
        assert stepped == {"metrics": {"gradient": 3}}
    assert client.backend.weights[model].steps == 1
    assert client.post("create_model", session_id=client.session, model_seq_id=0, base_model=BASE) == {
        "request_id": f"{model}:0"
    }
    again = client.raw("optim_step", model_id=model, seq_id=1, adam_params={})
    assert again.status_code == 400 and "was sent before as forward_backward" in again.json()["detail"]


def test_a_wrong_request_takes_its_place(client: Client):
    model = client.model()
    client.send_pass(model, 1, [BAD_TOKEN])
    failed = client.result(f"{model}:1")
    assert failed["category"] == "user" and "vocabulary" in failed["error"]
    client.send_pass(model, 2, [1])
    assert client.ask("optim_step", model_id=model, seq_id=3, adam_params={})["metrics"] == {"gradient": 1}
    unknown = client.ask("optim_step", model_id=model, seq_id=4, optimizer_params={"type": "dimuon"})
    assert "dimuon" in unknown["error"]
    assert "knows no model" in client.ask("optim_step", model_id="s:train:9", adam_params={})["error"]


def test_a_step_does_not_use_half_a_gradient(client: Client):
    model = client.model()
    for seq_id, tokens in ((2, [BAD_TOKEN]), (3, [1])):
        client.send_pass(model, seq_id, tokens)
    step = client.post("optim_step", model_id=model, seq_id=4, adam_params={})["request_id"]
    client.send_pass(model, 1, [1])  # only now can they run
    assert "Not run" in client.result(step)["error"]
    assert "vocabulary" in client.result(f"{model}:2")["error"]
    assert client.backend.weights[model].steps == 0
    assert client.ask("optim_step", model_id=model, seq_id=5, adam_params={})["metrics"] == {"gradient": 1}


def test_a_failure_that_was_known_before_does_not_let_a_later_one_pass(client: Client):
    model = client.model()
    client.send_pass(model, 1, [BAD_TOKEN])
    assert "vocabulary" in client.result(f"{model}:1")["error"]
    client.send_pass(model, 2, [1])
    client.send_pass(model, 3, [BAD_TOKEN])
    client.server.clients.futures.get(f"{model}:3").when_settled((settled := threading.Event()).set)
    assert settled.wait(5)
    assert "vocabulary" in client.result(f"{model}:1")["error"]  # fetched again, nothing new
    assert "Not run" in client.ask("optim_step", model_id=model, seq_id=4, adam_params={})["error"]
    assert client.backend.weights[model].steps == 0


def test_a_client_hears_what_its_request_waits_for(client: Client, monkeypatch):
    model = client.model()
    object.__setattr__(client.server.clients.limits, "poll_s", 0.01)
    client.send_pass(model, 3, [1])
    answer = client.raw("retrieve_future", request_id=f"{model}:3")
    assert answer.status_code == 408
    assert "waits for request 1" in answer.json()["queue_state_reason"]


def test_models_are_limited(client: Client):
    for number in range(4):
        client.model(number)
    body = {"session_id": client.session, "model_seq_id": 4, "base_model": BASE, "lora_config": {"rank": 1}}
    assert "holds 4 models" in client.ask("create_model", **body)["error"]
    assert client.ask("unload_model", model_id=f"{client.session}:train:0")["type"] == "unload_model"
    assert "error" not in client.ask("create_model", **body)
    for lora, said in (({"rank": 17}, "takes 1 to 16"), ({"rank": 0}, "takes 1 to 16"), (None, "is missing")):
        body = {"session_id": client.session, "model_seq_id": 5, "base_model": BASE, "lora_config": lora}
        client.http.post(f"/api/v1/sessions/{client.session}/finish")
        client.session = client.post("create_session")["session_id"]
        assert said in client.ask("create_model", **body | {"session_id": client.session})["error"]
        assert client.server.clients.models == {}


def test_a_session_that_ends_takes_its_own_along(client: Client):
    model, other = client.model(), Client(client.http, client.server, client.backend)
    kept = other.model()
    snapshot = client.ask("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=7)
    assert snapshot["sampling_session_id"] == f"{client.session}:sample:7"
    waits = client.post("optim_step", model_id=model, seq_id=5, adam_params={})["request_id"]
    assert client.http.get("/api/v1/sessions").json()["sessions"] == [client.session, other.session]
    assert client.http.get(f"/api/v1/sessions/{client.session}").json()["training_run_ids"] == [model]
    assert client.http.post(f"/api/v1/sessions/{client.session}/finish", json={}).status_code == 204
    assert client.raw("session_heartbeat", session_id=client.session).status_code == 410
    assert client.raw("retrieve_future", request_id=waits).status_code == 404
    assert "knows no model" in client.ask("optim_step", model_id=model, seq_id=6, adam_params={})["error"]
    other.server.clients.queue.call(lambda _: None).result()
    assert [*client.backend.weights] == [kept] and client.backend.samplers == {}


def test_samples_of_every_kind(client: Client):
    sampler = client.sampler()
    assert client.http.get(f"/api/v1/samplers/{sampler}").json()["base_model"] == BASE

    def sample(seq_id: int, tokens: list[int], params: dict, **fields: Any) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": params}
        answer = client.post("asample", **body, **fields)
        assert len(answer["sample_sequence_ids"]) == fields.get("num_samples", 1)
        found = client.result(answer["request_id"])
        return wire.SampleResponse.FromString(found) if isinstance(found, bytes) else found["error"]

    first = sample(1, [1, 2], {"max_tokens": 3}, num_samples=2)
    assert [len(sequence.tokens) for sequence in first.sequences] == [12, 12]
    assert sample(1, [1, 2], {"max_tokens": 3}, num_samples=2) == first  # sent again
    assert sample(2, [1, 2], {"max_tokens": 3}) != first
    for number, (tokens, params, fields, said) in enumerate([
        ([], {}, {}, "The prompt has 0 tokens"),
        ([1] * 64, {}, {}, "exceed the 64 tokens"),
        ([1], {"max_tokens": 64}, {}, "exceed the 64 tokens"),
        ([-1], {}, {}, "outside 0"),
        ([2**40], {}, {}, "outside 0"),
        ([1], {}, {"topk_prompt_logprobs": 10**6}, "0 to 128"),
        ([1], {}, {"topk_sample_logprobs": 1}, "topk_sample_logprobs is not known"),
        ([1], {}, {"record_stability_info": True}, "stable_reinforce"),
        ([1], {}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "at least 1"),
        ([BAD_TOKEN], {}, {}, "vocabulary"),
    ]):  # fmt: skip
        assert said in sample(10 + number, tokens, params, **fields)
    gone = client.post("asample", sampling_session_id="s:sample:1", prompt={"chunks": []})
    assert "knows no sampler" in client.result(gone["request_id"])["error"]


def test_samplers_of_saved_weights_are_closed_and_opened_again_on_use(client: Client):
    object.__setattr__(client.server.clients.limits, "snapshots", 2)
    model, samplers = client.model(), []
    for number in range(5):
        seq_id = number + 1
        path = client.ask("save_weights_for_sampler", model_id=model, seq_id=seq_id, path=f"n{number}")[
            "path"
        ]
        body = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
        samplers.append(client.post("create_sampling_session", **body)["sampling_session_id"])
        assert len(client.backend.samplers) <= 2
    prompt = {"chunks": [{"tokens": [1]}]}
    for number, sampler in enumerate([*samplers, *samplers]):
        found = client.ask("asample", sampling_session_id=sampler, seq_id=number, prompt=prompt)
        assert isinstance(found, bytes), found
        assert len(client.backend.samplers) <= 2
    client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/n0")
    lost = client.ask("asample", sampling_session_id=samplers[0], seq_id=20, prompt=prompt)
    assert "Nothing is saved" in lost["error"]
    client.http.post(f"/api/v1/sessions/{client.session}/finish")
    client.server.clients.queue.call(lambda _: None).result()
    assert client.backend.samplers == {}


@pytest.mark.parametrize(
    ("stop", "ids", "strings"),
    [
        (None, None, ()),
        ([], (), ()),
        ([1, 2], (1, 2), ()),
        ("a", None, ("a",)),
        ("", None, ()),
        ([""], None, ()),
        (["a", "b"], None, ("a", "b")),
    ],
)
def test_stops_mean_what_they_say(stop, ids, strings):
    from qerl.serve.requests import Sample

    body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"stop": stop, "top_k": -1}}
    request = Sample.model_validate(body).request("base", 5, limits())
    assert (request.stop_token_ids, request.stop_strings, request.top_k) == (ids, strings, 0)
    assert (request.seed, request.max_tokens) == (5, None)


def test_too_many_requests_are_put_off(client: Client):
    model = client.model()
    answers = [client.raw("optim_step", model_id=model, seq_id=n, adam_params={}) for n in range(3, 220)]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert "its limit" in answers[-1].json()["detail"]


def test_a_model_that_was_put_off_leaves_nothing_behind(client: Client):
    model = client.model()
    for number in range(2, 220):
        client.raw("optim_step", model_id=model, seq_id=number, adam_params={})
    lora = {"rank": 4}
    body = {"session_id": client.session, "model_seq_id": 1, "base_model": BASE, "lora_config": lora}
    assert client.raw("create_model", **body).status_code == 429
    assert [*client.server.clients.models] == [model]
    assert client.server.clients.queue.missing(f"{client.session}:train:1") is None
    client.http.post(f"/api/v1/sessions/{client.session}/finish")
    client.session = client.post("create_session")["session_id"]
    body["session_id"] = client.session
    assert "error" not in client.ask("create_model", **body)


def test_links_to_downloads_are_signed(client: Client):
    model = client.model()
    client.ask("save_weights", model_id=model, seq_id=1, path="one")
    checkpoints = f"/api/v1/training_runs/{model}/checkpoints"
    url = client.http.get(f"{checkpoints}/weights/one/archive").json()["url"]
    assert client.http.get(url, headers={"X-API-Key": ""}).status_code == 200
    for wrong in (url[:-1] + "x", url.replace("one.tar", "state.json"), url.replace("expires=", "expires=9")):
        assert client.http.get(wrong).status_code == 403
    assert client.http.get(f"{checkpoints}/weights/two/archive").status_code == 404
    assert client.http.get(f"{checkpoints}/other/one/archive").status_code == 400
    listed = client.http.get("/api/v1/checkpoints?limit=1").json()
    assert listed["cursor"]["total_count"] == 1
    assert listed["checkpoints"][0]["checkpoint_type"] == "training"


def test_a_client_that_hangs_up_costs_nothing(client: Client):
    model, sampler = client.model(), client.sampler()
    client.backend.seconds = 0.05
    prompt = {"chunks": [{"tokens": [1]}]}
    for number in range(10):
        client.post("asample", sampling_session_id=sampler, seq_id=number, prompt=prompt)
    client.send_pass(model, 1, [1])
    asked = threading.Thread(target=client.result, args=(f"{model}:1",), daemon=True)
    asked.start()
    client.http.post(f"/api/v1/sessions/{client.session}/finish")
    asked.join(5)
    assert not asked.is_alive()
    deadline = time.monotonic() + 5
    while client.backend.weights and time.monotonic() < deadline:
        time.sleep(0.01)
    gauges = client.server.clients.gauges()
    assert not client.backend.weights and not any(gauges.values()), gauges


def test_the_status_is_shown(client: Client):
    from qerl.serve.status import _table

    client.model(rank=3)
    status = client.http.get("/status").json()
    assert status["bases"] == [BASE] and json.dumps(status)
    assert status["sessions"][0]["models"][0] == {
        "id": f"{client.session}:train:0", "rank": 3, "steps": 0,
    }  # fmt: skip
    assert _table(status).row_count == 1
