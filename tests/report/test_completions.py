"""Completions on the report's page: which, in what order, escaped, and few enough to stay small."""

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qerl.cli import main
from qerl.report.completions import CHARACTERS, SAMPLES, Message, read_table, spread
from qerl.report.page import document, filter_script, write_report
from qerl.report.runs import read_runs
from qerl.run_folder import table_path
from qerl.visible import shortened, visible
from tests.report.test_page import Page, make_run

HOSTILE = (
    '</pre></details></script><script>alert("x")</script><img src=x onerror=alert(1)>'
    "<!-- &lt; ]]> <style>*{display:none}</style> {} %s \x1b[2J\x00\u202egnp.exe\u0085"
)
ADDING = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(3)]


def keep(run: Path, step: int, rows: list[dict], evaluation: str = "") -> None:
    path = table_path(run, step, evaluation)
    path.parent.mkdir(exist_ok=True)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pyarrow.parquet.write_table(pyarrow.table({"step": [step] * len(rows), **columns}), path)


def answers(rewards, prompts=ADDING):
    """Two samples for each prompt, as a run on a chat model keeps them."""
    return [
        {
            "prompt": prompts[i // 2],
            "completion": [{"role": "assistant", "content": f"answer {i} of reward {reward}"}],
            "accuracy": reward,
            "format": 0.5,
            "advantage": 0.25,
        }
        for i, reward in enumerate(rewards)
    ]


@pytest.fixture
def run(tmp_path):
    """A run of four steps, two reward functions and groups of two samples."""
    settings = {"num_generations": 2, "reward_weights": [1.0, 0.1]}
    parts = {"rewards/accuracy/mean": lambda step: 0.5, "rewards/format/mean": lambda step: 0.5}
    return make_run(tmp_path / "run", steps=4, settings=settings, **parts)


def page_of(run, tmp_path, *options):
    assert main(["report", str(run), "--out", str(tmp_path / "r.html"), *options]) == 0
    return (tmp_path / "r.html").read_text(encoding="utf-8")


def groups(page):
    return [e for tag, e in page.elements if e.get("class") == "group"]


def test_best_and_worst_group_are_by_weighted_reward_with_its_parts(run, tmp_path):
    keep(run, 2, answers([0.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    page = Page(page_of(run, tmp_path))
    assert [(e["data-step"], e["data-rank"]) for e in groups(page)] == [
        ("step 2", "best"),
        ("step 2", "worst"),
    ]
    rewards = [float(e["data-reward"]) for _, e in page.elements if e.get("class") == "sample"]
    assert rewards == pytest.approx([1.05, 1.05, 0.05, 0.05])
    text = "".join(page.text)
    assert "What is 1 + 1?" in text and "What is 2 + 2?" in text and "What is 0 + 0?" not in text
    assert "accuracy 1 | format 0.5 | advantage 0.25" in text
    assert "best of 3 groups, mean reward 1.05" in text and "2 of 2 samples" in text


def test_turns_calls_of_tools_and_their_results_stand_in_their_order(run, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    turns = [
        {"role": "assistant", "content": "I count.", "name": None, "tool_calls": [call]},
        {"role": "tool", "content": "four", "name": "add", "tool_calls": None},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "It is 4."}],
            "name": None,
            "tool_calls": None,
        },
    ]
    with pytest.raises(pyarrow.ArrowInvalid):  # text and parts of a content are two types
        keep(run, 1, [{"prompt": "2 + 2?", "completion": turns, "accuracy": 1.0}] * 2)
    turns[2]["content"] = "It is 4."
    keep(run, 1, [{"prompt": "2 + 2?", "completion": turns, "accuracy": 1.0}] * 2)
    (sample, _) = read_table(read_runs([run])[0], table_path(run, 1), 1).groups[0].samples
    assert sample.messages == (
        Message("assistant", "I count.", (("add", '{"a": 2}'),)),
        Message("tool add", "four"),
        Message("assistant", "It is 4."),
    )
    text = "".join(Page(page_of(run, tmp_path)).text)
    order = [text.index(words) for words in ("2 + 2?", "I count.", 'calls add {"a": 2}', "four", "It is 4.")]
    assert order == sorted(order) and "only group" in text


def test_what_a_model_writes_is_seen_and_never_acts(run, tmp_path):
    rows = answers([1.0, 0.0])
    for row in rows:
        row["prompt"] = [{"role": HOSTILE, "content": HOSTILE}]
        call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
        row["completion"] = [{"role": "assistant", "content": HOSTILE, "tool_calls": [call]}]
        row[HOSTILE] = HOSTILE
    keep(run, 1, rows)
    text = page_of(run, tmp_path)
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and tags.count("style") == 1 and "img" not in tags
    assert not any(name.startswith("on") for _, e in page.elements for name in e)
    assert not re.search("[\x00\x1b\x85\u202e]", text)
    shown = "".join(page.text)
    assert visible(HOSTILE) in shown and "\u241b[2J\u2400[U+202E]gnp.exe[U+0085]" in shown


def test_the_page_lets_no_script_run_but_the_filter(run, tmp_path):
    keep(run, 1, answers([1.0, 0.0]))
    text = page_of(run, tmp_path)
    page = Page(text)
    (policy,) = [e["content"] for tag, e in page.elements if "http-equiv" in e]
    script = text[text.index("<script>") + 8 : text.index("</script>")]
    assert script == filter_script() and "</" not in script
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';") and f"script-src 'sha256-{digest}'" in policy
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", text)
    assert "script" not in document("t", "i", "b").replace("Content-Security-Policy", "")


def test_long_texts_many_samples_and_many_steps_keep_the_page_small(run, tmp_path):
    """Ten steps of sixty long samples of ampersands, which escaping makes five times as long."""
    long = "&" * 50_000 + "the end"
    rows = answers([1.0, 0.0] * 30, prompts=[[{"role": "user", "content": "same"}]] * 30)
    for row in rows:
        row["completion"] = [{"role": "assistant", "content": long}]
    (run / "config.yaml").write_text("num_generations: 30\n")
    rows[0]["completion"] = [{"role": "assistant", "content": "\u202e" * 50_000}]
    for step in range(1, 11):
        keep(run, step, rows)
    text = page_of(run, tmp_path, "--completions", "10")
    page = Page(text)
    assert len(text.encode()) < 6 * CHARACTERS
    assert len(groups(page)) == 20
    assert sum(e.get("class") == "sample" for _, e in page.elements) == 20 * SAMPLES
    assert "the end" in text and f"{SAMPLES} of 30 samples" in text


def test_steps_are_chosen_at_even_distances_and_the_last_evaluation_is_among_them(run, tmp_path):
    assert spread(range(1, 101), 4) == [1, 34, 67, 100]
    assert [spread([3, 5, 8], count) for count in (1, 2, 3, 9)] == [[8], [3, 8], [3, 5, 8], [3, 5, 8]]
    for step in range(1, 5):
        keep(run, step, answers([1.0, 0.0]))
        keep(run, step, answers([1.0, 0.0]), "eval")
    steps = [e["data-step"] for e in groups(Page(page_of(run, tmp_path, "--completions", "2")))]
    assert steps == ["step 1", "step 4", "step 4, eval"]
    assert groups(Page(page_of(run, tmp_path, "--completions", "0"))) == []


def test_samples_without_a_reward_come_last_and_say_so(run, tmp_path):
    keep(run, 1, [row | {"format": None} for row in answers([None, 0.0, None, None])])
    page = Page(page_of(run, tmp_path))
    assert [e["data-reward"] for _, e in page.elements if e.get("class") == "sample"] == ["0", "", "", ""]
    assert "mean reward none" in "".join(page.text)


def test_groups_of_a_run_without_settings_are_samples_of_the_same_prompt(run):
    (run / "config.yaml").unlink()
    keep(run, 1, answers([1.0] * 6))
    (one,) = read_runs([run])
    assert [len(group.samples) for group in read_table(one, table_path(run, 1), 1).groups] == [2, 2, 2]


def test_a_table_that_is_half_written_is_left_out_and_said(run, tmp_path, caplog):
    keep(run, 1, answers([1.0, 0.0]))
    keep(run, 2, answers([1.0, 0.0]))
    whole = table_path(run, 2).read_bytes()
    table_path(run, 2).write_bytes(whole[: len(whole) // 2])
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), table_path(run, 3))
    assert [e["data-step"] for e in groups(Page(page_of(run, tmp_path)))] == ["step 1"]
    assert "completions_00002.parquet is not a complete table" in caplog.text
    assert "completions_00003.parquet is not a complete table" in caplog.text


def test_long_text_keeps_its_beginning_and_its_end():
    text = shortened("a" * 600 + "b" * 400, 100)
    assert text.startswith("a" * 50 + "\n[... 900 ch") and text.endswith("\n" + "b" * 50)
    assert shortened("short", 100) == "short"


def test_runs_are_told_apart_in_the_filter(run, tmp_path):
    other = make_run(tmp_path / "other", steps=4, settings=json.loads('{"num_generations": 2}'))
    for folder in (run, other):
        keep(folder, 1, answers([1.0, 0.0]))
    write_report([run, other], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert [e["data-run"] for e in groups(page)] == ["0", "1"]
    assert [e["name"] for tag, e in page.elements if tag == "select"] == ["run", "step", "rank"]
