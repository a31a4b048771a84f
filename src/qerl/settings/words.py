"""The words of a command line: how flags are spelled, which of them are fields, and numbers in a range."""

import argparse
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from qerl.errors import QeRLError
from qerl.settings.foreign import refuse_foreign


def with_underscores(words: Sequence[str]) -> list[str]:
    """Replace dashes in flags by underscores; words after a lone ``--`` are left alone."""
    end = words.index("--") if "--" in words else len(words)
    return [*(_underscored(word) if word.startswith("--") else word for word in words[:end]), *words[end:]]


def _underscored(word: str) -> str:
    flag, sign, value = word.partition("=")
    return f"--{flag[2:].replace('-', '_')}{sign}{value}"


def split_fields(
    words: Sequence[str], flags: Sequence[str], options: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Take `--FIELD VALUE` and `--FIELD=VALUE` out of the words of a command.

    Args:
        words: The command's name and the words after it.
        flags: Flags of the command itself, which have no value.
        options: Options of the command itself, which have a value.

    Returns:
        The command's own words, its options first because argparse takes positional words together, and the
        values of the fields by name.

    Raises:
        QeRLError: A field or option has no value, a field has two, or a flag is from another program.
    """
    kept: list[str] = []
    own: list[str] = []
    fields: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--") or word in flags:
            kept.append(word)
            continue
        flag, sign, text = word.partition("=")
        if flag not in options:
            refuse_foreign(flag[2:], "The command line")
        value = text if sign else next(remaining, "")
        if not value or (not sign and value.startswith("--")):
            raise QeRLError(f"{flag} needs a value.")
        if flag in options:
            own += [flag, value]
        elif flag[2:] in fields:
            raise QeRLError(f"{flag} is given twice; give it once.")
        else:
            fields[flag[2:]] = value
    return [*kept[:1], *own, *kept[1:]], fields


def positionals_first(
    words: Sequence[str], count: int, lists: Collection[str], flags: Collection[str]
) -> list[str]:
    """Move the positional words of a command to the front.

    argparse gives an option of several values all words up to the next option: `--adapter DIR MODEL` is then
    two adapters and no model. As the number of positional words is known, missing ones are taken from the end
    of such an option's values. If two options could have them, the words stay as they are.

    Args:
        words: The words after the command's name.
        count: Number of positional words that the command takes.
        lists: Options that take several values.
        flags: Options that take none; the others take one each.
    """
    end = words.index("--") if "--" in words else len(words)
    positional: list[int] = []  # places
    values: list[list[int]] = []  # places of the values of each list
    free = 0  # words that the option before takes, -1 for all
    for place, word in enumerate(words[:end]):
        if word.startswith("--") or word in flags:
            option, sign, _ = word.partition("=")
            free = 0 if sign or option in flags else -1 if option in lists else 1
            if free < 0:
                values.append([])
        elif free < 0:
            values[-1].append(place)
        elif free:
            free = 0
        else:
            positional.append(place)
    missing = count - len(positional) - len(words[end + 1 :])
    having = [places for places in values if len(places) > missing]
    if missing < 1 or len(having) != 1:
        return [*words]
    positional = sorted([*positional, *having[0][-missing:]])
    return [words[at] for at in positional] + [word for at, word in enumerate(words) if at not in positional]


def number_from(least: float, kind: Any = int, most: float = math.inf) -> Callable[[str], Any]:
    """Return a parser of numbers from ``least`` to ``most``, for argparse."""

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most or math.isinf(value):
            limits = f"from {least} to {most}" if math.isfinite(most) else f"at least {least}"
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return value

    return number


def add_command(commands: Any, name: str, run: Callable[..., Any], text: str) -> argparse.ArgumentParser:
    """Add a command called ``name`` that calls ``run``; ``text`` is its help."""
    sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    sub.set_defaults(run=run)
    return sub
