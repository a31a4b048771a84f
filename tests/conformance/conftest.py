"""The tiny model that both trainers learn on."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.conformance.harness import Bench


@pytest.fixture(scope="session")
def bench(tiny_model, tiny_tokenizer, tmp_path_factory) -> Bench:
    """Both trainers on a Llama of one layer; it is loaded from a folder, as TRL's reference model will be."""
    folder = tmp_path_factory.mktemp("conformance")
    tiny_model("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=48).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return Bench(AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer, Path(folder / "runs"))


@pytest.fixture(autouse=True)
def groups_stay_together(monkeypatch):
    """TRL shuffles the samples of a rollout over its microbatches, ours keeps groups together."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
