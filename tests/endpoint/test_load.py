"""Many conversations at once, whose clients die, repeat themselves and write their history anew."""

import http.client
import json
import random
import threading
import urllib.parse

import pytest

from tests.support.endpoint import Refused, chat, check_logprobs, message_of, play, tiny_engine, user

pytestmark = pytest.mark.slow

CONVERSATIONS = 64
TURNS = 8


class Books:
    """What clients were sent, which an update must hold: no more and no less."""

    def __init__(self):
        self.lock, self.requests = threading.Lock(), 0
        self.answers = {}  # by trajectory: tokens of prompt and answer, by what was asked

    def note(self, name, mark, answer):
        with self.lock:
            found = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
            known = self.answers.setdefault(name, {}).setdefault(mark, found)
            assert known == found, "a request that is sent again has the first one's answer"


def die(endpoint, messages, draw):
    """Ask, and leave before the answer is there."""
    url = urllib.parse.urlparse(endpoint.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = {
        "model": endpoint.model, "messages": messages, "max_tokens": 8, "return_token_ids": True,
        "stream": draw.random() < 0.5,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    connection.close()


def agent_of(books):
    def ask(endpoint, name, messages):
        answer = chat(endpoint, messages, max_tokens=8)
        books.note(name, json.dumps(messages), answer)
        return answer

    def agent(endpoint, row):
        name, draw = row["name"], random.Random(row["name"])
        messages = [user(f"{name}?")]
        for number in range(TURNS):
            kind = draw.choice(["plain", "plain", "dies", "repeats", "rewrites", "wrong", "together"])
            if kind == "dies":
                die(endpoint, messages, draw)
            if kind == "wrong":
                for wrong in ({"temperature": 9}, {"messages": "all"}, {"n": 0}):
                    with pytest.raises(Refused):
                        chat(endpoint, wrong.pop("messages", messages), **wrong)
            answers = []
            for _ in range(3 if kind == "repeats" else 1):
                answers.append(ask(endpoint, name, messages))
            if kind == "together":
                threads = [threading.Thread(target=ask, args=(endpoint, name, messages)) for _ in range(2)]
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]
            with books.lock:
                books.requests += len(answers) + 3 * (kind == "wrong") + 2 * (kind == "together")
                books.requests += kind == "dies"
            messages = [*messages, message_of(answers[0]), user(str(number))]
            if kind == "rewrites" and len(messages) > 4:
                messages = (
                    messages[:-4] + messages[-2:] if draw.random() < 0.5 else messages[:-4] + messages[-1:]
                )
        if draw.random() < 0.1:
            raise RuntimeError("dies for good")
        return draw.random()

    return agent


def test_nothing_is_lost_doubled_or_kept():
    books, engine = Books(), tiny_engine(num_hidden_layers=1, max_position_embeddings=2048)
    rows = [{"name": number} for number in range(CONVERSATIONS)]
    environments, found = play(
        agent_of(books), rows, engine=engine, max_tokens=1000, options={"timeout": 200.0, "at_once": 64}
    )
    failed = [each for each in environments if each.error is not None]
    assert all("dies for good" in each.error for each in failed), [each.error for each in failed]
    assert books.requests > 600
    forks = 0
    for row, trajectory in zip(rows, found, strict=True):
        every, answers = [trajectory, *trajectory.forks], books.answers[row["name"]]
        forks += len(trajectory.forks)
        wholes = [[*each.prompt_ids, *each.token_ids] for each in every]
        for prompt, drawn in answers.values():  # nothing is lost
            assert any(whole[: len(prompt) + len(drawn)] == prompt + drawn for whole in wholes)
        # Nothing is doubled: what counts is what was sent, once for each request that was another.
        assert sum(sum(each.written) for each in every) == sum(len(drawn) for _, drawn in answers.values())
        assert sum(each.turns for each in every) == len(answers)
    for trajectory in found[::8]:
        for each in (trajectory, *trajectory.forks):
            check_logprobs(engine.model, each)
    assert forks > 20
