"""Rows refilled across steps on a GPU: a resumed run ends with the bits of one that was not stopped."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from datasets import Dataset

from qerl.measure.random_task import random_prompts, word_tokenizer
from qerl.rollout.paged.engine import PagedEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.refill import UNDER_WAY_FILE
from tests.support.trainer import GROUP, settings, sum_reward

VOCABULARY = 1000


def trained(model: torch.nn.Module, folder: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
    """Train 4 steps of 3 groups, saving after the second; return the adapter."""
    args = QeRLConfig(
        **settings(
            folder, max_staleness=2, max_steps=4, per_device_train_batch_size=3 * GROUP, use_cpu=False,
            max_completion_length=40, stop_strings=["w1"], learning_rate=1e-3, signal="reward",
            save_strategy="steps", save_steps=2, disable_tqdm=True,
        )
    )  # fmt: skip
    torch.manual_seed(3)
    tokenizer = word_tokenizer(VOCABULARY)
    trainer = QeRLTrainer(
        model, [sum_reward], args, Dataset.from_dict({"prompt": random_prompts(12, 20)}),
        engine=PagedEngine(model, tokenizer.pad_token_id, 3 * GROUP), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_was_not_stopped(nvfp4_llama, tmp_path):
    def model():
        return nvfp4_llama(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4,
        )  # fmt: skip

    whole, again = trained(model(), tmp_path / "whole"), trained(model(), tmp_path / "again")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    groups = json.loads((checkpoint / UNDER_WAY_FILE).read_text())
    waiting = [each["finish_reason"] for group in groups for each in group["samples"]]
    assert None in waiting and any(waiting), "some are under way and some have ended"
    resumed = trained(model(), tmp_path / "whole", checkpoint)
    for name, expected in whole.items():
        assert torch.equal(again[name], expected), "a run repeats itself"
        assert torch.equal(resumed[name], expected), name
