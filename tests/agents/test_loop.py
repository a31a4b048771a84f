"""Trajectories: turns, answers, limits, and what tools may do to a run."""

import asyncio
import threading
import time

import pytest

from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import Call, ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.world import TextWorld, ToolWorld
from qerl.calls.beside import Beside
from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from tests.support.agents import SayingEngine, call, multiply, tool_tokenizer
from tests.support.models import make_tiny_tokenizer

TOKENIZER = tool_tokenizer()
TEMPLATE = TurnTemplate(TOKENIZER, tools=True)
PROMPT = TOKENIZER("a question")["input_ids"]


def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "done"


def boom() -> str:
    """Fail."""
    raise ValueError("no fuse")


def leave() -> str:
    """Leave."""
    raise SystemExit


def spin() -> str:
    """Never end."""
    while True:
        pass


def big() -> str:
    """Return a megabyte."""
    return "x" * 2**20


async def later(seconds: float) -> str:
    """Wait without a thread.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "later"


async def spin_without_awaiting() -> str:
    """Never end, and hold up the loop."""
    return spin()


async def block(seconds: float) -> str:
    """Hold up the loop where nothing can be interrupted.

    Args:
        seconds: How long.
    """
    return slow(seconds)


TOOLS = [multiply, slow, boom, leave, spin, big, later, spin_without_awaiting, block]


def play(say, samples=1, tools=TOOLS, limits=None, most=2000, timeout=5.0, positions=None, worlds=None):
    """Trajectories of one prompt in which the policy says what `say(track, so_far)` returns."""
    engine = SayingEngine(TOKENIZER, say, positions)
    pool = ToolPool(timeout, output_limit=100, patience=0.25)
    worlds = worlds or [ToolWorld(TEMPLATE, tools) for _ in range(samples)]
    try:
        with engine.session(SamplingParams(most)) as session:
            return run_trajectories(session, [PROMPT], samples, worlds, pool, limits or Limits())
    finally:
        pool.close()


def once(text, then="So it is."):
    """Says a text, and something else when it was answered."""
    return lambda track, so_far: then if so_far else text


def test_a_call_is_answered_and_the_policy_goes_on():
    (found,) = play(once("Let me see. " + call("multiply", a=6, b=7)))
    assert [message["role"] for message in found.messages] == ["assistant", "tool", "assistant"]
    assert found.messages[1] == {"role": "tool", "name": "multiply", "content": "42"}
    assert (found.turns, found.calls, found.failures, found.end) == (2, 1, 0, "stop")
    told = [token for token, wrote in zip(found.token_ids, found.written, strict=True) if not wrote]
    assert TOKENIZER.decode(told) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(p == 0 for p, wrote in zip(found.logprobs, found.written, strict=True) if not wrote)
    assert all(p < 0 for p, wrote in zip(found.logprobs, found.written, strict=True) if wrote)
    assert len(found.token_ids) == len(found.entropies) == len(found.logprobs) == len(found.written)


def test_several_calls_of_a_turn_are_answered_in_order():
    both = call("later", seconds=0.05) + "\n" + call("multiply", a=2, b=2)
    (found,) = play(once(both))
    assert [message["content"] for message in found.messages[1:3]] == ["later", "4"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("boom"), "{'error': 'no fuse'}"),
        (call("leave"), "{'error': 'SystemExit'}"),
        (call("divide", a=1), "{'error': 'Tool divide not found.'}"),
        (call("multiply", a=1), "missing 1 required positional argument"),
        (call("big"), "x" * 100 + f" [{2**20 - 100} more characters]"),
        (call("spin"), "{'error': 'no result within 0.2 s'}"),
        (call("slow", seconds=3), "{'error': 'no result within 0.2 s'}"),
        (call("later", seconds=3), "{'error': 'no result within 0.2 s'}"),
        (call("spin_without_awaiting"), "{'error': 'no result within 0.2 s, and nothing was awaited'}"),
        (call("block", seconds=3), "{'error': 'no result within 0.2 s'}"),
    ],
)
def test_whatever_a_tool_does_the_policy_is_told(text, answer):
    (found,) = play(once(text), timeout=0.2)
    assert answer in found.messages[1]["content"]
    assert found.end == "stop" and found.failures == (0 if "big" in text else 1)


@pytest.mark.slow
def test_who_calls_after_the_loop_was_held_up_gets_a_new_one():
    def say(track, so_far):
        return [call("block", seconds=3), call("later", seconds=0.01), "So it is."][
            so_far.count("</tool_resp")
        ]

    (found,) = play(say, timeout=0.2)
    assert [m["content"] for m in found.messages if m["role"] == "tool"] == [
        "{'error': 'no result within 0.2 s'}",
        "later",
    ]


def test_a_failed_call_may_end_the_trajectory():
    failing, fine = play(
        lambda track, so_far: "Done." if so_far else call("boom") if track.sample == 0 else call("big"),
        samples=2,
        limits=Limits(tool_errors="end"),
    )
    assert (failing.end, failing.turns, len(failing.messages)) == ("tool", 1, 1)
    assert fine.end == "stop"


def test_rows_end_with_their_reason_when_the_budget_is_used_up():
    text = call("multiply", a=6, b=7)
    length = len(TOKENIZER(text)["input_ids"]) + 1
    answer = len(TEMPLATE.suffix_ids([{"role": "tool", "name": "multiply", "content": "42"}]))
    for most, turns, tokens in [
        (length - 1, 1, length - 1),  # the turn itself is cut off
        (length + answer, 1, length),  # the answer leaves no token to draw
        (length + answer + 3, 2, length + answer + 3),  # the second turn is cut off
    ]:
        (found,) = play(lambda track, so_far: text, most=most)
        assert (found.end, found.turns, len(found.token_ids)) == ("length", turns, tokens)
    (found,) = play(lambda track, so_far: text, positions=len(PROMPT) + length + answer + 3)
    assert (found.end, len(found.token_ids)) == ("length", length + answer + 3)
    (found,) = play(lambda track, so_far: text, positions=len(PROMPT))
    assert (found.end, found.token_ids, found.turns) == ("length", [], 0)


def test_the_number_of_answers_is_bounded():
    (found,) = play(lambda track, so_far: call("multiply", a=1, b=1), limits=Limits(iterations=3))
    assert (found.end, found.turns, found.calls) == ("turns", 4, 3)


@pytest.mark.slow
def test_nobody_waits_for_a_slow_tool():
    """The other sequence plays all its turns while the first one's tool works."""
    ends = []

    def say(track, so_far):
        if track.sample == 0:
            return "Done." if so_far else call("slow", seconds=1.5)
        ends.append(time.perf_counter())
        return call("multiply", a=2, b=2) if so_far.count("4") < 5 else "Done."

    start = time.perf_counter()
    first, second = play(say, samples=2)
    assert first.end == second.end == "stop" and second.turns > 5
    assert ends[-1] - start < 1.2


class Game:
    def reset(self, **row):
        self.heard = []

    def respond(self, text):
        self.heard.append(text)
        return None if text == "enough" else f"You said {text}."


def texts(say, **options):
    template, game = TurnTemplate(make_tiny_tokenizer()), Game()
    game.reset()
    (found,) = play(say, worlds=[TextWorld(template, game)], **options)
    return found, game


def test_an_environment_answers_texts_until_the_episode_is_over():
    found, game = texts(lambda track, so_far: "enough" if so_far else "hello")
    assert game.heard == ["hello", "enough"]
    assert found.messages == [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "You said hello."},
        {"role": "assistant", "content": "enough"},
    ]
    assert found.end == "stop"
    assert TOKENIZER.decode(found.token_ids).startswith("hello<|im_end|>\n<|im_start|>user\nYou said hello.")


def test_a_template_that_rewrites_turns_is_replaced_or_refused():
    """Qwen3's own writes an empty thought into the last turn alone."""
    tokenizer = tool_tokenizer()
    template = TurnTemplate(tokenizer)
    assert template.chat_template != tokenizer.chat_template
    suffix = template.suffix_ids([{"role": "user", "content": "Go on."}])
    assert tokenizer.decode(suffix) == "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}last{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(QeRLError, match="changes the tokens of a turn once another follows"):
        TurnTemplate(tokenizer)


def test_an_environment_hears_the_last_turn_that_it_may():
    found, game = texts(lambda track, so_far: "again", limits=Limits(iterations=3))
    assert (found.end, found.turns, len(game.heard)) == ("turns", 3, 3)


def test_threads_that_hang_are_bounded_and_end_when_they_can():
    before = set(threading.enumerate())  # threads of other tests may end at any time
    release = threading.Event()
    pool = ToolPool(timeout=0.01, output_limit=100, beside=Beside(at_once=4, stuck=3))
    for key in range(8):
        pool.submit(key, [Call("wait", release.wait, {"timeout": 20})])
    found = {}
    while pool.pending:
        found |= dict(pool.collect(wait=True))
    assert sorted(found) == list(range(8)) and all(answers[0].failed for answers in found.values())
    stuck = set(threading.enumerate()) - before
    assert 3 <= len(stuck) - 1 <= 4 + 3, "and the loop's thread"
    pool.submit(9, [Call("wait", release.wait)])
    ((_, (answer,)),) = pool.collect(wait=True)
    assert "calls hang" in answer.text
    release.set()
    until = time.monotonic() + 5
    while len(stuck & set(threading.enumerate())) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    pool.close()
    assert set(threading.enumerate()) <= before


def test_quick_answers_come_together_and_in_order():
    """However the threads take turns, so that a repeated run decodes the same rows together."""
    pool = ToolPool(timeout=5, output_limit=10)
    for key in range(20):
        pool.submit(key, [Call("nap", lambda key=key: time.sleep(0.02 - key / 1000))])
    assert [key for key, _ in pool.collect(wait=False)] == list(range(20))
    pool.close()


def echo(word: str) -> str:
    """Say it again.

    Args:
        word: What to say.
    """
    return word


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"name": "echo", "arguments": {"word": "\\ud83d"}}', id="in an argument"),
        pytest.param('{"name": "\\udc00", "arguments": {}}', id="in a name"),
        pytest.param('{"name": "echo", "arguments": {"\\ud800": 1}}', id="in an argument's name"),
    ],
)
def test_half_a_character_costs_nobody_the_run(text):
    """JSON can escape one, tokenizers and files take none."""
    (found,) = play(once(f"<tool_call>\n{text}\n</tool_call>"), tools=[echo])
    assert found.end == "stop" and [m["role"] for m in found.messages] == ["assistant", "tool", "assistant"]
    assert str(found.messages).encode("utf-8")
