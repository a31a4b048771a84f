"""Descriptions of the settings' fields, from their declarations in `qerl.settings.groups`.

`qerl train --help` and `qerl fields` print them, and `python -m qerl.settings.docs` prints the tables of
docs/configuration.md, which a test compares with the page.
"""

import dataclasses
import textwrap
from typing import Any

from trl import GRPOConfig

from qerl.settings.algorithms import ALGORITHMS, UNSAID
from qerl.settings.config import FIELDS, refusal
from qerl.settings.groups import DECLARED, GROUPS, OWN_NAMES, sentence_of
from qerl.settings.parents import REFUSED, REPLACED, default_of, shown
from qerl.settings.recipe import check_key

_WIDTH = 100
_PARENTS = "trl.GRPOConfig and transformers.TrainingArguments"

INSTEAD_OF_TRL = {
    "loss_type": "In a study of ours (docs/method.md) it learned better with a sampler four steps behind "
    "and as well with a fresh one; with a field that bounds a ratio the default is TRL's.",
    "epsilon": "For loss_type dppo_kl it is a divergence; for TRL's losses the default is TRL's.",
    "delta": "It is for loss_type dppo_kl; for TRL's losses the default is TRL's.",
    "learning_rate": "TRL's 1e-6 suits training all weights; the paper trains adapters on NVFP4 with 1e-5.",
    "bf16": "Autocast would make the trainer's policy differ from the sampler's.",
    "logging_steps": "A step includes a rollout and takes minutes, so a run has few points to log.",
    "logging_nan_inf_filter": "The filter reads every loss, for which several processes would wait; a "
    "gradient that is not finite ends the run.",
    "per_device_eval_batch_size": "An evaluation computes no loss that would need memory, and 8 samples "
    "leave most rows of the engine empty.",
    "ddp_find_unused_parameters": "Every backward pass contains a sample, so every adapter has a gradient.",
    "ddp_broadcast_buffers": "The packed weights are buffers that never change; DDP would send them in every "
    "pass.",
    "vllm_importance_sampling_mode": "With noise every token's probability shifts a little; over a sequence "
    "these shifts add up, and most long samples would be masked.",
    "num_completions_to_print": "The run folder holds all of them, for `qerl report` and `qerl watch`.",
}
"""Why a default differs from TRL's."""

Rows = list[tuple[str, ...]]


def own_fields() -> dict[str, Rows]:
    """Return name, default and sentence of each field with a sentence of its own, by group."""
    return {
        group.__name__: [
            (name, shown(_unsaid(name)), sentence_of(name)) for name in group.flat() if name in OWN_NAMES
        ]
        for group in GROUPS.values()
    }


def other_defaults() -> Rows:
    """Return name, TRL's default, ours and the reason, for every field whose default differs from TRL's."""
    theirs = {spec.name: default_of(spec) for spec in dataclasses.fields(GRPOConfig)}
    return [
        (name, shown(theirs[name]), shown(_unsaid(name)), INSTEAD_OF_TRL.get(name, ""))
        for name in FIELDS
        if name in theirs and _unsaid(name) != theirs[name]
    ]


def _unsaid(name: str) -> Any:
    """Return the value of a field that neither the user nor an algorithm sets."""
    return UNSAID.get(name, default_of(FIELDS[name]))


def presets() -> Rows:
    """Return the name of each algorithm, and the fields to which it gives other values than the defaults."""
    others = {
        name: [f"{key}: {shown(value)}" for key, value in fields.items() if value != _unsaid(key)]
        for name, fields in ALGORITHMS.items()
    }
    return [(name, ", ".join(said) or "nothing") for name, said in others.items()]


def inherited_fields() -> list[str]:
    """Return the names of the fields of TRL and transformers that act as they do there."""
    return sorted(name for name in DECLARED if name in FIELDS and name not in OWN_NAMES)


def help_text() -> str:
    """Return the fields by group, and how to list the others, for the end of a command's help."""
    lines = ["fields, each set by --FIELD VALUE or in a recipe (default in brackets):"]
    for group, rows in own_fields().items():
        lines += [
            "",
            f"{group}: {GROUPS[group.lower()].__doc__}",
            *(line for row in rows for line in _entry(*row)),
        ]
    lines += ["", f"The fields of {_PARENTS} are fields too, with their defaults:"]
    lines += ["`qerl fields` names them all, `qerl fields NAME` explains one."]
    return "\n".join(lines)


def all_fields_text() -> str:
    """Return the text of `qerl fields`: every field."""
    parts = ["\n".join([f"{group}:", *(line for row in rows for line in _entry(*row))])
             for group, rows in own_fields().items()]  # fmt: skip
    parts.append(_presets_text())
    for what, names in {
        "as there": inherited_fields(),
        "that ask for speed or memory alone": [*REPLACED],
        "that must keep their defaults": [
            name for name, spec in FIELDS.items() if refusal(name, spec.default)
        ],
    }.items():
        parts.append("\n".join([f"Fields of {_PARENTS}, {what}:", *_wrapped(", ".join(names), "  ")]))
    return "\n\n".join(parts)


def field_text(name: str) -> str:
    """Return the text of `qerl fields NAME`: the description of one field.

    Raises:
        QeRLError: There is no such field; the message names the nearest.
    """
    check_key(name, "The command line")
    default = default_of(FIELDS[name])
    if sentence := refusal(name, default):
        return "\n".join(_wrapped(sentence, ""))
    if name in REPLACED:
        return "\n".join(_wrapped(f"{name} is accepted and changes nothing: {REPLACED[name].by}.", ""))
    text = " ".join(str(FIELDS[name].metadata.get("help") or "").split())
    if name in OWN_NAMES:
        entry = _entry(name, shown(_unsaid(name)), f"{text} {INSTEAD_OF_TRL.get(name, '')}".strip())
        setting = [(algorithm, fields[name]) for algorithm, fields in ALGORITHMS.items() if name in fields]
        by = ", ".join(
            f"{algorithm}: {shown(value)}" for algorithm, value in setting if value != _unsaid(name)
        )
        lines = _wrapped(f"By algorithm: {by}.", "  ") if by else []
        return "\n".join([*entry, *lines, *([_presets_text()] if name == "algorithm" else [])])
    said = text or f"It is a field of {_PARENTS}, whose documentation explains it."
    return "\n".join([*_entry(name, shown(default), said), "It acts as in TRL and transformers."])


def markdown() -> dict[str, str]:
    """Return the tables of docs/configuration.md by their headings."""
    head = ("field", "default", "what")
    return {
        "Fields": "\n\n".join(
            f"### {group}\n\n{GROUPS[group.lower()].__doc__}\n\n{_table(head, rows)}"
            for group, rows in own_fields().items()
        ),
        "Algorithms": _table(("algorithm", "sets"), presets()),
        "Defaults that differ from TRL's": _table(("field", "TRL", "here", "why"), other_defaults()),
        "Fields that ask for speed": _table(
            ("field", "what takes its place"), [(name, replaced.by) for name, replaced in REPLACED.items()]
        ),
        "Fields that are refused": ", ".join(f"`{name}`" for name, instead in REFUSED.items() if not instead)
        + ".\n\n"
        + _table(("field", "instead"), [item for item in REFUSED.items() if item[1]]),
    }


def _presets_text() -> str:
    lines = [line for name, fields in presets() for line in _wrapped(f"{name}: {fields}", "  ")]
    return "\n".join(["What an algorithm sets unless you set the field:", *lines])


def _entry(name: str, default: str, text: str) -> list[str]:
    return _wrapped(f"--{name} [{default}] {text}", "  ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + " " * 6, break_on_hyphens=False
    )


def _table(head: tuple[str, ...], rows: Rows) -> str:
    lines = [head, ("-",) * len(head), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    for heading, table in markdown().items():
        print(f"## {heading}\n\n{table}\n")
