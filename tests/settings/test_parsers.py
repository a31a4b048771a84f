"""`QeRLConfig` with the parsers of TRL's and transformers' scripts."""

from dataclasses import dataclass

import pytest
from transformers import HfArgumentParser
from trl import ScriptArguments, TrlParser

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig


@dataclass
class Others:
    """What a script adds."""

    dataset: str = "none"


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_a_script_makes_settings_of_its_words(parser):
    made = parser((Others, QeRLConfig))
    assert "Rank of the adapters. (default: 32)" in " ".join(made.format_help().split())
    words = [
        "--dataset", "gsm8k", "--output_dir", "runs/a", "--learning_rate", "3e-5", "--noise", "--lora-r", "8",
        "--loss_type", "dapo", "--reward_files", "a.py:f", "b.py:g", "--logging_steps", "5",
    ]  # fmt: skip
    others, config = made.parse_args_into_dataclasses(words)
    assert (others.dataset, config.output_dir, config.learning_rate) == ("gsm8k", "runs/a", 3e-5)
    assert (config.noise, config.loss_type, config.lora_r) == (True, "dapo", 8)
    assert (config.logging_steps, config.reward_files) == (5, ["a.py:f", "b.py:g"])
    _, mappings = made.parse_args_into_dataclasses(
        ["--task_options", '{"level": "wp1"}', "--gradient_checkpointing_kwargs", '{"every_n_layers": 2}',
         "--pad_to_multiple_of", "8"]
    )  # fmt: skip
    assert mappings.task_options == {"level": "wp1"}
    assert mappings.gradient_checkpointing_kwargs["every_n_layers"] == 2
    assert mappings.pad_to_multiple_of == 8
    with pytest.raises(QeRLError, match=r"^judge is '\{url: x\}'; as text it must be valid JSON \(.+\)\.$"):
        made.parse_args_into_dataclasses(["--judge", "{url: x}"])
    _, plain = made.parse_args_into_dataclasses(["--output_dir", "runs/a"])
    assert plain == QeRLConfig(output_dir="runs/a")


def test_a_file_of_trls_parser_may_hold_mappings(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("dataset_name: mine\ntask: arithmetic\ntask_options: {level: wp1}\noutput_dir: runs/a\n")
    parser = TrlParser((ScriptArguments, QeRLConfig))
    script, config = parser.parse_args_and_config(["--config", str(file), "--lora_r", "4"])
    assert script.dataset_name == "mine"
    assert (config.task, config.task_options, config.lora_r) == ("arithmetic", {"level": "wp1"}, 4)


@dataclass
class OwnConfig(QeRLConfig):
    dataset: str = "none"


def test_a_config_of_ones_own_may_have_further_fields():
    (config,) = TrlParser(OwnConfig).parse_args_into_dataclasses(["--dataset", "gsm8k", "--lora_r", "4"])
    assert (config.dataset, config.lora_r) == ("gsm8k", 4)
    with pytest.raises(QeRLError, match="lora_r is 0"):
        OwnConfig(lora_r=0)


def test_ranges_hold_after_a_parser_has_seen_the_fields():
    """The parsers overwrite the types that dataclasses keep of their fields."""
    parser = HfArgumentParser(QeRLConfig)
    with pytest.raises(QeRLError, match=r"^lora_r is -1; it must be at least 1\.$"):
        parser.parse_args_into_dataclasses(["--lora_r", "-1"])
    assert QeRLConfig(adapter=None, lora_target_modules=None, logging_steps=0.5).logging_steps == 0.5
    with pytest.raises(QeRLError, match=r"^logging_steps is 1\.5; it must be less than 1 or "):
        QeRLConfig(logging_steps=1.5)
