"""An update asks the device for nothing: it runs on the meta device, where no number can be read."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qerl.kernels.tensors import upload
from qerl.settings.config import QeRLConfig
from qerl.trainer import update_step
from qerl.trainer.grpo import QeRLTrainer
from qerl.update import packed_row
from tests.support.models import move_adapter
from tests.support.trainer import DATA, ScriptedEngine, settings, sum_reward

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts the tensors that an operation takes from the CPU to the device."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        to_device = any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves(result))
        self.made += to_device and any(isinstance(x, torch.Tensor) and x.is_cpu and x.ndim for x in given)
        return result


@pytest.fixture
def trainer(tiny_model, tiny_tokenizer, tmp_path):
    """``trainer(**changes)``: one of a tiny model with an adapter."""

    def make(**changes):
        model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        args = QeRLConfig(**settings(tmp_path, **changes))
        return QeRLTrainer(
            move_adapter(model), [sum_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer
        )

    return make


OPTIONS = [
    {},
    {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"},
    {"loss_type": "cispo", "epsilon_high": 2.0},
    {"loss_type": "vespo"},
    {"beta": 0.1},
    {"entropy_coef": 0.1},
    {"tokens_per_forward": 25},
    {"num_iterations": 2},
    {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_update_waits_for_nothing(trainer, monkeypatch, options):
    """Loss and backward of a step that was sampled on the CPU."""
    trainer = trainer(**options)
    trainer.model.train()
    microbatches = trainer._rollout(trainer.model, [row for row in DATA for _ in range(4)])
    assert len(microbatches) == trainer.args.gradient_accumulation_steps
    monkeypatch.setattr(type(trainer.accelerator), "device", META)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know this device
    trainer.model.to(META)
    uploads = []
    for module in (packed_row, update_step):
        monkeypatch.setattr(module, "upload", lambda x, device: uploads.append(x) or upload(x, device))
    with Copies() as copies:
        loss = trainer.updates.run(trainer.model, microbatches, 1)
    assert copies.made == len(uploads) > 0, "all that the device gets comes from pinned memory"
    assert loss.is_meta
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.is_meta for p in trained)
    reported = trainer.updates._reports
    assert len(reported) == len(microbatches) + 1, "one of each loss, and what trainer and sampler differ in"
    assert all(metric.parts.is_meta for metrics in reported for metric in metrics.values())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_hands_its_loss_on_once(trainer, monkeypatch, microbatches):
    """transformers asks each loss that it gets whether it is finite, which waits."""
    trainer = trainer(
        per_device_train_batch_size=4, gradient_accumulation_steps=microbatches, max_steps=2, logging_steps=1
    )
    computed, handed = [], []
    run, training_step = trainer.updates.run, trainer.training_step
    monkeypatch.setattr(trainer.updates, "run", lambda *a: computed.append(run(*a)) or computed[-1])
    monkeypatch.setattr(trainer, "training_step", lambda *a: handed.append(training_step(*a)) or handed[-1])
    trainer.train()
    assert len(computed) == 2 and len(handed) == 2 * microbatches
    for step in (0, 1):
        *before, last = handed[step * microbatches : (step + 1) * microbatches]
        assert not any(before) and last == computed[step] != 0
        assert [row["loss"] for row in trainer.state.log_history if "loss" in row][step] == pytest.approx(
            last.item(), abs=1e-4
        )
