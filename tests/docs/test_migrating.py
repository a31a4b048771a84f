"""The tables of docs/migrating.md: what is typed here is a field here, what is typed in TRL is one there."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import trl

import qerl
from qerl.settings.recipe import check_key
from tests.support.training_page import is_explained

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
_CODE = re.compile(r"`([^`]+)`")
_IDENTIFIER = re.compile(r"[a-z_]\w*")
OF_DATA = {"prompt", "messages", "answer"}


def rows(heading):
    """The cells of the tables under a heading, without their heads."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [one for one in cells if not one[0].startswith(("TRL", "Unsloth", "verl", "metric of verl"))]


@pytest.mark.parametrize("heading", ["From TRL", "From Unsloth", "From verl"])
def test_what_is_typed_here_is_known(heading):
    found = rows(heading)
    assert len(found) > 8
    for theirs, ours, *_ in found:
        assert ours in ("nothing", "the same") or _CODE.search(ours), theirs
        for name in _CODE.findall(ours):
            if name.startswith(("qerl ", "torchrun ", "trainer.")):
                continue
            if name[0].isupper():
                assert hasattr(qerl, name)
            elif "/" in name or is_explained(name):
                assert is_explained(name), name
            elif name not in OF_DATA:
                check_key(name, "The page")


def test_what_is_typed_in_trl_is_a_field_there():
    known = {field.name for config in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
             for field in fields(config)}  # fmt: skip
    named = [name for theirs, *_ in rows("From TRL") for name in _CODE.findall(theirs)]
    for name in named:
        assert inspect.isclass(getattr(trl, name)) if name[0].isupper() else name in known, name


def test_fields_that_are_the_same_there_and_here_are():
    for theirs, ours, *_ in rows("From TRL"):
        if ours == "the same":
            for name in _CODE.findall(theirs):
                assert _IDENTIFIER.fullmatch(name)
                check_key(name, "The page")
