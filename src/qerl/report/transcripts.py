"""Completions on the page: of each chosen step the best and the worst group, turn by turn.

What a model wrote is shown and never acts: it is escaped, characters that would act are shown as signs
(`qerl.report.visible`), and the page's policy (`qerl.report.page.document`) lets no script run but the filter
of this package. Without a script all groups are there and open by a click.

A long run stays a small page: the chosen steps, two groups of each, at most `SAMPLES` samples of a group, the
best and the worst of them, and at most `CHARACTERS` characters of all models together, of which each text has
its share. What was given up is looking at any completion of any step; those are in the tables of the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from qerl.report.completions import Group, Message, Sample, Table
from qerl.report.metrics import number
from qerl.report.runs import Run
from qerl.report.svg import swatch
from qerl.report.visible import shortened, visible

SAMPLES = 8
"""Largest number of samples that are shown of a group."""

CHARACTERS = 500_000
"""Of all texts of the page together; with the marks around them a page has at most a few megabytes."""

LONGEST = 6_000
"""Characters of one text, however few there are."""


@dataclass(frozen=True)
class _Shown:
    """A group of the page.

    Attributes:
        run: Index of its run.
        table: Its step.
        rank: ``best``, ``worst`` or, where a step has one group, ``only``.
        group: Itself.
        samples: Those of its samples that are shown.
    """

    run: int
    table: Table
    rank: str
    group: Group
    samples: tuple[Sample, ...]


def filter_script() -> str:
    """The script of pages with completions."""
    return files("qerl.report").joinpath("filter.js").read_text(encoding="utf-8")


def transcripts(runs: Sequence[Run], tables: Sequence[Sequence[Table]]) -> str:
    """The part of the page with completions, as HTML; nothing where there are none.

    Args:
        runs: Runs of the page.
        tables: For each run, the steps of which completions are shown.
    """
    shown = [group for i, found in enumerate(tables) for table in found for group in _chosen(i, table)]
    if not shown:
        return ""
    texts = sum(1 + len(turn.calls) for item in shown for turn in _shown_turns(item))
    longest = max(min(LONGEST, CHARACTERS // max(texts, 1)), 1)
    several = len({item.run for item in shown}) > 1
    groups = "\n".join(_group(runs[item.run], item, longest) for item in shown)
    return f"""<h2>Completions</h2>
<p>The best and the worst group of some steps, by mean reward; a group is the samples of one prompt.
Click to open.</p>
{_form(runs, shown, several)}
{groups}"""


def _shown_turns(item: _Shown) -> Iterator[Message]:
    yield from item.group.prompt
    for sample in item.samples:
        yield from sample.messages


def _chosen(run: int, table: Table) -> Iterator[_Shown]:
    """Best and worst group of a table, whose groups are in that order."""
    if len(table.groups) == 1:
        yield _Shown(run, table, "only", table.groups[0], _ends(table.groups[0].samples))
        return
    for rank, group in (("best", table.groups[0]), ("worst", table.groups[-1])):
        yield _Shown(run, table, rank, group, _ends(group.samples))


def _ends(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The first and the last of the samples, if there are too many."""
    return samples if len(samples) <= SAMPLES else samples[: SAMPLES // 2] + samples[-(SAMPLES // 2) :]


def _form(runs: Sequence[Run], shown: Sequence[_Shown], several: bool) -> str:
    """The filter, hidden until its script runs."""
    steps = dict.fromkeys(_step(item.table) for item in shown)
    choices = [
        _choice("run", "all runs", {str(i): run.label for i, run in enumerate(runs)}) if several else "",
        _choice("step", "all steps", {step: step for step in steps}),
        _choice("rank", "best and worst groups", {"best": "best groups", "worst": "worst groups"}),
    ]
    bounds = "".join(
        f'<label>reward {words} <input name="{name}" type="number" step="any"></label>'
        for name, words in (("least", "at least"), ("most", "at most"))
    )
    return (
        f'<form id="filter" hidden>{"".join(choices)}{bounds}'
        '<label>text <input name="words" type="search"></label>'
        '<button id="open" type="button">open or close all</button><button type="reset">reset</button>'
        "<output></output></form>"
    )


def _choice(name: str, all_of_them: str, values: dict[str, str]) -> str:
    options = "".join(
        f'<option value="{escape(value)}">{escape(words)}</option>' for value, words in values.items()
    )
    return f'<select name="{name}"><option value="">{all_of_them}</option>{options}</select>'


def _step(table: Table) -> str:
    return f"step {table.step}" + (f", {table.evaluation}" if table.evaluation else "")


def _group(run: Run, item: _Shown, longest: int) -> str:
    count, step = len(item.group.samples), _step(item.table)
    which = f"{item.rank} of {len(item.table.groups)} groups" if item.rank != "only" else "only group"
    some = f" <span class='dim'>{len(item.samples)} of {count} samples</span>"
    samples = "".join(_sample(sample, longest) for sample in item.samples)
    return (
        f'<details class="group" data-run="{item.run}" data-step="{escape(step)}" data-rank="{item.rank}">'
        f"<summary>{swatch(item.run)}{escape(run.label)}, {escape(step)}, {which}, mean reward "
        f"{_number(item.group.reward)}{some}</summary>"
        f'<div class="prompt">{_turns(item.group.prompt, longest)}</div>{samples}</details>'
    )


def _sample(sample: Sample, longest: int) -> str:
    facts = [f"<b>reward {_number(sample.reward)}</b>"]
    facts += [f"{_text(name, 60)} {_number(value)}" for name, value in sample.parts.items()]
    facts += [f"{_text(name, 60)} {_text(value, 200)}" for name, value in sample.extra.items()]
    turns = _turns(sample.messages, longest)
    reward = "" if sample.reward is None else f"{sample.reward:.6g}"
    return f'<section class="sample" data-reward="{reward}"><p>{" | ".join(facts)}</p>{turns}</section>'


def _turns(messages: Sequence[Message], longest: int) -> str:
    """A conversation: each turn's text as it stands, and the tools that it calls."""
    parts = []
    for message in messages:
        parts.append(f'<div class="turn"><span class="role">{_text(message.role, 60)}</span>')
        if message.text or not message.calls:
            parts.append(f'<pre dir="auto">{_text(message.text, longest)}</pre>')
        parts += [
            f'<pre class="call"><b>calls {_text(name, 60)}</b> {_text(arguments, longest)}</pre>'
            for name, arguments in message.calls
        ]
        parts.append("</div>")
    return "".join(parts)


def _text(text: str, longest: int) -> str:
    few = shortened(text, longest)  # first, as signs are looked for in what is shown alone
    return escape(shortened(visible(few), longest))


def _number(value: float | None) -> str:
    return "none" if value is None else number(value)
