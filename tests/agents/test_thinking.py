"""Budgets of thinking: when thoughts are closed, what is written then, and what counts it."""

from contextlib import contextmanager

import pytest
from datasets import Dataset
from rich.console import Console

from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.thinking import ThinkingBudget
from qerl.agents.world import ToolWorld
from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate, held_out
from qerl.eval.request import Request
from qerl.eval.run import _sampled
from qerl.eval.sampling import in_one_turn
from qerl.models.decide import Choices
from qerl.rollout.engine import Completion, RolloutEngine, SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task
from qerl.trainer.grpo import QeRLTrainer
from tests.support.agents import call, multiply, tool_tokenizer
from tests.support.models import make_tiny_tokenizer
from tests.support.sessions import WholeTurns
from tests.support.trainer import as_batch, rollout_of, settings


def thinking(tokenizer):
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


TOKENIZER = thinking(make_tiny_tokenizer())


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("prompt", "before", "turn", "cut"),
    [
        ("a<think>\n", "", "abcdef", 3),
        ("a<think>", "", "ab", None),
        ("a<think>\n", "", "a</think>bcd", None),
        ("a<think>\n", "", "abc</think>d", 3),
        ("a<think>\n\n</think>\n\n", "", "abcd", None),
        ("write <think> first", "", "abcd", None),
        ("a", "", "abcd", None),
        ("a", "", "<think>bcd", 3),
        ("a", "", "<think>b</think>d", None),
        ("a<think>\n", "bcdefg", "abcd", None),
        ("a<think>\n", "bcd<think>", "abcd", 3),
        ("a<think>\n", "bc\n</think>\n\n", "abcd", None),
    ],
)
def test_thoughts_that_are_open_are_interrupted(prompt, before, turn, cut):
    budget, had = ThinkingBudget(TOKENIZER, 3), ids(before)
    every = [*had, *ids(turn)]
    expected = None if cut is None else len(had) + cut
    assert budget.end(ids(prompt), every, len(had), len(had)) == expected
    found, checked = None, len(had)
    while found is None and checked < len(every):
        found = budget.end(ids(prompt), every[: checked + 1], len(had), checked)
        checked += 1
    assert found == expected


@pytest.mark.parametrize(
    ("before", "turn", "others", "closed"),
    [
        ("a<think>\n", "abc</think>d", "", True),
        ("a", "<think>b</think>d", "", True),
        ("a", "b</think>d", "", False),  # nothing was open
        ("a<think>\n", "abcd", "", False),
        ("a<think>\n", "ab", "\n</think>\n\nc", False),  # the budget
        ("a<think>\n", "ab", "</think>c<think>d", False),
        ("a<think>\n\n</think>\n\n", "</think>", "", False),
    ],
)
def test_who_closes_thoughts_is_seen(before, turn, others, closed):
    drawn, written = ids(turn), ids(others)
    mask = [1] * len(drawn) + [0] * len(written)
    assert ThinkingBudget(TOKENIZER, 3).closed_by_policy(ids(before), [*drawn, *written], mask) == closed


def test_a_model_that_does_not_think_is_refused():
    with pytest.raises(QeRLError, match=r"as single tokens, which .* does not have"):
        ThinkingBudget(make_tiny_tokenizer(), 3)
    with pytest.raises(QeRLError, match="thinking_end is 'enough', which does not end the thinking"):
        ThinkingBudget(TOKENIZER, 3, "enough")


def test_settings_that_leave_no_answer_are_refused(tmp_path):
    with pytest.raises(
        QeRLError, match="thinking_budget is 6; it must be below max_completion_length, which is 6"
    ):
        QeRLConfig(**settings(tmp_path, thinking_budget=6))
    with pytest.raises(QeRLError, match="thinking_end needs a thinking_budget"):
        QeRLConfig(**settings(tmp_path, thinking_end="</think>"))
    run = Choices({"thinking_budget": 8, "thinking_end": "</think>"})
    asked, _ = _sampled(Request(max_tokens=9), run)
    assert asked.ends == {"thinking_budget": 8, "thinking_end": "</think>"}
    own = {"thinking_budget": 3, "thinking_end": " </think>"}
    assert _sampled(Request(max_tokens=9, **own), run)[0].ends == own
    with pytest.raises(QeRLError, match="thinking_budget is 8; it must be below --max_tokens, which is 8"):
        _sampled(Request(max_tokens=8), run)


def test_the_policy_goes_on_behind_the_closing(tiny_model):
    """With the numbers of its own places, and within the tokens that it has in all."""
    engine = PortableEngine(tiny_model("llama", vocab_size=len(TOKENIZER)), 0)
    prompts, budget = [ids("a<think>\n"), *map(ids, "bcdef")], ThinkingBudget(TOKENIZER, 5)
    params = SamplingParams(20, seed=3, stops=(budget,))
    whole = engine.generate(prompts, 1, SamplingParams(20, seed=3)).completions
    found = in_one_turn(engine, TOKENIZER, prompts, 1, params)
    closing, closed = TOKENIZER.decode(budget.closing_ids), 0
    for prompt, said, free in zip(prompts, found, whole, strict=True):
        if budget.end(prompt, free.token_ids, 0, 0):
            assert said.text.startswith(
                TOKENIZER.decode(free.token_ids[:5], skip_special_tokens=True) + closing
            )
            assert said.tokens == 20 - len(budget.closing_ids) and said.end == "length"
            closed += 1
        else:
            assert said.text == TOKENIZER.decode(free.token_ids, skip_special_tokens=True)
    assert 1 <= closed < len(prompts)
    assert [said.thoughts for said in found].count("budget") == closed
    (short,) = in_one_turn(engine, TOKENIZER, prompts[:1], 1, SamplingParams(7, seed=3, stops=(budget,)))
    assert (short.tokens, short.end) == (5, "length"), "no room to close and to go on"


class Turns(WholeTurns):
    """Says given parts of turns, each with the reason why it ends."""

    def __init__(self, tokenizer, parts):
        super().__init__(SamplingParams(1000), None)
        self.tokenizer, self.parts = tokenizer, iter(parts)

    def turn(self, sequence):
        text, reason = next(self.parts)
        drawn = self.tokenizer.encode(text, add_special_tokens=False)
        return Completion(drawn, [-1.0] * len(drawn), [2.0] * len(drawn), reason)


def test_a_turn_with_a_call_is_read_as_a_whole():
    tokenizer = thinking(tool_tokenizer())
    budget, end = ThinkingBudget(tokenizer, 3), tokenizer.eos_token
    parts = [
        ("abc", "pause"),
        (call("multiply", a=6, b=7) + end, "stop"),
        ("<think>d</think>42" + end, "stop"),
    ]
    pool, world = ToolPool(5.0, 100), ToolWorld(TurnTemplate(tokenizer, tools=True), [multiply])
    (found,) = run_trajectories(
        Turns(tokenizer, parts), [tokenizer.encode("q<think>")], 1, [world], pool, Limits(thinking=budget)
    )
    pool.close()
    assert (found.end, found.turns, found.calls, found.thoughts) == ("stop", 2, 1, "budget")
    assert [message["role"] for message in found.messages] == ["assistant", "tool", "assistant"]
    first = tokenizer.decode(found.token_ids[: found.first])
    assert first == "abc\n</think>\n\n" + parts[1][0]
    assert found.written[: found.first + 1] == [1, 1, 1, *[0] * len(budget.closing_ids)] + [1] * (
        found.first - 3 - len(budget.closing_ids)
    ) + [0]
    assert [lp for lp, own in zip(found.logprobs, found.written, strict=True) if not own] == [0] * (
        found.written.count(0)
    )


def test_training_masks_the_closing(tiny_model, tmp_path):
    seen = []

    def reward(completions, written_tokens, **_):
        seen.extend(zip(completions, written_tokens, strict=True))
        return [float(len(text) % 5) for text in completions]

    config = QeRLConfig(
        **settings(
            tmp_path, tuning="full", weights="bf16", max_completion_length=16, thinking_budget=4, max_steps=1
        )
    )
    data = Dataset.from_dict({"prompt": ["one<think>", "two<think>\n", "three", "four<think>\n"]})
    model = tiny_model("llama", vocab_size=len(TOKENIZER))
    trainer = QeRLTrainer(model, reward, config, data, processing_class=TOKENIZER)
    batch = as_batch(rollout_of(trainer, [row for row in data for _ in range(4)]))
    closing = trainer.rollouts.sampler._stops[0].closing_ids
    others = [(mask == 0).nonzero().flatten().tolist() for mask in batch["tool_mask"]]
    closed = [places for places in others if places]
    assert 6 < len(closed) <= 12 and closed == [list(range(4, 4 + len(closing)))] * len(closed)
    assert all(row[4 : 4 + len(closing)].tolist() == closing for row in batch["completion_ids"][:2])
    drawn = (batch["completion_mask"] * batch["tool_mask"]).sum(dim=1)
    assert [count for _, count in seen] == drawn.tolist()
    metrics = trainer._log.metrics["train"]
    assert metrics["completions/mean_length"][-1] == pytest.approx(drawn.float().mean().item())
    assert metrics["num_tokens"][-1] == batch["prompt_mask"].sum() + drawn.sum()
    assert sum("\n</think>\n\n" in text for text, _ in seen) == len(closed)
    assert metrics["thinking/closed_by_budget"][-1] == pytest.approx(len(closed) / 16)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


class Closing(RolloutEngine):
    """Says one of three things to each prompt: the first closes its thoughts, the others leave them open."""

    said = (("a</think>b", "stop"), ("abc", "pause"), ("a", "stop"))

    def generate(self, *args, **kwargs):
        raise AssertionError("there is a budget")

    @contextmanager
    def session(self, params, norm_offsets=None):
        more = [("d" + TOKENIZER.eos_token, "stop")] * 9
        parts = [self.said[i % 3] for i in range(self.rows)] + more
        yield Turns(TOKENIZER, parts)


def test_training_and_its_evaluations_log_who_closed_thoughts(tiny_model, tmp_path, monkeypatch):
    changes = {"tuning": "full", "weights": "bf16", "max_completion_length": 16, "thinking_budget": 3}
    config = QeRLConfig(**settings(tmp_path, **changes, max_steps=1, num_generations_eval=1))
    data = Dataset.from_dict({"prompt": ["one<think>", "two<think>\n", "three<think>", "four<think>\n"]})
    model = tiny_model("llama", vocab_size=len(TOKENIZER))
    trainer = QeRLTrainer(
        model, lambda completions, **_: [float(len(text)) for text in completions], config, data,
        eval_dataset=data.select(range(3)), processing_class=TOKENIZER, engine=(engine := Closing()),
    )  # fmt: skip
    engine.rows = 16
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert row["rollout/entropy"] == pytest.approx(2.0), "of drawn tokens alone"
    assert row["thinking/closed_by_model"] == 6 / 16 and row["thinking/closed_by_budget"] == 5 / 16
    engine.rows = 3
    found = trainer.evaluate()
    assert found["eval_thinking/closed_by_model"] == found["eval_thinking/closed_by_budget"] == 1 / 3


def test_an_evaluation_says_who_closed_thoughts():
    task = get_task("arithmetic", test_size=3, examples=0)

    engine = Closing()
    engine.rows, engine.said = 3, tuple((f"<think>{text}", why) for text, why in Closing.said)
    params = SamplingParams(16, temperature=0, stops=(ThinkingBudget(TOKENIZER, 3),))
    result = evaluate(
        engine, TOKENIZER, task, held_out(task), samples=1, params=params, console=Console(quiet=True)
    )
    assert result.thoughts_closed_by == {"model": 1 / 3, "budget": 1 / 3}
    assert "thoughts were closed in 33.3 % by the model and in 33.3 % by the budget" in result.summary()
