"""What stands before the routes and what reads bodies: keys, sizes, refusals of what nobody should send."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl_serve.checkpoints import EXPIRY_FILE
from qerl_serve.gate import Gate
from qerl_serve.owners import Keys
from tests.support.http import Client, connected
from tests.support.wire import BASE, KEY


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with connected(tmp_path, body=20_000) as client:
        yield client


def test_a_key_is_asked_for(client: Client):
    for key in ("", "tml-wrong", KEY[:-1]):
        answer = client.http.get("/api/v1/get_server_capabilities", headers={"X-API-Key": key})
        assert answer.status_code == 401 and "not this server's" in answer.json()["detail"]
    for path in ("/metrics", "/api/v1/healthz"):
        assert client.http.get(path, headers={"X-API-Key": ""}).status_code == 200
    assert client.http.get("/status", headers={"X-API-Key": ""}).status_code == 401


def test_flags_keep_new_behaviours_off(client: Client):
    flags = client.post("client/config", sdk_version="9.9")
    assert not flags["pjwt_auth_enabled"] and not flags["proto_compress_fwdbwd"]
    assert not flags["sample_use_retrieve_futures"] and not flags["custom_loss_server_side"]


def test_a_client_is_told_how_many_samples_it_may_wait_for(tmp_path: Path):
    for most, told in ((400, 200), (50_000, 2000)):  # each takes a connection
        with connected(tmp_path, connections=most) as client:
            assert client.post("client/config")["sample_max_concurrent_requests"] == told


def test_a_large_body_is_refused_before_it_is_read(client: Client):
    answer = client.http.post("/api/v1/optim_step", content=b"x" * 20_001)
    assert answer.status_code == 413 and "20000 bytes" in answer.json()["detail"]
    assert "the same seq_id" in answer.json()["detail"]
    pieces = (b"x" * 1000 for _ in range(30))  # of a length that no header says
    assert client.http.post("/api/v1/optim_step", content=pieces).status_code == 413


def test_a_body_of_json_is_no_longer_than_a_prompt_may_be(tmp_path: Path):
    """It is parsed in the thread that answers everybody; tensors are not."""
    prompt = {"chunks": [{"tokens": [123456] * 200_000}]}
    with connected(tmp_path, context=64) as client:
        answer = client.raw("asample", sampling_session_id=client.sampler(), prompt=prompt)
        assert answer.status_code == 413 and f"{16 * 64 + (1 << 20)} bytes" in answer.json()["detail"]
        tensors = client.send_pass(client.model(), 1, [1] * 200_000)
        assert tensors.status_code == 200
        assert "takes 1 to 64" in client.result(tensors.json()["request_id"])["error"]


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_that_are_on_their_way_are_bounded_together(declared: bool):
    """Whether their length is known or not; those that have come, or have been cut off, count no more."""
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append(f"{scope['client']} read {len((await receive())['body'])}")

    gate = Gate(app, Keys(KEY, {}), 6000, 6000, 10_000)

    async def upload(name: str, *pieces: int, ends: bool = True) -> None:
        left = list(pieces)

        async def receive() -> dict:
            await asyncio.sleep(0.02)
            if not left and not ends:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": bytes(left.pop(0)), "more_body": bool(left) or not ends}

        async def send(message: dict) -> None:
            if "status" in message:
                order.append(f"{name} {message['status']}")

        fields = {"x-api-key": KEY} | ({"content-length": str(sum(pieces))} if declared else {})
        headers = [(key.encode(), value.encode()) for key, value in fields.items()]
        scope = {"type": "http", "path": "/api/v1/forward_backward", "headers": headers, "client": name}
        await gate(scope, receive, send)

    async def uploads() -> None:
        await asyncio.gather(upload("one", 3000, 3000, 0), upload("two", 3000, 3000, 0))
        await asyncio.gather(upload("three", 5000, 0), upload("four", 5000, 0))
        await upload("five", 3000, 3000, ends=False)
        await asyncio.gather(upload("six", 5000, 0), upload("seven", 5000, 0))

    asyncio.run(uploads())
    assert sorted(order[:2]) == ["one read 6000", "two 429"]
    assert [line.split()[1] for line in order[2:]] == ["read", "read", "400", "read", "read"]


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
    asyncio.run(Gate(app, Keys(KEY, {}), 20_000, 20_000, 20_000)(scope, receive, send))
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
        ("optim_step", {"model_id": "x", "adam_params": {"beta1": "two"}}, "beta1: input should be a valid"),
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
    for method, path in (("POST", "nowhere"), ("GET", "asample"), ("PATCH", "")):
        answer = client.http.request(method, f"/api/v1/{path}")
        assert answer.status_code == 404
        assert f"This server has no {method} /api/v1/{path};" in answer.json()["detail"]
    run = "training_runs/s:train:0/checkpoints/weights/a"
    for method, path, told in (
        ("POST", f"{run}/publish", "publishes nothing"), ("DELETE", f"{run}/publish", "publishes nothing"),
        ("POST", "sessions/search", "list them"), ("GET", "sessions/search", "list them"),
        ("PUT", "sessions/s/project", "display_name"),
        ("GET", "sessions/s/trace_export", "no traces"), ("GET", "billing/usage/events", "no bills"),
        ("GET", "auth/apikey/me", "export TINKER_API_KEY"), ("POST", "retrieve_futures", "retrieve_future."),
    ):  # fmt: skip
        answer = client.http.request(method, f"/api/v1/{path}")
        assert answer.status_code == 404 and told in answer.json()["detail"]
    answer = client.raw("retrieve_future", request_id="gone")
    assert answer.status_code == 404 and "fetched long ago" in answer.json()["detail"]
    assert client.raw("retrieve_future", request_id="s:sample:0:1").status_code == 410


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


def test_the_status_is_shown(client: Client):
    from qerl_serve.status import _table

    client.model(rank=3)
    status = client.http.get("/status").json()
    assert status["bases"] == [BASE] and json.dumps(status)
    assert status["sessions"][0]["models"][0] == {
        "id": f"{client.session}:train:0", "rank": 3, "steps": 0,
    }  # fmt: skip
    assert _table(status).row_count == 1


def test_health_is_that_of_the_thread_that_runs_the_model(client: Client):
    assert client.http.get("/api/v1/healthz").json() == {"status": "ok"}
    client.server.stop()
    sick = client.http.get("/api/v1/healthz")
    assert sick.status_code == 503 and "start the server again" in sick.json()["detail"]


@pytest.mark.parametrize("what", ["archive", "external_weights_urls", ""])
def test_one_checkpoint_is_found_without_a_list_of_all(client: Client, monkeypatch, what: str):
    model = client.model()
    client.ask("save_weights", model_id=model, seq_id=1, path="one")
    monkeypatch.setattr(client.backend, "checkpoints", lambda: 1 / 0)
    path = f"/api/v1/training_runs/{model}/checkpoints/weights/one"
    if what:
        assert client.http.get(f"{path}/{what}").status_code == 200
    else:
        assert client.http.delete(path).status_code == 204
        assert client.http.delete(path).status_code == 404


def test_weights_for_other_programs_are_apart_from_those_to_sample_from(client: Client):
    model = client.model()
    saved = client.ask("save_weights_for_sampler", model_id=model, seq_id=1, path="one")
    external = client.ask("save_weights_external", model_id=model, seq_id=2, path="one")
    assert external["path"] == f"tinker://{model}/external_weights/one"
    base = f"/api/v1/training_runs/{model}/checkpoints"
    found = client.http.get(base).json()["checkpoints"]
    assert {item["tinker_path"]: item["checkpoint_type"] for item in found} == {
        saved["path"]: "sampler",
        external["path"]: "external",
    }
    assert client.http.delete(f"{base}/sampler_weights/one").status_code == 204
    assert client.http.get(f"{base}/external_weights/one/external_weights_urls").json()["urls"]


def test_what_is_deleted_meanwhile_is_not_there(client: Client, monkeypatch):
    """After it was described: before its files are listed, before they are opened, while they are read."""
    import qerl_serve.checkpoint_routes as routes

    model = client.model()
    path = f"tinker://{model}/weights/one"
    base = f"/api/v1/training_runs/{model}/checkpoints/weights/one"
    for number, at in enumerate(("checkpoint", "_files_of", "_tar"), start=1):
        saved = client.ask("save_weights", model_id=model, seq_id=number, path="one", overwrite=True)
        assert saved["path"] == path
        url = client.http.get(f"{base}/archive").json()["url"]
        whole = client.http.get(url).content
        owner = client.backend if at == "checkpoint" else routes
        found = getattr(owner, at)

        def then_delete(*args, found=found):
            answer = found(*args)
            client.backend.delete_checkpoint(path)
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(owner, at, then_delete)
            answer = client.http.get(url)
        if at == "_tar":
            assert answer.content == whole
        else:
            assert answer.status_code == 404 and "deleted" in answer.json()["detail"]


def test_what_a_client_notes_of_its_work_is_answered(client: Client):
    session = client.post("create_session", user_metadata={"recipe": "sl"}, display_name="mine")["session_id"]
    found = client.http.get(f"/api/v1/sessions/{session}").json()
    assert found["user_metadata"] == {"recipe": "sl"} and found["display_name"] == "mine"
    model = client.model(user_metadata={"renderer_name": "qwen3", "rank": 4})
    of_run = {"renderer_name": "qwen3", "rank": "4"}
    runs = f"/api/v1/training_runs/{model}"
    assert client.http.get(runs).json()["user_metadata"] == of_run
    body = {"model_id": model, "path": "one", "user_metadata": {"step": "3"}, "ttl_seconds": 7200}
    client.ask("save_weights", seq_id=1, **body)
    client.ask("save_weights_for_sampler", seq_id=2, model_id=model, path="one")
    kept = {
        item["checkpoint_type"]: item for item in client.http.get(f"{runs}/checkpoints").json()["checkpoints"]
    }
    assert kept["training"]["user_metadata"] == {"step": "3"} and kept["sampler"]["user_metadata"] == {}
    client.http.post(f"/api/v1/sessions/{client.session}/finish")
    assert client.http.get(runs).json()["user_metadata"] == of_run  # as it was saved
    assert kept["training"]["expires_at"] is not None and kept["sampler"]["expires_at"] is None
    long = client.raw("create_session", user_metadata={"x": "y" * 17_000})
    assert long.status_code == 400 and "keeps 16384" in long.json()["detail"]


def test_a_checkpoint_expires_if_its_client_says_so(client: Client, monkeypatch: pytest.MonkeyPatch):
    model = client.model()
    for number, name in enumerate(("one", "two", "three"), start=1):
        client.ask("save_weights", model_id=model, seq_id=number, path=name, ttl_seconds=3600)
    wrong = client.ask("save_weights", model_id=model, seq_id=4, path="four", ttl_seconds=60)
    assert "3600 to 315360000" in wrong["error"]
    checkpoints = f"/api/v1/training_runs/{model}/checkpoints"
    for name, seconds in (("one", None), ("two", 10 * 3600)):
        path = f"{checkpoints}/weights/{name}/ttl"
        assert client.http.put(path, json={"ttl_seconds": seconds}).status_code == 204
    assert client.http.put(path, json={"ttl_seconds": 1}).status_code == 400
    client.backend.folder.joinpath(model, "weights", "three", EXPIRY_FILE).touch()
    urls = client.http.get(f"{checkpoints}/weights/three/external_weights_urls").json()["urls"]
    assert {*urls} == {"state.json", "other.bin"}
    assert client.http.put(f"{checkpoints}/weights/none/ttl", json={}).status_code == 404
    now = time.time()

    def left(hours: float) -> list[str]:
        monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)
        client.server.clients.queue.call(methodcaller("delete_expired")).result()
        found = client.http.get(checkpoints).json()["checkpoints"]
        return [item["checkpoint_id"].partition("/")[2] for item in found]

    assert left(0.9) == ["three", "two", "one"]
    assert left(1.1) == ["two", "one"]
    assert left(10.1) == ["one"]


def test_what_has_expired_is_looked_for(client: Client):
    called = threading.Event()
    client.backend.delete_expired = called.set
    client.server.clients.sweep()
    client.server.clients.queue.call(lambda _: None).result()
    assert not called.is_set()
    client.server.clients._looked_for_expired -= 61
    client.server.clients.sweep()
    assert called.wait(20)
