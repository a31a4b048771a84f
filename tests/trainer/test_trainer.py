"""The trainer's loss is TRL's loss; rollouts are noisy, corrected, and seeded by step."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qerl.trainer.batch import GROUP_KEY
from qerl.trainer.resume.rollout_file import load_rollouts, save_rollouts
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils
from trl import GRPOConfig, GRPOTrainer

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer import updates
from qerl.trainer.grpo import QeRLTrainer
from tests.support.models import move_adapter
from tests.support.trainer import (
    DATA,
    GROUP,
    ScriptedEngine,
    gradients,
    logged,
    same_gradients,
    settings,
    sum_reward,
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


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_loss_and_gradients_equal_trl(make_trainer, tiny_tokenizer, tmp_path, loss_type, correction):
    highest = 1.1 if loss_type == "cispo" else None
    ours = make_trainer(loss_type=loss_type, vllm_importance_sampling_mode=correction, epsilon_high=highest)
    reference = trl_reference(ours, tiny_tokenizer, tmp_path, loss_type, correction)
    losses = []
    for trainer in (reference, ours):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        ours._call_key = None  # both train on the first rollout of the step
        inputs = trainer._generate_and_score_completions(batch_rows())
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-7)
    same_gradients(reference.model, ours.model)


def trl_reference(ours, tokenizer, tmp_path, loss_type, correction):
    """TRL's own trainer on a copy of the model, fed by the same engine."""
    values = settings(tmp_path, loss_type=loss_type, vllm_importance_sampling_mode=correction)
    del values["noise"]
    args = GRPOConfig(**values, bf16=False, epsilon_high=ours.args.epsilon_high)
    model = copy.deepcopy(ours.model)
    model.base_model.model.__dict__.pop("forward", None)  # the fused head is added anew to the copy
    trainer = GRPOTrainer(model, [length_reward], args, DATA, processing_class=tokenizer)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = copy.copy(ours.vllm_generation)
    return trainer


def test_samples_without_advantage_are_not_computed(make_trainer, monkeypatch):
    trainer = make_trainer()
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(batch_rows())
    seen = []
    inner = trainer.model.forward

    def spy(*args, **kwargs):
        seen.append(kwargs["input_ids"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", spy)
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, inputs)
    assert len(seen) == 1, "one forward for the loss, none for old log-probabilities"
    live = inputs["advantages"] != 0
    tokens = int(inputs["completion_mask"][live].sum())
    prompts = inputs["prompt_mask"][live][::GROUP].sum() - 2  # each of the two prompts without its last token
    assert seen[0].numel() == tokens + prompts


def test_a_batch_without_any_advantage_has_zero_gradient(make_trainer):
    trainer = make_trainer(reward=lambda completion_ids, **kwargs: [1.0] * len(completion_ids))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, trainer._generate_and_score_completions(batch_rows()))
    loss.backward()
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in gradients(trainer.model).values())
    assert gradients(trainer.model)


def test_importance_correction_reaches_the_gradient(make_trainer):
    """Without the correction the same batch gives another gradient, by the ratio's factor."""
    norms = {}
    for correct in (True, False):
        trainer = make_trainer(vllm_importance_sampling_correction=correct)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = trainer._generate_and_score_completions(batch_rows())
        logps = inputs["sampling_per_token_logps"]
        inputs["sampling_per_token_logps"] = torch.full_like(logps, -1.0)  # log 1/e everywhere
        trainer.compute_loss(trainer.model, inputs).backward()
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
    assert trainer._metrics["train"]["noise/norms"] == [4.0]
    assert trainer._metrics["train"]["noise/sigma"] == [trainer.args.noise_sigma_start]


def test_dynamic_sampling_fills_the_batch_with_live_groups(make_trainer):
    def every_third_group(completion_ids, **kwargs):
        return [float(i % 2) if (i // GROUP) % 3 == 0 else 0.0 for i in range(len(completion_ids))]

    trainer = make_trainer(reward=every_third_group, dynamic_sampling_rounds=3)
    trainer.model.train()
    batch = trainer._generate_and_score_completions(batch_rows())
    live = (batch["advantages"].view(-1, GROUP) != 0).any(dim=1)
    # Groups 0 and 3 of the first rollout live; each extra rollout of n groups has group 0 alive.
    assert live.all()
    assert len(trainer.engine.calls) == 3
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_microbatches_know_the_groups_of_their_samples(make_trainer):
    """Also where a group is spread over several, and in the file in which a checkpoint keeps them."""
    trainer = make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=8)
    trainer.model.train()
    trainer._prepare_inputs(batch_rows())
    parts = trainer._buffered_inputs
    assert [part[GROUP_KEY].tolist() for part in parts] == [[i // 2] * 2 for i in range(8)]
    file = Path(trainer.args.output_dir) / "rollouts_0.safetensors"
    save_rollouts(parts, file)
    loaded = load_rollouts(file, 8, torch.device("cpu"))
    for part, other in zip(parts, loaded, strict=True):
        assert torch.equal(other[GROUP_KEY], part.pop(GROUP_KEY))
    save_rollouts(parts, file)
    with pytest.raises(QeRLError, match="does not say which samples share a prompt"):
        load_rollouts(file, 8, torch.device("cpu"))


def test_samples_that_do_not_share_prompts_are_refused(make_trainer):
    trainer = make_trainer()
    trainer.model.train()
    rows = batch_rows()
    with pytest.raises(QeRLError, match="not 4 of each prompt, side by side"):
        trainer._generate_and_score_completions([*rows[1:], rows[0]])


def test_dynamic_sampling_is_bounded(make_trainer):
    constant = lambda completion_ids, **kwargs: [1.0] * len(completion_ids)  # noqa: E731
    trainer = make_trainer(reward=constant, dynamic_sampling_rounds=2)
    trainer.model.train()
    batch = trainer._generate_and_score_completions(batch_rows())
    assert len(trainer.engine.calls) == 3
    assert (batch["advantages"] == 0).all()


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
    with pytest.raises(QeRLError, match="divisible by num_generations"):
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
    "entropy quantile": {"top_entropy_quantile": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tokens", [25, 1])
def test_chunks_change_nothing(train, options, tokens):
    """Samples in one forward pass, in a few, and each by itself train alike and log the same."""
    reference, expected = train(reward=sum_reward, **options)
    trainer, weights = train(reward=sum_reward, tokens_per_forward=tokens, **options)
    same(expected, weights)
    rows, others = logged(trainer), logged(reference)
    assert len(rows) == 3 and any(row["loss"] != 0 for row in rows)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=1e-4, abs=1e-6, nan_ok=True), name


def test_chunks_are_chunks(make_trainer):
    """What the tests beside this one compare is computed in so many forward passes."""
    passes = {}
    for tokens in (None, 25, 1):
        trainer = make_trainer(reward=sum_reward, tokens_per_forward=tokens)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = trainer._generate_and_score_completions(batch_rows())
        seen = []
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(args[0].numel())
        )
        trainer.compute_loss(trainer.model, inputs)
        passes[tokens] = seen
    assert len(passes[None]) == 1
    assert len(passes[1]) == (inputs["advantages"] != 0).sum() > 8
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
    monkeypatch.setattr(updates, "no_offload_on_cpu", lambda *_: None)
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
