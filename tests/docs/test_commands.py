"""Commands that README and docs show: their words are taken, and their fields and recipes are known."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.result import EVERYWHERE
from lab.__main__ import COMMANDS
from lab.study.library import study_file
from qerl.cli import TAKE_FIELDS, _parser
from qerl.settings.library import recipe_file
from qerl.settings.recipe import check_key, parse_field
from qerl.settings.words import split_fields, with_underscores

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
_COMMAND = r"(?:torchrun .*?-m )?qerl [^`\n]+?|(?:python|torchrun .*?) -m (?:bench|lab) [^`\n]+?"
_BLOCK = re.compile(rf"^(?:    )?({_COMMAND})(?: +#.*)?$", flags=re.MULTILINE)
_INLINE = re.compile(rf"`({_COMMAND})`")


def shown():
    """The words of each command, from its program on."""
    for page in PAGES:
        for command in _BLOCK.findall(page.read_text()) + _INLINE.findall(page.read_text()):
            words = shlex.split(re.sub(r"(?<=RECIPE)\.\.\.| \.\.\.$| > .*", "", command))
            words = words[next(i for i, word in enumerate(words) if word in ("qerl", "bench", "lab")) :]
            yield pytest.param(words, id=f"{page.name}: {command}")


@pytest.mark.parametrize("words", shown())
def test_a_command_of_the_docs_is_taken(words):
    program, name, *others = words
    if program == "bench":
        assert name in BENCHMARKS
        of_module = getattr(import_module(f"bench.{name}"), "_parser", None)
        if of_module and others and "--help" not in others:
            for option in EVERYWHERE:
                at = others.index(option) if option in others else len(others)
                others = others[:at] + others[at + 2 :]
            of_module().parse_args(others)
    elif program == "lab":
        of_module = getattr(import_module(f"lab.{COMMANDS[name]}"), "_parser", None)
        if of_module and others:
            args = of_module().parse_args(others)
            for study in getattr(args, "studies", ()):
                assert "/" in study or study == "my.yaml" or study_file(study).exists()
                assert not study.startswith("lab/") or (ROOT / study).exists()
    elif not others:  # a mention
        assert f"    {name} " in _parser().format_help()
    elif others != ["--help"]:
        words, fields = with_underscores([name, *others]), {}
        if name in TAKE_FIELDS:
            words, fields = split_fields(words, *TAKE_FIELDS[name])
        args = _parser().parse_args(words)
        for field, text in fields.items():
            check_key(field, "The command")
            parse_field(field, text)
        for recipe in getattr(args, "recipes", ()):
            assert recipe.isupper() or recipe_file(recipe).exists()


def test_the_docs_show_commands():
    found = [parameters.id for parameters in shown()]
    assert len(found) > 60 and any(name.startswith("README.md: qerl eval ") for name in found)
