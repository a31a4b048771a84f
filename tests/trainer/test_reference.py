"""The reference of the KL penalty: the policy as it was given, also after a resume."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.families import tiny
from tests.support.models import move_adapter
from tests.support.trainer import (
    DATA,
    ScriptedEngine,
    rollout_of,
    samples_of,
    settings,
    sum_reward,
)

pytestmark = pytest.mark.slow

FULL = {"tuning": "full", "weights": "bf16"}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "learning_rate": 2e-2, "beta": 0.2}


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    """``make(adapter, name, **changes)``: a trainer on the tiny Qwen2, which has biases."""

    def trainer(adapter=full, name="run", **changes):
        model = adapter(tiny_model("qwen2"))
        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        args = QeRLConfig(**settings(tmp_path / name, **(STEPS | changes)))
        return QeRLTrainer(model, [sum_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer)

    return trainer


def fresh(model):
    return add_lora(model, rank=4, alpha=8, dropout=0.0)


def moved(model):
    """An adapter other than the fresh one, the same each time."""
    torch.manual_seed(2)
    return move_adapter(fresh(model))


def full(model):
    return model


def trained(model):
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def kl_by_step(trainer):
    return {row["step"]: row["kl"] for row in trainer.state.log_history if "kl" in row}


@pytest.mark.parametrize(
    "adapter, at_resume, changes",
    [
        pytest.param(fresh, fresh, {}, id="fresh LoRA"),
        pytest.param(fresh, moved, {}, id="fresh LoRA, another given at the resume"),
        pytest.param(moved, fresh, {}, id="LoRA that has moved, a fresh one given at the resume"),
        pytest.param(moved, moved, {"num_iterations": 2}, id="rollouts half used"),
        pytest.param(full, full, FULL, id="full"),
        pytest.param(full, full, FULL | SYNC, id="full, reference moves"),
    ],
)
def test_resume_with_a_reference_is_bit_exact(make, tmp_path, adapter, at_resume, changes):
    """The checkpoint decides what the reference is, whatever adapter is in hand."""
    whole = make(adapter, **changes)
    whole.train()
    resumed = make(at_resume, "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for one, other in zip(trained(whole.model), trained(resumed.model), strict=True):
        assert one.equal(other)
    kl = kl_by_step(whole)
    assert kl_by_step(resumed) == kl and len(kl) == 4
    assert kl[1] == pytest.approx(0, abs=1e-9) and kl[4] > 1e-6


def test_a_fresh_adapter_needs_no_second_one(make, tmp_path):
    trainer = make(fresh)
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))
    assert list(trainer.model.peft_config) == ["default"]
    assert not list((tmp_path / "run").rglob("ref"))


def test_an_adapter_that_has_moved_is_its_own_reference(make):
    trainer = make(moved)
    weights = dict(trainer.model.named_parameters())
    copies = {name: p for name, p in weights.items() if ".ref." in name}
    assert copies and not any(p.requires_grad for p in copies.values())
    assert all(p.equal(weights[name.replace(".ref.", ".default.")]) for name, p in copies.items())
    assert trainer.model.active_adapter == "default"


def test_packed_weights_have_the_same_two_kinds_of_reference(make, tmp_path, tiny_model):
    from qerl.models.load import load_model

    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)

    def packed(_model):
        return moved(load_model(folder, "nvfp4", torch.float32, "cpu"))

    whole, resumed = make(packed), make(packed, "resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert all(a.equal(b) for a, b in zip(trained(whole.model), trained(resumed.model), strict=True))
    assert kl_by_step(whole) == kl_by_step(resumed)
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "ref" / "adapter_model.safetensors")
    start = packed(None)
    for name, parameter in start.named_parameters():
        if parameter.requires_grad:
            assert saved[name.replace(".default", "")].equal(parameter)


def test_a_reference_model_is_the_start_and_stands_still(make):
    trainer = make(**FULL)
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    for name, tensor in trainer.ref_model.state_dict().items():
        assert tensor.equal(start[name]), name
    assert not trainer.ref_model.training
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


def test_a_copy_with_delta_nets_computes_packed_rows_as_the_policy_does(tiny_tokenizer, tmp_path):
    """A state that runs on from one sample of a row into the next would differ by a nat."""
    model = tiny("qwen3_5_text")
    engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
    args = QeRLConfig(**settings(tmp_path, beta=0.1, **FULL))
    trainer = QeRLTrainer(model, sum_reward, args, DATA, engine=engine, processing_class=tiny_tokenizer)
    samples = samples_of(rollout_of(trainer))
    policy = trainer.updates.logprobs(trainer.model, samples)
    for sample, own in zip(samples, policy, strict=True):
        assert sample.reference_logprobs == pytest.approx(own, abs=1e-6)


def test_trained_biases_are_refused(make):
    def biased(model):
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], bias="all"))

    with pytest.raises(QeRLError, match="without trained biases"):
        make(biased)
