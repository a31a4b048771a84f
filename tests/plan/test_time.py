"""How long a step takes: carried over from measured steps, as others of them show; not known elsewhere."""

import re
from dataclasses import replace

import pytest

from qerl.cli import main
from qerl.plan.time import Step, carried_over, measured, nearest

STEP = Step("H200", "7b", "nvfp4", 8, 8, 256, 1024, 3.0, 0.6, "2026-11-27")


KNOWN = ["7b", "--gpu", "h200"]


def words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_each_measured_step_is_told_by_the_nearest_other_one():
    told = 0
    for step in measured():
        others = [
            other
            for other in measured()
            if (other.card, other.shape, other.weights) == (step.card, step.shape, step.weights)
            and other != step
        ]
        found = nearest(others, step.samples, step.prompt_tokens, step.completion_tokens)
        if found is not None:
            lengths = step.prompt_tokens, step.completion_tokens
            estimate = carried_over(found, step.samples, step.samples, step.group, *lengths)
            assert 0.75 < estimate.total_s / (step.rollout_s + step.update_s) < 4 / 3, (step, found)
            told += 1
    assert told >= 12


def test_by_hand():
    """Twice the length and 64 samples, 16 at a time: four waves, each 2^(1/3) wider."""
    found = carried_over(STEP, 64, 16, 8, 256, 2048)
    assert found.rollout_s == pytest.approx(3.0 * 2 * 2 ** (1 / 3) * 4)
    assert found.update_s == pytest.approx(0.6 * (8 * 256 + 64 * 2048) / (256 + 8 * 1024))


def test_of_two_that_are_as_near_the_one_of_more_tokens_is_taken():
    """Half of 512 and its double: the update of the longer step is the surer one to carry over."""
    short, long = (replace(STEP, completion_tokens=tokens) for tokens in (256, 1024))
    assert nearest([short, long], 8, 256, 512) == nearest([long, short], 8, 256, 512) == long


def test_steps_share_the_rollout_that_they_learn_from(capsys):
    """What a step takes of rollout and update, of 8 completions by default."""
    lengths = ["--max_completion_length", "1024", "--max_prompt_length", "256", "--gpu", "h200"]

    def seconds(*more):
        assert main(["plan", "7b", *lengths, *more]) == 0
        found = re.search(r"([\d.]+) s of rollout, ([\d.]+) s of update", words(capsys))
        return float(found[1]), float(found[2])

    rollout, update = seconds()
    assert seconds("--num_iterations", "4") == (pytest.approx(rollout / 4, abs=0.06), update)
    of_eight, same = seconds("--steps_per_generation", "8")
    assert of_eight == pytest.approx(rollout * 8 ** (1 / 3) / 8, rel=0.1), "64 at a time, for 8 steps"
    assert same == pytest.approx(update, abs=0.11), "carried over from the step of 128"


def test_of_several_gpus_it_says_that_one_was_measured(capsys):
    words_ = ["plan", "7b", "--gpu", "h200", "--max_prompt_length", "256", "--max_completion_length", "1024"]
    assert main([*words_, "--processes", "8", "--max_steps", "1000", "--price", "3"]) == 0
    assert "is for one GPU; communication between several is extra and was not measured." in words(capsys)
    assert main(words_) == 0
    assert "several" not in words(capsys)


def test_lengths_that_are_far_are_not_carried_over():
    assert nearest([STEP], 8, 256, 1024) == STEP
    assert nearest([STEP], 8, 4096, 1024) is None
    assert nearest([STEP], 8, 256, 16384) is None
    assert nearest([STEP], 128, 256, 1024) == STEP
    assert nearest([STEP], 256, 256, 1024) is None


def test_a_plan_says_time_and_cost_where_they_are_known(capsys):
    lengths = ["--max_completion_length", "1024", "--max_prompt_length", "256"]
    assert main(["plan", "7b", "--gpu", "h200", *lengths, "--max_steps", "1000", "--price", "3"]) == 0
    said = words(capsys)
    assert "A step takes about 3.2 s (2.6 s of rollout, 0.6 s of update)" in said
    assert "on H200 (2026-11-27). 1000 steps take about 0:53:50, which cost about 2.69, without" in said
    assert main(["plan", "7b", "--gpu", "h200", *lengths]) == 0
    assert "Set max_steps for the time of the run." in words(capsys)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ["7b"],
            "not known for a GPU that is known by its memory alone; steps were measured on H100 and H200.",
        ),
        (["7b", "--gpu", "rtx4090"], "not known for such steps of this model on RTX 4090;"),
        (["1.5b", "--gpu", "h200"], "not known for such steps of this model on H200;"),
        (["7b", "--gpu", "h200", "--weights", "mxfp4"], "not known for"),
        ([*KNOWN, "--algorithm", "sft"], "not known for supervised fine-tuning;"),
        ([*KNOWN, "--lora_dropout", "0.1"], "not known for a run with lora_dropout;"),
        ([*KNOWN, "--beta", "0.04"], "not known for a run with a KL penalty (beta);"),
        ([*KNOWN, "--task", "gsm8k", "--tools", "calculator"], "for a run with an environment or tools;"),
        ([*KNOWN, "--max_staleness", "1"], "not known for a run with max_staleness;"),
        ([*KNOWN, "--dynamic_sampling_batches", "2"], "not known for a run with dynamic sampling;"),
    ],
)
def test_elsewhere_it_says_that_it_is_not_known(capsys, asked, said):
    assert main(["plan", *asked]) == 0
    assert said in words(capsys)


@pytest.mark.parametrize("price", ["cheap", ".inf", ".nan", "true", "-1"])
def test_a_price_is_a_number(capsys, price):
    assert main(["plan", "7b", "--price", price]) == 2
    said = {".inf": "inf", ".nan": "nan", "true": "True"}.get(price, price)
    assert f"--price is {said}; it must be the price of a GPU per hour" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_or_is_for_a_server_says_no_time(capsys):
    assert main(["plan", "72b", "--gpu", "24"]) == 1
    assert "step takes" not in words(capsys)
    assert main(["plan", "7b", "--gpu", "h200", "--adapters", "2"]) == 0
    assert "step takes" not in words(capsys)
