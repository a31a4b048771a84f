"""docs/configuration.md says what the dataclasses say."""

from pathlib import Path

import pytest

from qerl.cli import main
from qerl.settings.algorithms import ALGORITHMS
from qerl.settings.config import refusal
from qerl.settings.docs import (
    all_fields_text,
    field_text,
    help_text,
    inherited_fields,
    markdown,
    other_defaults,
    own_fields,
    presets,
)
from qerl.settings.groups import OWN_NAMES, sentence_of
from qerl.settings.parents import REPLACED, default_of
from qerl.settings.recipe import FIELDS

_ACTS_NOT = ("ask for speed", "are refused")
PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "heading",
    ["Fields", "Algorithms", "Defaults that differ from TRL's", *(f"Fields that {x}" for x in _ACTS_NOT)],
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


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_explained(name):
    text = " ".join(field_text(name).split())
    if sentence := refusal(name, default_of(FIELDS[name])):
        assert text == sentence
    elif name in OWN_NAMES:
        assert FIELDS[name].metadata["help"] == sentence_of(name) and sentence_of(name) in text
    elif name in inherited_fields():
        assert f"--{name} [" in text and text.endswith("It acts as in TRL and transformers.")
    else:
        assert text == f"{name} is accepted and changes nothing: {REPLACED[name].by}."


def test_what_an_algorithm_sets_is_said_with_the_fields():
    """Under its own name, with the field that it sets, and in the list of all."""
    text = field_text("algorithm")
    assert "  gspo: loss_type: grpo, epsilon: 0.0003," in text
    assert "By algorithm: grpo: unset, dr_grpo: unset," in field_text("delta")
    assert "--scale_rewards [group]" in field_text("scale_rewards")
    assert "dr_grpo: none, dppo: none." in field_text("scale_rewards")
    assert "What an algorithm sets" in all_fields_text()
    assert all(name in ALGORITHMS and words for name, words in presets())


def test_fields_on_the_command_line(capsys):
    assert main(["fields"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in FIELDS)
    assert main(["fields", "lora_rank"]) == 2
    assert "did you mean 'lora_r'" in capsys.readouterr().err
