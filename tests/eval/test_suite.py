"""Suites: what their files may say, and what several policies on several tasks come to."""

import io

import numpy as np
import pytest
from rich.console import Console

from qerl.errors import QeRLError
from qerl.eval.interval import accuracy_interval, mean_interval, pass_interval, score_interval
from qerl.eval.record import EvalResult
from qerl.eval.request import Request, load_suite, packaged
from qerl.eval.several import Standing, best_first, table, verdict
from qerl.tasks import get_task

SHARES = {"a": 0.2, "b": 0.38, "c": 0.4}


def result(accuracy, half=0.05, samples=1):
    return EvalResult(
        task="t", problems=100, samples=samples, accuracy=accuracy,
        interval=(accuracy - half, accuracy + half), pass_at={}, answered=1.0, failed=0, errors=0,
        truncated=0.0, mean_tokens=1.0, settings={},
    )  # fmt: skip


@pytest.mark.parametrize("name", packaged())
def test_suites_of_the_package_name_tasks_that_exist(name):
    suite = load_suite(name)
    assert suite.name == name and suite.about.endswith(".")
    for request in suite.requests.values():
        get_task(request.task, **request.task_options)


def test_an_entry_says_what_is_asked_and_the_command_line_wins(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "tasks:\n  gsm8k:\n  hard: {task: arithmetic, task_options: {level: wp2}, samples: 4, limit: 8}\n"
    )
    suite = load_suite(str(path), {"limit": 2, "seed": 5})
    assert suite.name == "mine"
    assert suite.requests == {
        "gsm8k": Request(task="gsm8k", task_options={}, limit=2, seed=5),
        "hard": Request(task="arithmetic", task_options={"level": "wp2"}, samples=4, limit=2, seed=5),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [gsm8k]", "must have the key tasks"),
        ("about: x", "must have the key tasks"),
        ("tasks: {}", "must have the key tasks"),
        ("tasks: {a: {}}\nmore: 1", "must have the key tasks"),
        ("tasks: {a: 3}", "a in .* is 3; it must be a mapping"),
        ("tasks: {a: {sample: 3}}", "unknown key 'sample' .did you mean 'samples'"),
        ("tasks: {a: {samples: 0}}", "a in .*: samples is 0"),
        ("tasks: {a: {samples: 1000000}}", "a in .*: samples is 1000000; it must be at most 65536"),
        ("tasks: {a: {top_p: 2.0}}", "a in .*: top_p is 2.0"),
        ("tasks: {a/b: {}}", "becomes a folder"),
        ("tasks: {..: {}}", "becomes a folder"),
    ],
)
def test_a_file_that_is_no_suite_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(QeRLError, match=message):
        load_suite(str(path))


def test_an_unknown_suite_is_told_the_nearest_name():
    with pytest.raises(QeRLError, match="no suite named 'maths'; did you mean 'math'"):
        load_suite("maths")
    with pytest.raises(QeRLError, match="cannot be read"):
        load_suite("./no.yaml")


def test_the_average_gives_each_task_the_same_weight_and_its_interval_is_by_hand():
    one = Standing("a", {"x": result(0.2, 0.03), "y": result(0.6, 0.04)})
    assert one.average == pytest.approx(0.4)
    assert one.interval == pytest.approx((0.4 - 0.025, 0.4 + 0.025)), "half of the root of 0.03^2 + 0.04^2"
    assert mean_interval([0.5], [(0.3, 0.9)]) == pytest.approx((0.3, 0.9)), "alone, it is its own"
    assert mean_interval([0.0, 0.0], [(0.0, 0.3), (0.0, 0.4)]) == pytest.approx((0.0, 0.25))


def test_the_best_is_named_and_what_may_be_chance_is_said():
    low, near, high = (Standing(name, {"x": result(share)}) for name, share in SHARES.items())
    assert [one.label for one in best_first([low, near, high])] == ["c", "b", "a"]
    assert verdict([low, high]) == "Best: c, 40.0 (35.0 to 45.0) %, 20.0 points above a."
    assert verdict([near, high]).endswith("within the interval of the best, so the choice may be chance.")
    assert "has the same score" in verdict([low, Standing("d", low.results)])


def test_the_table_has_a_row_for_each_policy_and_an_average_of_several_tasks():
    several = Standing("run/checkpoint-1", {"x": result(0.25), "aime": result(0.5, samples=8)})
    console = Console(width=120, file=io.StringIO())
    console.print(table([several]))
    text = console.file.getvalue()
    for words in ("run/checkpoint-1", "aime avg@8", "25.0 (20.0 to 30.0)", "average", "37.5 ("):
        assert words in text


def test_pass_at_1_is_the_accuracy_and_pass_at_all_a_share_of_problems():
    counts = [0, 1, 4, 2, 0, 3, 4, 0]
    assert pass_interval(counts, 4, 1) == accuracy_interval(counts, 4)
    assert pass_interval(counts, 4, 4) == score_interval(5 / 8, 8)


@pytest.mark.parametrize(("problems", "samples", "k"), [(10, 8, 4), (30, 16, 8), (200, 8, 4)])
def test_intervals_of_pass_at_k_cover(problems, samples, k):
    rng = np.random.default_rng(0)
    shares = []
    for mean, spread in ((0.02, 1), (0.1, 10), (0.5, 1), (0.9, 10), (0.9, 0)):
        size = (60, problems)
        population = rng.beta(mean * spread, (1 - mean) * spread, 100_000) if spread else np.array([mean])
        true = (1 - (1 - population) ** k).mean()
        difficulty = rng.beta(mean * spread, (1 - mean) * spread, size) if spread else np.full(size, mean)
        bounds = [pass_interval(row, samples, k) for row in rng.binomial(samples, difficulty).tolist()]
        shares.append(np.mean([low <= true <= high for low, high in bounds]))
    assert min(shares) >= 0.86, "95 % less three standard errors of 60 trials"
    assert np.mean(shares) >= 0.945
