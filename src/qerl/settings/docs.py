"""The fields of the settings as text, from one source: the sentences in `qerl.settings.fields` and TRL's own.

The terminal shows them (`qerl train --help`, `qerl fields`), and `python -m qerl.settings.docs` prints the
tables of docs/configuration.md, which a test compares with the page.
"""

import dataclasses
import json
import textwrap
from typing import Any

from trl import GRPOConfig

from qerl.settings.config import QeRLConfig, default_of
from qerl.settings.fields import OWN_NAMES, Sentence
from qerl.settings.parents import PARENTS, Refused, Replaced, fate_of
from qerl.settings.recipe import FIELDS, check_key

_WIDTH = 100
_PARENTS = "trl.GRPOConfig and transformers.TrainingArguments"


def own_fields() -> dict[str, list[tuple[str, str, str]]]:
    """Name, default and sentence, by group, of each field that is new here or has another default."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    rows: list[tuple[str, str, str]] = []
    for name in OWN_NAMES:
        sentence: Sentence = FIELDS[name].metadata["help"]
        if sentence.group:
            rows = groups.setdefault(sentence.group, [])
        rows.append((name, _shown(default_of(FIELDS[name])), sentence))
    return groups


def other_defaults() -> list[tuple[str, str, str, str]]:
    """Name, TRL's default, ours and the reason, of every field whose default differs from TRL's."""
    theirs = {spec.name: default_of(spec) for spec in dataclasses.fields(GRPOConfig)}
    return [
        (name, _shown(theirs[name]), _shown(default_of(spec)), spec.metadata["help"].instead_of_trl)
        for name, spec in FIELDS.items()
        if name in theirs and default_of(spec) != theirs[name]
    ]


def refused_fields() -> list[tuple[str, str]]:
    """Name and reason of every field of TRL and transformers that cannot be set."""
    return [(name, fate.reason) for name, fate in PARENTS.items() if isinstance(fate, Refused)]


def replaced_fields() -> list[tuple[str, str]]:
    """Name of every field of TRL and transformers that asks for speed or memory, and what takes its place."""
    return [(name, fate.by) for name, fate in PARENTS.items() if isinstance(fate, Replaced)]


def _newer_fields() -> list[tuple[str, str]]:
    """Names and reasons of the refused fields that only the installed transformers or TRL has."""
    found = []
    for spec in dataclasses.fields(QeRLConfig):
        fate = fate_of(spec.name)
        if spec.name not in PARENTS and spec.name not in OWN_NAMES:
            assert isinstance(fate, Refused)
            found.append((spec.name, fate.reason))
    return found


def accepted_fields() -> list[str]:
    """Names of the fields of TRL and transformers that act as they do there."""
    return sorted(name for name, fate in PARENTS.items() if not isinstance(fate, Refused | Replaced))


def help_text() -> str:
    """This project's fields by group, and where the others are said, for the end of a command's help."""
    lines = ["fields, each set by --FIELD VALUE or in a recipe (default in brackets):"]
    for group, rows in own_fields().items():
        lines += ["", f"{group}:", *(line for row in rows for line in _entry(*row))]
    lines += ["", f"The fields of {_PARENTS} are fields too, with their defaults:"]
    lines += ["`qerl fields` names them all, `qerl fields NAME` explains one."]
    return "\n".join(lines)


def all_fields_text() -> str:
    """Every field by origin, for `qerl fields`."""
    lines = [f"{group}:\n" + "\n".join(line for row in rows for line in _entry(*row))
             for group, rows in own_fields().items()]  # fmt: skip
    accepted = _wrapped(", ".join(accepted_fields()), "  ")
    refused = "\n".join(
        line
        for name, reason in [*refused_fields(), *_newer_fields()]
        for line in _wrapped(f"{name}: {reason}", "  ")
    )
    lines.append(f"Fields of {_PARENTS}, as there:\n" + "\n".join(accepted))
    replaced = _wrapped(", ".join(name for name, _ in replaced_fields()), "  ")
    lines.append(f"Fields of {_PARENTS} that ask for speed or memory alone:\n" + "\n".join(replaced))
    lines.append(f"Fields of {_PARENTS} that are refused:\n{refused}")
    return "\n\n".join(lines)


def field_text(name: str) -> str:
    """What one field is, for `qerl fields NAME`.

    Raises:
        QeRLError: There is no such field; the message names the nearest.
    """
    check_key(name, "The command line")
    spec, fate = FIELDS[name], fate_of(name)
    if name in OWN_NAMES:
        sentence: Sentence = spec.metadata["help"]
        lines = _entry(name, _shown(default_of(spec)), f"{sentence} {sentence.instead_of_trl}".strip())
    elif isinstance(fate, Refused):
        lines = _wrapped(f"{name} is not supported: {fate.reason}.", "")
    elif isinstance(fate, Replaced):
        lines = _wrapped(f"{name} is accepted and changes nothing: {fate.by}.", "")
    else:
        text = " ".join(str(spec.metadata.get("help") or "").split())
        said = text or f"It is a field of {_PARENTS}, whose documentation explains it."
        lines = [*_entry(name, _shown(default_of(spec)), said), "It acts as in TRL and transformers."]
    return "\n".join(lines)


def markdown() -> dict[str, str]:
    """The tables of docs/configuration.md by the heading under which each stands."""
    head = ("field", "default", "what")
    return {
        "Fields": "\n\n".join(f"### {group}\n\n{_table(head, rows)}" for group, rows in own_fields().items()),
        "Defaults that differ from TRL's": _table(("field", "TRL", "here", "why"), other_defaults()),
        "Fields that ask for speed": _table(("field", "what takes its place"), replaced_fields()),
        "Fields that are refused": _table(("field", "why"), refused_fields()),
    }


def _entry(name: str, default: str, text: str) -> list[str]:
    return _wrapped(f"--{name} [{default}] {text}", "  ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + " " * 6, break_on_hyphens=False
    )


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("-",) * len(head), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _shown(value: Any) -> str:
    """A value as a recipe holds it."""
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    text = str(getattr(value, "value", value))
    return text if text.isprintable() else json.dumps(text)


if __name__ == "__main__":
    for heading, table in markdown().items():
        print(f"## {heading}\n\n{table}\n")
