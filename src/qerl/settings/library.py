"""YAML files: the recipes of the package by name, and reading of any file.

A recipe of the package is named by the stem of its file: `gsm8k`, `nvfp4-aqn`, `qwen3-8b`. A word that ends
in .yaml or holds a slash is a path instead, so that no file of the current folder can hide a recipe of the
package, nor the other way around. Each recipe of the package begins with a header of comments (what it sets,
what else it needs, on which hardware it runs, how long it takes), which `qerl recipes` prints. Tests compare
the hardware with the memory plan and the time with a measurement.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qerl import yaml12
from qerl.errors import QeRLError
from qerl.run_folder import CONFIG_FILE

_ENDINGS = (".yaml", ".yml")

FOLDER = Path(__file__).parents[1] / "recipes"

_USAGE = "qerl train TASK VARIANT MODEL [CARD], or one complete recipe: qerl train demo"
_OVER = "Later ones override earlier ones; the card is named last."
_UNMEASURED = "not measured"

# Folder: heading, and what needs not be repeated for each recipe.
_KINDS = {
    "": ("complete", {_UNMEASURED, "as the model"}),
    "tasks": ("TASK", {_UNMEASURED, "as the model"}),
    "variants": ("VARIANT", {_UNMEASURED, "a task and a model", "CUDA GPU; CPU for small models"}),
    "models": (
        "MODEL, its id on the Hub, and GPUs of how many GB hold it by the plan of gsm8k with nvfp4-lora",
        {_UNMEASURED, "a task and a variant", "gsm8k with nvfp4-lora"},
    ),
    "cards": ("CARD", {_UNMEASURED}),
}


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
    return {path.stem: path for kind in _KINDS for path in sorted((FOLDER / kind).glob("*.yaml"))}


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


def check_card_is_last(files: Sequence[Path]) -> None:
    """Raise if a card's recipe is followed by another kind of recipe of the package.

    The card's settings are smaller than those of a task and would be overridden by them without a word. The
    user's own files may follow: they override on purpose.

    Raises:
        QeRLError: Such a recipe follows.
    """
    cards = [file for file in files if file.parent == FOLDER / "cards"]
    if not cards:
        return
    for file in files[files.index(cards[0]) + 1 :]:
        if file not in cards and file.is_relative_to(FOLDER):
            card = cards[0].stem
            raise QeRLError(
                f"{card} comes before {file.stem}, which may undo its settings; name {card} last."
            )


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
        QeRLError: The file is missing, is a folder, is no text, or is not a YAML mapping.
    """
    try:
        values = yaml12.load(path.read_text(encoding="utf-8"))
    except IsADirectoryError as error:
        inside = path / CONFIG_FILE
        hint = f"give {inside}, its run's settings" if inside.is_file() else "give a .yaml file"
        raise QeRLError(f"The {what} {path} is a folder; {hint}.") from error
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


def recipe_list() -> Group:
    """Return the package's recipes for a terminal: how they are named together, then each kind with what its
    headers say beyond that, without unmeasured times."""
    parts: list[RenderableType] = [Text(_USAGE), Text(_OVER)]
    for kind, (heading, usual) in _KINDS.items():
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, path in packaged().items():
            if path.parent == FOLDER / kind:
                row = _model_row(path, usual) if kind == "models" else [_said(path, usual)]
                table.add_row(f"  {name}", *row)
        parts += [Text(), Text(heading, style="bold"), table]
    return Group(*parts)


def _said(path: Path, usual: Collection[str]) -> str:
    """Return what a header says, without the details that are usual for recipes of its kind."""
    header = read_header(path)
    details = ("needs", header.needs), ("hardware", header.hardware), ("time", header.time)
    said = [(key, text) for key, text in details if text not in usual]
    return "\n".join([escape(header.about), *(f"[dim]{key}: {escape(text)}[/dim]" for key, text in said)])


def _model_row(path: Path, usual: Collection[str]) -> list[str]:
    """Return a model's Hub id, with what is special about it below, and the sizes of GPUs that hold it."""
    header = read_header(path)
    sizes, _, planned = header.hardware.partition(" GB, by the plan of ")
    _, _, special = header.about.removesuffix(".").partition(", ")
    needs = header.needs.removeprefix("a task and a variant; ")
    special_plan = "" if planned in usual else f"planned as {planned}"
    notes = [special, "" if header.needs in usual else f"needs {needs}", special_plan]
    under = "".join(f"\n[dim]{escape(note)}[/dim]" for note in notes if note)
    return [escape(str(read_mapping(path, "recipe")["model"])) + under, " ".join(re.findall(r"\d+", sizes))]
