"""Tasks from the Hub's data sets: their rows, what they hold out, and what is said where they are missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.models import hub as models_hub
from qerl.tasks import get_task, hub
from qerl.tasks.base import holdout_rank
from tests.support.tasks import questions

# Names


def test_unknown_task_names_the_nearest_and_all_of_them() -> None:
    with pytest.raises(QeRLError, match=r"'gsm8' is unknown \(did you mean 'gsm8k'\?\)") as caught:
        get_task("gsm8")
    for name in ("arithmetic", "bigmath", "dapo-math", "math500", "aime24", "aime25", "amc23", "jsonl:PATH"):
        assert name in str(caught.value)
    with pytest.raises(QeRLError, match="Task 'jsonl:' is unknown"):
        get_task("jsonl:")
    with pytest.raises(QeRLError, match=r"'some/problems' is unknown; if it is a data set of the Hub"):
        get_task("some/problems")
    with pytest.raises(QeRLError, match=r"'openai/gsm8k' is unknown \(did you mean 'gsm8k'\?\)"):
        get_task("openai/gsm8k")


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

        monkeypatch.setattr(hub, "part_of", load)

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
    with pytest.raises(QeRLError, match="openai/gsm8k was found neither on the Hub nor") as caught:
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
        r"\(no file main/test-\*\.parquet\); run again with a network connection to download missing",
    ):
        get_task("gsm8k").test()
    for file in (folder / "main").iterdir():
        file.write_bytes(b"PAR1 cut off")
    with pytest.raises(QeRLError, match="split train, cannot be read from"):
        get_task("gsm8k").train()
