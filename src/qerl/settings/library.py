"""The recipes that are part of the package, by name.

A recipe of the package is named by the stem of its file: `gsm8k`, `nvfp4-aqn`, `qwen3-8b`. A word that ends
in .yaml or holds a slash is the path of a file instead, so that no file of the current folder can hide a
recipe of the package, nor the other way around. Each recipe of the package begins with a header of comments
(what it is about, what it needs beside itself, on which hardware it runs, how long it takes), which
`qerl recipes` prints. Tests compare the hardware with the memory plan and the time with a measurement.
"""

import difflib
from dataclasses import dataclass, fields
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from qerl.errors import QeRLError

FOLDER = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Header:
    """What a recipe of the package says of itself in its first lines, each ``# KEY: TEXT``.

    Attributes:
        about: What the recipe sets.
        needs: What has to come with it: other recipes, data, packages.
        hardware: Where a run of it fits.
        time: How long a run takes, "not measured" where nobody has measured it.
    """

    about: str
    needs: str
    hardware: str
    time: str


def packaged() -> dict[str, Path]:
    """Files of the package's recipes by name: complete ones first, then tasks, variants, models and cards."""
    folders = [FOLDER, *(FOLDER / name for name in ("tasks", "variants", "models", "cards"))]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def recipe_file(word: str) -> Path:
    """The file that a word on the command line means: a path, or a recipe of the package.

    Raises:
        QeRLError: The package has no recipe of this name; the message says which names are near.
    """
    is_file = word.endswith((".yaml", ".yml"))
    name, sign, value = word.partition("=")
    if sign and name.isidentifier() and not is_file:
        raise QeRLError(f"{word!r} is no recipe; a field is set with two dashes: --{name} {value}.")
    if is_file or "/" in word:
        return Path(word).expanduser()
    known = packaged()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see `qerl recipes`."
        raise QeRLError(
            f"There is no recipe named {word!r}; {hint} A file is given as a path in .yaml, a task without a "
            "recipe as --task NAME."
        )
    return known[word]


def read_header(path: Path) -> Header:
    """The header of a recipe of the package.

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
    """The package's recipes with their headers, for a terminal, without times that nobody has measured."""
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
