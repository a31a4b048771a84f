"""docs/configuration.md says what the dataclasses say."""

from pathlib import Path

import pytest

from qerl.settings.docs import help_text, markdown, other_defaults, own_fields

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("heading", ["Fields", "Defaults that differ from TRL's", "Fields that are refused"])
def test_the_page_has_the_tables_as_they_are(heading):
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert table == markdown()[heading], "python -m qerl.settings.docs prints the tables"


def test_each_default_that_differs_has_a_reason():
    reasons = {name: reason for name, *_, reason in other_defaults()}
    assert reasons.keys() == {
        "loss_type", "mask_truncated_completions", "bf16", "logging_steps", "vllm_importance_sampling_mode",
        "ddp_broadcast_buffers", "ddp_find_unused_parameters",
    }  # fmt: skip
    assert all(reason.endswith(".") for reason in reasons.values())


def test_every_field_has_a_help_text():
    text = help_text()
    for name, _, words in own_fields():
        assert f"--{name} [" in text
        assert words.endswith(".")
