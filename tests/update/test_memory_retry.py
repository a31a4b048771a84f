"""A step that runs out of memory is redone with the gradients, the loss and the log it would have had."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer import run
from qerl.trainer.grpo import QeRLTrainer
from qerl.update.chunks import LIMITS_FILE, MemoryRetry
from qerl.update.packed_row import Lengths
from tests.support.models import move_adapter
from tests.support.trainer import DATA, GROUP, ScriptedEngine, logged, settings, sum_reward

pytestmark = pytest.mark.slow


class SmallMemory:
    """Raises CUDA's error where a forward pass holds too many tokens.

    Args:
        trainer: Its forward passes are watched.
        tokens: How many fit.
        phase: ``forward``, or ``backward``: then the gradients of the last layer have been added already.
        spare: Forward passes that fit whatever they hold.
    """

    def __init__(self, trainer, tokens, phase, spare=0):
        self.tokens, self.phase, self.spare = tokens, phase, spare
        self.held, self.errors, self.sizes = 0, 0, []
        self._forward = trainer.updates._forward
        trainer.updates._forward = self.forward
        trainer.model.get_input_embeddings().register_forward_hook(self.watch)

    def forward(self, model, samples, lengths, rows, **given):
        self.held = lengths.tokens(rows)
        self.sizes.append(self.held)
        outputs = self._forward(model, samples, lengths, rows, **given)
        if self.phase == "forward":
            self.fill()
        return outputs

    def watch(self, module, args, output):
        if self.phase == "backward" and output.requires_grad:
            output.register_hook(lambda grad: self.fill())

    def fill(self):
        if self.held <= self.tokens:
            return
        if self.spare:
            self.spare -= 1
            return
        self.errors += 1
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@pytest.fixture
def train(tiny_model, tiny_tokenizer, tmp_path):
    def run(memory=None, resume=None, **changes):
        values = {
            "per_device_train_batch_size": 2 * GROUP, "gradient_accumulation_steps": 2,
            "gradient_checkpointing": True, "max_steps": 2,
        }  # fmt: skip
        args = QeRLConfig(**settings(tmp_path, **(values | changes)))
        torch.manual_seed(1)
        model = get_peft_model(
            tiny_model("llama"), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        )
        gradients = Gradients()
        trainer = QeRLTrainer(
            move_adapter(model), [sum_reward], args, DATA, engine=ScriptedEngine(128, shortest=2),
            processing_class=tiny_tokenizer, callbacks=[gradients],
        )  # fmt: skip
        trainer.memory = SmallMemory(trainer, *memory) if memory else None
        trainer.train(resume_from_checkpoint=resume)
        return trainer, gradients.steps

    return run


@pytest.mark.parametrize(
    "loss_type, memory",
    [
        ("bnpo", (24, "forward")),
        ("dapo", (24, "forward", 1)),
        ("bnpo", (24, "backward", 1)),
        ("dapo", (24, "backward")),
        ("grpo", (18, "backward", 2)),
        ("dapo", (18, "forward")),
    ],
)
def test_gradients_are_those_without_the_error(train, loss_type, memory):
    reference, expected = train(loss_type=loss_type)
    trainer, actual = train(memory, loss_type=loss_type)
    assert trainer.memory.errors >= 1
    assert len(trainer.engine.calls) == len(reference.engine.calls), "nothing is sampled again"
    assert trainer.state.global_step == reference.state.global_step
    assert len(actual) == len(expected) == 2
    for step in range(2):
        assert actual[step].keys() == expected[step].keys()
        for name, grad in expected[step].items():
            error = (actual[step][name] - grad).norm() / grad.norm()
            assert error < 1e-4, f"step {step}, {name}: relative error {error:.1e}"
    for row, other in zip(logged(trainer), logged(reference), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=1e-4, abs=1e-6, nan_ok=True), name


def test_the_limit_stays(train):
    trainer, _ = train((24, "forward"))
    assert trainer.memory.errors == 1
    assert trainer.memory.sizes[0] == 48
    assert trainer.updates.retry.max_tokens == 24
    assert 12 < max(trainer.memory.sizes[1:]) <= 24


def test_a_second_training_keeps_the_limit_and_repeats_its_own_batches_alone(train):
    """Both end in step 0, where the second one begins."""
    reference, expected = train(max_steps=1)
    trainer, actual = train((24, "forward"), max_steps=1)
    for again in (reference, trainer):
        again.train()
        seeds = [params.seed for _, params, _ in again.engine.calls]
        assert len(seeds) == 2 and seeds[0] == seeds[1], "of a step, whatever was trained before"
    assert trainer.memory.errors == 1, "the limit of the first one holds"
    trainer.memory.tokens = 18
    trainer.train()
    reference.train()
    assert trainer.memory.errors == 2
    for first, second in zip(expected, actual, strict=True):
        for name, grad in first.items():
            torch.testing.assert_close(second[name], grad, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_has_the_limit(train, tmp_path):
    train((24, "forward"), save_strategy="steps", save_steps=1, max_steps=1)
    checkpoint = str(tmp_path / "checkpoint-1")
    trainer, _ = train((24, "forward"), resume=checkpoint)
    assert trainer.memory.errors == 0
    assert trainer.memory.sizes
    for given, limit in ((100, 24), (20, 20)):
        trainer, _ = train(resume=checkpoint, tokens_per_forward=given)
        assert trainer.updates.retry.max_tokens == limit


def test_adaptive_entropy_is_counted_once(train):
    settings = {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 10.0}
    reference, _ = train(**settings)
    trainer, _ = train((24, "backward", 1), **settings)
    assert trainer.memory.errors == 1
    assert trainer.updates._entropy_coef == reference.updates._entropy_coef != 0.1


def test_what_was_logged_says_so(train, caplog):
    train((24, "forward", 3))
    (record,) = [record for record in caplog.records if record.name == "qerl.update.chunks"]
    assert record.getMessage() == (
        "Out of GPU memory in step 2: it is redone from its start, from now on with at most 22 instead of 44 "
        "tokens in one forward pass; tokens_per_forward: 22 sets that from the start."
    )


def test_layers_are_recomputed_before_chunks_get_smaller(train, tmp_path, caplog):
    kwargs = {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    _, expected = train()
    settings = {**kwargs, "save_strategy": "steps", "save_steps": 1}
    trainer, actual = train((24, "backward"), **settings)
    assert trainer.memory.errors == 2 and trainer.updates.retry.max_tokens == 24
    assert "every layer recomputed" in caplog.text and "at most 24 instead of" in caplog.text
    assert [layer.gradient_checkpointing for layer in trainer.model.get_base_model().model.layers] == [
        True
    ] * 2
    for name, grad in expected[1].items():
        torch.testing.assert_close(actual[1][name], grad, rtol=1e-4, atol=1e-6)
    resumed, _ = train((24, "backward"), resume=str(tmp_path / "checkpoint-1"), **kwargs)
    assert resumed.memory.errors == 0
    assert [layer.gradient_checkpointing for layer in resumed.model.get_base_model().model.layers] == [
        True
    ] * 2


def test_one_sample_that_does_not_fit_is_an_error(train):
    with pytest.raises(QeRLError, match="with a single sample in it; lower max_completion_length"):
        train((0, "forward"))


def test_several_processes_are_not_left_waiting():
    def update():
        retry.note_forward([0, 1], Lengths(own_B=[7, 8], shared_B=[4, 4], group_B=[0, 0]))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    retry = MemoryRetry(processes=2, checkpointing={"every_n_layers": 4, "offload": True})
    with pytest.raises(QeRLError, match="it is not redone: set tokens_per_forward: 10") as caught:
        retry.run(1, update, lambda: None)
    assert "gradient_checkpointing_kwargs: {every_n_layers: 1, offload: true} if" in str(caught.value)


def test_what_is_said_of_every_layer_keeps_the_other_settings(caplog):
    def update():
        if not recomputed:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    recomputed, undone = [], []
    retry = MemoryRetry(
        recompute_every_layer=lambda: not recomputed.append(True), checkpointing={"offload": False}
    )
    assert retry.run(1, update, lambda: undone.append(True)) == "done"
    assert undone == [True]
    assert "gradient_checkpointing_kwargs: {offload: false, every_n_layers: 1} sets" in caplog.text


def test_a_lower_setting_of_a_resumed_run_is_no_limit_of_its_checkpoints(tmp_path):
    (tmp_path / LIMITS_FILE).write_text('{"tokens_per_forward": 100, "recompute_every_layer": false}')
    limits = []
    for setting in (200, None, 100, 50):
        retry = MemoryRetry(setting)
        retry.load(tmp_path)
        retry.save(folder := tmp_path / str(setting))
        limits.append((retry.max_tokens, (folder / LIMITS_FILE).is_file()))
    assert limits == [(100, True), (100, True), (100, False), (50, False)]


@pytest.mark.parametrize("retry", [MemoryRetry(), None])
def test_memory_that_cannot_be_pinned_is_said(retry):
    """torch raises this, and no `OutOfMemoryError`, where CUDA refuses to pin the CPU's memory."""

    def fail(message):
        def update():
            raise torch.AcceleratorError(message)

        if retry is not None:
            retry.run(1, update, lambda: None)
        with run._memory_errors_said():
            update()

    with pytest.raises(QeRLError, match=r"\{offload: true\}.*\(CUDA error: out of memory\)\."):
        fail("CUDA error: out of memory\nCUDA kernel errors might be reported later")
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        fail("CUDA error: an illegal memory access was encountered")
