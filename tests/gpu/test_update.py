"""Whole training steps on a GPU: full tuning in bf16, NF4 with LoRA, a reference of NVFP4 weights, inputs of
layers in the CPU's memory.

The engine and the trainer compute the same policy but for rounding, also after the weights have moved: a
stale copy anywhere in the engine makes `sampling/kl` grow with the steps.
"""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from transformers import TrainerCallback, modeling_utils

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.kernels.cards import card_of
from qerl.lora.adapter import add_lora
from qerl.lora.fused import why_not_fused
from qerl.models.load import load_model
from qerl.rollout.select import make_engine
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import DATA, ScriptedEngine, settings, sum_reward

STEPS = 6
ROUNDING = 3e-4  # of bf16, in nats per token; stale biases make 6e-4 to 9e-3


@pytest.fixture
def run(tiny_model, tiny_tokenizer, tmp_path):
    """``run(weights, lora, engine, callbacks, **changes)``: the trainer after its steps, and its weights
    before them. Without an engine it is the one for this model."""
    folder = tmp_path / "model"
    tiny_model(
        "qwen2", hidden_size=256, intermediate_size=448, head_dim=64, initializer_range=0.05
    ).save_pretrained(folder)

    def train(weights, lora=True, engine=None, callbacks=(), **changes):
        model = load_model(folder, weights, torch.bfloat16, "cuda")
        if lora:
            model = add_lora(model, rank=16, alpha=32, dropout=0.0)
        values = {"weights": weights, "max_steps": STEPS, "use_cpu": False, "max_completion_length": 16}
        args = QeRLConfig(**settings(tmp_path / "run", **(values | changes)))
        trainer = QeRLTrainer(
            model, [sum_reward], args, DATA, engine=engine or make_engine(model, tiny_tokenizer.pad_token_id),
            processing_class=tiny_tokenizer, callbacks=list(callbacks),
        )  # fmt: skip
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer.train()
        return trainer, start

    return train


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def moved(trainer, start):
    """Names of the weights that training changed; all are finite."""
    weights = dict(trainer.model.named_parameters())
    assert all(p.isfinite().all() for p in weights.values() if p.is_floating_point())
    return {name for name, p in weights.items() if not torch.equal(p, start[name])}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_full_tuning_in_bf16(run, beta):
    trainer, start = run("bf16", lora=False, tuning="full", dtype="bfloat16", learning_rate=1e-2, beta=beta)
    changed = moved(trainer, start)
    assert {name for name in start if "bias" in name} <= changed and len(changed) == len(start)
    assert max(logged(trainer, "sampling/kl")) < ROUNDING
    if beta:
        kl = logged(trainer, "kl")
        assert kl[0] < ROUNDING < kl[-1]


def test_lora_on_nf4(run):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    trainer, start = run("nf4", learning_rate=1e-2)
    changed = moved(trainer, start)
    assert changed == {name for name in start if "lora_" in name}
    path = trainer.update_path
    assert path.by_segment and path.is_slow and path.products.why_not == why_not_fused("nf4", 0.0)
    assert (path.norms.fused, path.mlps.fused, path.rotary.fused, path.products.fused) == (5, 2, 0, 0)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad)
    assert max(logged(trainer, "sampling/kl")) < ROUNDING


def test_a_fresh_adapter_on_nvfp4_has_the_base_model_as_its_reference(run):
    trainer, _ = run("nvfp4", learning_rate=1e-2, beta=0.1)
    assert list(trainer.model.peft_config) == ["default"]
    assert trainer.update_path.by_segment and not trainer.update_path.is_slow
    record = trainer.update_path.record()
    assert record.pop("attention kernel").startswith("FlashAttention-")
    assert record == {
        "attention": "2/2", "norms": "5/5", "rotary embeddings": "2/2", "MLPs": "2/2",
        "adapted layers": "14/14",
    }  # fmt: skip
    kl = logged(trainer, "kl")
    assert kl[0] < ROUNDING < kl[-1]
    assert max(logged(trainer, "sampling/kl")) < ROUNDING


def test_noise_is_in_the_paged_engines_rollouts(run):
    noise = {"noise": True, "noise_stages": 2, "noise_scale": "relative", "noise_sigma_start": 0.2}
    trainer, _ = run("nvfp4", learning_rate=1e-2, **noise)
    assert logged(trainer, "noise/sigma") == [0.0] * 3 + [0.2] * 3
    kl = logged(trainer, "sampling/kl")
    assert max(kl[:3]) < ROUNDING < 10 * ROUNDING < min(kl[3:])


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_in_fp8_train_the_same_policy(run, every):
    """Samples and log-probabilities are those of the run without it as long as no weight has moved."""
    if not card_of(torch.device("cuda", 0)).fp8:
        pytest.skip("FP8 needs compute capability 8.9")
    steps = []
    for dtype in ("auto", "fp8"):
        seen = Gradients()
        kept = {"gradient_checkpointing_kwargs": {"every_n_layers": every}}
        torch.manual_seed(0)  # of the adapter's A
        trainer, start = run("nvfp4", callbacks=[seen], learning_rate=1e-2, backward_dtype=dtype, **kept)
        assert moved(trainer, start) == {name for name in start if "lora_" in name}
        assert max(logged(trainer, "sampling/kl")) < ROUNDING
        assert trainer.update_path.fp8_gradients == (14 if dtype == "fp8" else 0)
        steps.append(seen.steps[0])
    exact, found = (
        torch.cat([g.flatten() for name, g in sorted(s.items()) if "lora_B" in name]) for s in steps
    )
    assert 1e-3 < (found - exact).norm() / exact.norm() < 0.2


class Gradients(TrainerCallback):
    """Copies of all gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def test_inputs_of_layers_in_the_cpus_memory_change_no_bit_of_the_gradients(run, monkeypatch):
    """All of the same completions. The second run shows that without it two runs are equal as well."""
    packed = []

    class Counted(save_on_cpu):
        def __init__(self, **given):
            assert given["pin_memory"]
            super().__init__(**given)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Counted)
    found, counts = [], []
    for offload in (False, False, True):
        gradients, kwargs = Gradients(), {"every_n_layers": 1, "offload": offload}
        trainer, start = run(
            "nvfp4", engine=ScriptedEngine(100), callbacks=[gradients], learning_rate=1e-2,
            gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs,
        )  # fmt: skip
        assert moved(trainer, start) == {name for name in start if "lora_" in name}
        found.append(gradients.steps)
        counts.append(len(packed))
    layers = trainer.model.config.num_hidden_layers
    assert counts[:2] == [0, 0] and counts[2] >= STEPS * layers
    assert len(found[0]) == STEPS and all(grad.any() for grad in found[0][-1].values())
    for other in found[1:]:
        for expected, actual in zip(found[0], other, strict=True):
            assert expected.keys() == actual.keys()
            assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
