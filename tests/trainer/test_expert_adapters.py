"""A run whose experts have adapters: one for all of a layer unless `lora_experts` says otherwise, with a
reference, saved, and resumed."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.families import tiny
from tests.support.trainer import DATA, ScriptedEngine, settings, sum_reward

pytestmark = pytest.mark.slow

STEPS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 2e-2, "beta": 0.1}
TARGETS = ["q_proj", "gate_proj", "down_proj"]


@pytest.fixture
def make(tiny_tokenizer, tmp_path):
    def trainer(name="run", **changes):
        model = tiny("qwen3_moe", vocab_size=len(tiny_tokenizer))
        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        args = QeRLConfig(**settings(tmp_path / name, **(STEPS | changes)))
        return QeRLTrainer(
            model, [sum_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer,
            peft_config=LoraConfig(r=4, target_modules=TARGETS),
        )  # fmt: skip

    return trainer


def trained(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("experts", ["shared", "each"])
def test_a_run_is_saved_and_resumed(make, tmp_path, experts):
    trainer = make(lora_experts=experts)
    before = trained(trainer)
    trainer.train()
    found, last = trained(trainer), tmp_path / "run" / "checkpoint-2"
    of_experts = [name for name in found if ".experts." in name]
    numbers = {name.partition(".experts.")[2].partition(".")[0] for name in of_experts}
    assert numbers == ({"0"} if experts == "shared" else {"0", "1", "2", "3"})
    assert all(not torch.equal(found[name], before[name]) for name in of_experts if "lora_B" in name)
    saved = load_file(last / "adapter_model.safetensors")
    assert sum(".experts.3." in name for name in saved) == sum(".experts.0." in name for name in saved) > 0
    resumed = make("run", lora_experts=experts)
    resumed.train(resume_from_checkpoint=str(last))
    again = trained(resumed)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)
