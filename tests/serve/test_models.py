"""Requests of models over HTTP: order, what a failure means for those after it, limits, ends of sessions."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from tests.support.http import Client, connected
from tests.support.wire import BAD_TOKEN, BASE


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with connected(tmp_path, waiting=200) as client:
        yield client


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
    saved = {"session_id": client.session, "model_seq_id": 1, "path": f"tinker://{model}/weights/x"}
    assert "'no/such' is not on" in client.ask("load_weights", base_model="no/such", **saved)["error"]
    unknown = client.ask("optim_step", model_id=model, seq_id=4, optimizer_params={"type": "dimuon"})
    assert "dimuon" in unknown["error"]
    assert "knows no model" in client.ask("optim_step", model_id="s:train:9", adam_params={})["error"]


NUMBERS = (
    {"learning_rate": -1e-4}, {"learning_rate": "NaN"}, {"learning_rate": "Infinity"}, {"beta1": 1.0},
    {"beta2": -0.1}, {"eps": "-Infinity"}, {"weight_decay": "nan"}, {"grad_clip_norm": -1},
    {"eps": 0}, {"eps": 1e-46}, {"learning_rate": 1e38}, {"weight_decay": 1e30},
)  # fmt: skip


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_a_step_with_a_bad_number_takes_its_place(client: Client, numbers: dict):
    model, (name,) = client.model(), numbers
    client.send_pass(model, 1, [1])
    said = client.ask("optim_step", model_id=model, seq_id=2, adam_params=numbers)
    assert said["category"] == "user" and f"adam_params.{name} is" in said["error"]
    client.send_pass(model, 3, [1, 1])
    assert client.ask("optim_step", model_id=model, seq_id=4, adam_params={})["metrics"] == {"gradient": 2}
    assert client.backend.weights[model].steps == 1


UNREADABLE = (
    ("optim_step", {}, "adam_params: field required"),
    ("optim_step", {"adam_params": {"eps": "none"}}, "eps: input should be a valid number"),
    ("save_weights", {"path": 3}, "path: input should be a valid string"),
    ("save_weights", {"path": "x", "overwrite": "perhaps"}, "overwrite: input should be a valid boolean"),
    ("save_weights_for_sampler", {"sampling_session_seq_id": "x"}, "sampling_session_seq_id"),
    ("save_weights_for_sampler", {"kind": "inflight"}, "kind is 'inflight'"),
    ("save_weights_external", {}, "path: field required"),
    ("load_weights", {}, "path: field required"),
)


@pytest.mark.parametrize(("path", "body", "said"), UNREADABLE)
def test_a_body_that_cannot_be_read_takes_its_place(client: Client, path: str, body: dict, said: str):
    model = client.model()
    for _ in range(2):
        assert said in client.ask(path, model_id=model, seq_id=1, **body)["error"]
    client.send_pass(model, 2, [1])
    assert client.ask("optim_step", model_id=model, seq_id=3, adam_params={})["metrics"] == {"gradient": 1}


def test_a_body_larger_than_all_that_is_held_takes_its_place(tmp_path: Path):
    with connected(tmp_path, held=1000) as client:
        model = client.model()
        client.send_pass(model, 1, [1] * 100)
        assert "--held_gb" in client.result(f"{model}:1")["error"]
        client.send_pass(model, 2, [1])
        assert client.ask("optim_step", model_id=model, seq_id=3, adam_params={})["metrics"] == {
            "gradient": 1
        }


def test_a_step_does_not_use_half_a_gradient(client: Client):
    model = client.model()
    for seq_id, tokens in ((2, [BAD_TOKEN]), (3, [1])):
        client.send_pass(model, seq_id, tokens)
    step = client.post("optim_step", model_id=model, seq_id=4, adam_params={})["request_id"]
    client.send_pass(model, 1, [1])  # only now can they run
    assert "Not run" in client.result(step)["error"]
    said = client.result(f"{model}:2")["error"]
    assert "vocabulary" in said and said.endswith("send that whole batch again.")
    assert client.backend.weights[model].steps == 0
    assert client.ask("optim_step", model_id=model, seq_id=5, adam_params={})["metrics"] == {"gradient": 0}


def test_a_batch_that_is_sent_again_after_a_failure_counts_once(client: Client):
    model = client.model()
    client.send_pass(model, 1, [1, 1])
    client.send_pass(model, 2, [BAD_TOKEN])
    assert "gradients" in client.result(f"{model}:2")["error"]
    for seq_id, tokens in ((3, [1, 1]), (4, [1])):
        client.send_pass(model, seq_id, tokens)
    assert client.ask("optim_step", model_id=model, seq_id=5, adam_params={})["metrics"] == {"gradient": 3}
    client.send_pass(model, 6, [BAD_TOKEN])
    assert "gradients" not in client.result(f"{model}:6")["error"]  # because there were none
    client.send_pass(model, 7, [1])
    assert "error" in client.ask("save_weights", model_id=model, seq_id=8, path="../x")
    stepped = client.ask("optim_step", model_id=model, seq_id=9, adam_params={})
    assert stepped["metrics"] == {"gradient": 1}  # what only failed to be saved changes nothing


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
    full = client.ask("create_model", **body)
    assert "holds 4 models" in full["error"] and "all of them yours" in full["error"]
    assert client.ask("unload_model", model_id=f"{client.session}:train:0")["type"] == "unload_model"
    assert "error" not in client.ask("create_model", **body)
    for lora, said in (({"rank": 17}, "takes 1 to 16"), ({"rank": 0}, "takes 1 to 16"), (None, "is missing")):
        body = {"session_id": client.session, "model_seq_id": 5, "base_model": BASE, "lora_config": lora}
        client.http.post(f"/api/v1/sessions/{client.session}/finish")
        client.session = client.post("create_session")["session_id"]
        assert said in client.ask("create_model", **body | {"session_id": client.session})["error"]
        assert client.server.clients.models == {}


def test_models_of_clients_that_are_gone_make_room(client: Client):
    """The one that has been silent for longest; nobody who lives, and then a client asks again by itself."""
    others = [Client(client.http, client.server, client.backend) for _ in range(3)]
    for each in (*others, others[0]):
        each.model(number=1 + (each.backend.weights != {}))
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 1}}
    sessions = client.server.clients.sessions
    for each, silent in zip(others, (5, 59, 40), strict=True):
        sessions[each.session].seen -= silent
    lives = client.raw("create_model", **body)
    assert lives.status_code == 429 and "--max_models" in lives.json()["detail"]
    assert len(client.backend.weights) == 4
    for each, silent in zip(others, (0, 2, 25), strict=True):
        sessions[each.session].seen -= silent
    assert "error" not in client.ask("create_model", **body)
    assert [each.session in sessions for each in others] == [True, True, False]
    assert len(client.backend.weights) == 4


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


def test_too_many_requests_are_put_off(client: Client):
    model = client.model()
    answers = [client.raw("optim_step", model_id=model, seq_id=n, adam_params={}) for n in range(3, 220)]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert "its limit" in answers[-1].json()["detail"]


def test_requests_that_are_too_large_together_are_put_off(client: Client):
    model = client.model()
    client.server.clients.futures._max_bytes = 20_000
    answers = [client.send_pass(model, seq_id, [1] * 60) for seq_id in range(3, 40)]  # number 2 is missing
    states = [answer.status_code for answer in answers]
    assert states == sorted(states) and {*states} == {200, 429}
    assert "--held_gb" in answers[-1].json()["detail"]
    sent = states.count(200)
    held = client.server.clients.gauges()["held_bytes"]
    assert sent * 60 * 16 < held < 20_000
    other = Client(client.http, client.server, client.backend)  # which those that wait keep waiting, not out
    theirs = other.model()
    assert other.send_pass(theirs, 2, [1] * 60).status_code == 429
    for sender, mine in ((other, theirs), (client, model)):
        for seq_id in (1, 2):
            assert sender.send_pass(mine, seq_id, [1] * 60).status_code == 200
            assert isinstance(sender.result(f"{mine}:{seq_id}"), bytes)
    assert isinstance(client.result(f"{model}:{2 + sent}"), bytes)
    for each in (client, other):
        client.http.post(f"/api/v1/sessions/{each.session}/finish")
    assert client.server.clients.gauges()["held_bytes"] == 0


def test_prompts_that_wait_count_more_than_their_digits():
    from qerl_serve.requests import TOKEN_BYTES, Sample, read

    body = b'{"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}}'
    assert read(Sample, body).size == len(body) + 3 * TOKEN_BYTES
    place, number = sys.getsizeof((1, 2)) - sys.getsizeof((1,)), sys.getsizeof(151_000)
    assert 0 <= TOKEN_BYTES - place - number < 16  # what the allocator may add


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
