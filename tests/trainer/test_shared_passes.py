"""Microbatches that share a forward pass train and log as those that have one each."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.models import move_adapter
from tests.support.trainer import DATA, GROUP, ScriptedEngine, logged, settings, sum_reward

pytestmark = pytest.mark.slow


@pytest.fixture
def train(tiny_model, tiny_tokenizer, tmp_path):
    """``train(out_of_memory, **changes)``: trainer, trained weights and tokens of each forward pass."""

    def run(out_of_memory=None, **changes):
        values = {"learning_rate": 1e-2, "max_steps": 3, "per_device_train_batch_size": GROUP}
        values |= {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}
        args = QeRLConfig(**settings(tmp_path, **(values | changes)))
        torch.manual_seed(0)
        model = get_peft_model(
            tiny_model("llama"), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        )
        engine = ScriptedEngine(128, tiny_tokenizer.eos_token_id)
        trainer = QeRLTrainer(
            move_adapter(model), [sum_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer
        )
        passes = []

        def watch(module, inputs, output):
            passes.append(inputs[0].numel())
            if out_of_memory == len(passes):
                output.register_hook(fail)

        def fail(gradient):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        model.get_input_embeddings().register_forward_hook(watch)
        trainer.train()
        return trainer, [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad], passes

    return run


OPTIONS = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"},
    {"loss_type": "vespo"},
    {"beta": 0.1},
    {"entropy_coef": 0.1},
    # One step: samples of a group have the same entropy at their first token, and rounding parts them.
    {"top_entropy_quantile": 0.3, "max_steps": 1},
    {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 3.0},
    {"num_iterations": 2},
    {
        "algorithm": "dppo",
        "epsilon": 0.01,
        "kl_tau": 0.1,
        "filter_zero_advantages": True,
        "num_iterations": 2,
    },
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [60, 500])
def test_shared_passes_change_nothing(train, options, tokens):
    reference, expected, alone = train(**options)
    trainer, weights, passes = train(tokens_per_forward=tokens, **options)
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-5)
    rows, others = logged(trainer), logged(reference)
    assert len(rows) == trainer.args.max_steps and any(row["loss"] != 0 for row in rows)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=1e-4, abs=1e-6, nan_ok=True), name
    assert len(passes) < len(alone), "fewer forward passes"
    assert max(passes) <= tokens


def test_the_samplers_log_probabilities_spare_a_pass(train):
    """Two updates of each rollout, and a pass for the old log-probabilities unless they are the sampler's."""
    options = {"loss_type": "dapo", "tokens_per_forward": 500, "num_iterations": 2, "max_steps": 4}
    assert len(train(**options)[2]) == 2 * (2 + 1)
    trainer, _, passes = train(**options, use_rollout_logprobs=True)
    assert len(passes) == 2 * 2
    assert all(row["sampling/kl"] > 0 for row in logged(trainer)), "what is measured stays the trainer's"


def test_a_shared_pass_that_runs_out_of_memory_is_done_again(train):
    _, expected, passes = train(tokens_per_forward=500)
    assert len(passes) == 3, "one a step"
    trainer, weights, again = train(out_of_memory=2, tokens_per_forward=500)
    assert trainer.updates.retry.max_tokens < 500 and len(again) > len(passes)
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-5)


STRADDLING = {"gradient_accumulation_steps": 3, "steps_per_generation": 2}


@pytest.mark.parametrize("options", [STRADDLING, STRADDLING | {"steps_per_generation": 1}], ids=str)
def test_rollouts_of_one_step_have_no_group_in_common(tiny_model, tiny_tokenizer, tmp_path, options):
    """Their samples stand in one row, where a group's prompt is there once. Most rows of the data have
    one prompt."""
    data = Dataset.from_dict({"prompt": ["one two"] * 8 + ["three"] * 4})
    values = options | {"per_device_train_batch_size": GROUP, "tokens_per_forward": 500}
    args = QeRLConfig(**settings(tmp_path, **values))
    engine = ScriptedEngine(128, tiny_tokenizer.eos_token_id)
    trainer = QeRLTrainer(
        get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj"])),
        [sum_reward], args, data, engine=engine, processing_class=tiny_tokenizer,
    )  # fmt: skip
    steps, run = [], trainer.updates.run

    def spy(model, microbatches, step):
        steps.append([list(part.samples) for part in microbatches])
        return run(model, microbatches, step)

    trainer.updates.run = spy
    trainer.train()
    assert [len(step) for step in steps] == [3] * 4
    for step in steps:
        groups = [{sample.group for sample in part} for part in step]
        assert all(len(each) == 1 for each in groups), "a microbatch is a group"
        assert len(set.union(*groups)) == 3
        for part in step:
            assert len({tuple(sample.prompt) for sample in part}) == 1


@pytest.mark.parametrize("tokens", [60, 500])
def test_a_rollout_that_straddles_steps_trains_as_in_passes_of_its_own(train, tokens):
    _, expected, _ = train(**STRADDLING)
    _, weights, _ = train(tokens_per_forward=tokens, **STRADDLING)
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-5)
