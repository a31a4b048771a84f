"""OpenAI's routes of the server: the base and saved weights by name, over the same queue as all else."""

import threading
import time
import urllib.request

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

import torch

from qerl.agents.process import EndpointOf
from qerl_serve.adapters import Adapters
from qerl_serve.backend import ModelBackend
from qerl_serve.checkpoints import Store
from qerl_serve.types import AdamParams
from tests.support.endpoint import TOKENIZER, Refused, chat, message_of, post, send, user
from tests.support.http import connected
from tests.support.serve import DATA, lora, request, sampled, tiny_backend, tiny_base
from tests.support.wire import KEY, FakeBackend, RunningServer

pytestmark = pytest.mark.slow


def trained(folder):
    """A backend with weights saved under a name, and the path of these."""
    backend = tiny_backend(folder)
    backend.create_model("m", lora())
    for _ in range(3):
        backend.forward_backward("m", DATA, "cross_entropy", {}, False)
        backend.optim_step("m", AdamParams(learning_rate=0.3))
    return backend, backend.save_for_sampler("m", "wales")


def endpoint_of(server, model="tiny") -> EndpointOf:
    return EndpointOf(f"{server.url}/v1", KEY, model)


def test_base_and_adapter_answer_by_name(tmp_path):
    backend, path = trained(tmp_path)
    with RunningServer(backend, context=512) as server:
        base = endpoint_of(server)
        names = [model["id"] for model in send(base, "models", None)["data"]]
        assert names == ["tiny", path, "wales"]
        found = {}
        for name in names:
            answer = chat(
                endpoint_of(server, name), [user("a")], seed=4, max_tokens=8, temperature=0.7, top_k=9
            )
            assert answer["model"] == name
            found[name] = answer["choices"][0]["token_ids"]
            prompt = answer["prompt_token_ids"]
        assert found["wales"] == found[path] != found["tiny"]
        with pytest.raises(Refused) as refused:
            chat(endpoint_of(server, "gpt-9"), [user("a")])
        assert refused.value.status == 404 and refused.value.error["code"] == "model_not_found"
    again, path = trained(tmp_path / "again")
    for name in ("tiny", path):  # what the Tinker API draws with the same seed
        key = again.sampler(name)
        asked = request(key, prompt, seed=4, max_tokens=8, temperature=0.7, top_k=9)
        assert list(sampled(again, [asked])[0].sequences[0].tokens) == found[name]


def test_a_conversation_goes_on_with_the_tokens_that_were_drawn(tmp_path):
    with RunningServer(tiny_backend(tmp_path), context=512) as server:
        endpoint, messages, whole = endpoint_of(server), [user("a")], []
        for text in ("b", "c"):
            answer = chat(endpoint, messages, max_tokens=40, seed=5, temperature=5)
            assert answer["prompt_token_ids"][: len(whole)] == whole
            whole = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
            messages += [message_of(answer), user(text)]
        rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        last = chat(endpoint, messages, max_tokens=4)["prompt_token_ids"]
        assert last[: len(whole)] == whole
        assert last != rendered, "special tokens were drawn, of which the text says nothing"


def test_answers_are_drawn_anew_stop_and_stream(tmp_path):
    with RunningServer(tiny_backend(tmp_path), context=512) as server:
        endpoint = endpoint_of(server)
        answers = [chat(endpoint, [user("a")], max_tokens=8) for _ in range(2)]
        assert answers[0]["choices"] != answers[1]["choices"]
        many = chat(endpoint, [user("a")], max_tokens=8, n=3, logprobs=True)
        assert len({tuple(choice["token_ids"]) for choice in many["choices"]}) == 3
        whole = post(endpoint, "completions", prompt="ab", max_tokens=40, seed=2)["choices"][0]["text"]
        stop = whole[5:7]
        cut = post(endpoint, "completions", prompt="ab", max_tokens=40, seed=2, stop=stop)["choices"][0]
        assert cut["text"] == whole[: whole.find(stop)] and cut["finish_reason"] == "stop"
        headers = {"Authorization": f"Bearer {KEY}"}
        body = b'{"model": "tiny", "prompt": "ab", "max_tokens": 40, "seed": 2, "stream": true}'
        asked = urllib.request.Request(f"{endpoint.base_url}/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and len(events) > 10


def test_openais_client_is_served(tmp_path):
    openai = pytest.importorskip("openai")
    with RunningServer(tiny_backend(tmp_path), context=512) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        said = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=5, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in said)
        with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-else", max_retries=0).models.list()
        with pytest.raises(openai.BadRequestError, match="positions"):
            client.completions.create(model="tiny", prompt="a" * 600)
        with pytest.raises(openai.NotFoundError, match="no GET /v1/files"):
            client.files.list()


def test_what_nobody_waits_for_is_not_finished(tmp_path):
    backend = tiny_backend(tmp_path)
    with RunningServer(backend, context=512) as server:
        endpoint, began = endpoint_of(server), time.monotonic()
        body = b'{"model": "tiny", "prompt": "ab", "max_tokens": 500, "n": 40, "logit_bias": {}}'
        asked = urllib.request.Request(
            f"{endpoint.base_url}/completions", body, {"Authorization": f"Bearer {KEY}"}
        )
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(asked, timeout=0.1)
        chat(endpoint, [user("a")], max_tokens=2)
        assert time.monotonic() - began < 20
        futures, deadline = server.server.clients.futures._futures, time.monotonic() + 10
        while time.monotonic() < deadline and (
            backend._given or any(each.settled is None for each in futures.values())
        ):
            time.sleep(0.05)
        assert all(each.settled is not None for each in futures.values())
        assert not backend._given, "no policy stays open for a request that is over"


def test_many_clients_at_once_each_get_their_own(tmp_path):
    with RunningServer(tiny_backend(tmp_path), context=512) as server:
        endpoint, found, alone = endpoint_of(server), {}, {}

        def ask(number):
            found[number] = chat(endpoint, [user(str(number))], seed=number, max_tokens=6)["choices"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for number in (0, 11, 23):
            alone[number] = chat(endpoint, [user(str(number))], seed=number, max_tokens=6)["choices"]
    for number, choices in alone.items():
        assert found[number][0]["token_ids"] == choices[0]["token_ids"]
    assert len(found) == 24
    assert torch.is_grad_enabled()


def test_teachers_and_what_was_trained_on_them_are_refused(tmp_path):
    folder = tmp_path / "saved"
    base = tiny_base("taught", fingerprint="t")
    facts = {"base": "taught", "fingerprint": "t", "dtype": "float32"}
    first = ModelBackend(base, Adapters(base.seats, 4, 2), Store(folder, facts, {"model": "taught"}))
    first.create_model("s:train:0", lora())
    path = first.save_for_sampler("s:train:0", "able")
    first.close()
    teacher = tiny_base("taught", fingerprint="t", trainable=False)
    with RunningServer(tiny_backend(folder, teachers=[teacher]), context=512) as server:
        names = [model["id"] for model in send(endpoint_of(server), "models", None)["data"]]
        assert names[0] == "tiny" and "taught" not in names
        assert chat(endpoint_of(server), [user("a")], max_tokens=2)["choices"]
        for name, says in (("taught", "is a teacher"), (path, "was trained on taught")):
            with pytest.raises(Refused, match=says) as refused:
                chat(endpoint_of(server, name), [user("a")], max_tokens=2)
            assert refused.value.status == 400


def test_without_a_reader_there_are_no_such_routes(tmp_path):
    with connected(tmp_path) as client:
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = client.http.get("/v1/models", headers=headers)
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
        answer = client.http.get("/v1/models", headers={"Authorization": "Bearer tml-else"})
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    assert FakeBackend(tmp_path).reader is None
