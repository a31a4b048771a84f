"""The package `openai` as it is, and what it reads of streams and of calls of tools."""

import http.client
import json
import time
import urllib.request

import pytest

from tests.support.agents import SayingEngine, call, tool_tokenizer
from tests.support.endpoint import chat, message_of, play, user

ADD = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture
def openai():
    return pytest.importorskip("openai")


def events(endpoint, **body):
    """The events of a stream."""
    body = {"model": endpoint.model, "stream": True} | body
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    url = f"{endpoint.base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]


def test_a_stream_says_what_the_whole_answer_says():
    def agent(endpoint, row):
        for stop in (None, "e", ["ab", "\n"]):
            found = events(
                endpoint,
                messages=[user("a")],
                seed=3,
                n=2,
                stop=stop,
                max_tokens=60,
                stream_options={"include_usage": True},
            )
            assert found[-1] == "[DONE]"
            *chunks, last = [json.loads(each) for each in found[:-1]]
            assert last["choices"] == []
            whole = chat(endpoint, [user("a")], seed=3, n=2, stop=stop, max_tokens=60)
            assert last["usage"] == whole["usage"]
            for at in range(2):
                own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == at]
                assert own[0]["delta"]["role"] == "assistant"
                text = "".join(each["delta"].get("content") or "" for each in own)
                assert text == message_of(whole, at)["content"]
                assert own[-1]["finish_reason"] == whole["choices"][at]["finish_reason"]
                row.setdefault("pieces", []).append(len(own))
        return float(max(row["pieces"]))

    (environment,), (trajectory,) = play(agent)
    assert environment.get_reward() > 10  # it came in many pieces
    assert len(trajectory.forks) == 5  # a stream and the whole answer are one request


def test_openais_client_talks_and_streams(openai):
    def agent(endpoint, row):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        messages = [{"role": "user", "content": "a"}]
        said = client.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=8, logprobs=True, n=2
        )
        assert len(said.choices) == 2
        assert said.choices[0].logprobs.content[0].logprob < 0
        messages += [said.choices[0].message.model_dump(), {"role": "user", "content": "b"}]
        with client.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=8, stream=True
        ) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "c"}]
        client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=8)
        assert client.models.list().data[0].id == endpoint.model
        assert client.completions.create(model=endpoint.model, prompt="ab", max_tokens=3).usage.total_tokens
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=endpoint.model, messages=messages, temperature=0.3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="temperature"):  # ahead of the stream
            client.chat.completions.create(
                model=endpoint.model, messages=messages, temperature=0.3, stream=True
            )
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-9", messages=messages)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=endpoint.base_url, api_key="sk-none").models.list()
        return 1.0

    (environment,), (trajectory,) = play(agent)
    assert environment.get_reward() == 1.0
    assert max(each.turns for each in (trajectory, *trajectory.forks)) == 3


def test_openais_client_calls_tools(openai):
    tokenizer = tool_tokenizer()

    def say(row, before):
        return (
            f"It is {before.split('<tool_response>')[1].split()[0]}" if before else call("multiply", a=6, b=7)
        )

    async def agent(endpoint, row):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages = [{"role": "user", "content": "6*7?"}]
            said = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[ADD])
            choice = said.choices[0]
            assert choice.finish_reason == "tool_calls"
            (asked,) = choice.message.tool_calls
            arguments = json.loads(asked.function.arguments)
            messages += [
                choice.message,
                {"role": "tool", "tool_call_id": asked.id, "content": str(arguments["a"] * arguments["b"])},
            ]
            stream = await client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=[ADD], stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return float(text == "It is 42")

    engine = SayingEngine(tokenizer, say)
    (environment,), (trajectory,) = play(agent, engine=engine, tokenizer=tokenizer, max_tokens=2000)
    assert environment.error is None
    assert environment.get_reward() == 1.0
    assert trajectory.turns == 2 and trajectory.calls == 1 and not trajectory.forks


def test_calls_of_tools_come_in_a_stream():
    tokenizer = tool_tokenizer()

    def agent(endpoint, row):
        found = events(endpoint, messages=[user("6*7?")], tools=[ADD])
        deltas = [json.loads(each)["choices"][0] for each in found[:-1]]
        (calls,) = [each["delta"]["tool_calls"] for each in deltas if "tool_calls" in each["delta"]]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        return float(
            calls[0]["index"] == 0 and json.loads(calls[0]["function"]["arguments"]) == {"a": 6, "b": 7}
        )

    engine = SayingEngine(tokenizer, lambda row, before: call("multiply", a=6, b=7))
    (environment,), _ = play(agent, engine=engine, tokenizer=tokenizer, max_tokens=2000)
    assert environment.get_reward() == 1.0


def test_a_tool_is_not_told_of_where_none_may_be_called():
    tokenizer = tool_tokenizer()

    def agent(endpoint, row):
        answer = chat(endpoint, [user("6*7?")], tools=[ADD], tool_choice="none")
        assert "multiply" not in tokenizer.decode(answer["prompt_token_ids"])
        return float("tool_calls" not in message_of(answer))

    engine = SayingEngine(tokenizer, lambda row, before: call("multiply", a=6, b=7))
    (environment,), _ = play(agent, engine=engine, tokenizer=tokenizer, max_tokens=2000)
    assert environment.get_reward() == 1.0


@pytest.mark.slow
def test_a_connection_stays_open_while_an_update_takes_longer_than_servers_usually_wait():
    def agent(endpoint, row):
        _, _, address = endpoint.base_url.removesuffix("/v1").rpartition("/")
        connection = http.client.HTTPConnection(address, timeout=60)
        body = json.dumps({"model": endpoint.model, "messages": [user("a")], "max_tokens": 3})
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        for pause in (0, 6):  # uvicorn waits for 5
            time.sleep(pause)
            connection.auto_open = pause == 0  # it raises then if it has to connect again
            connection.request("POST", "/v1/chat/completions", body, headers)
            assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 3
        return 1.0

    (environment,), _ = play(agent, stop_token_ids=())
    assert environment.get_reward() == 1.0
