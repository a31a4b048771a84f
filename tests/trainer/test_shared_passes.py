"""Microbatches that share a forward pass train and log as those that have one each."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qerl.update.padded import Lengths
from qerl.update.spans import Spans

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


def test_a_shared_pass_that_runs_out_of_memory_is_done_again(train):
    _, expected, passes = train(tokens_per_forward=500)
    assert len(passes) == 3, "one a step"
    trainer, weights, again = train(out_of_memory=2, tokens_per_forward=500)
    assert trainer._retry.max_tokens < 500 and len(again) > len(passes)
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=2e-5)


def spans(tokens, groups=None):
    """Microbatches of two samples each, the second of which is computed; its outputs are its weight's."""
    own = [n for count in tokens for n in (1000, count)]
    lengths = Lengths(own, [0] * len(own), list(range(len(own))))
    weight, passes = torch.ones(len(own), 1, requires_grad=True), []

    def forward(rows, last):
        assert rows[-1] // 2 <= last
        passes.append(rows)
        mask = torch.zeros(len(own), 1)
        mask[rows] = 1
        return weight * mask, (weight * mask).detach()

    rows = [[2 * i + 1] if count else [] for i, count in enumerate(tokens)]
    return Spans(rows, 2, lengths, forward), weight, passes


def test_a_pass_takes_as_many_microbatches_as_it_may():
    of, weight, passes = spans([5, 3, 2, 9, 4, 0, 1])
    for number in range(7):
        outputs = of.outputs(number, 10)
        if number == 3:
            assert outputs is None, "it fits with none after it"
            continue
        values, entropies = outputs
        assert values.requires_grad and values.grad_fn is not None and not entropies.requires_grad
        assert weight.grad is None or not weight.grad[2 * number + 1].any(), "nothing before its last loss"
        (values.sum() * (number + 1)).backward()
        of.end(number)
    assert passes == [[1, 3, 5], [9, 13]]
    assert weight.grad[:, 0].tolist() == [0, 1, 0, 2, 0, 3, 0, 0, 0, 5, 0, 0, 0, 7]


def test_microbatches_without_samples_are_computed_by_themselves():
    of, _, passes = spans([0, 0])
    assert of.outputs(0, 10) is None and not passes
