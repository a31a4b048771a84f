"""The filter of the report's page: its script, run by node on the page that the report wrote."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qerl.report.page import write_report
from tests.report.test_completions import answers, keep
from tests.report.test_page import VOID, make_run

NODE = shutil.which("node")
DOM = Path(__file__).parents[1] / "support" / "page_dom.js"

pytestmark = pytest.mark.skipif(NODE is None, reason="The page's script is run by node, which is not here.")


class Tree(HTMLParser):
    """A page as nested {tag, attributes, children}, and its script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = {"tag": "", "attributes": {}, "children": []}
        self.open = [self.root]
        self.feed(text)
        self.close()
        (self.script,) = [
            "".join(element["children"]) for element in self.all(self.root) if element["tag"] == "script"
        ]

    def all(self, element):
        yield element
        for child in element["children"]:
            if not isinstance(child, str):
                yield from self.all(child)

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attributes": {name: value or "" for name, value in attrs}, "children": []}
        self.open[-1]["children"].append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        self.open[-1]["children"].append(data)


@pytest.fixture
def read(tmp_path):
    """``read(*acts)``: what is seen on the page of two runs as it opens, and after each act of its reader.

    Each run has a best and a worst group in steps 1 and 2, of rewards 1.05, 0.05 and 0.05, 0.05; the second
    run's last step is an evaluation's, and one of its samples has no reward.
    """
    parts = {"rewards/accuracy/mean": lambda step: 0.5, "rewards/format/mean": lambda step: 0.5}
    settings = {"num_generations": 2, "reward_weights": [1.0, 0.1]}
    runs = [make_run(tmp_path / name, steps=2, settings=settings, **parts) for name in ("one", "two")]
    rows = answers([1.0, 0.0, 0.0, 0.0])
    for run in runs:
        keep(run, 1, rows)
    keep(runs[0], 2, rows)
    keep(runs[1], 2, [*rows[:3], rows[3] | {"accuracy": None, "format": None}], "eval")
    write_report(runs, tmp_path / "r.html")
    page = Tree((tmp_path / "r.html").read_text(encoding="utf-8"))

    def shown(*acts):
        given = json.dumps({"tree": page.root, "script": page.script, "acts": acts})
        done = subprocess.run(
            [NODE, DOM], input=given, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return shown


def places(state):
    return [(group["run"], group["step"], group["rank"]) for group in state["groups"]]


def rewards(state):
    return [reward for group in state["groups"] for reward in group["samples"]]


def test_a_page_opens_with_everything_and_a_filter(read):
    (state,) = read()
    assert state["form"] and state["says"] == "16 completions"
    assert places(state) == [
        (run, step, rank)
        for run, steps in (("0", ("step 1", "step 2")), ("1", ("step 1", "step 2, eval")))
        for step in steps
        for rank in ("best", "worst")
    ]
    assert not any(group["open"] for group in state["groups"])


def test_groups_are_chosen_by_run_step_and_rank(read):
    _, run, step, rank = read(
        {"set": {"run": "1"}}, {"set": {"step": "step 2, eval"}}, {"set": {"rank": "worst"}}
    )
    assert {place[0] for place in places(run)} == {"1"} and run["says"] == "8 completions"
    assert places(step) == [("1", "step 2, eval", "best"), ("1", "step 2, eval", "worst")]
    assert places(rank) == [("1", "step 2, eval", "worst")] and rank["says"] == "2 completions"


def test_samples_are_chosen_by_reward_and_one_without_is_in_no_range(read):
    _, least, both, most = read(
        {"set": {"least": "1"}}, {"set": {"most": "1.04"}}, {"set": {"least": "", "most": "0.05"}}
    )
    assert rewards(least) == ["1.05"] * 4 and {place[2] for place in places(least)} == {"best"}
    assert rewards(both) == [] and both["groups"] == [] and both["says"] == "0 completions"
    assert rewards(most) == ["0.05"] * 11 and most["says"] == "11 completions"


def test_words_are_looked_for_in_prompts_and_completions_whatever_their_case(read):
    _, asked, said, nothing = read(
        {"set": {"words": "WHAT is 1 +"}}, {"set": {"words": "Answer 1 of"}}, {"set": {"words": "<b>"}}
    )
    assert {place[2] for place in places(asked)} == {"worst"} and asked["says"] == "8 completions"
    assert [len(group["samples"]) for group in said["groups"]] == [1] * 4
    assert nothing["groups"] == []


def test_a_click_opens_what_is_seen_and_a_reset_shows_all(read):
    _, _, opened, all_of_them, closed = read(
        {"set": {"rank": "best"}},
        {"click": "open"},
        {"reset": True},
        {"set": {"rank": "best"}, "click": "open"},
    )
    assert all(group["open"] for group in opened["groups"]) and len(opened["groups"]) == 4
    assert all_of_them["says"] == "16 completions"
    assert [group["open"] for group in all_of_them["groups"]] == [True, False] * 4
    assert not any(group["open"] for group in closed["groups"])


def test_the_form_is_never_sent(read):
    assert read({"submit": True})[1]["says"] == "16 completions"
