"""Live view of a run in the terminal: its progress, last metrics, reward so far and latest completions.

The run folder is polled, so the run is not disturbed and may be on another machine with the same disk. Given
up: updates between two logged steps.
"""

import itertools
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text

from qerl.errors import QeRLError
from qerl.report.completions import Sample, Table, read_table
from qerl.report.curve import terminal_curve
from qerl.report.runs import METRICS, Run, Series, number, read_runs, series, shown_series
from qerl.run_folder import CONFIG_FILE, METRICS_FILE, table_paths
from qerl.visible import seen, visible

SECONDS = 2.0
"""Seconds between two polls of the folder."""

SETTLED = 1.0
"""Seconds after its last change from which on a table of completions counts as complete."""

TWO_METRICS = 140
"""Characters of a line from which on it has room for two metrics."""

PROMPT, COMPLETION = 300, 600
"""Largest number of characters shown of a prompt's last message, and of a completion."""


@dataclass(frozen=True)
class View:
    """The state of a run at one poll.

    Attributes:
        run: Its metrics and settings.
        logged: Time when its metrics were last written, in seconds since the epoch; None before the first.
        table: Its latest completions.
    """

    run: Run
    logged: float | None
    table: Table | None = None

    @property
    def ended(self) -> bool:
        """True if the training has ended, at its last step or before."""
        return bool(self.run.rows) and "train_runtime" in self.run.rows[-1]


def watch(folder: Path, console: Console) -> None:
    """Show a run until it ends or the user presses Ctrl-C, and its last state after that; without a terminal,
    show its present state once.

    Raises:
        QeRLError: The folder holds no run, or its metrics are damaged.
    """
    view = look(folder)
    if console.is_terminal:
        try:
            with Live(render(view, time.time(), console.width), console=console, screen=True) as live:
                while not view.ended:
                    time.sleep(SECONDS)
                    view = look(folder, view)
                    live.update(render(view, time.time(), console.width), refresh=True)
        except KeyboardInterrupt:
            pass  # the way to end it
    console.print(render(view, time.time(), console.width))


def look(folder: Path, former: View | None = None) -> View:
    """Read the current state of a run.

    Args:
        folder: The run folder.
        former: The state at an earlier poll; files that have not changed since are not read again.

    Raises:
        QeRLError: The folder holds no run, or its metrics are damaged.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        if not (folder / CONFIG_FILE).is_file():
            raise QeRLError(
                f"{folder} holds no run (neither {METRICS_FILE} nor {CONFIG_FILE}); name the output_dir of "
                "one."
            )
        return View(Run(str(folder), folder, [], None), None)
    logged = metrics.stat().st_mtime
    run = former.run if former and former.logged == logged else read_runs([folder])[0]
    return View(run, logged, _latest(run, former.table if former else None))


def _latest(run: Run, former: Table | None) -> Table | None:
    """Return the last complete table of training; ``former`` if that is still the last."""
    for step, path in reversed(table_paths(run.folder).get("", {}).items()):
        if former and former.step == step:
            return former
        if time.time() - path.stat().st_mtime >= SETTLED:
            return read_table(run, path, step)
    return None


def render(view: View, now: float, width: int) -> RenderableType:
    """Render the view of a run for a terminal.

    Args:
        view: The state of the run.
        now: The current time, in seconds since the epoch.
        width: Characters of a line.
    """
    parts: list[RenderableType] = [Rule(Text(visible(view.run.label)), align="left"), _progress(view, now)]
    reward = series(view.run.rows, "reward")
    if reward is not None:
        parts += [Text("reward", style="bold"), _curve(reward, width), _metrics(view, width)]
    if view.table is not None:
        parts += _completions(view.table)
    return Group(*parts)


def _progress(view: View, now: float) -> RenderableType:
    """Return one line: steps done, a bar if their total is known, and the remaining time."""
    rows = view.run.rows
    done = view.run.last_step
    total = next((row["max_steps"] for row in reversed(rows) if isinstance(row.get("max_steps"), int)), None)
    words = [f"step {done}" + (f" of {total}" if total else "")]
    seconds = series(rows, "step_time")
    if view.ended:
        words.append("finished" if done == total else "ended")
    elif done == 0:
        words.append("waiting for the first step")
    elif seconds is not None:
        words.append(f"{number(seconds.tail_mean)} s per step")
        if total:
            words.append(f"about {timedelta(seconds=round((total - done) * seconds.tail_mean))} left")
    if view.logged is not None and not view.ended:
        words.append(f"last logged {timedelta(seconds=max(0, round(now - view.logged)))} ago")
    grid = Grid.grid(padding=(0, 2))
    bar = [ProgressBar(total=total, completed=done, width=24)] if total else []
    grid.add_row(*bar, Text(", ".join(words)))
    return grid


def _curve(reward: Series, width: int) -> Text:
    room = max(10, min(100, width - 12))
    return Text(terminal_curve(reward.values, room, 7, (reward.steps[0], reward.steps[-1])), no_wrap=True)


def _metrics(view: View, width: int) -> RenderableType:
    """Return last value and mean of the last tenth of the report's metrics, two per line if it is wide."""
    cells: list[Any] = []
    for metric in METRICS:
        found = shown_series(view.run, metric)
        if found is None:
            continue
        last, mean = (number(value * metric.scale) for value in (found.values[-1], found.tail_mean))
        cells.append((Text(metric.title), Text(last, style="bold"), Text(mean), Text(metric.unit)))
    grid = Grid.grid(padding=(0, 2))
    side_by_side = 2 if width >= TWO_METRICS else 1
    heads = [Text(head, style="dim") for head in ("", "last", "mean, last tenth", "")]
    grid.add_row(*side_by_side * heads)
    for i in range(0, len(cells), side_by_side):
        grid.add_row(*itertools.chain.from_iterable(cells[i : i + side_by_side]))
    return grid


def _completions(table: Table) -> list[RenderableType]:
    """Return the best completion of the last step's best group and the worst of its worst, each with the last
    message of its prompt."""
    parts: list[RenderableType] = []
    for word, end in (("best", 0), ("worst", -1)):
        group = table.groups[end]
        sample = group.samples[end]
        reward = "none" if sample.reward is None else number(sample.reward)
        parts += [
            Rule(Text(f"step {table.step}, {word} completion, reward {reward}"), align="left"),
            Text(seen(group.prompt[-1].text if group.prompt else "", PROMPT), style="dim"),
            Text(seen(_words(sample), COMPLETION)),
        ]
    return parts


def _words(sample: Sample) -> str:
    """Return a completion as text; several turns each have their role in front."""
    if len(sample.messages) == 1 and not sample.messages[0].calls:
        return sample.messages[0].text
    lines = []
    for message in sample.messages:
        calls = "".join(f" calls {name} {arguments}" for name, arguments in message.calls)
        lines.append(f"{message.role}: {message.text}{calls}")
    return "\n".join(lines)
