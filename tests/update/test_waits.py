"""A loss asks the device for nothing: it runs on the meta device, where no number can be read."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qerl.kernels.tensors import upload
from qerl.settings.config import QeRLConfig
from qerl.trainer import updates
from qerl.trainer.grpo import QeRLTrainer
from qerl.update import chunks, joined_row
from qerl.update.policy_loss import Mismatch
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
def loss_on_meta(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    """``loss_on_meta(**changes)``: loss and backward of a microbatch that was sampled on the CPU."""

    def run(**changes):
        model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        args = QeRLConfig(**settings(tmp_path, **changes))
        trainer = QeRLTrainer(
            move_adapter(model), [sum_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._prepare_inputs([row for row in DATA for _ in range(4)])
        monkeypatch.setattr(type(trainer.accelerator), "device", META)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it does not know this device
        trainer.model.to(META)
        trainer._mismatch = Mismatch.none(META)
        on_device = {name: x.to(META) for name, x in batch.items()}
        monkeypatch.setattr(trainer._microbatches, "copy_of", lambda _: batch)
        uploads = []
        for module in (chunks, joined_row, updates):
            monkeypatch.setattr(module, "upload", lambda x, device: uploads.append(x) or upload(x, device))
        with Copies() as copies:
            loss = trainer.compute_loss(trainer.model, on_device)
            loss.backward()
        assert copies.made == len(uploads) > 0, "all that the device gets comes from pinned memory"
        return trainer, loss

    return run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"},
        {"loss_type": "cispo", "epsilon_high": 2.0},
        {"loss_type": "vespo"},
        {"beta": 0.1},
        {"entropy_coef": 0.1},
        {"tokens_per_forward": 25},
        {"num_iterations": 2},
    ],
    ids=str,
)
def test_a_loss_waits_for_nothing(loss_on_meta, options):
    trainer, loss = loss_on_meta(**options)
    assert loss.is_meta
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.is_meta for p in trained)
    (metrics,) = trainer._losses
    assert all(metric.parts.is_meta for metric in metrics.values()), "what it reports is still on the device"


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_hands_its_loss_on_once(tiny_model, tiny_tokenizer, tmp_path, monkeypatch, microbatches):
    """transformers asks each loss that it gets whether it is finite, which waits."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": microbatches, "max_steps": 2}
    args = QeRLConfig(**settings(tmp_path, **sizes))
    trainer = QeRLTrainer(
        move_adapter(model), [sum_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer
    )
    computed, handed = [], []
    microbatch, training_step = trainer._microbatch, trainer.training_step
    monkeypatch.setattr(trainer, "_microbatch", lambda *a: computed.append(microbatch(*a)) or computed[-1])
    monkeypatch.setattr(trainer, "training_step", lambda *a: handed.append(training_step(*a)) or handed[-1])
    trainer.train()
    assert len(computed) == len(handed) == 2 * microbatches
    for step in (0, 1):
        part = slice(step * microbatches, (step + 1) * microbatches)
        *before, last = handed[part]
        assert not any(before) and last == sum(computed[part]) != 0
        assert [row["loss"] for row in trainer.state.log_history if "loss" in row][step] == pytest.approx(
            last.item(), abs=1e-4
        )
