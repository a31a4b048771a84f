"""External agents that play against a tiny policy over HTTP, and what an update would learn from."""

import gc
import itertools
import threading
import time
from contextlib import contextmanager

import pytest

from qerl.agents.chat import Templates
from qerl.agents.conversations import Conversations, check_others
from qerl.agents.loop import Limits
from qerl.agents.outside import Endpoint
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.endpoint.reply import Reply
from qerl.errors import QeRLError
from qerl.eval.sampling import in_conversations
from qerl.rollout.engine import SamplingParams
from tests.support.agents import SayingEngine, tool_tokenizer
from tests.support.endpoint import (
    TOKENIZER,
    Refused,
    chat,
    check_logprobs,
    message_of,
    play,
    post,
    rollouts,
    send,
    tiny_engine,
    user,
)
from tests.support.models import make_tiny_model


def three_turns(endpoint, row):
    """Keeps what it was answered in its row."""
    messages, row["seen"] = [user(row.get("say", "hi"))], []
    for number in range(3):
        answer = chat(endpoint, messages, max_tokens=8)
        row["seen"].append(answer)
        messages += [message_of(answer), user(str(number))]
    return 0.5


def kept(agent, found):
    """An agent that notes what another one was given in its row."""

    def wrapped(endpoint, row):
        reward = agent(endpoint, row)
        found.append(row)
        return reward

    return wrapped


def test_every_turn_is_trained_on_the_tokens_that_its_client_was_sent():
    rows, engine = [], tiny_engine()
    (environment,), (trajectory,) = play(kept(three_turns, rows), engine=engine)
    assert environment.get_reward() == 0.5
    seen = rows[0]["seen"]
    assert trajectory.turns == 3 and not trajectory.forks
    whole = [*trajectory.prompt_ids, *trajectory.token_ids]
    for answer in seen:
        ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        assert whole[: len(ids)] == ids
    drawn = [token for answer in seen for token in answer["choices"][0]["token_ids"]]
    own = [token for token, mine in zip(trajectory.token_ids, trajectory.written, strict=True) if mine]
    assert own == drawn
    check_logprobs(engine.model, trajectory)
    # One sequence was continued: each token was computed once.
    assert engine.last._started == 1
    assert engine.last.prefilled_tokens < len(whole)
    said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    assert said == [message_of(answer)["content"] for answer in seen]


def test_history_written_anew_is_a_fork_of_the_same_trajectory():
    def agent(endpoint, row):
        first = chat(endpoint, [user("a")], max_tokens=6)
        begun = [user("a"), message_of(first)]
        chat(endpoint, [*begun, user("b")], max_tokens=6)
        chat(endpoint, [*begun, user("c")], max_tokens=6)
        chat(endpoint, [user("a"), {"role": "assistant", "content": "never"}, user("b")], max_tokens=6)
        return 1.0

    engine = tiny_engine()
    _, (trajectory,) = play(agent, engine=engine)
    assert len(trajectory.forks) == 2
    every = [trajectory, *trajectory.forks]
    assert [each.turns for each in every] == [2, 1, 1]
    for each in every:
        check_logprobs(engine.model, each)
    assert every[1].prompt_ids == every[0].prompt_ids != every[2].prompt_ids


def test_a_fork_computes_what_its_trajectory_has_not_computed():
    asked, engine = [], tiny_engine()

    def agent(endpoint, row):
        first = chat(endpoint, [user("a" * 100)], max_tokens=6)
        begun = [user("a" * 100), message_of(first)]
        asked.extend([first, *(chat(endpoint, [*begun, user(one)], max_tokens=6) for one in "bc")])
        return 1.0

    _, (trajectory,) = play(agent, engine=engine)
    assert len(trajectory.forks) == 1 and engine.last._started == 2
    first, second, fork = (len(answer["prompt_token_ids"]) for answer in asked)
    drawn = first + len(asked[0]["choices"][0]["token_ids"])
    assert fork == second > drawn > 100
    # Of the second turn what is said anew, and the last drawn token, which was not read; of the fork no more.
    once = second - drawn + 1
    assert first + once < engine.last.prefilled_tokens <= first + 2 * once
    for one in (trajectory, *trajectory.forks):
        check_logprobs(engine.model, one)


def test_what_a_rollout_computed_is_not_taken_in_the_next():
    """In which the policy is another."""
    engine, counts = tiny_engine(), []
    for _ in range(2):
        play(lambda endpoint, row: chat(endpoint, [user("a" * 100)], max_tokens=6) and 1.0, engine=engine)
        counts.append(engine.last.prefilled_tokens)
    assert counts[0] == counts[1] > 100


def test_a_repeated_request_is_drawn_once_and_another_seed_draws_again():
    def agent(endpoint, row):
        answers = [chat(endpoint, [user("a")], max_tokens=6) for _ in range(2)]
        time.sleep(1.0)  # the answer's own time stays
        answers.append(chat(endpoint, [user("a")], max_tokens=6))
        assert answers[0] == answers[1] == answers[2]
        other = chat(endpoint, [user("a")], max_tokens=6, seed=7)
        assert other["choices"][0]["token_ids"] != answers[0]["choices"][0]["token_ids"]
        return 1.0

    (environment,), (trajectory,) = play(agent)
    assert environment.get_reward() == 1.0
    assert len(trajectory.forks) == 1


def test_a_play_is_repeated_with_the_same_tokens():
    rows = [{"say": str(number)} for number in range(6)]
    runs = [play(three_turns, rows)[1] for _ in range(2)]
    assert [t.token_ids for t in runs[0]] == [t.token_ids for t in runs[1]]
    assert len({tuple(t.token_ids) for t in runs[0]}) == 6


def test_several_choices_are_forks_and_the_chosen_one_goes_on():
    def agent(endpoint, row):
        answer = chat(endpoint, [user("a")], n=4, max_tokens=6)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        row["ids"] = [choice["token_ids"] for choice in answer["choices"]]
        chat(endpoint, [user("a"), message_of(answer, 2), user("b")], max_tokens=6)
        return 1.0

    rows, engine = [], tiny_engine()
    _, (trajectory,) = play(kept(agent, rows), engine=engine)
    every = [trajectory, *trajectory.forks]
    assert sorted(t.turns for t in every) == [1, 1, 1, 2]
    (long,) = (t for t in every if t.turns == 2)
    assert long.token_ids[: len(rows[0]["ids"][2])] == rows[0]["ids"][2]
    for each in every:
        check_logprobs(engine.model, each)


def test_limits_stops_and_probabilities_are_openais():
    def agent(endpoint, row):
        short = post(
            endpoint, "chat/completions", messages=[user("a")], max_completion_tokens=3, logprobs=True
        )
        choice = short["choices"][0]
        assert choice["finish_reason"] == "length"
        assert short["usage"]["completion_tokens"] == 3
        assert len(choice["logprobs"]["content"]) == 3
        assert all(each["logprob"] <= 0 for each in choice["logprobs"]["content"])
        whole = chat(endpoint, [user("a")], max_tokens=40, seed=5)
        text = message_of(whole)["content"]
        row["text"] = text
        stop = text[4:6]
        cut = chat(endpoint, [user("a")], max_tokens=41, seed=5, stop=[stop, "never that"])
        row["cut"], row["stop"] = cut, stop
        return 1.0

    rows = []
    (environment,), _ = play(kept(agent, rows))
    assert environment.get_reward() == 1.0
    (row,) = rows
    message = message_of(row["cut"])["content"]
    assert row["stop"] not in message
    assert row["cut"]["choices"][0]["finish_reason"] in ("stop", "length")
    assert row["stop"] in TOKENIZER.decode(row["cut"]["choices"][0]["token_ids"])


def test_texts_are_completed_and_go_on():
    def agent(endpoint, row):
        first = post(endpoint, "completions", prompt="ab", max_tokens=4, return_token_ids=True, logprobs=0)
        text = first["choices"][0]["text"]
        row["first"] = first
        if first["choices"][0]["finish_reason"] == "length":
            post(endpoint, "completions", prompt="ab" + text + "cd", max_tokens=4)
        ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        post(endpoint, "completions", prompt=[*ids, 9], max_tokens=4)
        return 1.0

    rows, engine = [], tiny_engine()
    (environment,), (trajectory,) = play(kept(agent, rows), engine=engine)
    assert environment.get_reward() == 1.0
    first = rows[0]["first"]
    assert first["object"] == "text_completion"
    assert len(first["choices"][0]["logprobs"]["token_logprobs"]) == 4
    assert trajectory.prompt_ids == TOKENIZER.encode("ab")
    for each in (trajectory, *trajectory.forks):
        check_logprobs(engine.model, each)
        assert each.prompt_ids == trajectory.prompt_ids


def test_refusals_have_openais_shape_and_cost_nothing():
    refused = []

    def agent(endpoint, row):
        asked = [
            lambda: send(endpoint, "models", None, key="sk-else"),
            lambda: send(endpoint, "chat/completions", {"model": "gpt-9", "messages": [user("a")]}),
            lambda: chat(endpoint, [user("a")], temperature=0.1),
            lambda: chat(endpoint, [user("a" * 600)]),
            lambda: chat(endpoint, [user("a")], tools=[{"type": "function", "function": {"name": "add"}}]),
            lambda: post(endpoint, "completions", prompt=[10**6], max_tokens=1),
            lambda: chat(endpoint, []),
        ]
        for each in asked:
            with pytest.raises(Refused) as error:
                each()
            refused.append(error.value)
        assert [model["id"] for model in send(endpoint, "models", None)["data"]] == [endpoint.model]
        assert send(endpoint, f"models/{endpoint.model}", None)["object"] == "model"
        chat(endpoint, [user("a")], temperature=1.0, top_p=1, max_tokens=4)
        return 1.0

    (environment,), (trajectory,) = play(agent)
    assert environment.get_reward() == 1.0
    assert [each.status for each in refused] == [401, 404, 400, 400, 400, 400, 400]
    for each in refused:
        assert set(each.error) == {"message", "type", "param", "code"}
    assert refused[3].error["code"] == "context_length_exceeded"
    assert "temperature" in refused[2].error["message"]
    assert trajectory.turns == 1 and not trajectory.forks


def test_an_evaluation_samples_as_it_is_asked_to():
    def agent(endpoint, row):
        return float(chat(endpoint, [user("a")], temperature=0, max_tokens=4)["usage"]["completion_tokens"])

    greedy = [play(agent, fixed=False, seed=seed)[1][0].token_ids for seed in (1, 2)]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize(("more", "sequences"), [({}, 1), ({"temperature": 0.5}, 2), ({"seed": 7}, 2)])
def test_a_turn_that_is_sampled_otherwise_has_a_sequence_of_its_own(more, sequences):
    def agent(endpoint, row):
        first = chat(endpoint, [user("a")], max_tokens=4)
        chat(endpoint, [user("a"), message_of(first), user("b")], max_tokens=4, **more)
        return 1.0

    engine = tiny_engine()
    (environment,), (trajectory,) = play(agent, engine=engine, fixed=False)
    assert environment.reward == 1.0 and trajectory.turns == 2
    assert engine.last._started == sequences


def test_a_conversation_ends_where_the_run_says():
    def agent(endpoint, row):
        messages = [user("a")]
        with pytest.raises(Refused) as error:
            for _ in range(50):
                messages += [message_of(chat(endpoint, messages)), user("b")]
        row["error"] = error.value.error
        return 1.0

    rows = []
    (environment,), (trajectory,) = play(kept(agent, rows), max_tokens=60)
    assert environment.get_reward() == 1.0
    assert rows[0]["error"]["code"] == "context_length_exceeded"
    assert len(trajectory.token_ids) <= 60


def test_an_agent_that_fails_or_hangs_costs_its_own_row():
    def agent(endpoint, row):
        chat(endpoint, [user("a")], max_tokens=4)
        if row["kind"] == "raises":
            raise ValueError("no such thing")
        if row["kind"] == "exits":
            raise SystemExit(3)
        if row["kind"] == "hangs":
            until = time.monotonic() + 40
            while time.monotonic() < until:
                time.sleep(0.01)
        if row["kind"] == "silent":
            return None
        return 1.0

    kinds = ["well", "raises", "exits", "hangs", "silent", "well"]
    begun = time.monotonic()
    environments, found = play(agent, [{"kind": kind} for kind in kinds], options={"timeout": 5.0})
    assert time.monotonic() - begun < 30
    assert [each.error is None for each in environments] == [True, False, False, False, False, True]
    assert "no such thing" in environments[1].error
    assert [each.turns for each in found] == [1] * 6
    assert environments[0].get_reward() == environments[5].get_reward() == 1.0


def test_one_that_fails_too_late_says_so_of_no_other_trajectory(monkeypatch):
    monkeypatch.setattr("qerl.agents.play.GRACE_S", -1.5)

    def agent(endpoint, row):
        time.sleep(row["stays"])
        if row["fails"]:
            raise ValueError("late")
        return 1.0

    environment, errors = Endpoint(agent, timeout=2.5), []
    with rollouts([environment]) as play_rows:
        for fails in (True, False):
            play_rows({"stays": 2.0, "fails": fails})
            errors.append(environment.error)
            environment.timeout = 60.0
    assert errors == ["The trajectory has no reward after 2.5 s.", None]
    assert environment.reward == 1.0


def test_an_agent_that_asks_nothing_leaves_a_sample_that_nobody_counts():
    (environment,), (trajectory,) = play(lambda endpoint, row: 0.0)
    assert environment.get_reward() == 0.0
    assert trajectory.token_ids and not any(trajectory.written)


def test_the_reward_may_be_sent_and_ends_the_trajectory():
    def agent(endpoint, row):
        chat(endpoint, [user("a")], max_tokens=4)
        with pytest.raises(Refused):
            send(endpoint, "reward", {"reward": "much"})
        send(endpoint, "reward", {"reward": 0.25})

    (environment,), _ = play(agent)
    assert environment.get_reward() == 0.25


def test_a_reward_that_was_sent_stands_when_the_time_is_up():
    def agent(endpoint, row):
        chat(endpoint, [user("a")], max_tokens=4)
        send(endpoint, "reward", {"reward": 0.25})
        time.sleep(5)

    (environment,), (trajectory,) = play(agent, options={"timeout": 1.0})
    assert environment.get_reward() == 0.25 and trajectory.turns == 1


def test_coroutines_are_agents_too():
    async def agent(endpoint, row):
        return float(len(row["word"]))

    environments, _ = play(agent, [{"word": "abc"}, {"word": "ab"}])
    assert [each.get_reward() for each in environments] == [3.0, 2.0]


def test_what_is_drawn_when_a_trajectory_ends_is_left_out():
    refused = []

    def agent(endpoint, row):
        def late():
            try:
                chat(endpoint, [user("b")])
            except Refused as error:
                refused.append(error)

        chat(endpoint, [user("a")], max_tokens=4)
        row["thread"] = threading.Thread(target=late)
        row["thread"].start()
        time.sleep(0.1)
        return 1.0

    rows = []
    _, (trajectory,) = play(kept(agent, rows), max_tokens=400, stop_token_ids=())
    rows[0]["thread"].join()
    assert trajectory.turns == 1 and not trajectory.forks
    assert refused[0].error["code"] == "trajectory_ended"


def test_an_evaluation_keeps_what_was_said():
    def agent(endpoint, row):
        answer = chat(endpoint, [user(row["word"])], max_tokens=4)
        chat(endpoint, [user(row["word"]), message_of(answer), user("b")], max_tokens=4)
        return 1.0

    others = check_others(None, lambda: Endpoint(agent))
    params = SamplingParams(60, stop_token_ids=(TOKENIZER.eos_token_id,))
    with Conversations(TOKENIZER, None, others, ToolPool(1.0, 100), Limits()) as conversations:
        rows = [{"prompt": [user("a")], "word": word} for word in ("x", "y")]
        engine = tiny_engine()
        said = in_conversations(conversations, engine, rows, 2, params, range(4))
        assert not engine._prefixes.nbytes
    assert [len(each.text) for each in said] == [3] * 4
    assert all(4 <= each.tokens <= 8 for each in said)
    assert said[0].text != said[1].text


def test_the_samples_of_a_group_share_their_prompt():
    together = threading.Barrier(8)

    def agent(endpoint, row):
        together.wait()
        chat(endpoint, [user("the same " * 10)], max_tokens=4)
        return 1.0

    engine = tiny_engine()
    _, found = play(agent, [{}] * 8, engine=engine)
    assert engine.last._started == 8
    assert engine.last._started_prompts < 8
    assert engine.last.prefilled_tokens < 8 * len(found[0].prompt_ids)
    assert len({tuple(each.token_ids) for each in found}) == 8


def test_the_samples_of_agents_that_take_their_time_to_begin_share_their_prompt():
    def agent(endpoint, row):
        time.sleep(row["after"])
        chat(endpoint, [user("the same " * 10)], max_tokens=4)
        return 1.0

    engine = tiny_engine()
    play(agent, [{"after": after} for after in (0, 0.1, 0.2)], engine=engine)
    assert (engine.last._started, engine.last._started_prompts) == (3, 1)


def test_an_agent_that_begins_late_holds_nobody_up():
    ended = {}

    def agent(endpoint, row):
        time.sleep(row["after"])
        chat(endpoint, [user("a")], max_tokens=4)
        ended[row["after"]] = time.monotonic()
        return 1.0

    play(agent, [{"after": after} for after in (0, 2.0)])
    assert ended[2.0] - ended[0] > 1.0


def test_answers_go_out_while_the_next_round_is_computed(monkeypatch):
    """One is short and the other long, so the short one's is told within a round, the other's behind all."""
    state, told, rendered = {"within": False}, {}, []
    settle, choice = Reply.settle, Templates.choice

    def noting(reply, outcome):
        told.setdefault(reply.name, state["within"])
        settle(reply, outcome)

    def rendering(*args):
        rendered.append(state["within"])
        return choice(*args)

    monkeypatch.setattr(Reply, "settle", noting)
    monkeypatch.setattr(Templates, "choice", rendering)

    class Rounds(type(tiny_engine())):
        @contextmanager
        def session(self, *args, **kwargs):
            with super().session(*args, **kwargs) as session:
                plain = session.next

                def next_round(one_round, meanwhile):
                    def within():
                        state["within"] = True
                        meanwhile()
                        state["within"] = False

                    return plain(one_round, within)

                session.next = next_round
                yield session

    def agent(endpoint, row):
        row["seen"] = chat(endpoint, [user(row["word"])], max_tokens=row["most"])
        return 1.0

    rows = []
    engine = Rounds(make_tiny_model(), pad_token_id=0)
    both = [{"word": "a", "most": 2}, {"word": "b", "most": 60}]
    play(kept(agent, rows), both, engine=engine, stop_token_ids=())
    names = [row["seen"]["id"].removeprefix("chatcmpl-") for row in sorted(rows, key=lambda row: row["most"])]
    assert [told[name] for name in names] == [True, False]
    assert rendered == [True, False]


def test_requests_are_rendered_beside_the_thread_that_draws_and_equal_prompts_once(monkeypatch):
    prompt_ids, suffix_ids, prompts, suffixes = TurnTemplate.prompt_ids, TurnTemplate.suffix_ids, [], []

    def of_prompt(self, messages, tools=()):
        prompts.append((threading.current_thread().name, messages[0]["content"]))
        return prompt_ids(self, messages, tools)

    def of_suffix(self, messages, last=None):
        suffixes.append(threading.current_thread().name)
        return suffix_ids(self, messages, last)

    monkeypatch.setattr(TurnTemplate, "prompt_ids", of_prompt)
    monkeypatch.setattr(TurnTemplate, "suffix_ids", of_suffix)
    _, found = play(three_turns, [{"say": say} for say in "aabab"])
    assert sorted(prompts) == [("qerl-endpoint", "a"), ("qerl-endpoint", "b")]
    assert len(suffixes) >= 10 and set(suffixes) == {"qerl-endpoint"}
    assert found[0].prompt_ids == found[1].prompt_ids != found[2].prompt_ids


def test_prompts_are_rendered_anew_with_other_tools_and_in_the_next_rollout(monkeypatch):
    """A template may write the date, and writes tools."""
    prompt_ids, rendered = TurnTemplate.prompt_ids, []

    def of_prompt(self, messages, tools=()):
        rendered.append([tool["function"]["name"] for tool in tools])
        return prompt_ids(self, messages, tools)

    def agent(endpoint, row):
        tools = [{"type": "function", "function": {"name": name}} for name in row["tools"]]
        chat(endpoint, [user("a")], tools=tools)
        return 1.0

    monkeypatch.setattr(TurnTemplate, "prompt_ids", of_prompt)
    tokenizer = tool_tokenizer()
    engine, rows = SayingEngine(tokenizer, lambda row, before: "hi"), [{"tools": []}, {"tools": ["add"]}]
    rows.append({"tools": ["mul"]})
    environments = [Endpoint(agent) for _ in rows]
    with rollouts(environments, engine=engine, tokenizer=tokenizer, max_tokens=2000) as play_rows:
        for number in (1, 2):
            found = play_rows(*rows)
            assert [each.reward for each in environments] == [1.0] * 3
            assert len({tuple(each.prompt_ids) for each in found}) == 3
            assert sorted(rendered) == sorted([[], ["add"], ["mul"]] * number)


def test_what_nobody_waits_for_is_drawn_no_further():
    gone = threading.Event()

    def agent(endpoint, row):
        if row["stays"]:
            gone.wait(60)
            chat(endpoint, [user("a")], max_tokens=60)
            return 1.0
        threading.Thread(target=refused, args=(endpoint,)).start()
        time.sleep(0.2)
        threading.Timer(0.1, gone.set).start()
        return 1.0

    def refused(endpoint):
        with pytest.raises(Refused, match="trajectory_ended"):
            chat(endpoint, [user("b")])

    engine = tiny_engine()
    play(agent, [{"stays": False}, {"stays": True}], engine=engine, max_tokens=4000, stop_token_ids=())
    assert engine.last._started == 2 and not engine.last._sequences


def test_a_rollout_that_fails_leaves_nobody_waiting_and_the_next_one_plays():
    class Failing(type(tiny_engine())):
        fails = True

        @contextmanager
        def session(self, *args, **kwargs):
            with super().session(*args, **kwargs) as session:
                plain, rounds = session.next, itertools.count()

                def next_round(**options):
                    if self.fails and next(rounds) == 3:
                        raise QeRLError("the device is gone")
                    return plain(**options)

                session.next = next_round
                yield session

    heard, over, before = [], threading.Event(), gc.get_threshold()

    def ask(endpoint):
        try:
            chat(endpoint, [user("a")], max_tokens=40)
        except Refused as error:
            heard.append((error.error["code"], endpoint))
        over.set()

    def agent(endpoint, row):
        over.clear()
        threading.Thread(target=ask, args=(endpoint,)).start()  # which outlives the agent's own
        over.wait(30)
        return 1.0

    engine, environment = Failing(make_tiny_model(), pad_token_id=0), Endpoint(agent, timeout=60.0)
    with rollouts([environment], engine=engine, stop_token_ids=()) as play_rows:
        with pytest.raises(QeRLError, match="the device is gone"):
            play_rows({})
        assert over.wait(10) and gc.get_threshold() == before
        ((code, endpoint),) = heard
        assert code == "trajectory_ended"
        with pytest.raises(Refused) as refused:
            send(endpoint, "models", None)
        assert refused.value.status == 401  # its key has ended with its rollout
        engine.fails = False
        (trajectory,) = play_rows({})
        assert (environment.error, environment.reward, trajectory.turns) == (None, 1.0, 1)


@pytest.mark.parametrize("before", [(700, 10, 10), (90_000, 5, 5), (0, 10, 10)])
def test_garbage_is_looked_at_more_seldom_in_a_rollout_and_as_before_behind_it(before):
    seen, given = [], gc.get_threshold()

    def agent(endpoint, row):
        seen.append(gc.get_threshold())
        raise ValueError("no")

    gc.set_threshold(*before)
    try:
        play(agent)
        behind = gc.get_threshold()
    finally:
        gc.set_threshold(*given)
    assert behind == before
    assert seen == [(max(before[0], 50_000) if before[0] else 0, *before[1:])]
