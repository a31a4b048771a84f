"""Rollouts are noisy, corrected, and seeded by step; `tests/conformance` compares the loss with TRL's."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer import grpo
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.update_step import load_rollouts, save_rollouts
from tests.support.models import move_adapter
from tests.support.trainer import (
    DATA,
    GROUP,
    ScriptedEngine,
    gradients,
    logged,
    logged_of,
    rollout_of,
    samples_of,
    settings,
    sum_reward,
    update_of,
)


def length_reward(completion_ids, **kwargs):
    """One group of every two gets equal rewards, so it has no advantage."""
    return [0.0 if (i // GROUP) % 2 else float(len(ids)) for i, ids in enumerate(completion_ids)]


@pytest.fixture
def make_trainer(tiny_model, tiny_tokenizer, tmp_path):
    def make(reward=length_reward, **changes):
        model = lora(tiny_model("llama"))
        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        args = QeRLConfig(**settings(tmp_path, **changes))
        return QeRLTrainer(model, [reward], args, DATA, engine=engine, processing_class=tiny_tokenizer)

    return make


def lora(model):
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    return move_adapter(model)


def batch_rows():
    return [row for row in DATA for _ in range(GROUP)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu trains with it")
def test_gradients_in_fp8_are_never_left_in_16_bits_silently(make_trainer):
    with pytest.raises(QeRLError, match="fp8 is not available here: the model is not on a CUDA device"):
        make_trainer(backward_dtype="fp8")


def test_samples_without_advantage_are_not_computed(make_trainer, monkeypatch):
    trainer = make_trainer()
    parts = rollout_of(trainer)
    seen = []
    inner = trainer.model.forward

    def spy(*args, **kwargs):
        seen.append(kwargs["input_ids"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", spy)
    update_of(trainer, parts)
    assert len(seen) == 1, "one forward for the loss, none for old log-probabilities"
    live = [sample for sample in samples_of(parts) if sample.advantage != 0]
    tokens = sum(len(sample.tokens) for sample in live)
    prompts = sum(len(sample.prompt) - 1 for sample in live[::GROUP])  # each once, without its last token
    assert seen[0].numel() == tokens + prompts


def test_a_batch_without_any_advantage_has_zero_gradient(make_trainer):
    trainer = make_trainer(reward=lambda completion_ids, **kwargs: [1.0] * len(completion_ids))
    loss = update_of(trainer, rollout_of(trainer))
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in gradients(trainer.model).values())
    assert gradients(trainer.model)


def test_importance_correction_reaches_the_gradient(make_trainer):
    """Without the correction the same batch gives another gradient, by the ratio's factor."""
    norms = {}
    for correct in (True, False):
        trainer = make_trainer(vllm_importance_sampling_correction=correct)
        parts = rollout_of(trainer)
        for sample in samples_of(parts):
            sample.logprobs = [-1.0] * len(sample.tokens)  # log 1/e everywhere
        update_of(trainer, parts)
        norms[correct] = sum(g.norm() for g in gradients(trainer.model).values()).item()
    assert norms[True] < 0.1 * norms[False]  # ratio is about (1/vocabulary) * e


def test_rollout_seed_depends_on_the_step_not_on_the_past(make_trainer):
    trainer = make_trainer()
    trainer.model.train()
    trainer.state.global_step = 3
    first = trainer.rollout([[5, 6]], 2)
    trainer.model.eval()
    trainer.rollout([[5, 6]], 2)
    fresh = make_trainer()
    fresh.model.train()
    fresh.state.global_step = 3
    assert fresh.rollout([[5, 6]], 2).completions == first.completions
    assert fresh.rollout([[5, 6]], 2).completions != first.completions, "a second call of a step draws anew"


def test_noise_is_on_in_training_and_off_in_evaluation(make_trainer):
    trainer = make_trainer(noise=True, noise_stages=2)
    trainer.state.max_steps, trainer.state.global_step = 4, 2
    trainer.model.train()
    trainer.rollout([[5, 6]], 1)
    trainer.model.eval()
    trainer.rollout([[5, 6]], 1)
    (_, _, noisy), (_, _, clean) = trainer.engine.calls
    assert len(noisy) == 4, "two norms in each of two layers"
    assert not clean
    assert trainer._log.metrics["train"]["noise/norms"] == [4.0]
    assert trainer._log.metrics["train"]["noise/sigma"] == [trainer.args.noise_sigma_start]


def test_dynamic_sampling_fills_the_batch_with_live_groups(make_trainer):
    calls = []

    def every_third_group(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        return [float(i % 2) if len(calls) % 3 == 1 else 0.0 for i in range(len(completion_ids))]

    trainer = make_trainer(reward=every_third_group, dynamic_sampling_batches=3)
    parts = rollout_of(trainer)
    samples = samples_of(parts)
    live = (torch.tensor([s.advantage for s in samples]).view(-1, GROUP) != 0).any(dim=1)
    # Of the groups in order of start, 0, 3, 6 and 9 live.
    assert live.all()
    assert len(trainer.engine.calls) == 1 and calls == [GROUP] * len(calls) and len(calls) >= 10
    assert parts[0].rollout_tokens == sum(len(sample.tokens) for sample in samples)
    assert [sample.group for sample in samples] == [i // GROUP * GROUP for i in range(len(samples))]


def test_microbatches_know_the_groups_of_their_samples(make_trainer):
    """Also where a group is spread over several, and in the file in which a checkpoint keeps them."""
    trainer = make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=8)
    parts = rollout_of(trainer)
    assert [[sample.group for sample in part.samples] for part in parts] == [
        [i // 2 * 4] * 2 for i in range(8)
    ]
    file = Path(trainer.args.output_dir) / "rollouts_0.json"
    save_rollouts(parts, file)
    assert load_rollouts(file) == parts
    file.rename(file.with_suffix(".safetensors"))
    with pytest.raises(QeRLError, match=r"as QeRL 0\.2 wrote it"):
        load_rollouts(file)


def test_samples_that_do_not_share_prompts_are_refused(make_trainer):
    trainer = make_trainer()
    rows = batch_rows()
    with pytest.raises(QeRLError, match="not 4 of each prompt, side by side"):
        rollout_of(trainer, [*rows[1:], rows[0]])


def test_dynamic_sampling_is_bounded(make_trainer):
    constant = lambda completion_ids, **kwargs: [1.0] * len(completion_ids)  # noqa: E731
    trainer = make_trainer(reward=constant, dynamic_sampling_batches=2)
    samples = samples_of(rollout_of(trainer))
    assert logged_of(trainer)["dynamic_sampling/started_groups"] == 12
    assert not any(sample.advantage for sample in samples)


def test_a_process_that_does_not_save_writes_nothing(make_trainer, tmp_path, monkeypatch):
    """Newer versions of transformers call `_save` in every process, and only one of them makes the folder."""
    trainer = make_trainer()
    with monkeypatch.context() as patch:
        patch.setattr(QeRLConfig, "should_save", False)
        trainer.save_model(str(tmp_path / "other"))
        trainer._save(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    trainer.save_model(str(tmp_path / "first"))
    assert (tmp_path / "first" / "config.yaml").exists()


def test_samples_of_a_group_must_fit_a_process(tmp_path):
    with pytest.raises(QeRLError, match="not a multiple of it"):
        QeRLConfig(**settings(tmp_path, per_device_train_batch_size=6))


# Settings that are the same on paper

OPTIONS = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo", "vllm_importance_sampling_mode": "sequence_mask"},
    "dapo": {"loss_type": "dapo"},
    "vespo": {"loss_type": "vespo"},
    "sequence ratio": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "KL": {"loss_type": "dr_grpo", "beta": 0.1},
    "two updates a rollout": {"loss_type": "dapo", "num_iterations": 2},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 3.0},
    # A threshold may be the entropy of a token itself, which the last bit of another chunk moves across it.
    "entropy quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_change_nothing(train, options):
    """Samples in one forward pass, in a few, and each by itself train alike and log the same."""
    reference, expected = train(reward=sum_reward, **options)
    for tokens in (25, 1):
        trainer, weights = train(reward=sum_reward, tokens_per_forward=tokens, **options)
        same(expected, weights)
        rows, others = logged(trainer), logged(reference)
        assert len(rows) == 3 and any(row["loss"] != 0 for row in rows)
        for row, other in zip(rows, others, strict=True):
            assert row.keys() == other.keys()
            for name, value in row.items():
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-6, nan_ok=True), (tokens, name)


def test_chunks_are_chunks(make_trainer):
    """What the tests beside this one compare is computed in so many forward passes."""
    passes = {}
    for tokens in (None, 25, 1):
        trainer = make_trainer(reward=sum_reward, tokens_per_forward=tokens)
        parts = rollout_of(trainer)
        seen = []
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(args[0].numel())
        )
        update_of(trainer, parts)
        passes[tokens] = seen
    assert len(passes[None]) == 1
    assert len(passes[1]) == sum(sample.advantage != 0 for sample in samples_of(parts)) > 8
    assert max(passes[25]) <= 25
    assert -(-passes[None][0] // 25) <= len(passes[25]) < 8


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("microbatch, tokens", [(4, None), (1, None), (8, 25)])
def test_dividing_a_batch_into_microbatches_changes_nothing(train, loss_type, microbatch, tokens):
    """16 samples at once; a group at a time; one at a time (nothing shared); two groups, each in chunks."""
    reference, expected = train(loss_type=loss_type)
    trainer, weights = train(
        loss_type=loss_type,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=16 // microbatch,
        tokens_per_forward=tokens,
    )
    same(expected, weights)
    losses, cut = ([row["loss"] for row in logged(one)] for one in (reference, trainer))
    assert len(losses) == 3 and losses == pytest.approx(cut, rel=1e-4, abs=1e-6)
    assert any(loss != 0 for loss in losses)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_layers_change_nothing(train, every):
    """Activations kept, computed again in every layer, in every second one, or in none of the two."""
    _, expected = train()
    kwargs = {"every_n_layers": every}
    trainer, weights = train(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    layers = trainer.model.get_base_model().model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [every <= 2, every == 1]
    same(expected, weights)


def test_whoever_turns_checkpointing_on_an_n_above_the_layers_recomputes_none(make_trainer):
    """transformers calls the second where it has one, with n beside the mapping; TRL calls the first."""
    model = make_trainer().model
    layers = model.get_base_model().model.layers
    names = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
    for enable in (getattr(model, name) for name in names if hasattr(model, name)):
        for n, expected in ((2, [True, False]), (3, [False, False])):
            enable(None, every_n_layers=n)
            assert [layer.gradient_checkpointing for layer in layers] == expected
    model.gradient_checkpointing_enable({"every_n_layers": 3, "use_reentrant": False})
    assert not any(layer.gradient_checkpointing for layer in layers)


def test_inputs_of_layers_may_wait_elsewhere(train, monkeypatch):
    """As on a GPU, and not pinned, because there is none; nothing else is copied, and nothing changes."""
    _, expected = train()
    packed = []

    class Counted(save_on_cpu):
        def __init__(self, **_):
            super().__init__(pin_memory=True, device_type="cuda")
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Counted)
    monkeypatch.setattr(grpo, "no_offload_on_cpu", lambda *_: None)
    kwargs = {"offload": True}
    trainer, weights = train(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    width = trainer.model.config.hidden_size
    assert len(packed) >= 2 * 3 and all(shape[-1] == width for shape in packed)
    same(expected, weights)


def test_on_a_cpu_inputs_of_layers_stay_where_they_are(train, caplog):
    _, expected = train()
    assert "offload" not in caplog.text
    trainer, weights = train(gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True})
    assert caplog.text.count("{offload: true} is turned off") == 1
    assert trainer.args.gradient_checkpointing_kwargs == {"offload": False}
    same(expected, weights)


def test_adapters_of_nf4_weights_stay_fp32(tiny_model, tiny_tokenizer, tmp_path, to_nf4):
    model = lora(to_nf4(tiny_model("llama")))
    engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
    args = QeRLConfig(**settings(tmp_path))
    trainer = QeRLTrainer(model, [length_reward], args, DATA, engine=engine, processing_class=tiny_tokenizer)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}


@pytest.fixture
def train(make_trainer):
    """Trainer and trained weights after three steps from the same start."""

    def run(**changes):
        torch.manual_seed(0)  # of the adapter's A
        trainer = make_trainer(**{"learning_rate": 1e-2, "max_steps": 3} | changes)
        trainer.train()
        return trainer, [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]

    return run


def same(expected, weights):
    for weight, other in zip(expected, weights, strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=2e-5)
