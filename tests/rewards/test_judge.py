"""A judge behind a real server, which may refuse, break off, hang or talk nonsense."""

import asyncio
import itertools
import json
import socket
import time
from typing import Any

import pytest

from qerl.errors import QeRLError
from qerl.rewards import judge as module
from qerl.rewards.judge import Judge, make_judge
from qerl.tasks.together import guarded
from tests.support.chat_server import chat_server, slow

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.05)


def judged(judge: Judge, *texts: str, **columns: Any) -> list[float | None]:
    """Rewards as a trainer gets them."""
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return guarded(judge)(prompts=[PROMPT] * len(texts), completions=completions, **columns)


def test_the_judge_reads_problem_completion_and_answer_and_its_last_score_counts():
    with chat_server(lambda body: "Not Score: 2 but\n**Score:** 7.5") as served:
        judge = Judge(served.url, "critic", request={"max_tokens": 64})
        assert judged(judge, "It is {answer}.", answer=["2"]) == [0.75]
    (body,) = served.requests
    (message,) = body.pop("messages")
    assert body == {"model": "critic", "temperature": 0, "max_tokens": 64}
    assert "What is 1 + 1?" in message["content"] and "Be brief" not in message["content"]
    assert "Right answer: 2\n" in message["content"]
    assert "It is {answer}." in message["content"], "places in what is judged are left alone"
    assert "Authorization" not in served.headers[0]


def test_template_scale_and_pattern_are_the_users_own():
    with chat_server(lambda body: "verdict=-1 " + body["messages"][0]["content"]) as served:
        judge = Judge(served.url, "m", "Rate <{completion}>", r"verdict=(\S+)", scores=(-2, 2), name="style")
        assert judged(judge, "two") == [0.25]
        assert judge.__name__ == "style"
    assert served.requests[0]["messages"][0]["content"] == "Rate <two>"


def test_requests_wait_at_the_same_time_but_no_more_than_allowed():
    with chat_server(slow(0.1, "Score: 10")) as served:
        started = time.perf_counter()
        assert judged(Judge(served.url, "m", at_once=4), *"abcdefgh") == [1.0] * 8
        assert time.perf_counter() - started < 0.6
    assert served.most_at_once == 4


@pytest.mark.parametrize(
    "passing", [(429, b"slow down"), (500, b""), (503, b"busy"), (200, b"<html>"), (200, {"choices": []})]
)
def test_what_may_pass_is_asked_again(passing):
    answers = iter([passing, passing, "Score: 5"])
    with chat_server(lambda body: next(answers)) as served:
        assert judged(Judge(served.url, "m"), "a") == [0.5]
    assert len(served.requests) == 3


@pytest.mark.parametrize(
    ("answer", "said", "times"),
    [
        ((429, b"slow down"), "ConnectionError: the judge at URL, asked 3 times, answers 429 'slow down'", 3),
        ((200, b"<html>"), "asked 3 times, answers something other than a chat completion ('<html>')", 3),
        ((401, {"error": "bad key"}), "ValueError: the judge at URL refuses the request: 401", 1),
        ((404, b"no model m"), "refuses the request: 404 'no model m'", 1),
        ("I like it.", "ValueError: the judge's reply has no score", 1),
        ("Score: 11", "the judge's score 11 is not in 0 to 10", 1),
    ],
)
def test_a_completion_without_a_score_has_no_reward_and_the_reason_is_said(answer, said, times, caplog):
    with chat_server(lambda body: answer) as served:
        assert judged(Judge(served.url, "m", tries=3), "a") == [None]
    assert len(served.requests) == times
    assert "failed on 1 of 1 samples, which have no reward" in caplog.text
    assert said.replace("URL", served.url) in caplog.text


def test_one_completion_without_a_score_costs_the_others_nothing():
    with chat_server(lambda body: "hm" if "bad" in body["messages"][0]["content"] else "Score: 1") as served:
        assert judged(Judge(served.url, "m"), "a", "bad", "c") == [0.1, None, 0.1]


def test_a_server_that_hangs_has_a_time_limit(caplog):
    with chat_server(slow(1.0, "Score: 1")) as served:
        started = time.perf_counter()
        assert judged(Judge(served.url, "m", timeout=0.2), "a", "b") == [None, None]
        assert time.perf_counter() - started < 0.8
    assert f"TimeoutError: the judge at {served.url} gave no reply within 0.2 s" in caplog.text


def test_a_judge_that_is_down_is_said_after_a_few_samples(caplog):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        judge = Judge(url, "m", tries=2)
        asked = itertools.count()
        ask = judge._ask
        judge._ask = lambda body: (next(asked), ask(body))[1]
        assert judged(judge, *["a"] * 200) == [None] * 200
    assert next(asked) < 50
    assert f"ConnectionError: the judge at {url}, asked 2 times, cannot be reached (" in caplog.text


def test_replies_are_kept_on_disk_by_what_was_asked(tmp_path):
    with chat_server(lambda body: "Score: 3") as served:
        for _ in range(2):  # as in a run that is resumed
            judge = Judge(served.url, "m", cache=tmp_path / "replies")
            assert judged(judge, "a", "b", answer=["1", "1"]) == [0.3, 0.3]
        assert len(served.requests) == 2
        assert judged(judge, "a", answer=["2"]) == [0.3]
        assert judged(Judge(served.url, "other", cache=tmp_path / "replies"), "a", answer=["1"]) == [0.3]
        assert len(served.requests) == 4
        files = list((tmp_path / "replies").rglob("*.json"))
        assert len(files) == 4
        for file in files:
            file.write_text("{")  # a file that was damaged counts as none
        assert judged(judge, "a", answer=["1"]) == [0.3]
        assert len(served.requests) == 5
    assert json.loads(max(files, key=lambda file: file.stat().st_size).read_text())["reply"] == "Score: 3"


def test_a_reply_without_a_score_is_not_kept(tmp_path):
    answers = iter(["hm", "Score: 4"])
    with chat_server(lambda body: next(answers)) as served:
        judge = Judge(served.url, "m", cache=tmp_path)
        assert judged(judge, "a") == [None]
        assert judged(judge, "a") == [0.4]


@pytest.mark.parametrize(
    ("reply", "scores", "reward"),
    [
        ("Score: -5", (-5, 5), 0.0),
        ("score: -0.5", (-1, 1), 0.25),
        ("**Score:** \u22121", (-1, 1), 0.0),
        ("Score: .5", (0, 1), 0.5),
        ("Score: 1e3", (0, 1000), 1.0),
        ("Score: 7/10", (0, 10), 0.7),
        ("Score: -1", (0, 10), None),
        ("Score:-7", (0, 10), None),
        ("Score: 1e3", (0, 10), None),
        ("Score: 1e999", (0, 10), None),
    ],
)
def test_a_score_is_read_with_its_sign_and_its_exponent(reply, scores, reward):
    with chat_server(lambda body: reply) as served:
        assert judged(Judge(served.url, "m", scores=scores), "a") == [reward]


@pytest.mark.parametrize(
    "answer", [(401, b"bad key sesame-123"), (500, b"x" * 95 + b"sesame-123"), "sesame-123"]
)
def test_keys_and_passwords_are_in_no_message_and_in_no_kept_reply(answer, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CRITIC_KEY", "sesame-123")
    with chat_server(lambda body: answer) as served:
        url = served.url.replace("http://", "http://ann:sesame-123@")
        judge = Judge(url, "m", tries=1, cache=tmp_path, api_key_env="CRITIC_KEY")
        assert judged(judge, "a") == [None]
        assert served.headers[0]["Authorization"].startswith("Basic ")
    assert "sesame" not in caplog.text and "ann" not in caplog.text
    with chat_server(lambda body: "Score: 1") as served:
        assert judged(Judge(url.replace(url[-8:], served.url[-8:]), "m", cache=tmp_path), "a") == [0.1]
    (kept,) = tmp_path.rglob("*.json")
    assert "sesame" not in kept.read_text()
    with pytest.raises(QeRLError) as refused:
        Judge("ftp://ann:sesame@x", "m")
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize("key", ["sesame\nmore", "ses ame", "s\u00e9same", "ses\x00ame"])
def test_a_key_that_http_cannot_send_is_refused_when_the_judge_is_made(key, monkeypatch):
    monkeypatch.setattr(module.os, "environ", {"CRITIC_KEY": key})
    with pytest.raises(QeRLError, match="CRITIC_KEY holds no key that HTTP could send") as refused:
        Judge("http://x", "m", api_key_env="CRITIC_KEY")
    assert "same" not in str(refused.value)


def test_a_reply_is_read_as_far_as_one_may_be_long(monkeypatch, caplog):
    monkeypatch.setattr(module, "_MAX_BYTES", 2**20)
    with chat_server(lambda body: (200, b" " * 2**21)) as served:
        assert judged(Judge(served.url, "m"), "a") == [None]
        assert f"the judge at {served.url} answers more than 1 MiB" in caplog.text
    assert len(served.requests) == 1


def test_replies_that_are_nested_without_end_are_none(tmp_path):
    deep = b"[" * 10**5
    answers = iter([(200, deep), "Score: 4", "Score: 4"])
    with chat_server(lambda body: next(answers)) as served:
        judge = Judge(served.url, "m", cache=tmp_path)
        assert judged(judge, "a") == [0.4]
        (kept,) = tmp_path.rglob("*.json")
        kept.write_bytes(deep)
        assert judged(judge, "a") == [0.4]
    assert len(served.requests) == 3


def test_the_key_comes_from_the_environment_alone(monkeypatch):
    monkeypatch.setenv("CRITIC_KEY", "sesame")
    with chat_server(lambda body: "Score: 3") as served:
        assert judged(Judge(served.url, "m", api_key_env="CRITIC_KEY"), "a") == [0.3]
    assert served.headers[0]["Authorization"] == "Bearer sesame"
    monkeypatch.delenv("CRITIC_KEY")
    with pytest.raises(
        QeRLError, match="The environment variable CRITIC_KEY with the judge's key is not set"
    ):
        Judge("http://x", "m", api_key_env="CRITIC_KEY")
    with pytest.raises(QeRLError, match="not the key itself") as refused:
        Judge("http://x", "m", api_key_env="sk-sesame")
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "m"}, "judge lacks url"),
        ({"url": "http://x"}, "judge lacks model"),
        (
            {"url": "http://x", "model": "m", "temperature": 0},
            "judge has no option 'temperature'; its options",
        ),
        ({"url": "x:8000/v1", "model": "m"}, "must begin with http:// or https://"),
        ({"url": "http://x", "model": 3}, "model of the judge is 3; it must be text"),
        ({"url": "http://x", "model": "m", "prompt": "Good?"}, "lacks the placeholder {completion}"),
        ({"url": "http://x", "model": "m", "score": "("}, "no regular expression"),
        ({"url": "http://x", "model": "m", "score": r"\d+"}, "must have one group"),
        ({"url": "http://x", "model": "m", "scores": [5, 5]}, "give the lowest and the highest"),
        ({"url": "http://x", "model": "m", "scores": "ab"}, "give the lowest and the highest"),
        ({"url": "http://x", "model": "m", "at_once": 0}, "at_once of the judge is 0"),
        ({"url": "http://x", "model": "m", "timeout": "long"}, "timeout of the judge is 'long'"),
        ({"url": "http://x", "model": "m", "request": 1}, "request of the judge is 1"),
        ({"url": "http://[x", "model": "m"}, "url of the judge is no URL"),
        ({"url": "http://x", "model": "m", "request": {"seed": {1}}}, "request of the judge cannot be sent"),
        ({"url": "http://x", "model": "m", "request": {"top_p": float("nan")}}, "cannot be sent as JSON"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options, said):
    with pytest.raises(QeRLError) as refused:
        make_judge(options)
    assert said in str(refused.value)


def test_a_judge_works_on_one_event_loop_after_another():
    with chat_server(lambda body: "Score: 3") as served:
        judge = Judge(served.url, "m", at_once=1)
        for _ in range(2):
            assert asyncio.run(judge(["p"] * 3, ["a", "b", "c"])) == [0.3] * 3
