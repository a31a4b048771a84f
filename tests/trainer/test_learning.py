"""Whole trainers on a tiny model: reward rises, noise stays in the rollouts, recipes' shapes run."""

import pytest
import torch
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.algorithms import ALGORITHMS
from qerl.settings.config import QeRLConfig
from qerl.settings.library import recipe_file
from qerl.settings.recipe import read_recipe
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import as_batch

pytestmark = pytest.mark.slow

DATA = Dataset.from_dict({"prompt": [f"prompt {i}" for i in range(16)]})


def share(completion_ids, **_):
    """A bandit: tokens of one half of the vocabulary pay."""
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]


def accuracy(completion_ids, **_):
    return [float(sum(ids) % 5 < 2) for ids in completion_ids]


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def build(reward=share, **changes):
        values = {
            "output_dir": str(tmp_path), "num_generations": 8,
            "per_device_train_batch_size": 16, "max_completion_length": 4, "gradient_checkpointing": False,
            "use_cpu": True, "max_steps": 20, "learning_rate": 1e-2, "report_to": "none",
            "lr_scheduler_type": "constant", "save_strategy": "no", "noise": False,
        }  # fmt: skip
        model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
        engine = PortableEngine(model, tiny_tokenizer.pad_token_id)
        args = QeRLConfig(**(values | changes))
        return QeRLTrainer(model, [reward], args, DATA, engine=engine, processing_class=tiny_tokenizer)

    return build


def rows(trainer):
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"distill", "sft"}))
def test_reward_rises(make, algorithm):
    noise = {"noise": True, "noise_stages": 2, "noise_sigma_start": 0.05}
    logged = rows(make(algorithm=algorithm, signal="reward", learning_rate=3e-2, **noise))
    before, after = (sum(row["rewards/share/mean"] for row in part) / 4 for part in (logged[:4], logged[-4:]))
    assert before < 0.65 and after > 0.85
    assert logged[10]["noise/sigma"] == 0.05 and logged[10]["sampling/kl"] > 1e-5


def test_reward_rises_from_samples_of_older_policies(make):
    stops = [*"0123456789abcdefghijABCDEFGHIJ"]
    lengths = {"max_completion_length": 16, "stop_strings": stops}
    logged = rows(make(max_staleness=2, learning_rate=2e-2, max_steps=30, **lengths))
    before, after = (sum(row["rewards/share/mean"] for row in part) / 4 for part in (logged[:4], logged[-4:]))
    assert before < 0.7 and after > 0.9
    assert max(row["staleness/max"] for row in logged) == 2
    assert sum(row["staleness/mean"] for row in logged) / len(logged) > 0.5


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_ends_the_run_and_changes_no_weight(make, monkeypatch, max_grad_norm):
    """transformers logs its loss as 0, and the policy of NaN would end each answer at its first token."""
    trainer = make(max_steps=4, max_grad_norm=max_grad_norm)
    inner, kept = trainer.updates._loss_of, []

    def loss_of(*args):
        loss, metrics = inner(*args)
        if trainer.state.global_step < 2:
            return loss, metrics
        kept.extend(weights(trainer))
        return loss * float("nan"), metrics

    monkeypatch.setattr(trainer.updates, "_loss_of", loss_of)
    with pytest.raises(QeRLError, match="gradient of step 3 is not finite"):
        trainer.train()
    assert all(map(torch.equal, weights(trainer), kept)) and all(map(torch.any, kept))


def log_probabilities(model, inputs):
    """[B, C], of the completions of a batch under the model as it is, without its update's path."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    width = inputs["completion_ids"].size(1)
    logps = out.logits[:, -width - 1 : -1].log_softmax(-1)
    return logps.gather(2, inputs["completion_ids"][..., None])[..., 0]


def distances(trainer, monkeypatch):
    """For each loss: step, and how far the update's and the sampler's log-probabilities are from the
    model's."""
    seen = []
    inner = trainer.updates._loss_of

    def spy(part, count, inputs, outputs, computed_BC, *rest):
        own = log_probabilities(trainer.model, as_batch([part]))
        pairs = (outputs[0].detach(), inputs.sampler_BC)
        far = [((other - own) * computed_BC).abs().max().item() for other in pairs]
        seen.append((trainer.state.global_step, *far))
        return inner(part, count, inputs, outputs, computed_BC, *rest)

    monkeypatch.setattr(trainer.updates, "_loss_of", spy)
    return seen


def test_noise_is_in_the_rollouts_and_not_in_the_update(make, monkeypatch):
    """The update's log-probabilities are the clean model's; in a stage without noise, rollouts' too."""
    trainer = make(noise=True, noise_stages=2, noise_sigma_start=0.3, max_steps=4)
    seen = distances(trainer, monkeypatch)
    norms = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "norm" in n}
    logged = rows(trainer)
    assert [step for step, _, _ in seen] == [0, 1, 2, 3]
    assert max(update for _, update, _ in seen) < 1e-4
    assert max(sampler for step, _, sampler in seen if step < 2) < 1e-4
    assert min(sampler for step, _, sampler in seen if step >= 2) > 0.1
    assert min(row["sampling/kl"] for row in logged[2:]) > 1e-3
    assert all(norm.equal(trainer.model.get_parameter(name)) for name, norm in norms.items())


def test_the_stage_without_noise_is_a_run_without_noise(make):
    runs = []
    for noise in ({"noise": True, "noise_stages": 2, "noise_sigma_start": 0.3}, {"noise": False}):
        torch.manual_seed(0)
        trainer = make(max_steps=4, **noise)
        at_two = []
        log = trainer.log
        trainer.log = lambda *a, t=trainer, log=log, at=at_two: (at.append(weights(t)), log(*a))[1]
        rows(trainer)
        runs.append(at_two)
    for noisy, clean in zip(runs[0][:2], runs[1][:2], strict=True):
        assert all(a.equal(b) for a, b in zip(noisy, clean, strict=True))
    assert not all(a.equal(b) for a, b in zip(runs[0][3], runs[1][3], strict=True))


def test_a_second_training_has_a_schedule_of_its_own(make):
    trainer = make(noise=True, noise_stages=2, noise_sigma_start=0.1, max_steps=2)
    assert [row["noise/sigma"] for row in rows(trainer)] == [0.0, 0.1]
    trainer.args.max_steps = 4
    assert [row["noise/sigma"] for row in rows(trainer)] == [0.0, 0.0, 0.1, 0.1]


def test_pass_at_k_in_a_trainer(make):
    trainer = make(pass_at_k=3, scale_rewards="none", max_steps=2)
    before = weights(trainer)
    rows(trainer)
    assert not any(a.equal(b) for a, b in zip(before, weights(trainer), strict=True))


def test_the_shape_of_gsm8ks_recipe(make):
    """Four updates a rollout, bnpo, clip-higher, truncated samples masked: five steps."""
    recipe = read_recipe(recipe_file("gsm8k"))
    shape = (
        "loss_type",
        "epsilon_high",
        "mask_truncated_completions",
        "temperature",
        "max_grad_norm",
    )
    updates = recipe["steps_per_generation"] // recipe["gradient_accumulation_steps"]
    assert updates == 4
    trainer = make(
        **{name: recipe[name] for name in shape},
        num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=2 * updates, max_completion_length=8, max_steps=5, noise=True, noise_stages=2,
    )  # fmt: skip
    stops = list(range(1, 16))  # a random model seldom stops at one token
    trainer.rollouts.sampler._eos, trainer.rollouts.sampler._ends = stops, set(stops)
    calls = []
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *args: calls.append(args) or generate(*args)
    before = weights(trainer)
    logged = rows(trainer)
    assert len(logged) == 5 and len(calls) == 2
    assert all(
        0 < row["completions/clipped_ratio"] < 1 for row in logged if "completions/clipped_ratio" in row
    )
    assert all(torch.isfinite(torch.tensor([row["loss"], row["grad_norm"]])).all() for row in logged)
    assert all(row["grad_norm"] > 0 and row["sampling/kl"] < 1e-6 for row in logged[:4]), "no noise yet"
    assert not any(a.equal(b) for a, b in zip(before, weights(trainer), strict=True))


def test_a_filter_does_not_shrink_the_gradient(make):
    """The ratio is 1 without noise, whatever share of the probability top-k keeps."""
    norms = {
        correct: rows(make(top_k=5, max_steps=1, vllm_importance_sampling_correction=correct))[0]["grad_norm"]
        for correct in (True, False)
    }
    assert norms[True] == pytest.approx(norms[False], rel=1e-4)
