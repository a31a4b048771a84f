"""Malformed files that `python -m tests.fuzz malformed` found to end in another library's exception."""

import json
import re

import pytest

from qerl.cli import main
from tests.fuzz import malformed


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return malformed._made(tmp_path_factory.mktemp("sound"))


def test_sound_files_are_read(cases):
    for name in ("recipe", "metrics", "planned", "config.json", "adapter adapter_config.json"):
        assert main(cases[name][1]) == 0, name


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("adapter adapter_config.json", {"base_model_name_or_path": 3}, "does not fit this model"),
        ("adapter adapter_config.json", {"alora_invocation_tokens": [5]}, "activated LoRA adapter"),
        ("adapter adapter_config.json", {"trainable_token_indices": [1]}, "adapter"),
        ("tokenizer.json", {"pre_tokenizer": 3}, "tokenizer of .* cannot be loaded"),
        ("tokenizer.json", {"truncation": 1e20}, "tokenizer of .* cannot be loaded"),
        ("config.json", {"attention_bias": {}}, "cannot be loaded"),
        ("config.json", {"head_dim": 10**20}, "cannot be loaded"),
        ("config.json", {"hidden_size": 10**12}, "has shape .* but its config asks for .*000000000000"),
        ("config.json", {"num_hidden_layers": -1}, "has num_hidden_layers -1"),
        ("planned", {"initializer_range": 1.5}, "config.json of this llama model is not valid"),
        ("planned", {"num_hidden_layers": -1}, "has num_hidden_layers -1"),
    ],
)
def test_a_value_that_no_reader_expects_is_one_sentence(cases, name, changes, message, capsys):
    path, words = cases[name]
    sound = path.read_bytes()
    path.write_text(json.dumps(json.loads(sound) | changes))
    try:
        assert main(words) == 2
    finally:
        path.write_bytes(sound)
    printed = " ".join(capsys.readouterr().err.split())
    assert re.search(message, printed), printed


@pytest.mark.slow
def test_nesting_without_end_is_one_sentence(cases, capsys):
    for name in ("recipe", "data", "metrics", "planned", "adapter adapter_config.json"):
        path, words = cases[name]
        sound = path.read_bytes()
        path.write_bytes(b"[" * 3000)
        try:
            assert main(words) == 2, name
        finally:
            path.write_bytes(sound)
        assert "error:" in capsys.readouterr().err


def test_a_few_random_cases(tmp_path):
    assert "found" not in malformed.run(20, 0, tmp_path)
