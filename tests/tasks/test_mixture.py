"""Several tasks in one run: each row is judged by its own task, and weights are shares of the prompts."""

import asyncio
import json
from collections import Counter

import pytest
from datasets import Dataset
from rich.console import Console

from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate, held_out
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult, SamplingParams
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task
from qerl.tasks.base import Task
from qerl.tasks.formats import get_format
from qerl.tasks.mixture import Mixture, Part
from qerl.tasks.together import guarded
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.preflight import preflight
from tests.support.tasks import questions
from tests.support.trainer import ScriptedEngine, settings


class Fixed(Task):
    """Problems that are their answers, and a reward of its own."""

    def __init__(self, name, count, form="hashes", **columns):
        super().__init__(name, get_format(form))
        self.count, self.columns = count, columns

    def train(self):
        rows = {"prompt": [self.prompt(f"{self.name} {i}") for i in range(self.count)]}
        return Dataset.from_dict(rows | {"answer": [str(i) for i in range(self.count)]} | self.columns)

    test = train


class WithBonus(Fixed):
    @property
    def rewards(self):
        async def bonus(prompts, completions, topic, log_extra=None, **_):
            if log_extra:
                log_extra("topic", topic)
            return [float(len(one)) for one in topic]

        return [*super().rewards, bonus]


def mixture(first=3, second=6, weights=(1.0, 1.0)):
    one = Fixed("one", first)
    two = WithBonus("two", second, "boxed", topic=["ab"] * second)
    return Mixture({"one": Part(one, weights[0]), "two": Part(two, weights[1])})


def call(mixture, name, rows, completions, **more):
    function = next(f for f in mixture.rewards if f.__name__ == name)
    columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
    got = function(prompts=[row["prompt"] for row in rows], completions=completions, **columns, **more)
    return asyncio.run(got) if asyncio.iscoroutine(got) else got


def test_what_the_tasks_log_of_their_samples_is_one_column():
    tasks = Mixture({name: Part(WithBonus(name, 1, topic=[name])) for name in ("first", "second")})
    rows, logged = list(tasks.train()), []
    log = {"log_extra": lambda *pair: logged.append(pair)}
    assert call(tasks, "bonus", rows[::-1], ["", ""], **log) == [6.0, 5.0]
    assert logged == [("topic", ["second", "first"])]


def test_each_row_is_judged_by_the_task_that_it_belongs_to():
    tasks = mixture()
    rows = list(tasks.train())
    chosen = [rows[1], rows[4], rows[4], rows[1]]
    completions = ["#### 1", "#### 1", r"\boxed{1}", r"\boxed{1}"]
    assert [f.__name__ for f in tasks.rewards] == ["accuracy", "format", "bonus"]
    assert call(tasks, "format", chosen, completions) == pytest.approx([0.1, 0.0, 0.1, 0.0])
    assert call(tasks, "accuracy", chosen, completions) == [1.0] * 4
    assert [tasks.of(row).name for row in chosen] == ["one", "two", "two", "one"]


def test_a_reward_that_a_task_does_not_have_is_none_for_its_rows():
    tasks, logged = mixture(), []
    rows = list(tasks.train())
    chosen = [rows[1], rows[4]]
    assert rows[1]["topic"] is None
    assert call(tasks, "bonus", chosen, ["", ""], log_extra=lambda *pair: logged.append(pair)) == [None, 2.0]
    assert logged == [("topic", [None, "ab"])]
    judge = guarded(tasks.rewards[2])
    columns = {name: [row[name] for row in chosen] for name in ("task", "topic")}
    assert judge(["", ""], ["", ""], **columns) == [None, 2.0]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1, 1), {"one": 6, "two": 6}), ((1, 4), {"one": 3, "two": 12}), ((3, 1), {"one": 18, "two": 6})],
)
def test_an_epoch_has_every_problem_and_the_shares_that_were_asked_for(weights, expected):
    tasks = mixture(weights=weights)
    rows = tasks.epoch(tasks.train())
    assert Counter(rows["task"]) == expected
    assert set(questions(rows)) == {f"one {i}" for i in range(3)} | {f"two {i}" for i in range(6)}
    of_one = Counter(question for question in questions(rows) if question.startswith("one"))
    assert max(of_one.values()) - min(of_one.values()) <= 1


def test_a_share_is_met_after_long_prompts_were_left_out():
    tasks = mixture(weights=(1, 3))
    short = tasks.train().filter(lambda row: row["answer"] != "0")
    assert Counter(tasks.epoch(short)["task"]) == {"one": 2, "two": 6}
    with pytest.raises(QeRLError, match="Task two of the mixture has no training prompt"):
        tasks.epoch(short.filter(lambda row: row["task"] == "one"))


def test_an_epoch_of_millions_of_rows_is_refused():
    tasks = mixture(weights=(1e6, 1))
    with pytest.raises(QeRLError, match="shows all 6 problems of task two has 6000006 rows"):
        tasks.epoch(tasks.train())


def test_every_beginning_of_the_held_out_problems_has_the_proportion_of_the_weights():
    rows = mixture(first=8, second=8, weights=(1, 3)).test()
    assert Counter(rows["task"][:8]) == {"one": 2, "two": 6}
    assert Counter(rows["task"]) == {"one": 8, "two": 8}


def test_recipes_name_the_tasks_with_weights_and_options():
    tasks = get_task("mixture", words={"task": "arithmetic", "weight": 2, "task_options": {"test_size": 4}},
                     arithmetic={"task_options": {"test_size": 2}})  # fmt: skip
    assert {name: part.weight for name, part in tasks.parts.items()} == {"words": 2.0, "arithmetic": 1.0}
    assert Counter(tasks.test()["task"]) == {"words": 4, "arithmetic": 2}
    tasks.opening = "<think>"
    assert tasks.opening == tasks.parts["arithmetic"].task.opening == "<think>"
    assert not tasks.on_hub and get_task("mixture", gsm8k={}).on_hub


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "has no tasks; name them in task_options"),
        ({"gsm9k": {}}, "'gsm9k' is unknown"),
        ({"a": 3}, "Task a of the mixture is 3; give a mapping with task, weight, task_options"),
        ({"gsm8k": {"wieght": 2}}, "unknown key 'wieght'; its keys are: task, weight, task_options"),
        ({"gsm8k": {"weight": 0}}, "The weight of task gsm8k is 0; it must be a number above 0"),
        ({"gsm8k": {"weight": True}}, "The weight of task gsm8k is True"),
        ({"arithmetic": {"task_options": [1]}}, "task_options of task arithmetic are"),
        ({"all": {"task": "mixture", "task_options": {"gsm8k": {}}}}, "Task all of the mixture is a mixture"),
    ],
)
def test_a_malformed_mixture_ends_in_a_sentence(parts, message):
    with pytest.raises(QeRLError, match=message):
        get_task("mixture", **parts)


def test_columns_that_cannot_be_joined_are_named():
    clash = {"one": Part(Fixed("one", 1, level=[1])), "two": Part(Fixed("two", 1, level=["hard"]))}
    with pytest.raises(QeRLError, match="The mixture has a column of values of different types"):
        Mixture(clash).train()
    with pytest.raises(QeRLError, match="The rows of task one have the mixture's own column 'task'"):
        Mixture({"one": Part(Fixed("one", 1, task=["x"]))}).test()


def test_a_question_has_no_form_before_its_task_is_named():
    with pytest.raises(QeRLError, match=r"none of its tasks \(one, two\); .* with --system"):
        mixture().prompt("What is 1 + 1?")


def test_a_dry_run_counts_the_prompts_of_an_epoch():
    parts = {"a": {"task": "arithmetic", "task_options": {"train_size": 2}},
             "arithmetic": {"weight": 3, "task_options": {"train_size": 2}}}  # fmt: skip
    fields = {"model": "nowhere/at-all", "task": "mixture", "task_options": parts, "output_dir": "o"}
    fields |= {"noise": False, "num_generations": 8, "report_to": "none"}
    preflight(QeRLConfig(**fields, per_device_train_batch_size=64))
    with pytest.raises(QeRLError, match="A step needs 9 prompts but the task mixture has 8"):
        preflight(QeRLConfig(**fields, per_device_train_batch_size=72))


class Half(RolloutEngine):
    """Answers the problems of task one, in the form of task one."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None, ended=None):
        texts = self.tokenizer.batch_decode(prompts)
        ids = [self.tokenizer("#### 1" if "one" in text else "none")["input_ids"] for text in texts]
        return RolloutResult([Completion(i, [0.0] * len(i), [0.0] * len(i), "stop") for i in ids], 0, 0, 0.0)


def test_an_evaluation_reads_answers_and_reports_accuracy_by_task(tiny_tokenizer):
    tasks = Mixture({"one": Part(Fixed("one", 2)), "two": Part(Fixed("two", 2, "boxed"))})
    result = evaluate(
        Half(tiny_tokenizer), tiny_tokenizer, tasks, held_out(tasks), samples=1,
        params=SamplingParams(max_tokens=32), console=Console(quiet=True),
    )  # fmt: skip
    assert {name: part.accuracy for name, part in result.strata.items()} == {"task_one": 0.5, "task_two": 0.0}
    assert result.answered == 0.5


def test_training_logs_accuracy_by_task_and_samples_the_same_again(tiny_model, tiny_tokenizer, tmp_path):
    tasks = mixture(weights=(1, 3))
    logs = []
    for folder in ("first", "second"):
        model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
        engine = ScriptedEngine(model.config.vocab_size)
        trainer = QeRLTrainer(
            model,
            tasks.rewards,
            QeRLConfig(**settings(tmp_path / folder, max_steps=2)),
            tasks.epoch(tasks.train()),
            engine=engine,
            processing_class=tiny_tokenizer,
        )
        trainer.train()
        logs.append(json.dumps([prompts for prompts, *_ in engine.calls]))
    row = trainer.state.log_history[0]
    assert {"rewards/accuracy/task_one", "rewards/accuracy/task_two", "rewards/bonus/mean"} <= row.keys()
    assert row["rewards/bonus/mean"] == 2.0, "rows of the other task have no share in it"
    assert logs[0] == logs[1]
