"""Groups without signal are replaced by groups of fresh prompts."""

import torch
from datasets import Dataset
from qerl.trainer.batch import GROUP_KEY, group_index

from qerl.trainer.dynamic_sampling import FreshPrompts, fresh_rows, replace_groups

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


def test_replaced_group_is_padded_on_the_right_sides():
    old = batch_of([[1], [1], [2], [2]], [[3], [4], [5], [6]])
    new = batch_of([[7, 8], [7, 8]], [[9, 10], [11]])
    merged = replace_groups(old, [1], new, [0], group_size=2, pad=99)
    assert merged["prompt_ids"].tolist() == [[99, 1], [99, 1], [7, 8], [7, 8]]
    assert merged["prompt_mask"].tolist() == [[0, 1], [0, 1], [1, 1], [1, 1]]
    assert merged["completion_ids"].tolist() == [[3, 99], [4, 99], [9, 10], [11, 99]]
    assert merged["completion_mask"].tolist() == [[1, 0], [1, 0], [1, 1], [1, 0]]
    assert merged["advantages"].tolist() == [0, 1, 0, 1]
    assert merged[GROUP_KEY].tolist() == [0, 0, 1, 1], "not the index that the group had in its own rollout"


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    C = max(map(len, completions))
    batch = {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        "completion_ids": torch.tensor([c + [99] * (C - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (C - len(c)) for c in completions]),
        "advantages": torch.arange(len(prompts)).float() % 2,
        "num_items_in_batch": torch.tensor(4),
    }
    return batch | {GROUP_KEY: group_index(batch, 2)}
