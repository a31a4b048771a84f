"""Scores, intervals and the proof that an adapter is in use."""

import itertools
import json
import math

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate, held_out
from qerl.eval.interval import pass_at
from qerl.eval.policy import prove_adapter
from qerl.eval.record import Record
from qerl.lora.adapter import add_lora, check_adapter
from qerl.models.load import load_model
from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult, SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.tasks import get_task
from tests.support.models import move_adapter

QUIET = Console(quiet=True)


class OracleEngine(RolloutEngine):
    """Writes the right answer for the first `right` samples of each problem and a wrong one after."""

    def __init__(self, tokenizer, answers: list[str], right: list[int]) -> None:
        self.tokenizer, self.answers, self.right = tokenizer, answers, right

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None, ended=None):
        completions = []
        for answer, right in zip(self.answers, self.right, strict=True):
            for sample in range(samples_per_prompt):
                text = f"#### {answer}" if sample < right else f"#### {answer}1"
                ids = self.tokenizer(text)["input_ids"]
                completions.append(Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop"))
        return RolloutResult(completions, 0, 0, 0.0)


@pytest.fixture
def task():
    return get_task("arithmetic", test_size=8)


def score(engine, tokenizer, task, problems, params, samples=1, **kwargs):
    chosen = held_out(task, problems)
    return evaluate(engine, tokenizer, task, chosen, samples=samples, params=params, console=QUIET, **kwargs)


def oracle(tokenizer, task, right):
    return OracleEngine(tokenizer, task.test()["answer"][: len(right)], right)


def test_greedy_accuracy_and_files(tiny_tokenizer, task, tmp_path):
    engine = oracle(tiny_tokenizer, task, [1, 1, 0, 1])
    params = SamplingParams(max_tokens=32, temperature=0)
    record = Record(tmp_path / "e", {"seed": 0})
    result = score(engine, tiny_tokenizer, task, 4, params, record=record)
    assert (result.accuracy, result.problems) == (0.75, 4)
    assert result.interval == pytest.approx((0.2194, 0.9868), abs=1e-4), "prop.test(3, 4) of R"
    saved = json.loads((tmp_path / "e" / "result.json").read_text())
    assert saved["accuracy"] == 0.75
    rows = [json.loads(line) for line in (tmp_path / "e" / "completions.jsonl").read_text().splitlines()]
    assert [row["right"] for row in rows] == [True, True, False, True]


def test_sampled_accuracy_treats_the_problem_as_the_unit(tiny_tokenizer, task):
    engine = oracle(tiny_tokenizer, task, [4, 0])
    params = SamplingParams(max_tokens=32)
    result = score(engine, tiny_tokenizer, task, 2, params, samples=4)
    assert result.accuracy == 0.5
    assert result.pass_at == {1: 0.5, 2: 0.5, 4: 0.5}
    expected = pytest.approx((0.0267, 0.9733), abs=1e-4)
    assert result.interval == expected, "two problems that disagree are two trials, however many samples"


def test_answer_that_cannot_be_judged_is_wrong_and_counted(tiny_tokenizer, task, monkeypatch):
    def equal(found, want):
        if want == task.test()["answer"][1]:
            raise RecursionError
        return found == want

    monkeypatch.setattr("qerl.tasks.base.equal", equal)
    params = SamplingParams(max_tokens=32, temperature=0)
    engine = oracle(tiny_tokenizer, task, [1, 1])
    result = score(engine, tiny_tokenizer, task, 2, params, samples=1)
    assert (result.accuracy, result.failed) == (0.5, 1)
    assert "1 of them could not be judged" in result.summary()


def test_share_of_completions_that_state_an_answer(tiny_tokenizer, task, monkeypatch):
    monkeypatch.setattr(task, "extract", lambda text: None if text.endswith("1") else text.split()[-1])
    params = SamplingParams(max_tokens=32)
    engine = oracle(tiny_tokenizer, task, [3, 3])
    result = score(engine, tiny_tokenizer, task, 2, params, samples=4)
    expected = [3 * (not answer.endswith("1")) for answer in task.test()["answer"][:2]]
    assert result.answered == sum(expected) / 8
    assert result.failed == 0


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for right in range(5):
        for k in range(1, 5):
            draws = list(itertools.combinations([i < right for i in range(4)], k))
            assert pass_at(4, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_completions_that_end_in_an_error_are_counted(tiny_tokenizer, task):
    class Damaged(RolloutEngine):
        def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None, ended=None):
            return RolloutResult([Completion([0], [0.0], [0.0], "error") for _ in prompts], 0, 0, 0.0)

    params = SamplingParams(max_tokens=8, temperature=0)
    result = score(Damaged(), tiny_tokenizer, task, 3, params)
    assert result.errors == 3
    assert "3 completions ended at logits that are not finite" in result.summary()


def test_no_problems_is_an_error(task):
    with pytest.raises(QeRLError, match="No problems of the task"):
        held_out(task, 0)


def test_an_adapter_that_does_nothing_is_refused(tiny_model):
    model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
    with pytest.raises(QeRLError, match="changes no logit"):
        prove_adapter(model, [5, 6, 7])
    assert prove_adapter(move_adapter(model), [5, 6, 7]) > 1e-3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_that_diverged_is_refused(tiny_model, tmp_path, value):
    model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
    next(p for name, p in model.named_parameters() if "down_proj.lora_B" in name).data[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(QeRLError, match="diverged"):
        check_adapter(tmp_path)
    with pytest.raises(QeRLError, match="not finite"):
        prove_adapter(model, [5, 6, 7])


def test_each_completion_moves_the_bar_as_it_ends(llama_folder, tiny_tokenizer, tmp_path, monkeypatch):
    """A GPU gets a whole task in one call, so a bar that waited for the call would stand still."""
    model = load_model(llama_folder, "bf16", torch.float32, "cpu")
    seen = []
    monkeypatch.setattr(Progress, "advance", lambda self, bar, by=1: seen.append(by))
    task = get_task("arithmetic", test_size=3)
    params = SamplingParams(4, seed=1)
    score(PortableEngine(model, 0), tiny_tokenizer, task, 3, params, samples=2)
    assert seen == [1] * 6
