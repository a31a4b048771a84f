"""Training with stop strings: what they end is whole, in the loss and in what is logged."""

import pytest
import torch

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import DATA, as_batch, logged_of, rollout_of, settings, sum_reward

STOPS = [*"aeiou", "\n"]


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def made(**changes):
        config = QeRLConfig(**settings(tmp_path, tuning="full", weights="bf16", **changes))
        model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
        return QeRLTrainer(model, made.reward, config, DATA, processing_class=tiny_tokenizer)

    made.reward = sum_reward
    return made


def rollout(trainer):
    """The batch of a first rollout and what was logged of it."""
    parts = rollout_of(trainer, [row for row in trainer.train_dataset for _ in range(4)])
    return as_batch(parts), logged_of(trainer)


def test_what_a_text_has_ended_was_not_cut_off(make, tiny_tokenizer):
    texts, everything = [], []

    def reward(completions, completion_ids, **_):
        texts[:], everything[:] = completions, [*everything, *completion_ids]
        return [float(len(text)) for text in completions]

    make.reward = reward
    free, plain = rollout(make(max_completion_length=12))
    trainer = make(max_completion_length=12, stop_strings=STOPS, mask_truncated_completions=True)
    batch, metrics = rollout(trainer)
    longer, completions = everything[: len(texts)], everything[len(texts) :]
    assert texts == tiny_tokenizer.batch_decode(completions, skip_special_tokens=True)
    assert all(whole[: len(ids)] == ids for ids, whole in zip(completions, longer, strict=True))
    by_text = torch.tensor([text.endswith(tuple(STOPS)) for text in texts])
    ends = (*trainer.eos_token_ids, tiny_tokenizer.pad_token_id)
    by_token = torch.tensor([ids[-1] in ends for ids in completions])
    assert 2 < by_text.sum() < len(texts) and not any(each in text[:-1] for text in texts for each in STOPS)
    assert torch.equal(batch["completion_mask"].any(dim=1), by_text | by_token)
    lengths = torch.tensor([float(len(ids)) for ids in completions])
    ended = lengths[by_text | by_token]
    assert batch["num_items_in_batch"] == ended.sum()
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 - len(ended) / len(lengths))
    assert metrics["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert metrics["completions/max_terminated_length"] == ended.max()
    assert plain["completions/clipped_ratio"] > metrics["completions/clipped_ratio"]
    assert free["completion_mask"].any(dim=1).all()


def test_a_run_with_stop_strings_trains_and_evaluates(make):
    trainer = make(stop_strings=STOPS, max_steps=1, eval_strategy="no")
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] < 1
    assert trainer.evaluate(DATA)["eval_completions/clipped_ratio"] < 1


def test_nobody_reads_stop_strings_of_a_function_that_samples(tiny_model, tiny_tokenizer, tmp_path):
    config = QeRLConfig(**settings(tmp_path, tuning="full", weights="bf16", stop_strings="x"))
    with pytest.raises(QeRLError, match=r"stop_strings has no effect here \(rollout_func samples"):
        QeRLTrainer(
            tiny_model("llama"), sum_reward, config, DATA, processing_class=tiny_tokenizer,
            rollout_func=lambda prompts, trainer: {},
        )  # fmt: skip
