"""Scores, intervals and the proof that an adapter is in use."""

import json
import math

import pytest
from rich.console import Console

from qerl.errors import QeRLError
from qerl.eval.adapter_check import prove_adapter
from qerl.eval.evaluate import evaluate, pass_at, wilson
from qerl.lora import add_lora
from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult, SamplingParams
from qerl.tasks import get_task

QUIET = Console(quiet=True)


class OracleEngine(RolloutEngine):
    """Writes the right answer for the first `right` samples of each problem and a wrong one after."""

    def __init__(self, tokenizer, answers: list[str], right: list[int]) -> None:
        self.tokenizer, self.answers, self.right = tokenizer, answers, right

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None):
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


def oracle(tokenizer, task, right):
    return OracleEngine(tokenizer, task.test()["answer"][: len(right)], right)


def test_greedy_accuracy_and_files(tiny_tokenizer, task, tmp_path):
    engine = oracle(tiny_tokenizer, task, [1, 1, 0, 1])
    params = SamplingParams(max_tokens=32, temperature=0)
    result = evaluate(
        engine, tiny_tokenizer, task, samples=1, params=params, console=QUIET, limit=4, out=tmp_path / "e"
    )
    assert (result.accuracy, result.problems) == (0.75, 4)
    assert result.interval == pytest.approx((0.3006, 0.9544), abs=1e-4)
    saved = json.loads((tmp_path / "e" / "result.json").read_text())
    assert saved["accuracy"] == 0.75
    rows = [json.loads(line) for line in (tmp_path / "e" / "completions.jsonl").read_text().splitlines()]
    assert [row["right"] for row in rows] == [True, True, False, True]


def test_sampled_accuracy_treats_the_problem_as_the_unit(tiny_tokenizer, task):
    engine = oracle(tiny_tokenizer, task, [4, 0])
    params = SamplingParams(max_tokens=32)
    result = evaluate(engine, tiny_tokenizer, task, samples=4, params=params, console=QUIET, limit=2)
    assert result.accuracy == 0.5
    assert result.pass_at == {1: 0.5, 2: 0.5, 4: 0.5}
    assert result.interval == (0.0, 1.0), "two problems that disagree say nothing, however many samples"


def test_answer_that_cannot_be_judged_is_wrong_and_counted(tiny_tokenizer, task, monkeypatch):
    def equal(found, want):
        if want == task.test()["answer"][1]:
            raise RecursionError
        return found == want

    monkeypatch.setattr("qerl.tasks.base.equal", equal)
    params = SamplingParams(max_tokens=32, temperature=0)
    engine = oracle(tiny_tokenizer, task, [1, 1])
    result = evaluate(engine, tiny_tokenizer, task, samples=1, params=params, console=QUIET, limit=2)
    assert (result.accuracy, result.failed) == (0.5, 1)
    assert "1 of them could not be judged" in result.summary()


def test_share_of_completions_that_state_an_answer(tiny_tokenizer, task, monkeypatch):
    monkeypatch.setattr(task, "extract", lambda text: None if text.endswith("1") else text.split()[-1])
    params = SamplingParams(max_tokens=32)
    engine = oracle(tiny_tokenizer, task, [3, 3])
    result = evaluate(engine, tiny_tokenizer, task, samples=4, params=params, console=QUIET, limit=2)
    expected = [3 * (not answer.endswith("1")) for answer in task.test()["answer"][:2]]
    assert result.answered == sum(expected) / 8
    assert result.failed == 0


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for right in range(5):
        for k in range(1, 5):
            subsets = math.comb(4, k)
            assert pass_at(4, right, k) == pytest.approx(1 - math.comb(4 - right, k) / subsets)
    assert pass_at(4, 1, 1) == 0.25


def test_wilson_interval_against_published_values():
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)


def test_limit_zero_and_no_samples_are_errors(tiny_tokenizer, task):
    engine, params = oracle(tiny_tokenizer, task, []), SamplingParams(max_tokens=8)
    with pytest.raises(QeRLError, match="no problems"):
        evaluate(engine, tiny_tokenizer, task, samples=1, params=params, console=QUIET, limit=0)
    with pytest.raises(QeRLError, match="at least one completion"):
        evaluate(engine, tiny_tokenizer, task, samples=0, params=params, console=QUIET)


def test_an_adapter_that_does_nothing_is_refused(tiny_model):
    model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
    with pytest.raises(QeRLError, match="changes no logit"):
        prove_adapter(model, [5, 6, 7])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    assert prove_adapter(model, [5, 6, 7]) > 1e-3
