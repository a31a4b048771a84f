"""Every task takes a system prompt and an answer format."""

import json

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from qerl.tasks.formats import FORMATS


def rewards(task, text, answer):
    given = {"prompts": [None], "completions": [text], "answer": [answer]}
    return [reward(**given)[0] for reward in task.rewards]


@pytest.fixture
def own_file(tmp_path):
    lines = [{"question": f"What is {i}?", "answer": i} for i in range(8)]
    lines.append(
        {"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "8?"}], "answer": 8}
    )
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return f"jsonl:{tmp_path}/own.jsonl"


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_format_changes_instruction_worked_examples_and_rewards(name):
    task = get_task("arithmetic", answer_format=name, examples=2, train_size=1)
    (row,) = task.train()
    system, *shown, _ = row["prompt"]
    assert system == {"role": "system", "content": FORMATS[name].instruction}
    worked = [message["content"] for message in shown if message["role"] == "assistant"]
    assert len(worked) == 2 and all(task.format.followed(text) for text in worked)
    assert rewards(task, task.format.write("so", row["answer"]), row["answer"]) == [1.0, 0.1]
    others = [FORMATS[other].write("so", row["answer"]) for other in FORMATS if other not in (name, "number")]
    assert name == "number" or all(rewards(task, text, row["answer"])[1] == 0.0 for text in others)


def test_a_system_prompt_stands_in_place_of_the_instruction_and_leaves_the_format(own_file):
    for spec, options in (("arithmetic", {"train_size": 2}), (own_file, {})):
        plain = get_task(spec, **options)
        asked = get_task(spec, system_prompt="Be brief.", **options)
        silent = get_task(spec, system_prompt="", **options)
        first, other, none = (task.train()[0]["prompt"] for task in (plain, asked, silent))
        assert other == [{"role": "system", "content": "Be brief."}, *first[1:]]
        assert none == first[1:] and asked.format is plain.format
    assert asked.prompt("How many?")[0]["content"] == "Be brief."
    assert asked.train()[8]["prompt"][0]["content"] == "Own.", "a problem's own system message stays"


def test_tasks_of_the_hub_take_both_without_being_fetched():
    task = get_task("gsm8k", answer_format="tags", system_prompt="Use the tags.")
    assert task.prompt("1?")[0]["content"] == "Use the tags."
    assert task.extract("<think>a</think><answer>3</answer>") == "3"
    assert get_task("bigmath", levels=[3], answer_format="number").format.name == "number"


def test_the_way_to_ask_moves_no_problem_into_the_other_set(own_file):
    def held_out(**options):
        return [row["prompt"][-1]["content"] for row in get_task(own_file, test_size=4, **options).test()]

    assert (
        held_out()
        == held_out(answer_format="tags")
        == held_out(system_prompt="")
        == held_out(system_prompt="x")
    )


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("arithmetic", {"answer_format": "boxd"}, "Answer format 'boxd' is unknown; use one of: tags"),
        ("gsm8k", {"answer_format": ["boxed"]}, r"Answer format \['boxed'\] is unknown"),
        ("gsm8k", {"system_prompt": 3}, "system_prompt is 3; it must be text, empty for none"),
        ("gsm8k", {"system_promt": "x"}, r"'system_promt' \(did you mean 'system_prompt'\?\)"),
        ("mixture", {"gsm8k": {}, "system_prompt": "x"}, r"in the task_options of its tasks \(gsm8k\)"),
        ("arithmetic", {"calculator": True, "answer_format": "tags"}, "an answer format of its own; remove"),
    ],
)  # fmt: skip
def test_a_wrong_one_ends_in_a_sentence(spec, options, message):
    with pytest.raises(QeRLError, match=message):
        get_task(spec, **options)


def test_tasks_of_a_mixture_are_asked_each_in_its_own_way():
    part = {"task": "arithmetic", "task_options": {"system_prompt": "Hm.", "train_size": 1}}
    task = get_task("mixture", hm=part, words={"task": "arithmetic", "task_options": {"train_size": 1}})
    assert [row["prompt"][0]["content"] for row in task.train()] == ["Hm.", FORMATS["hashes"].instruction]
