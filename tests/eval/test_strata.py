"""Accuracy of parts of a task's problems: in evaluation, in training, and where a reward fails."""

import pytest
from datasets import Dataset
from rich.console import Console

from qerl.eval.evaluate import evaluate, held_out
from qerl.eval.interval import accuracy_interval
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult, SamplingParams
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task
from qerl.tasks.guard import stratified
from qerl.tasks.together import guarded
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import ScriptedEngine, settings


class OneStepEngine(RolloutEngine):
    """Solves the problems whose answer it is told with the first sample, and no other."""

    def __init__(self, tokenizer, answers) -> None:
        self.tokenizer, self.answers = tokenizer, answers

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None, ended=None):
        texts = [
            f"#### {answer}" if sample == 0 and answer else "none"
            for answer in self.answers
            for sample in range(samples_per_prompt)
        ]
        ids = [self.tokenizer(text)["input_ids"] for text in texts]
        made = [Completion(i, [0.0] * len(i), [0.0] * len(i), "stop") for i in ids]
        return RolloutResult(made, 0, 0, 0.0)


@pytest.fixture
def task():
    return get_task("arithmetic", level="wp12", test_size=12)


def test_rows_of_a_mixed_level_say_how_many_steps_they_take(task):
    rows = task.test()
    assert set(rows["steps"]) == {1, 2}
    assert all(row["prompt"][-1]["content"].count(".") >= row["steps"] for row in rows)
    assert set(get_task("arithmetic", level="wp2", test_size=4).test()["steps"]) == {2}


@pytest.mark.parametrize("samples", [1, 2])
def test_a_score_has_its_strata(task, tiny_tokenizer, samples):
    problems = held_out(task)
    solved = [row["answer"] if row["steps"] == 1 else None for row in problems]
    easy = sum(map(bool, solved))
    result = evaluate(
        OneStepEngine(tiny_tokenizer, solved), tiny_tokenizer, task, problems,
        samples=samples, params=SamplingParams(max_tokens=32), console=Console(quiet=True),
    )  # fmt: skip
    one, two = result.strata["steps_1"], result.strata["steps_2"]
    assert list(result.strata) == ["steps_1", "steps_2"] and 0 < easy < 12
    assert (one.problems, one.accuracy, two.problems, two.accuracy) == (easy, 1 / samples, 12 - easy, 0.0)
    assert one.interval == accuracy_interval([1] * easy, samples)
    assert f"; steps_1 {100 / samples:.1f} %, steps_2 0.0 %; " in result.summary()


def test_a_task_without_strata_has_none(task, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(task, "strata", None)
    problems = held_out(task, 2)
    engine = OneStepEngine(tiny_tokenizer, [None, None])
    params = SamplingParams(max_tokens=32)
    result = evaluate(
        engine, tiny_tokenizer, task, problems, samples=1, params=params, console=Console(quiet=True)
    )
    assert result.strata == {} and "steps" not in result.summary()


def test_samples_on_which_a_reward_fails_are_zeros_of_their_stratum():
    def reward(prompts, completions, level, **_):
        if completions == ["bad"] or len(completions) > 1:
            raise ValueError
        return [1.0]

    logged = []
    judge = guarded(stratified(reward, "level"), 1.0)
    columns = {"level": ["a", "b", "a"], "log_metric": lambda *pair: logged.append(pair)}
    assert judge(["p"] * 3, ["good", "good", "bad"], **columns) == [1.0, 1.0, 0.0]
    in_a, in_b = ([v for n, v in logged if n == f"rewards/reward/level_{x}"] for x in "ab")
    assert (in_a, in_b) == ([1.0, 0.0], [1.0])


def test_training_and_its_evaluations_log_accuracy_by_stratum(tiny_model, tiny_tokenizer, tmp_path):
    def accuracy(prompts, completions, level, **_):
        return [float(one == "easy") for one in level]

    rows = {"prompt": ["one two", "three", "four five", "six"], "level": ["easy", "hard", "hard", "hard"]}
    model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
    trainer = QeRLTrainer(
        model,
        [stratified(accuracy, "level")],
        QeRLConfig(**settings(tmp_path, max_steps=1, per_device_eval_batch_size=16)),
        Dataset.from_dict(rows),
        Dataset.from_dict(rows),
        engine=ScriptedEngine(model.config.vocab_size),
        processing_class=tiny_tokenizer,
    )
    trainer.train()
    scores = trainer.evaluate()
    assert trainer.state.log_history[0]["rewards/accuracy/level_easy"] == 1.0
    assert trainer.state.log_history[0]["rewards/accuracy/level_hard"] == 0.0
    assert scores["eval_rewards/accuracy/level_easy"] == 1.0
    assert scores["eval_rewards/accuracy/level_hard"] == 0.0
    assert scores["eval_rewards/accuracy/mean"] == pytest.approx(0.25)
