"""Requests for samples over HTTP: what may be asked for, and how long samplers stay."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl.errors import QeRLError
from qerl_serve import descriptors as wire
from tests.support.http import Client, connected
from tests.support.wire import BAD_TOKEN, BASE, limits


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with connected(tmp_path) as client:
        yield client


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
        ([1], {"temperature": 1e-40}, {}, "at least 1e-06, or 0"),
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
    from qerl_serve.requests import Sample

    body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"stop": stop, "top_k": -1}}
    request = Sample.model_validate(body).request("base", 5, limits())
    assert (request.stop_token_ids, request.stop_strings, request.top_k) == (ids, strings, 0)
    assert (request.seed, request.max_tokens) == (5, None)


@pytest.mark.parametrize("how", ["silent", "finished", "cancelled"])
def test_the_backend_hears_that_nobody_waits_while_it_decodes(client: Client, how: str):
    asked, begun, go_on = [], threading.Event(), threading.Event()

    def sample(requests: Any, arrived: Any, overdue: Any) -> Any:
        asked.extend(requests)
        begun.set()
        assert go_on.wait(5)
        yield 0, QeRLError("Nobody waits for it.")

    client.backend.sample = sample
    body = {"sampling_session_id": client.sampler(), "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]}}
    waits = client.post("asample", **body)["request_id"]
    assert begun.wait(5) and asked[0].wanted()
    if how == "silent":
        client.server.clients.sessions[client.session].seen -= 1000
        client.server.clients.sweep()
    elif how == "cancelled":
        assert client.raw("cancel_future", request_id=waits).status_code == 204
        assert "cancelled" in client.result(waits)["error"]
    else:
        client.http.post(f"/api/v1/sessions/{client.session}/finish")
    assert not asked[0].wanted()
    go_on.set()


def test_samples_alone_are_cancelled(client: Client):
    model = client.model()
    client.send_pass(model, 2, [1])
    for request_id in (f"{model}:2", "unknown"):
        assert client.raw("cancel_future", request_id=request_id).status_code == 204
    client.send_pass(model, 1, [1])
    assert isinstance(client.result(f"{model}:2"), bytes)


def test_another_temperature_is_said_once(client: Client, caplog):
    sampler = client.sampler()
    for temperature in (1.0, 0.0, 0.7, 0.5):
        client.ask(
            "asample", sampling_session_id=sampler, prompt={"chunks": [{"tokens": [1]}]},
            sampling_params={"temperature": temperature},
        )  # fmt: skip
    (said,) = (record.getMessage() for record in caplog.records if "temperature" in record.getMessage())
    assert "have temperature 0.7" in said and "temperature 1" in said
