"""The tree of a trajectory's conversations: messages found again as the tokens that were drawn."""

import pytest

from qerl.agents.template import TurnTemplate
from qerl.endpoint.bodies import ApiError, read_chat, read_completion
from qerl.endpoint.history import History
from qerl.rollout.engine import Completion
from tests.support.agents import tool_tokenizer
from tests.support.models import EOS, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
TEMPLATE = TurnTemplate(TOKENIZER)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def drawn(text, end=EOS, logprob=-1.0):
    ids = TOKENIZER(text + end)["input_ids"]
    return Completion(ids, [logprob] * len(ids), [0.5] * len(ids), "stop" if end else "length")


def say(history, messages, text, tools=(), **options):
    """Let the policy answer messages with a text."""
    turn = history.begin(history.place(messages, tools, TEMPLATE))
    history.end(turn, drawn(text, **options), said(text))
    return turn


def test_a_conversation_goes_on_with_the_tokens_that_were_drawn():
    history = History()
    first = history.begin(history.place([user("1+1?")], (), TEMPLATE))
    # The tokens say "2" in a way that the text does not tell of: rendered again, the pad token would be gone.
    odd = Completion([0, *TOKENIZER("2" + EOS)["input_ids"]], [-1.0, -2.0, -3.0], [0.1, 0.2, 0.3], "stop")
    history.end(first, odd, said("2"))
    place = history.place([user("1+1?"), said("2"), user("sure?")], (), TEMPLATE)
    assert place.parent is first
    assert first.token_ids + place.given == [
        *TOKENIZER.apply_chat_template([user("1+1?")], add_generation_prompt=True, return_dict=False),
        *odd.token_ids,
        *TOKENIZER("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")["input_ids"],
    ]
    second = history.begin(place)
    history.end(second, drawn("yes"), said("yes"))
    (branch,) = history.branches()
    assert branch.prompt_ids + branch.token_ids == second.token_ids
    assert sum(branch.written) == len(odd.token_ids) + len(drawn("yes").token_ids)
    assert branch.logprobs[:3] == [-1.0, -2.0, -3.0]
    assert all(value == 0.0 for value, own in zip(branch.logprobs, branch.written, strict=True) if not own)
    assert [message["content"] for message in branch.messages] == ["2", "sure?", "yes"]


def test_history_written_anew_forks_and_counts_no_token_twice():
    history = History()
    opened = [user("a")]
    one = say(history, opened, "b")
    two = say(history, [*opened, said("b"), user("c")], "d")
    fork = say(history, [*opened, said("b"), user("C")], "e")
    assert (two.parent, fork.parent) == (one, one)
    other = say(history, [*opened, said("B"), user("c")], "f")  # nothing of it was drawn
    assert other.parent is None
    branches = history.branches()
    assert [branch.last for branch in branches] == [two, fork, other]
    assert [branch.turns for branch in branches] == [[one, two], [fork], [other]]
    counts = [len(turn.drawn.token_ids) for turn in (one, two, fork, other)]
    assert sum(sum(branch.written) for branch in branches) == sum(counts)
    common = len(one.drawn.token_ids)
    assert branches[0].token_ids[:common] == branches[1].token_ids[:common] == one.drawn.token_ids
    assert branches[1].written[:common] == [0] * common
    assert branches[1].entropies[:common] == [0.0] * common
    for branch in branches:
        assert branch.prompt_ids + branch.token_ids == branch.last.token_ids


def test_siblings_are_forks_and_the_one_that_was_taken_goes_on():
    history = History()
    place = history.place([user("a")], (), TEMPLATE)
    turns = [history.begin(place) for _ in range(3)]
    for turn, text in zip(turns, "xyx", strict=True):
        history.end(turn, drawn(text), said(text))
    assert history.place([user("a"), said("y"), user("b")], (), TEMPLATE).parent is turns[1]
    assert (
        history.place([user("a"), said("x"), user("b")], (), TEMPLATE).parent is turns[0]
    )  # either would do
    assert [branch.last for branch in history.branches()] == turns


def test_tools_are_part_of_what_stands_before():
    tokenizer = tool_tokenizer()
    template = TurnTemplate(tokenizer, tools=True)
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    history = History()
    turn = history.begin(history.place([user("a")], [tool], template))
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    history.end(turn, drawn("call"), message)
    result = {"role": "tool", "name": "add", "content": "2"}
    asked = [user("a"), message, result]
    place = history.place(asked, [tool], template)
    assert place.parent is turn
    assert "<tool_response>\n2\n</tool_response>" in tokenizer.decode(place.given)
    assert history.place(asked, [], template).parent is None
    other = message | {
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    }
    assert history.place([user("a"), other, result], [tool], template).parent is None


def test_a_turn_that_was_cut_off_is_closed_before_another_follows():
    history = History()
    say(history, [user("a")], "bcd", end="")
    place = history.place([user("a"), said("bcd"), user("e")], (), TEMPLATE)
    assert TOKENIZER.decode(place.given).startswith(EOS + "\n<|im_start|>user")


def test_texts_and_token_ids_go_on_too():
    def encode(text, first=False):
        return TOKENIZER.encode(text, add_special_tokens=False)

    history = History()
    turn = history.begin(history.place_of_text("ab", encode))
    history.end(turn, drawn("cd", end=""), {"text": "cd", "over": False})
    place = history.place_of_text("abcdef", encode)
    assert (place.parent, place.given) == (turn, encode("ef"))
    assert history.place_of_text("abc", encode).parent is None
    ids = [*encode("abcd"), 7]
    assert history.place_of_text(ids, encode).parent is turn
    assert history.place_of_text(ids, encode).given == [7]
    over = history.begin(history.place_of_text("xy", encode))
    history.end(over, drawn("z"), {"text": "z", "over": True})
    assert history.place_of_text("xyz!", encode).parent is None  # its text does not say that it ended
    assert history.place_of_text([*over.token_ids, 7], encode).parent is over


def test_the_oldest_turns_are_forgotten_where_there_are_too_many_tokens():
    history = History(most_tokens=60)
    for number in range(20):
        say(history, [user(str(number))], "b")
    assert len(history) < 4
    assert history.place([user("19"), said("b"), user("c")], (), TEMPLATE).parent is not None
    assert history.place([user("0"), said("b"), user("c")], (), TEMPLATE).parent is None


def test_what_clients_make_of_a_message_is_the_same_message():
    plain = read_chat(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}')
    parts = read_chat(
        b'{"model": "m", "stream": true, "messages": [{"role": "user", "name": null, '
        b'"content": [{"type": "text", "text": "a"}]}], "tools": [], "store": false}'
    )
    assert plain.messages == parts.messages == (user("a"),)
    assert plain.fingerprint == parts.fingerprint
    assert read_chat(
        b'{"model": "m", "seed": 1, "messages": [{"role": "user", "content": "a"}]}'
    ).fingerprint != (plain.fingerprint)
    called = read_chat(
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
        b'"content": null, "refusal": null, "tool_calls": [{"id": "x", "type": "function", '
        b'"function": {"name": "add", '
        b'"arguments": "{\\"a\\": 1}"}}]}, {"role": "tool", "tool_call_id": "x", "content": "2"}]}'
    ).messages
    assert called[1]["content"] == ""
    assert called[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert called[2] == {"role": "tool", "name": "add", "content": "2"}


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"temperature": -1', "temperature"),
        ('"n": 0', "n"),
        ('"top_logprobs": 5', "top_logprobs"),
        ('"tool_choice": "required"', "tool_choice"),
        ('"response_format": {"type": "json_object"}', "response_format"),
        ('"frequency_penalty": 0.5', "frequency_penalty"),
        ('"logit_bias": {"5": 1}', "logit_bias"),
        ('"stop": ["a", ""]', "stop"),
        ('"max_tokens": "many"', "max_tokens"),
        ('"tools": [{"type": "web_search"}]', "tools"),
    ],
)
def test_what_is_not_there_is_refused(field, param):
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "a"}}], {field}}}'
    with pytest.raises(ApiError) as refused:
        read_chat(body.encode())
    assert refused.value.param == param
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"{}",
        b'{"model": "m", "messages": []}',
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"model": "m", "messages": [{"role": "assistant", "content": "a"}]}',
        b'{"model": "m", "messages": [{"role": "king", "content": "a"}]}',
    ],
)
def test_what_is_no_conversation_is_refused(body):
    with pytest.raises(ApiError):
        read_chat(body)


@pytest.mark.parametrize("prompt", ['""', "[]", "[-1]", '["a", "b"]', "null"])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ApiError):
        read_completion(f'{{"model": "m", "prompt": {prompt}}}'.encode())
