"""Tasks: problems that are right and do not leak, rows of the Hub's data sets, files of the user's own."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.models import hub as models_hub
from qerl.tasks import get_task, hub
from qerl.tasks.arithmetic import LEVELS, Level, draw_problems, make_problem, split_of
from qerl.tasks.custom import load_reward
from qerl.tasks.holdout import holdout_rank

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def messages(role_and_content: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in role_and_content]


def questions(rows: Dataset) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


# Arithmetic


@pytest.mark.parametrize("level", LEVELS)
def test_arithmetic_answers_follow_from_the_story(level: str) -> None:
    for problem in draw_problems("train", LEVELS[level], 150, seed=3):
        numbers = [int(word) for word in problem.question.replace(".", " ").split() if word.isdigit()]
        value = numbers.pop(0)
        for line in problem.lines:
            left, operation, right, equals, result = line.split()
            assert (int(left), int(right), equals) == (value, numbers.pop(0), "=")
            value = OPERATIONS[operation](value, int(right))
            assert value == int(result) >= 1
        assert numbers == []
        assert problem.answer == value
        assert len(problem.lines) in LEVELS[level].steps
        assert problem.solution == "\n".join([*problem.lines, f"#### {value}"])


def test_arithmetic_sentences_mean_their_operation() -> None:
    words = {"+": {"more"}, "-": {"loses", "gives away", "sells", "takes"}, "*": {"each", "Each", "packs"}}
    for problem in draw_problems("train", LEVELS["wp1"], 200, seed=4):
        operation = problem.lines[0].split()[1]
        meant = {op for op, marks in words.items() if any(mark in problem.question for mark in marks)}
        assert meant == {operation}, problem.question


def test_arithmetic_sets_share_no_problem_whatever_their_seeds() -> None:
    for level in LEVELS.values():
        keys = {
            split: {problem.key for seed in (0, 1) for problem in draw_problems(split, level, 60, seed)}
            for split in ("train", "test", "examples")
        }
        assert keys["train"].isdisjoint(keys["test"])
        assert keys["train"].isdisjoint(keys["examples"])
        assert keys["test"].isdisjoint(keys["examples"])


def test_arithmetic_key_ignores_names_and_things() -> None:
    by_key: dict[str, set[str]] = {}
    rng = random.Random(0)
    for _ in range(3000):
        problem = make_problem(rng, LEVELS["wp1"])
        by_key.setdefault(problem.key, set()).add(problem.question)
        assert not any(name in problem.key for name in ("Tom", "Anna", "apples", "coins"))
    assert max(map(len, by_key.values())) > 1  # the same problem did come up with other names


def test_arithmetic_split_shares() -> None:
    splits = [split_of(f"problem {i}") for i in range(8000)]
    assert splits.count("test") / 8000 == pytest.approx(7 / 32, abs=0.02)
    assert splits.count("examples") / 8000 == pytest.approx(1 / 32, abs=0.01)


def test_arithmetic_is_seeded() -> None:
    first, again, other = (
        get_task("arithmetic", seed=seed, train_size=40, test_size=20) for seed in (5, 5, 6)
    )
    assert first.train().to_list() == again.train().to_list()
    assert first.test().to_list() == again.test().to_list()
    assert questions(first.train()) != questions(other.train())
    assert first.train()[0]["prompt"][:3] == other.train()[0]["prompt"][:3]  # runs share the example


def test_arithmetic_prompt_is_a_one_shot_chat_in_the_format_the_reward_expects() -> None:
    task = get_task("arithmetic", train_size=30, test_size=10)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (30, 10)
    assert len(set(questions(train))) == 30
    assert set(questions(train)).isdisjoint(questions(test))
    for row in train:
        system, example, solution, question = row["prompt"]
        assert [m["role"] for m in row["prompt"]] == ["system", "user", "assistant", "user"]
        assert "####" in system["content"]
        assert task.format.followed(solution["content"])
        assert example["content"] not in questions(train)
        assert question["content"].endswith("?")
    accuracy, form = task.rewards
    solved = f"1 + 1 = 2\n#### {train[0]['answer']}"
    wrong = f"1 + 1 = 2\n#### {int(train[0]['answer']) + 1}"
    prompts = [train[0]["prompt"]] * 3
    completions = [messages([("assistant", text)]) for text in (solved, wrong, train[0]["answer"])]
    answers = [train[0]["answer"]] * 3
    assert accuracy(prompts=prompts, completions=completions, answer=answers) == [1.0, 0.0, 0.0]
    assert form(prompts=prompts, completions=completions, answer=answers) == [0.1, 0.1, 0.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "wp3"}, "Arithmetic level 'wp3' is unknown; use one of: wp1,"),
        ({"examples": -1}, "examples is -1; it must be 0 or more"),
        ({"levle": "wp1"}, "Task arithmetic has no option 'levle' .did you mean 'level'"),
    ],
)
def test_arithmetic_refuses_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task("arithmetic", **options)


def test_arithmetic_says_when_a_level_has_too_few_problems() -> None:
    with pytest.raises(QeRLError, match="Only 0 of 5 arithmetic examples problems"):
        draw_problems("examples", Level((1,), 3), 5, seed=0, operations=("-",))  # "3 - 2" alone


# Names


def test_unknown_task_names_the_nearest_and_all_of_them() -> None:
    with pytest.raises(QeRLError, match=r"'gsm8' is unknown \(did you mean 'gsm8k'\?\)") as caught:
        get_task("gsm8")
    for name in ("arithmetic", "bigmath", "dapo-math", "math500", "aime24", "aime25", "amc23", "jsonl:PATH"):
        assert name in str(caught.value)
    with pytest.raises(QeRLError, match="Task 'jsonl:' is unknown"):
        get_task("jsonl:")


# The Hub's data sets


ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}],
    "bigmath": [{"prompt": "Half of one?", "solution": r"\frac{1}{2}", "llama8b_solve_rate": 0.1}],
    "dapo-math": [{"prompt": "Half of 68?", "solution": "34", "source_prompt": [{"content": "long"}]}],
    "math500": [{"problem": "Polar?", "solution": "long", "answer": r"\left( 3, \frac{\pi}{2} \right)"}],
    "aime24": [{"id": 60, "problem": "Walk?", "solution": "long", "answer": "073"}],
    "aime25": [{"problem": "Bases?", "answer": "70", "id": "0"}],
    "amc23": [{"id": 0, "question": "Cities?", "answer": 27.0, "url": "x"}],
}
EXPECTED = {
    "gsm8k": ("Two and two?", "1,004"),
    "bigmath": ("Half of one?", r"\frac{1}{2}"),
    "dapo-math": ("Half of 68?", "34"),
    "math500": ("Polar?", r"\left( 3, \frac{\pi}{2} \right)"),
    "aime24": ("Walk?", "073"),
    "aime25": ("Bases?", "70"),
    "amc23": ("Cities?", "27.0"),
}
SPLITS = {"aime24": "train", "bigmath": "train", "dapo-math": "train"}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Any, list[dict[str, Any]]]], None]:
    """``fake_hub({(dataset, config, split): rows})`` stands in for the Hub."""

    def install(contents: dict[Any, list[dict[str, Any]]]) -> None:
        def load(dataset: str, config: str | None, split: str, where: str) -> Dataset:
            return Dataset.from_list(contents[(dataset, config, split)])

        monkeypatch.setattr(hub, "_load", load)

    return install


@pytest.mark.parametrize("name", ROWS)
def test_hub_rows_become_prompts_and_answers(name: str, fake_hub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hub.SOURCES[name]
    config = "level_3" if name == "bigmath" else source.configs[0]
    fake_hub({(source.dataset, config, SPLITS.get(name, "test")): ROWS[name]})
    monkeypatch.setattr(hub, "HELD_OUT_SHARE", 1.0)
    task = get_task(name, **({"levels": [3]} if name == "bigmath" else {}))
    (row,) = task.test()
    question, answer = EXPECTED[name]
    mark = "####" if name == "gsm8k" else r"\boxed{}"
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert mark in row["prompt"][0]["content"]
    assert (row["prompt"][1]["content"], row["answer"]) == (question, answer)
    stated = f"#### {answer}" if name == "gsm8k" else rf"So \boxed{{{answer}}}"
    accuracy, form = task.rewards
    assert accuracy(prompts=[row["prompt"]], completions=[stated], answer=[answer]) == [1.0]
    assert form(prompts=[row["prompt"]], completions=[stated], answer=[answer]) == [0.1]


def test_gsm8k_holds_out_its_test_split(fake_hub) -> None:
    rows = [
        {"question": f"{split} {i}", "answer": f"#### {i}"} for split in ("train", "test") for i in range(9)
    ]
    fake_hub({("openai/gsm8k", "main", "train"): rows[:9], ("openai/gsm8k", "main", "test"): rows[9:]})
    task = get_task("gsm8k")
    assert questions(task.train()) == [f"train {i}" for i in range(9)]
    assert questions(task.test()) == [f"test {i}" for i in range(9)]


def big_math_rows(level: int, count: int = 400) -> list[dict[str, Any]]:
    return [{"prompt": f"Problem {i} of level {level}", "solution": str(i)} for i in range(count)]


def test_bigmath_reads_the_levels_and_holds_out_what_training_does_not_contain(fake_hub) -> None:
    name = hub.SOURCES["bigmath"].dataset
    contents = {(name, f"level_{level}", "train"): big_math_rows(level) for level in range(1, 6)}
    contents[(name, "level_5", "train")] += big_math_rows(4)  # a problem that occurs twice
    fake_hub(contents)
    task = get_task("bigmath")
    train, test = questions(task.train()), questions(task.test())
    everything = {row["prompt"] for level in (3, 4, 5) for row in big_math_rows(level)}
    assert set(train) | set(test) == everything
    assert set(train).isdisjoint(test)
    assert len(test) == len(set(test))
    assert len(test) == pytest.approx(1200 / 32, abs=15)
    assert {question[-1] for question in test[:15]} == {"3", "4", "5"}  # --limit sees all levels
    # The other choice of levels moves nothing from one set to the other.
    fives = get_task("bigmath", levels=[5, 4])
    assert set(questions(fives.test())) <= set(test)
    assert set(questions(fives.train())) <= set(train)


def test_dapo_math_holds_out_a_share(fake_hub) -> None:
    rows = [{"prompt": f"Problem {i}", "solution": str(i)} for i in range(640)]
    fake_hub({("open-r1/DAPO-Math-17k-Processed", "en", "train"): rows})
    train, test = (questions(s) for s in (get_task("dapo-math").train(), get_task("dapo-math").test()))
    assert len(train) + len(test) == 640
    assert 8 <= len(test) <= 35
    assert set(train).isdisjoint(test)


def test_holdout_position_is_uniform() -> None:
    places = sorted(holdout_rank(f"problem {i}") for i in range(4000))
    assert places[0] >= 0 and places[-1] < 1
    assert max(abs(place - i / 4000) for i, place in enumerate(places)) < 0.03


@pytest.mark.parametrize("levels", [[], [0], [3, 6], ["3"], 3, "345"])
def test_bigmath_refuses_other_levels(levels: Any) -> None:
    with pytest.raises(QeRLError, match="give a list of numbers from 1 to 5"):
        get_task("bigmath", levels=levels)


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "amc23"])
def test_benchmarks_have_no_training_problems(name: str) -> None:
    with pytest.raises(QeRLError, match=f"Task {name} is a benchmark without training problems"):
        get_task(name).train()


def test_hub_names_a_missing_column_and_a_row_without_answer(fake_hub) -> None:
    fake_hub({("math-ai/aime25", None, "test"): [{"question": "?", "answer": "1"}]})
    with pytest.raises(
        QeRLError, match="math-ai/aime25, split test, has no column 'problem' but question, answer"
    ):
        get_task("aime25").test()
    row = {"question": "?", "answer": "no mark"}
    fake_hub({("openai/gsm8k", "main", "train"): [ROWS["gsm8k"][0], row]})
    with pytest.raises(QeRLError, match=r"openai/gsm8k \(main\), split train, states no answer in row 1"):
        get_task("gsm8k").train()
    fake_hub({("math-ai/aime25", None, "test"): [{"problem": None, "answer": "1"}]})
    with pytest.raises(QeRLError, match="states no question in row 0"):
        get_task("aime25").test()


def test_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **options: Any) -> str:
        assert options["etag_timeout"] <= 5
        raise ConnectionError("Name or service not known\nsecond line")

    monkeypatch.setattr(models_hub, "snapshot_download", download)
    with pytest.raises(QeRLError, match="openai/gsm8k is neither on the Hub as seen from here nor") as caught:
        get_task("gsm8k").test()
    assert "Name or service not known" in str(caught.value)
    assert "second line" not in str(caught.value)


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``downloaded(parts, present, row)``: a data set as `push_to_hub` lays it out, parts sorted by name.

    The README lists all parts; only the files of those that are present were downloaded.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def make(parts: list[str], present: dict[str, list[str]], row: dict[str, str]) -> Path:
        folder = tmp_path / "snapshot"
        listed = "".join(
            f"- config_name: {part}\n  data_files:\n  - split: train\n    path: {part}/train-*\n"
            for part in sorted(parts)
        )
        for part, splits in present.items():
            (folder / part).mkdir(parents=True)
            for split in splits:
                rows = [{name: f"{part} {split} {i} {text}" for name, text in row.items()} for i in (0, 1)]
                for shard in (0, 1):
                    name = f"{split}-0000{shard}-of-00002.parquet"
                    Dataset.from_list(rows[shard : shard + 1]).to_parquet(folder / part / name)
        (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
        monkeypatch.setattr(models_hub, "snapshot_download", lambda *_, **__: str(folder))
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "parts", "wanted"),
    [
        ("gsm8k", ["main", "socratic"], ["main"]),
        ("dapo-math", ["all", "cn", "en"], ["en"]),
        ("bigmath", ["all", *(f"level_{i}" for i in range(1, 6))], ["level_3", "level_4", "level_5"]),
    ],
)
def test_hub_reads_a_folder_that_holds_the_wanted_part_alone(
    name: str, parts: list[str], wanted: list[str], downloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "HELD_OUT_SHARE", 0.0)
    source = hub.SOURCES[name]
    downloaded(parts, {part: ["train"] for part in wanted}, {source.question: "?", source.answer: "#### 7"})
    rows = get_task(name).train()
    assert questions(rows) == [f"{part} train {i} ?" for part in wanted for i in (0, 1)]


def test_hub_reads_a_data_set_without_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"problem": "1 + 1?", "answer": "2", "level": 1}\n')
    monkeypatch.setattr(models_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert questions(get_task("math500").test()) == ["1 + 1?"]


def test_hub_says_what_is_missing_and_what_to_do(downloaded) -> None:
    folder = downloaded(["main"], {"main": ["train"]}, {"question": "?", "answer": "#### 7"})
    with pytest.raises(
        QeRLError,
        match=r"openai/gsm8k \(main\), split test, cannot be read from .*snapshot "
        r"\(no file main/test-\*\.parquet\); run again with network, which downloads what is missing",
    ):
        get_task("gsm8k").test()
    for file in (folder / "main").iterdir():
        file.write_bytes(b"PAR1 cut off")
    with pytest.raises(QeRLError, match="split train, cannot be read from"):
        get_task("gsm8k").train()


# Files of the user's own


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """``jsonl(row, ...)`` writes a file, a row or a raw line each, and gives the task's name."""

    def write(*rows: Any, name: str = "data.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n" * bool(lines), encoding="utf-8")
        return f"jsonl:{tmp_path / name}"

    return write


def test_jsonl_takes_text_and_messages(jsonl) -> None:
    chat = messages([("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")])
    own = messages([("system", "Use tags."), ("user", "3 + 3?")])
    spec = jsonl(
        {"question": "7 x 6?", "answer": 42, "difficulty": 3},
        "",
        {"prompt": "7 / 2?", "answer": 3.5},
        {"messages": chat, "answer": " 4 "},
        {"prompt": own, "answer": 1e-7},
    )
    task = get_task(spec, answer_format="hashes")
    rows = task.train().to_list()
    instruction = messages([("system", task.format.instruction)])
    assert [row["prompt"] for row in rows] == [
        instruction + messages([("user", "7 x 6?")]),
        instruction + messages([("user", "7 / 2?")]),
        instruction + chat,
        own,
    ]
    assert [row["answer"] for row in rows] == ["42", "3.5", "4", "0.0000001"]
    assert [row["difficulty"] for row in rows] == [3, None, None, None]
    assert set(rows[0]) == {"prompt", "answer", "difficulty"}
    assert "####" in instruction[0]["content"]
    assert r"\boxed{}" in get_task(spec).train()[0]["prompt"][0]["content"]


def test_jsonl_keeps_columns_that_only_later_lines_have(jsonl) -> None:
    spec = jsonl({"question": "a?", "answer": "1"}, {"question": "b?", "answer": "2", "source": "book"})
    assert get_task(spec).train()["source"] == [None, "book"]


GOOD = {"question": "fine?", "answer": "yes"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "x"', "this is not JSON"),
        ('["x", "y"]', "must be a JSON object"),
        (
            {"text": "x", "answer": "1"},
            "exactly one of the columns prompt, question, messages; this has text, answer",
        ),
        ({"prompt": "x", "question": "y", "answer": "1"}, "this has prompt and question"),
        ({"question": " ", "answer": "1"}, "the problem is empty"),
        ({"question": 7, "answer": "1"}, "must be text, or a list of messages"),
        ({"messages": [{"role": "human", "content": "x"}], "answer": "1"}, "one of the roles system, user"),
        ({"messages": [{"role": "user"}], "answer": "1"}, "must be text, or a list of messages"),
        ({"messages": messages([("assistant", "x")]), "answer": "1"}, "the last message must be the user's"),
        ({"messages": [], "answer": "1"}, "the last message must be the user's"),
        ({"question": "x"}, "answer must be text or a number; it is null"),
        ({"question": "x", "answer": ""}, 'answer must be text or a number; it is ""'),
        ({"question": "x", "answer": True}, "it is true"),
        ('{"question": "x", "answer": NaN}', "it is NaN"),
        ({"question": "x", "answer": ["1"]}, "it is .*1"),
        ({"question": "x", "answer": "1", "completions": 3}, "the column completions has a name that reward"),
        ({"question": "x", "answer": "1", "log_metric": 3}, "the column log_metric has a name"),
        ({"question": "x", "answer": "1", "images": []}, "the column images has a name"),
        ({"question": "half \ud83d", "answer": "1"}, "half of a character .*ud83d"),
        ({"question": "x", "answer": "1", "note": {"deep": ["\udc00"]}}, "half of a character"),
        ('{"question": "x", "answer": 1e999}', "it is Infinity"),
        ('{"question": "x", "answer": ' + "[" * 100_000 + "}", "this is not JSON"),
        ('{"question": "x", "answer": ' + "9" * 5000 + "}", "this is not JSON .*4300 digits"),
    ],
)
def test_jsonl_errors_name_file_and_line(jsonl, line: Any, said: str) -> None:
    with pytest.raises(QeRLError, match=rf"data\.jsonl, line 3: .*{said}"):
        get_task(jsonl(GOOD, "", line, GOOD)).train()


def test_jsonl_refuses_files_without_problems(jsonl, tmp_path: Path) -> None:
    with pytest.raises(QeRLError, match=r"data\.jsonl has no problems"):
        get_task(jsonl()).train()
    with pytest.raises(QeRLError, match=r"The data file .*missing\.jsonl cannot be read: No such file"):
        get_task(f"jsonl:{tmp_path / 'missing.jsonl'}").train()
    (tmp_path / "latin.jsonl").write_bytes('{"question": "où?", "answer": "là"}\n'.encode("latin-1"))
    with pytest.raises(QeRLError, match=r"latin\.jsonl, line 1: this is not JSON"):
        get_task(f"jsonl:{tmp_path / 'latin.jsonl'}").train()


def test_jsonl_refuses_a_column_of_several_types(jsonl) -> None:
    rows = [GOOD | {"level": 3}, GOOD | {"level": "hard"}]
    with pytest.raises(QeRLError, match=r"A column of .*data\.jsonl has values of different types"):
        get_task(jsonl(*rows)).train()


def test_jsonl_takes_long_numbers_as_answers_and_refuses_them_in_other_columns(jsonl) -> None:
    assert get_task(jsonl({"question": "x", "answer": 10**400})).train()[0]["answer"] == "1" + "0" * 400
    with pytest.raises(QeRLError, match=r"too large a number .*text for numbers beyond 64 bits"):
        get_task(jsonl(GOOD | {"seen": 10**30})).train()


def test_jsonl_holds_out_the_same_problems_in_any_order(jsonl) -> None:
    rows = [{"question": f"{i}?", "answer": i} for i in range(20)] + [{"question": "3?", "answer": 3}]
    task = get_task(jsonl(*rows), test_size=6)
    train, test = questions(task.train()), questions(task.test())
    assert len(set(test)) == 6
    assert set(train).isdisjoint(test)
    assert sorted(train + test) == sorted(row["question"] for row in rows)
    shuffled = get_task(jsonl(*reversed(rows), name="reversed.jsonl"), test_size=6)
    assert set(questions(shuffled.test())) == set(test)
    larger = get_task(jsonl(*rows), test_size=7)
    assert set(test) < set(questions(larger.test()))


def test_jsonl_takes_held_out_problems_from_a_second_file(jsonl, tmp_path: Path) -> None:
    jsonl({"question": "held out?", "answer": "yes"}, name="test.jsonl")
    task = get_task(jsonl(GOOD), test_path=str(tmp_path / "test.jsonl"))
    assert questions(task.train()) == ["fine?"]
    assert questions(task.test()) == ["held out?"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has no held-out problems; set test_size, or name a second file"),
        ({"test_size": 2}, "test_size 2 leaves no training problem of the 2 different ones"),
        ({"test_size": -1}, "test_size is -1"),
        ({"test_size": 0.5}, "test_size is 0.5"),
        ({"test_size": 1, "test_path": "x"}, "give one of them"),
        ({"answer_format": "boxd"}, "Answer format 'boxd' is unknown"),
        ({"test_sise": 1}, r"has no option 'test_sise' \(did you mean 'test_size'"),
    ],
)
def test_jsonl_refuses_bad_options(jsonl, options: dict[str, Any], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task(jsonl(GOOD, {"question": "other?", "answer": 1}), **options).test()


# Rewards of the user's own


REWARDS = """
from math import isclose

def brief(prompts, completions, **columns):
    return [1.0 / len(c) for c in completions]

def _helper():
    pass

limit = 3
"""


def test_custom_reward_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    reward = load_reward(f"{tmp_path / 'mine.py'}:brief")
    assert reward.__name__ == "brief"
    assert reward(prompts=["p"] * 2, completions=["ab", "abcd"], answer=["", ""]) == [0.5, 0.25]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mine.py", "not of the form PATH.py:function"),
        ("mine.txt:brief", "not of the form PATH.py:function"),
        ("other.py:brief", r"The reward file .*other\.py does not exist"),
        ("mine.py:breif", r"mine\.py has no function 'breif'; it has: brief\.$"),
        ("mine.py:limit", "has no function 'limit'"),
        ("broken.py:brief", r"broken\.py cannot be run: ZeroDivisionError: division by zero"),
        ("syntax.py:brief", r"syntax\.py cannot be run: SyntaxError"),
    ],
)
def test_custom_reward_errors_say_what_to_mend(tmp_path: Path, spec: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def brief(:\n")
    with pytest.raises(QeRLError, match=said):
        load_reward(f"{tmp_path}/{spec}")
