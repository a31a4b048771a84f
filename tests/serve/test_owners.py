"""Keys with an owner: what is one's own is not there for others, and nobody has more than their share."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl.errors import QeRLError
from qerl_serve.gate import Gate
from qerl_serve.owners import SERVER, Keys, Owner, read_keys
from tests.support.endpoint import TOKENIZER, user
from tests.support.http import Client, connected
from tests.support.serve import tiny_backend
from tests.support.wire import BASE, KEY

ALICE, BOB = "tml-of-alice-0123456789", "tml-of-bob-0123456789ab"


def other(client: Client, key: str) -> Client:
    """A client of another key at the same server."""
    http = TestClient(client.server.app, headers={"X-API-Key": key}, raise_server_exceptions=False)
    http.portal = client.http.portal  # of whose loop the server's records are
    return Client(http, client.server, client.backend)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[tuple[Client, Client, Client]]:
    """The server's own client, Alice's with half of its limits, and Bob's."""
    owners = {ALICE: Owner("alice", 0.5), BOB: Owner("bob")}
    with connected(tmp_path, owners=owners, held=40_000, body=40_000) as server:
        yield server, other(server, ALICE), other(server, BOB)


def test_what_is_ones_own_is_not_there_for_others(three):
    server, alice, bob = three
    model, sampler = alice.model(), alice.sampler()
    asked = alice.post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.1})
    for refused in (
        bob.ask("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.1}),
        bob.result(bob.send_pass(model, 2, [1]).json()["request_id"]),
        bob.ask("asample", sampling_session_id=sampler, prompt={"chunks": [{"tokens": [1]}]}),
        bob.ask("save_weights", model_id=model, seq_id=2, path="mine"),
        bob.ask("unload_model", model_id=model),
    ):
        assert "This server knows no" in refused["error"]
    assert bob.raw("get_info", model_id=model).status_code == 400
    assert bob.raw("session_heartbeat", session_id=alice.session).status_code == 410
    assert bob.raw("retrieve_future", request_id=asked["request_id"]).status_code == 404
    assert bob.raw("create_sampling_session", session_id=alice.session, base_model=BASE).status_code == 400
    theirs = {"session_id": alice.session, "model_seq_id": 5, "base_model": BASE, "lora_config": {"rank": 4}}
    assert bob.raw("create_model", **theirs).status_code == 400
    bob.raw(f"sessions/{alice.session}/finish")
    alice.backend.seconds = 0.5
    drawn = alice.post("asample", sampling_session_id=sampler, prompt={"chunks": [{"tokens": [1]}]})
    bob.raw("cancel_future", request_id=drawn["request_id"])
    assert isinstance(alice.result(drawn["request_id"]), bytes), "another owner has cancelled it"
    alice.backend.seconds = 0.0
    for path in (f"sessions/{alice.session}", f"samplers/{sampler}", f"training_runs/{model}"):
        assert bob.http.get(f"/api/v1/{path}").status_code == 404
        for whose in (alice, server):
            assert whose.http.get(f"/api/v1/{path}").status_code == 200
    assert bob.http.get("/api/v1/sessions").json()["sessions"] == [bob.session]
    assert set(server.http.get("/api/v1/sessions").json()["sessions"]) == {
        each.session for each in (server, alice, bob)
    }
    assert alice.result(asked["request_id"])["metrics"]
    for whose, shown in (server, {"", "alice", "bob"}), (alice, {"alice"}), (bob, {"bob"}):
        assert {each["owner"] for each in whose.http.get("/status").json()["sessions"]} == shown


def test_what_is_saved_is_read_by_all_and_deleted_by_its_owner(three):
    server, alice, bob = three
    model = alice.model()
    path = alice.ask("save_weights", model_id=model, seq_id=1, path="a")["path"]
    run = bob.http.get("/api/v1/training_runs").json()["training_runs"][0]
    assert run["model_owner"] == "alice"
    made = bob.ask("load_weights", session_id=bob.session, model_seq_id=0, path=path, optimizer=True)
    assert "error" not in made
    checkpoint = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    for refused in (
        bob.http.delete(checkpoint),
        bob.http.put(f"{checkpoint}/ttl", json={"ttl_seconds": 3600}),
    ):
        assert refused.status_code == 403 and "belongs to alice" in refused.json()["detail"]
    assert alice.http.put(f"{checkpoint}/ttl", json={"ttl_seconds": 3600}).status_code == 204
    assert alice.http.delete(checkpoint).status_code == 204
    own = server.model()
    server.ask("save_weights", model_id=own, seq_id=1, path="a")
    assert alice.http.delete(checkpoint.replace(model, own)).status_code == 403
    bob.ask("save_weights", model_id=made["model_id"], seq_id=1, path="b")
    assert server.http.delete(checkpoint.replace(model, made["model_id"])[:-1] + "b").status_code == 204


def test_nobody_has_more_models_than_their_share(three):
    server, alice, bob = three
    alice.model(0), alice.model(1)
    base = alice.backend.models[0].name
    third = {"session_id": alice.session, "model_seq_id": 2, "base_model": base, "lora_config": {"rank": 4}}
    told = alice.ask("create_model", **third)["error"]
    assert "alice has 2 models, their share of the 4 of this server, all of them yours" in told
    again = other(alice, ALICE)  # another script of hers: the first may be over
    answer = again.raw("create_model", **third | {"session_id": again.session})
    assert answer.status_code == 429 and "their share" in answer.json()["detail"]
    bob.model(0), bob.model(1)  # what is left is there for others
    server.server.clients.sessions[alice.session].seen -= 100
    assert again.model(0)  # a silent client of one's own makes room
    assert sum(id_.startswith(bob.session) for id_ in server.server.clients.models) == 2


def test_nobody_holds_more_than_their_share(three):
    _, alice, bob = three
    model = alice.model()
    assert "held" not in alice.send_pass(model, 5, [1] * 100).text  # waits for those before it
    refusals = [alice.send_pass(model, 6 + n, [1] * 500).status_code for n in range(6)]
    assert refusals[0] == 200 and refusals[-1] == 429
    theirs = bob.model()
    assert bob.send_pass(theirs, 2, [1] * 500).status_code == 200
    assert alice.send_pass(model, 1, [1] * 100).status_code == 200  # for which the others wait


def test_a_request_that_others_wait_for_comes_in_beside_a_full_share(tmp_path):
    owners = {ALICE: Owner("alice", 0.1)}
    with connected(tmp_path, owners=owners, waiting=100) as server:
        alice = other(server, ALICE)
        model = alice.model()
        sent = [alice.send_pass(model, number, [1]).status_code for number in range(2, 12)]
        assert sent[0] == 200 and sent[-1] == 429
        first = alice.send_pass(model, 1, [1])  # for which the others wait
        assert first.status_code == 200 and isinstance(alice.result(first.json()["request_id"]), bytes)


def test_nobodys_bodies_on_their_way_take_more_than_a_share():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        taken.append(scope["path"])

    gate = Gate(app, Keys(KEY, {ALICE: Owner("alice", 0.1), BOB: Owner("bob")}), 1000, 1000, 10_000)
    taken: list[str] = []
    refused: list[int] = []

    async def upload(key: str, length: int, stalls: bool) -> None:
        async def receive() -> dict:
            if stalls:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": bytes(length), "more_body": False}

        async def send(message: dict) -> None:
            refused.extend([message["status"]] if "status" in message else [])

        headers = [(b"x-api-key", key.encode()), (b"content-length", str(length).encode())]
        await gate({"type": "http", "path": "/api/v1/asample", "headers": headers}, receive, send)

    async def uploads() -> None:
        stalled = [asyncio.create_task(upload(ALICE, 600, True)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert refused == [429] * 19
        await upload(BOB, 1000, False)
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        await upload(ALICE, 1000, False)  # what was cut off counts no more

    asyncio.run(uploads())
    assert len(taken) == 2 and len(refused) == 19


def test_a_key_that_is_nobodys_is_refused():
    keys = Keys(KEY, {ALICE: Owner("alice")})
    assert keys.owner(ALICE.encode()) == Owner("alice") and keys.owner(KEY.encode()) is SERVER
    assert keys.owner(b"") is keys.owner(KEY[:-1].encode()) is None
    with pytest.raises(QeRLError, match="The key of alice is the server's own"):
        Keys(ALICE, {ALICE: Owner("alice")})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no owners"),
        ("- a", "names no owners"),
        ("alice: tml-x", "an owner is NAME"),
        (f"alice: {{key: {ALICE}, models: 3}}", "an owner is NAME"),
        ("alice: {key: tml-short}", "alice: a key begins with tml- and has at least 20"),
        (f"alice: {{key: {ALICE}, share: 0}}", "alice: the share is no number above 0"),
        (f"alice: {{key: {ALICE}, share: 1.5}}", "alice: the share is no number above 0"),
        (f"alice: {{key: {ALICE}, share: true}}", "alice: the share is no number above 0"),
        (f"alice: {{key: {ALICE}, share: {BOB}}}", "alice: the share is no number above 0"),
        (f"'': {{key: {ALICE}}}", "owner 1: an owner is NAME"),
        (f"bob: {{key: {BOB}}}\nlocal: {{key: {ALICE}}}", "owner 2: an owner is NAME"),
        (f"../x: {{key: {ALICE}}}", "owner 1: an owner is NAME"),
        (f"{ALICE}: {{key: alice}}", "owner 1: an owner is NAME"),
        (f"{ALICE}: {{key: {BOB}}}", "owner 1: an owner is NAME"),
        (f"alice: {{key: {ALICE}}}\n{BOB}: 1\n{BOB}: 2", r"cannot be read \(line 3\)"),
        (f"alice: {{key: '{ALICE} x'}}", "printable ASCII"),
        (f"alice: {{key: {ALICE}\u00e9}}", "printable ASCII"),
        (f"alice: {{key: {ALICE}}}\nbob: {{key: {ALICE}}}", "bob: alice has the same key"),
        ("alice: {key: *x}", "cannot be read"),
    ],
)
def test_a_file_of_keys_is_read_or_refused(tmp_path, text, told):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(QeRLError, match=told) as refused:
        read_keys(file)
    assert ALICE not in str(refused.value) and BOB not in str(refused.value)


def test_an_owner_without_a_name_is_not_the_server():
    assert SERVER.may("alice") and not Owner("").may("alice")


def test_a_file_of_keys_names_owners_and_is_nobody_elses(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"alice: {{key: {ALICE}, share: 0.5}}\nbob: {{key: {BOB}}}\n")
    file.chmod(0o600)
    assert read_keys(file) == {ALICE: Owner("alice", 0.5), BOB: Owner("bob", 1.0)}
    file.chmod(0o640)
    with pytest.raises(QeRLError, match="chmod 600"):
        read_keys(file)


def bearer(client: Client, key: str) -> Client:
    """The same, on OpenAI's routes too."""
    client.http.headers["Authorization"] = f"Bearer {key}"
    return client


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[Client, Client, Client, Path]]:
    """As `three`, with a tiny model; and the folder of the server."""
    folder = tmp_path / "real"
    owners = {ALICE: Owner("alice"), BOB: Owner("bob")}
    with connected(tmp_path, tiny_backend(folder), owners=owners, context=512) as server:
        others = [bearer(other(server, key), key) for key in (ALICE, BOB)]
        yield bearer(server, KEY), *others, folder


def complete(client: Client, model: str, **fields: Any) -> Any:
    body = {"model": model, "messages": [user("a")], "max_tokens": 4, "return_token_ids": True} | fields
    return client.http.post("/v1/chat/completions", json=body)


def saved_as(client: Client, name: str, number: int = 0) -> str:
    model = client.model(number)
    return client.ask("save_weights_for_sampler", model_id=model, seq_id=1, path=name)["path"]


@pytest.mark.slow
def test_conversations_are_ones_own(real, monkeypatch):
    server, alice, bob, _ = real
    first = complete(alice, "tiny", max_tokens=40, seed=5, temperature=5).json()
    drawn = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    messages = [user("a"), first["choices"][0]["message"], user("b")]
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert rendered[: len(drawn)] != drawn
    for whose in (bob, server):
        assert complete(whose, "tiny", messages=messages).json()["prompt_token_ids"] == rendered
    hers = complete(alice, "tiny", messages=messages).json()["prompt_token_ids"]
    assert hers[: len(drawn)] == drawn
    monkeypatch.setattr("qerl_serve.chat.KEPT_HISTORIES", 3)
    complete(bob, saved_as(bob, "b"))  # with it there are four
    complete(server, "tiny"), complete(bob, "tiny")
    complete(server, saved_as(server, "s"))
    assert complete(alice, "tiny", messages=messages).json()["prompt_token_ids"] == rendered


@pytest.mark.slow
def test_a_name_is_of_ones_own_weights(real):
    _, alice, bob, _ = real
    his = saved_as(bob, "final")
    assert complete(alice, "final").status_code == 404
    hers = saved_as(alice, "final")
    assert complete(alice, "final").status_code == 200
    assert complete(alice, his).status_code == complete(bob, his).status_code == 200
    names = [each["id"] for each in alice.http.get("/v1/models").json()["data"]]
    assert names == ["tiny", his, hers, "final"]
    saved_as(alice, "final", 1)
    refused = complete(alice, "final")
    assert refused.status_code == 404
    assert "2 saved weights have the name 'final'; ask for one by its path" in refused.text
    assert complete(bob, "final").status_code == 200


@pytest.mark.slow
def test_what_is_damaged_stays_its_owners_after_a_restart(real, tmp_path):
    server, alice, bob, folder = real
    path = saved_as(alice, "a")
    lost = saved_as(alice, "b", 1)
    server.backend.close()
    place = folder.joinpath(*path.removeprefix("tinker://").split("/"))
    (place / "adapter_model.safetensors").write_bytes(b"short")
    (folder.joinpath(*lost.removeprefix("tinker://").split("/")) / "state.json").write_text("{")
    owners = {ALICE: Owner("alice"), BOB: Owner("bob")}
    with connected(tmp_path, tiny_backend(folder), owners=owners, context=512) as server:
        alice, bob = other(server, ALICE), other(server, BOB)
        routes = [
            f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
            for run, kind, name in (each.removeprefix("tinker://").split("/") for each in (path, lost))
        ]
        told = bob.http.delete(routes[0])
        assert told.status_code == 403 and "belongs to alice" in told.json()["detail"]
        assert alice.http.delete(routes[0]).status_code == 204
        assert alice.http.delete(routes[1]).status_code == 403  # nobody can read whose it is
        assert server.http.delete(routes[1]).status_code == 204
        assert server.http.delete(routes[1]).status_code == 404
