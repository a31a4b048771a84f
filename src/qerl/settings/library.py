"""YAML files: the recipes of the package by name, and reading of any file.

A recipe of the package is named by the stem of its file: `gsm8k`, `nvfp4-aqn`, `qwen3-8b`. A word that ends
in .yaml or holds a slash is a path instead, so that no file of the current folder can hide a recipe of the
package, nor the other way around. Each recipe of the package begins with a header of comments (what it sets,
what else it needs, on which hardware it runs, how long it takes), which `qerl recipes` prints. Tests compare
the hardware with the memory plan and the time with a measurement.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from qerl import yaml12
from qerl.errors import QeRLError

_ENDINGS = (".yaml", ".yml")

FOLDER = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Header:
    """Header of a recipe of the package, in its first lines, each ``# KEY: TEXT``.

    Attributes:
        about: What the recipe sets.
        needs: What it needs: other recipes, data, packages.
        hardware: Hardware on which its run fits.
        time: How long a run takes, or "not measured".
    """

    about: str
    needs: str
    hardware: str
    time: str


def packaged() -> dict[str, Path]:
    """Return the package's recipe files by name: complete ones first, then tasks, variants, models, cards."""
    folders = [FOLDER, *(FOLDER / name for name in ("tasks", "variants", "models", "cards"))]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def recipe_file(word: str) -> Path:
    """Return the file that a word on the command line means: a path, or a recipe of the package.

    Raises:
        QeRLError: The package has no recipe of this name; the message has the nearest names.
    """
    name, sign, value = word.partition("=")
    if sign and name.isidentifier() and not word.endswith(_ENDINGS):
        raise QeRLError(f"{word!r} is no recipe; a field is set with two dashes: --{name} {value}.")
    also = ", a task without a recipe as --task NAME"
    return named_file(word, packaged(), "recipe", "see `qerl recipes`.", also)


def named_file(
    word: str, known: Mapping[str, Path], what: str, listed: str | None = None, also: str = ""
) -> Path:
    """Return the file that a command-line word means: a path, or a file of the package by its name.

    Args:
        word: The word; a path if it ends in .yaml or has a slash.
        known: Files of the package by name.
        what: Kind of file, such as ``suite``, for the message.
        listed: Where to find the known names; None lists them.
        also: Another possible meaning of the word, as the end of a sentence.

    Raises:
        QeRLError: The package has no file of this name.
    """
    if word.endswith(_ENDINGS) or "/" in word:
        return Path(word).expanduser()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else listed
        hint = hint or f"there are: {', '.join(known)}."
        raise QeRLError(
            f"There is no {what} named {word!r}; {hint} Give a file as a path that ends in .yaml{also}."
        )
    return known[word]


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read the mapping in a YAML file, which errors call ``what``.

    Raises:
        QeRLError: The file is missing, is no text, or is not a YAML mapping.
    """
    try:
        values = yaml12.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QeRLError(f"The {what} {path} cannot be read ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise QeRLError(f"The {what} {path} is not UTF-8 text; is it the right file?") from error
    except ValueError as error:
        raise QeRLError(f"The {what} {path} is not valid YAML ({error}); mend the file.") from error
    if not isinstance(values, dict):
        raise QeRLError(f"The {what} {path} must be a mapping of field names to values.")
    return values


def nearest(name: Any, known: Collection[str]) -> str:
    """Suggest the nearest known name, as the end of a clause: ` (did you mean 'steps'?)`, or list all."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else f"; there are {', '.join(known)}"


def read_header(path: Path) -> Header:
    """Read the header of a recipe of the package.

    Raises:
        ValueError: A key is missing, unknown or out of order.
    """
    keys = [spec.name for spec in fields(Header)]
    lines = path.read_text(encoding="utf-8").splitlines()[: len(keys)]
    found = dict(line.removeprefix("# ").split(": ", 1) for line in lines)
    if list(found) != keys:
        raise ValueError(f"{path} begins with {list(found)}, and the header of a recipe is {keys}")
    return Header(**found)


def recipe_table() -> Table:
    """Return a terminal table of the package's recipes with their headers, without unmeasured times."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    kind = ""
    for name, path in packaged().items():
        if path.parent.name != kind:
            kind = path.parent.name
            table.add_row(f"[bold]{'complete' if path.parent == FOLDER else kind}[/bold]")
        header = read_header(path)
        details = ("needs", header.needs), ("hardware", header.hardware), ("time", header.time)
        said = [(key, text) for key, text in details if text != "not measured"]
        lines = [escape(header.about), *(f"[dim]{key}: {escape(text)}[/dim]" for key, text in said)]
        table.add_row(f"  {name}", "\n".join(lines))
    return table
