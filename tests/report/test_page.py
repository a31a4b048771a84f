"""The report: what is read, what is computed from it, and a page that stands on its own."""

import json
import logging
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from qerl.errors import QeRLError
from qerl.report import page
from qerl.report.curve import terminal_curve
from qerl.report.page import differing, write_report
from qerl.report.runs import METRICS, Series, number, series, smooth, window
from qerl.report.svg import TOOLTIPS, WIDTH, ticks
from qerl.run_folder import CONFIG_FILE, METRICS_FILE, read_metrics

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Elements of a page; fails on an end tag that does not fit."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def curves(self) -> list[tuple[str, str]]:
        return [(e["data-run"], e["data-metric"]) for tag, e in self.elements if "data-metric" in e]


def make_run(folder: Path, steps: int = 12, settings: dict | None = None, **changes) -> Path:
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        row = {metric.key: step / 10 for metric in METRICS if not metric.key.startswith("eval_")}
        row |= {key: value(step) for key, value in changes.items()}
        rows.append({"step": step, "epoch": 0.1, **row})
    rows.append({"step": steps, "train_runtime": 3.0})
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(settings))
    return folder


def test_metrics_as_logged(tmp_path):
    rows = read_metrics(make_run(tmp_path / "a", steps=3))
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert rows[1]["reward"] == 0.2
    assert rows[3] == {"step": 3, "train_runtime": 3.0}


def test_last_line_cut_off_is_left_out_and_said(tmp_path, caplog):
    run = make_run(tmp_path / "a", steps=2)
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "rew')
    with caplog.at_level(logging.WARNING):
        assert len(read_metrics(run)) == 3
    assert "cut off" in caplog.text and str(run / METRICS_FILE) in caplog.text


@pytest.mark.parametrize("line", ['{"step": 1, "re', "[1]", '{"reward": 1.0}'])
def test_damage_before_the_last_line_names_the_line(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(QeRLError, match="Line 2 of"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("last", [{"step": 10**400}, {"step": 1.5}])
def test_a_step_that_is_none_is_no_row(tmp_path, last):
    folder = make_run(tmp_path / "run")
    (folder / METRICS_FILE).write_text(
        json.dumps({"step": 1, "reward": 1.0}) + "\n" + json.dumps(last) + "\n"
    )
    assert [row["step"] for row in read_metrics(folder)] == [1]


def test_missing_metrics(tmp_path):
    with pytest.raises(QeRLError, match=r"has no metrics\.jsonl"):
        read_metrics(tmp_path / "nowhere")


def test_smoothing_by_hand():
    assert smooth([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert smooth([3.0, 1.0], 1) == [3.0, 1.0]
    assert smooth([0.0, 0.0, 10.0, 0.0, 0.0, 0.0], 5) == pytest.approx([10 / 3, 2.5, 2, 2, 2.5, 0])
    assert [window(n) for n in (1, 19, 20, 40, 100)] == [1, 1, 3, 5, 11]


def test_mean_of_the_last_tenth():
    assert Series(list(range(20)), [0.0] * 18 + [1.0, 2.0]).tail_mean == 1.5
    assert Series([1, 2], [5.0, 7.0]).tail_mean == 7.0


def test_series_leaves_out_what_is_not_finite():
    rows = [
        {"step": 1, "a": 1},
        {"step": 2, "a": math.nan},
        {"step": 3},
        {"step": 4, "a": None},
        {"step": 5, "a": 2.0},
    ]
    assert series(rows, "a") == Series([1, 5], [1.0, 2.0], left_out=1)
    assert series(rows, "b") is None
    assert series(rows[1:2], "a") is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 1.02, [0, 0.25, 0.5, 0.75, 1.0, 1.25]),
        (-0.3, 0.5, [-0.4, -0.2, 0, 0.2, 0.4, 0.6]),
        (0, 0.01, [0, 0.002, 0.004, 0.006, 0.008, 0.01]),
        (0, 1650, [0, 500, 1000, 1500, 2000]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_numbers_are_written_shortly():
    texts = [number(value) for value in (0.0, 0.12345, 12.345, 999.4, 999.7, 12345.6, 1e-11)]
    assert texts == ["0", "0.123", "12.3", "999", "1\u2009000", "12\u2009346", "1e-11"]


def test_page_stands_on_its_own_with_a_curve_for_each_run_and_metric(tmp_path):
    first = make_run(
        tmp_path / "first", settings={"noise": True, "seed": 0, "task_options": {"level": "wp1"}}
    )
    second = make_run(
        tmp_path / "second",
        steps=5,
        settings={"noise": False, "seed": 0, "task_options": {"level": "wp2"}},
        **{"eval_rewards/accuracy/mean": lambda step: 0.5},
    )
    out = tmp_path / "sub" / "report.html"
    write_report([first, second], out)
    text = out.read_text(encoding="utf-8")
    page = Page(text)

    trained = [metric.key for metric in METRICS if not metric.key.startswith("eval_")]
    expected = [(run, key) for run in ("first", "second") for key in trained]
    assert sorted(page.curves()) == sorted([*expected, ("second", "eval_rewards/accuracy/mean")])
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in page.elements)
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", text)
    assert "prefers-color-scheme: dark" in text
    assert sum(tag == "table" for tag, _ in page.elements) == 2
    assert {"noise", "task_options.level", "wp1", "wp2"} <= set(page.text)
    assert "seed" not in page.text


@pytest.mark.parametrize(("key", "scale"), [("reward", 1.0), ("rewards/accuracy/mean", 0.01)])
def test_curve_goes_through_its_points(tmp_path, key, scale):
    """Three steps, so that smoothing is off: the axis ends at 3 (or 3 %), each step is a third of it."""
    run = make_run(tmp_path / "a", steps=3, **{key: lambda step: step * scale})
    write_report([run], tmp_path / "r.html")
    curve = next(
        e for _, e in Page((tmp_path / "r.html").read_text()).elements if e.get("data-metric") == key
    )
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", curve["d"])[1:]]
    assert [x for x, _ in points] == [74, 290, 506]  # 74 + 432 * (0, 1/2, 1)
    assert [y for _, y in points] == pytest.approx([236 - 224 / 3, 236 - 2 * 224 / 3, 12], abs=0.06)


def test_shares_are_shown_in_per_cent_and_best_with_its_step(tmp_path):
    accuracy = {"rewards/accuracy/mean": lambda step: {1: 0.25, 2: 0.75, 3: 0.5}[step]}
    run = make_run(tmp_path / "a", steps=3, **accuracy)
    write_report([run], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    row = text[text.index("Accuracy of samples", text.index("Numbers")) :]
    cells = re.findall(r'<td class="num">([^<]*)</td>', row)[:4]
    assert cells == ["50", "75", "2", "50"]
    assert "a, step 2: 75 %" in text


def test_what_only_an_own_reward_judges_has_its_curve_of_held_out_problems(tmp_path):
    """The task's accuracy is 0 throughout where its answers mean nothing to the user's reward."""
    zero = dict.fromkeys(("rewards/accuracy/mean", "eval_rewards/accuracy/mean"), lambda step: 0.0)
    run = make_run(tmp_path / "a", **zero, eval_reward=lambda step: step / 12)
    write_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert ("a", "eval_reward") in Page(text).curves() and "Reward on held-out problems" in text


def test_names_are_escaped(tmp_path):
    names = ['<b>&"x"', "plain"]
    runs = [make_run(tmp_path / name, steps=2, settings={"task": name}) for name in names]
    write_report(runs, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert {run for run, _ in page.curves()} == set(names)
    assert not any(tag == "b" for tag, _ in page.elements)


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / parent / "run", steps=2) for parent in ("one", "two")]
    write_report(runs, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert {run for run, _ in page.curves()} == {"one/run", "two/run"}


def test_long_runs_keep_the_page_small(tmp_path):
    run = make_run(tmp_path / "a", steps=3000)
    write_report([run], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    circles = sum(tag == "circle" for tag, _ in page.elements)
    assert circles <= (TOOLTIPS + 1) * len(METRICS)
    assert "a, step 3" in (tmp_path / "r.html").read_text()


def test_values_left_out_are_said(tmp_path):
    run = make_run(tmp_path / "a", steps=4, reward=lambda step: math.nan if step == 2 else 1.0)
    write_report([run], tmp_path / "r.html")
    assert "not finite: 1" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("value", [1e308, -1e308, 10**400])
def test_numbers_that_no_axis_holds_are_left_out(value):
    assert series([{"step": 1, "reward": 0.5}, {"step": 2, "reward": value}], "reward") == Series(
        [1], [0.5], 1
    )


def test_a_range_too_small_to_divide_has_ticks():
    assert ticks(0.0, 5e-324, 5)[0] == 0


def test_settings_that_differ():
    settings = [{"a": 1, "b": None, "c": 0.5, "output_dir": "x"}, {"a": 1, "b": True, "output_dir": "y"}]
    assert differing(settings) == {"b": ["null", "true"], "c": ["0.5", "default"]}


def evaluation(folder, **source):
    folder.mkdir(parents=True)
    result = {
        "task": "gsm8k", "samples": 1, "problems": 200, "accuracy": 0.425, "interval": [0.356, 0.497],
        "source": {"model": "base", "adapter": None, "weights": "nvfp4", **source},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_held_out_scores_stand_beside_the_curves_with_intervals(tmp_path):
    runs = [make_run(tmp_path / name, steps=2) for name in ("one", "two")]
    evaluation(runs[1] / "eval", adapter="somewhere/else")
    evaluation(runs[0] / "checkpoint-1" / "eval", adapter=str(runs[0] / "checkpoint-1"))
    more = [evaluation(tmp_path / "e1", adapter=str(runs[0])), evaluation(tmp_path / "e2")]
    write_report(runs, tmp_path / "r.html", more)
    text = (tmp_path / "r.html").read_text()
    part = text[text.index("Held-out scores") : text.index("<h2>Numbers")]
    rows = [re.sub(r"<[^>]*>", " ", row).split() for row in part.split("</tr>")[1:-1]]
    assert [row[0] for row in rows] == ["one", "one", "two", "base"]
    assert rows[0][1] == "checkpoint-1"
    assert rows[3] == ["base", "gsm8k", "accuracy", "42.5", "35.6", "to", "49.7", "200", "nvfp4"]
    Page(text)


def test_a_phone_gets_legible_labels_and_whole_names():
    """At 390 px a drawing of 520 units is 390 - 2 x (10 + 8 + 1) = 352 px wide, and tables scroll."""
    css = (Path(page.__file__).with_name("page.css")).read_text()
    narrow = css[css.index("@media (max-width: 560px)") :]
    size = int(re.search(r"\.tick, \.name { font-size: (\d+)px", narrow)[1])
    assert size * 352 / WIDTH >= 11
    assert "overflow-wrap: anywhere" not in re.sub(
        r"(\.settings td|\.sample p|\.turn pre|\.role) {[^}]*}", "", css
    )
    assert re.search(r"\.scroll { overflow-x: auto", css)


def test_scores_that_are_none(tmp_path):
    run = make_run(tmp_path / "a", steps=2)
    with pytest.raises(QeRLError, match=r"has no result\.json"):
        write_report([run], tmp_path / "r.html", [tmp_path])
    (run / "result.json").write_text("[]")
    with pytest.raises(QeRLError, match="not the result of an evaluation"):
        write_report([run], tmp_path / "r.html")


def test_report_errors(tmp_path):
    run = make_run(tmp_path / "a", steps=2)
    with pytest.raises(QeRLError, match="more than once"):
        write_report([run, tmp_path / "a" / ".." / "a"], tmp_path / "r.html")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / METRICS_FILE).write_text("")
    with pytest.raises(QeRLError, match="No step is logged"):
        write_report([tmp_path / "new"], tmp_path / "r.html")
    with pytest.raises(QeRLError, match="cannot be written"):
        write_report([run], tmp_path)
    (run / CONFIG_FILE).write_text("a: [")
    with pytest.raises(QeRLError, match=r"config\.yaml cannot be read"):
        write_report([run], tmp_path / "r.html")


def test_terminal_curve_by_hand():
    """Four dots up in four columns: one dot each, from the lower left to the upper right."""
    assert terminal_curve([0.0, 1.0, 2.0, 3.0], width=2, height=1) == "3 \u2524\u2860\u280a\n   14"


def test_terminal_curve_labels_and_size():
    lines = terminal_curve([0.5 + i / 100 for i in range(300)], width=40, height=6).splitlines()
    assert len(lines) == 7
    assert {len(line) for line in lines} == {len("3.49 |") + 40}
    assert lines[0].startswith("3.49 ") and lines[5].startswith(" 0.5 ")
    assert lines[6].split() == ["1", "300"]


def test_terminal_curve_of_few_flat_and_missing_values():
    assert terminal_curve([0.5]).splitlines()[4].count("\u2809") == 60
    gap = terminal_curve([2.0, 2.0, math.nan, 1.0, 1.0], width=5, height=1)
    assert gap.splitlines()[0] == "2 \u2524\u2809\u2801\u2800\u2880\u28c0"
    with pytest.raises(QeRLError, match="no finite value"):
        terminal_curve([math.nan])
