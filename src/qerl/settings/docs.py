"""The fields of the settings as text: for `qerl train --help` and for docs/configuration.md, from one source.

`python -m qerl.settings.docs` prints the tables of docs/configuration.md; a test compares them with the page.
"""

import dataclasses
import textwrap
from typing import Any

from trl import GRPOConfig

from qerl.settings.config import QeRLConfig, default_of
from qerl.settings.parents import PARENTS, Refused
from qerl.settings.recipe import FIELDS

_WIDTH = 100


def own_fields() -> list[tuple[str, str, str]]:
    """Name, default and help of every field that this project adds or whose default it changes."""
    return [
        (name, _shown(default_of(spec)), spec.metadata["help"])
        for name, spec in FIELDS.items()
        if name in QeRLConfig.__annotations__
    ]


def other_defaults() -> list[tuple[str, str, str, str]]:
    """Name, TRL's default, ours and the reason, of every field whose default differs from TRL's."""
    theirs = {spec.name: default_of(spec) for spec in dataclasses.fields(GRPOConfig)}
    return [
        (name, _shown(theirs[name]), _shown(default_of(spec)), spec.metadata["instead_of_trl"])
        for name, spec in FIELDS.items()
        if name in theirs and default_of(spec) != theirs[name]
    ]


def refused_fields() -> list[tuple[str, str]]:
    """Name and reason of every field of TRL and transformers that cannot be set."""
    return [(name, fate.reason) for name, fate in PARENTS.items() if isinstance(fate, Refused)]


def help_text() -> str:
    """The fields for a terminal."""
    lines = ["fields, each set by --field value or in a recipe (default in brackets):"]
    for name, default, text in own_fields():
        lines += textwrap.wrap(
            f"--{name} [{default}] {text}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 8
        )
    lines.append("Fields of trl.GRPOConfig and transformers.TrainingArguments are valid too.")
    return "\n".join(lines)


def markdown() -> dict[str, str]:
    """The tables of docs/configuration.md by the heading under which each stands."""
    return {
        "Fields": _table(("field", "default", "what"), own_fields()),
        "Defaults that differ from TRL's": _table(("field", "TRL", "here", "why"), other_defaults()),
        "Fields that are refused": _table(("field", "why"), refused_fields()),
    }


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("-",) * len(head), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _shown(value: Any) -> str:
    """A value as a recipe holds it."""
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    return str(getattr(value, "value", value))


if __name__ == "__main__":
    for heading, table in markdown().items():
        print(f"## {heading}\n\n{table}\n")
