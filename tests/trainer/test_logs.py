"""What is logged is right, of all samples it names, and the same set whichever way the ratio came about."""

import copy
import time
from itertools import count, product
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.run_folder import read_metrics
from qerl.settings.config import QeRLConfig
from qerl.trainer.callbacks import MetricsFile
from qerl.trainer.grpo import QeRLTrainer
from qerl.update import policy_loss
from qerl.update.policy_loss import gamma_weight
from tests.support.trainer import (
    DATA,
    GROUP,
    TrlClient,
    as_batch,
    fed_by,
    reported,
    rollout_of,
    samples_of,
    settings,
    trl_step,
    update_of,
)

SCIENCE = {
    "entropy", "entropy/computed", "rollout/entropy", "rollout/errors", "rollout/tokens_per_second",
    "sampling/kl", "sampling/kl_sequence", "sampling/ratio/mean", "sampling/ratio/max",
    "sampling/ratio/truncated", "sampling/ratio/effective_sample_size",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
}  # fmt: skip


def last_token(completion_ids, **_):
    """Differs within the groups of even index alone."""
    return [float(ids[0] % 5) if (i // 4) % 2 == 0 else 1.0 for i, ids in enumerate(completion_ids)]


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def build(reward=last_token, eval_dataset=None, callbacks=None, rollout_func=None, **changes):
        values = {"max_steps": 2, "learning_rate": 1e-2}
        if changes.get("noise"):
            values |= {"noise_stages": 2, "noise_sigma_start": 0.3}
        model = tiny_model("llama")
        engine = PortableEngine(model, tiny_tokenizer.pad_token_id)
        return QeRLTrainer(
            model, [reward], QeRLConfig(**settings(tmp_path, **(values | changes))), DATA, engine=engine,
            eval_dataset=eval_dataset, processing_class=tiny_tokenizer, callbacks=callbacks,
            rollout_func=rollout_func,
        )  # fmt: skip

    return build


def rows(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def trained(trainer):
    trainer.train()
    return rows(trainer)


PATHS = {
    "used once": {},
    "old log-probabilities given": {"num_iterations": 2},
    "no correction": {"vllm_importance_sampling_correction": False},
    "no correction, old given": {"vllm_importance_sampling_correction": False, "num_iterations": 2},
}


@pytest.mark.slow
def test_every_path_logs_the_same(make):
    """At the first update all of them are the same; one step is noisy, with ratios beyond the bound."""
    logs = {name: trained(make(noise=True, max_steps=4, **path)) for name, path in PATHS.items()}
    first = logs["used once"]
    assert first[0].keys() >= SCIENCE
    for name, path in logs.items():
        assert path[0].keys() == first[0].keys(), name
        for metric in SCIENCE - {"rollout/tokens_per_second"}:
            assert path[0][metric] == pytest.approx(first[0][metric], rel=1e-4, abs=1e-6), (name, metric)
    noisy, uncorrected = first[2], logs["no correction"][2]
    assert noisy["sampling/kl"] > 1e-3 and uncorrected["sampling/kl"] > 1e-3
    assert noisy["sampling/kl_sequence"] > noisy["sampling/kl"]
    assert 0 < noisy["sampling/ratio/effective_sample_size"] < 1 < noisy["sampling/ratio/max"]
    assert uncorrected["sampling/importance_sampling_ratio/max"] == 1


@torch.no_grad()
def clean_entropies(trainer, batch):
    """Of each token under the clean policy, by a forward pass of our own; and the mask."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logps = logits[:, batch["prompt_ids"].size(1) - 1 : -1].log_softmax(-1)
    return -(logps.exp() * logps).sum(-1), batch["completion_mask"].bool()


@pytest.mark.parametrize("noisy", [False, True])
def test_entropy_is_the_clean_policys_over_all_samples(make, noisy):
    trainer = make(noise=noisy)
    trainer.state.max_steps, trainer.state.global_step = 2, 1
    parts = rollout_of(trainer)
    batch = as_batch(parts)
    entropy_BC, mask_BC = clean_entropies(trainer, batch)
    update_of(trainer, parts)
    logged = reported(trainer)
    computed_BC = mask_BC & (batch["advantages"] != 0)[:, None]
    assert 0 < computed_BC.sum() < mask_BC.sum()
    assert logged["entropy/computed"] == pytest.approx(entropy_BC[computed_BC].mean().item(), rel=1e-4)
    sampler = parts[0].rollout_entropy
    assert sampler == pytest.approx(batch["sampling_entropies"][mask_BC].mean().item(), rel=1e-5)
    exact = entropy_BC[mask_BC].mean().item()
    if noisy:  # what is left is how the noise's effect differs between computed samples and others
        assert abs(logged["entropy"] - exact) < 0.5 * abs(sampler - exact)
    else:
        assert logged["entropy"] == pytest.approx(exact, rel=1e-4)
        assert abs(logged["entropy/computed"] - exact) > 1e-3


def test_evaluation_computes_no_log_probabilities(make, monkeypatch):
    trainer = make(eval_dataset=DATA, num_iterations=2, per_device_eval_batch_size=4)
    monkeypatch.setattr(trainer.updates, "_forward", None)
    metrics = trainer.evaluate()
    assert metrics["eval_rollout/entropy"] > 0


def test_an_evaluation_fills_the_engine(make, monkeypatch):
    """One call for all of its problems, and none twice where they are shared among processes."""
    trainer = make(eval_dataset={"a": DATA, "b": DATA.select(range(3))})
    calls, generate = [], trainer.engine.generate
    monkeypatch.setattr(trainer.engine, "generate", lambda *args: calls.append(args) or generate(*args))
    trainer.evaluate()
    assert [len(prompts) for prompts, *_ in calls] == [len(DATA), 3]
    assert trainer.args.per_device_eval_batch_size == 1024
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    assert trainer.get_eval_dataloader("b").batch_sampler.batch_size == 2 * GROUP
    assert trainer.get_eval_dataloader(DATA).batch_sampler.batch_size == 2 * GROUP


def test_the_time_of_an_update_includes_the_optimizers_step(make):
    trainer = make(max_steps=1)
    trainer.create_optimizer()
    inner = trainer.optimizer.step

    def slow(*args, **kwargs):
        time.sleep(0.3)
        return inner(*args, **kwargs)

    trainer.optimizer.step = slow
    assert trained(trainer)[0]["time/update"] > 0.3


def test_a_rollout_without_one_finite_sample_ends_the_run(make):
    """Its answers of one pad token are rewarded alike, and the run would go on without learning."""
    trainer = make(lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids])
    with torch.no_grad():
        trainer.model.lm_head.weight.requires_grad_(False)[5] = torch.nan
    with pytest.raises(QeRLError, match="all 16 samples"):
        trainer.train()


@pytest.mark.parametrize(
    ("reward_of_step", "changes", "said"),
    [
        (lambda step, samples: [1.0] * samples, {}, "none of the 3 rollouts did"),
        (lambda step, samples: [1.0] * samples, {"num_iterations": 2}, "none of the 2 rollouts did"),
        (
            lambda step, samples: [i % 4 // 2 for i in range(samples)] if step == 1 else [0.0] * samples,
            {},
            "",
        ),
    ],
)
def test_a_training_whose_rewards_taught_nothing_says_so(make, caplog, reward_of_step, changes, said):
    def reward(completion_ids, trainer_state, **_):
        return reward_of_step(trainer_state.global_step, len(completion_ids))

    trainer = make(reward, max_steps=3, **changes)
    for _ in range(2):  # a second training counts anew
        caplog.clear()
        trainer.train()
        warned = [text for text in caplog.messages if "Nothing was learned from rewards" in text]
        assert len(warned) == bool(said) and all(said in text for text in warned)


@pytest.mark.slow
def test_the_time_of_an_evaluation_is_no_steps(make):
    """And the times of a step add up to TRL's `step_time`, rollout included."""

    def slow(completion_ids, **_):
        time.sleep(0.2)
        return [float(ids[0] % 5) for ids in completion_ids]

    trainer = make(slow, DATA, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, max_steps=3)
    for row in trained(trainer):
        assert 0.2 <= row["time/reward"] < 0.4 and row["time/update"] > 0
        assert row["step_time"] == pytest.approx(
            sum(row[f"time/{x}"] for x in ("rollout", "reward", "update"))
        )


def test_a_clock_that_is_set_back_makes_no_negative_times(make, monkeypatch):
    trainer = make(eval_dataset=DATA, eval_strategy="steps", eval_steps=1)
    clock = count(1e9, -1)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    trainer.train()
    logged = [*trainer.state.log_history, trainer.predict(DATA).metrics]
    names = {name for row in logged for name in row if "_runtime" in name or "_per_second" in name}
    assert names >= {"train_runtime", "eval_samples_per_second", "test_steps_per_second"}
    assert all(row[name] >= 0 for row in logged for name in names & row.keys())


def test_vespos_weight_is_of_the_computed_samples(make, monkeypatch):
    trainer = make(loss_type="vespo")
    parts = rollout_of(trainer)
    seen = []

    def spy(*args):
        seen.append(gamma_weight(*args))
        return seen[-1]

    monkeypatch.setattr(policy_loss, "gamma_weight", spy)
    update_of(trainer, parts)
    expected = seen[0][as_batch(parts)["advantages"] != 0].mean().item()
    assert reported(trainer)["vespo/phi_seq_mean"] == pytest.approx(expected)


# Tokens that the policy did not write


def with_tool_output(prompts, trainer):
    """Completions in the middle of which a tool speaks; its tokens' log-probabilities are nonsense."""
    draw = torch.Generator().manual_seed(3)
    ids, logps, masks = [], [], []
    for _ in prompts:
        length = int(torch.randint(4, 7, (), generator=draw))
        ids.append(torch.randint(5, 90, (length,), generator=draw).tolist())
        masks.append([1] + [0] * (length - 3) + [1, 1])
        written = (-4.2 - torch.rand(length, generator=draw)).tolist()
        logps.append([value if own else -40.0 for value, own in zip(written, masks[-1], strict=True)])
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logps, "env_mask": masks}


TOKEN, SEQUENCE = ["token_truncate", "token_mask"], ["sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize(
    ("loss_type", "mode"),  # vespo needs ratios per token
    [*product(["grpo", "dapo"], TOKEN + SEQUENCE), *product(["vespo"], TOKEN)],
)
def test_a_tools_tokens_are_in_no_ratio_and_no_mean(make, mode, loss_type, tmp_path):
    options = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode}
    ours = make(rollout_func=with_tool_output, **options)
    same = {"num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 6}
    config = GRPOConfig(
        str(tmp_path), bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
        epsilon_high=ours.args.epsilon_high, **same, **options,
    )  # fmt: skip
    model = copy.deepcopy(ours.model)
    model.__dict__.pop("forward", None)  # the fused head is added anew to the copy
    reference = GRPOTrainer(model, [last_token], config, DATA, processing_class=ours.processing_class)
    fed_by(reference, TrlClient(ours)).rollout_func = with_tool_output
    update_of(ours, rollout_of(ours))
    batch, _ = trl_step(reference)
    for (name, ours_p), other in zip(
        ours.model.named_parameters(), reference.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours_p.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)
    logged = reported(ours)
    written = (batch["tool_mask"] * batch["completion_mask"] * (batch["advantages"] != 0)[:, None]).bool()
    old = batch["old_per_token_logps"]
    differences = (old - batch["sampling_per_token_logps"])[written].abs()
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(
        differences.mean().item(), rel=1e-4
    )
    assert logged["sampling/sampling_logp_difference/max"] < 10


@pytest.mark.parametrize(
    "options", [{"beta": 0.1}, {"beta": 0.1, "num_iterations": 2}, {"num_iterations": 2}]
)
@pytest.mark.parametrize("value", [1e4, -1e4, torch.inf])
def test_no_value_at_a_tools_tokens_reaches_the_loss(make, options, value):
    trainer, found = make(rollout_func=with_tool_output, **options), []
    parts = rollout_of(trainer)
    strange = copy.deepcopy(parts)
    for sample in samples_of(strange):
        assert 0 in sample.written
        for logps in (sample.logprobs, sample.old_logprobs, sample.reference_logprobs):
            if logps is not None:
                logps[:] = [lp if own else value for lp, own in zip(logps, sample.written, strict=True)]
    for each in (parts, strange):
        trainer.model.zero_grad()
        loss = update_of(trainer, each)
        found.append((loss.item(), [p.grad.clone() for p in trainer.model.parameters() if p.requires_grad]))
    (loss, gradients), (other, others) = found
    assert other == pytest.approx(loss) and any(gradient.any() for gradient in gradients)
    assert all(gradient.equal(same) for gradient, same in zip(gradients, others, strict=True))


def test_a_trainer_made_in_python_writes_what_a_run_writes(make, tmp_path):
    trainer = make(noise=False, callbacks=[MetricsFile(tmp_path)])
    logged = trained(trainer)
    first, *written = read_metrics(tmp_path)
    assert first == {"step": 0, "max_steps": 2, "update_path": trainer.update_path.record()}
    assert [row["reward"] for row in written[:2]] == [row["reward"] for row in logged]


def test_metrics_that_cannot_be_written_end_the_run_in_a_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    with pytest.raises(QeRLError, match=r"metrics\.jsonl"):
        MetricsFile(tmp_path).on_log(None, state, None, {"reward": 1.0})


def test_an_evaluation_draws_a_problem_alike_in_any_order_and_batch(make, tmp_path):
    """At any step of the run too; copies of a problem are drawn apart."""
    found = []

    def keep(prompts, completions, **_):
        found.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(completions)

    def drawn(trainer, rows):
        found.clear()
        trainer.evaluate(DATA.select(rows))
        return sorted(found)

    trainer = make(keep, eval_dataset=DATA, num_generations_eval=2)
    every = drawn(trainer, [0, 1, 2, 3])
    assert len(set(every)) == 8
    trainer.args.per_device_eval_batch_size = 4
    trainer.state.global_step = 1
    assert drawn(trainer, [3, 1, 0, 2]) == every
    assert drawn(trainer, [2, 1]) == [pair for pair in every if pair[0] in DATA[1:3]["prompt"]]
    copies = drawn(trainer, [1, 1, 1, 1])
    assert len(set(copies)) == 8 and set(copies) > {pair for pair in every if pair[0] == DATA[1]["prompt"]}
    assert drawn(trainer, [0, 1, 2, 3]) == every, "each evaluation counts its copies anew"


@pytest.mark.parametrize("prefix", ["test", "eval", "eval_other"])
def test_predictions_have_the_rewards_of_an_evaluation_and_leave_no_trace(make, prefix):
    trainer = make(eval_dataset=DATA, num_generations_eval=2)
    log = len(trainer.state.log_history)
    first = trainer.predict(DATA.select([0, 1, 2]), metric_key_prefix=prefix).metrics
    assert len(trainer.state.log_history) == log and not trainer._log.metrics["eval"]
    assert not trainer._log.records
    expected = trainer.evaluate(DATA.select([0, 1, 2]))
    kinds = {name.removeprefix("eval_") for name in expected} - {"epoch"}
    assert (
        {name.removeprefix(f"{prefix}_") for name in first} == kinds >= {"reward", "rewards/last_token/mean"}
    )
    for name in kinds:
        if "runtime" not in name and "second" not in name and "time" not in name:
            assert first[f"{prefix}_{name}"] == expected[f"eval_{name}"], name


def test_a_prediction_of_nothing_but_failures_is_none(make):
    trainer = make(lambda completions, **_: [None] * len(completions), eval_dataset=DATA)
    assert trainer.predict(DATA).metrics["test_reward"] is None


def test_rows_handed_over_later_are_checked_and_cut_as_the_first(make, caplog):
    sampled = []
    trainer = make(lambda prompts, **_: sampled.extend(prompts) or [0.0] * len(prompts), max_prompt_length=24)
    trainer.evaluate(Dataset.from_dict({"prompt": ["one two", "one two three four five six"]}))
    assert "1 of 2 evaluation prompts are longer than 24 tokens" in caplog.text
    missing, columns = Dataset.from_dict({"prompt": ["one", None]}), Dataset.from_dict({"text": ["one"]})
    for score, name in ((trainer.evaluate, "eval_dataset"), (trainer.predict, "test_dataset")):
        with pytest.raises(QeRLError, match=f"^Row 1 of {name} has no prompt"):
            score(missing)
        with pytest.raises(QeRLError, match=f"^{name} has no column `prompt`"):
            score(columns)
    sampled.clear()
    with pytest.raises(QeRLError, match=r"^Row 1 of eval_dataset 'second' has no prompt"):
        trainer.evaluate({"first": DATA, "second": missing})
    assert not sampled
