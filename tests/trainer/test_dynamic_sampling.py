"""Groups without signal are replaced by groups of fresh prompts."""

from datasets import Dataset

from qerl.trainer.dynamic_sampling import FreshPrompts, fresh_rows

DATA = Dataset.from_dict({"prompt": [f"p{i}" for i in range(10)]})


def test_fresh_prompts_are_not_those_in_use_and_depend_on_the_key_alone():
    used = ["p0", "p1", "p2"]
    first = [row["prompt"] for row in fresh_rows(DATA, used, 5, 7, 3, 0)]
    assert len(set(first)) == 5
    assert not set(first) & set(used)
    assert first == [row["prompt"] for row in fresh_rows(DATA, used, 5, 7, 3, 0)]
    assert first != [row["prompt"] for row in fresh_rows(DATA, used, 5, 7, 4, 0)]


def test_a_small_data_set_repeats_rows():
    assert len(fresh_rows(DATA, DATA["prompt"][:9], 3, 0)) == 3
    assert len(fresh_rows(DATA, list(DATA["prompt"]), 3, 0)) == 3


def test_a_step_draws_no_prompt_twice_while_there_are_others():
    fresh = FreshPrompts(DATA, seed=7)
    fresh.note(3, ["p0", "p1"])
    drawn = [row["prompt"] for count in (3, 4, 1) for row in fresh.draw(count)]
    assert sorted([*drawn, "p0", "p1"]) == sorted(DATA["prompt"])
    fresh.note(4, ["p0", "p1"])
    other = [row["prompt"] for count in (3, 4, 1) for row in fresh.draw(count)]
    assert sorted(other) == sorted(drawn) and other != drawn, "another step draws in another order"
    fresh.note(3, ["p0", "p1"])
    assert drawn == [row["prompt"] for count in (3, 4, 1) for row in fresh.draw(count)]
