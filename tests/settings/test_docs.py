"""docs/configuration.md says what the dataclasses say."""

from pathlib import Path

import pytest

from qerl.cli import main
from qerl.settings.docs import field_text, help_text, markdown, other_defaults, own_fields
from qerl.settings.fields import OWN_NAMES
from qerl.settings.parents import Refused, Replaced, fate_of
from qerl.settings.recipe import FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "heading",
    ["Fields", "Defaults that differ from TRL's", "Fields that ask for speed", "Fields that are refused"],
)
def test_the_page_has_the_tables_as_they_are(heading):
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert markdown()[heading] in section, "python -m qerl.settings.docs prints the tables"


def test_each_default_that_differs_has_a_reason():
    assert all(reason.endswith(".") for *_, reason in other_defaults())


def test_every_field_has_a_sentence_in_a_group():
    text, rows = help_text(), [row for group in own_fields().values() for row in group]
    assert [name for name, *_ in rows] == list(OWN_NAMES)
    for name, _, words in rows:
        assert f"--{name} [" in text
        assert words.endswith(".")


def test_every_field_is_explained():
    for name in FIELDS:
        text, fate = " ".join(field_text(name).split()), None if name in OWN_NAMES else fate_of(name)
        assert name in text and text.endswith("."), name
        assert ("is not supported: " in text) == isinstance(fate, Refused), name
        assert ("changes nothing: " in text) == isinstance(fate, Replaced), name


def test_fields_on_the_command_line(capsys):
    assert main(["fields"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in FIELDS)
    assert main(["fields", "lora_rank"]) == 2
    assert "did you mean 'lora_r'" in capsys.readouterr().err
