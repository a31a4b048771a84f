"""Distillation on the policy's own samples: each teacher against dense passes of each sample alone, and TRL's
`DistillationTrainer` on the same samples.

Legend: C tokens of a completion, V vocabulary.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from trl import DistillationConfig, DistillationTrainer

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora, load_adapter
from qerl.models.load import load_model
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.preflight import preflight
from qerl.trainer.run import train
from qerl.trainer.teacher import check_teacher_prompt, teacher_prompt
from tests.support.models import move_adapter
from tests.support.tiny_run import tiny_run  # noqa: F401  a fixture
from tests.support.trainer import (
    DATA,
    GROUP,
    ScriptedEngine,
    as_batch,
    gradients,
    logged,
    reported,
    rollout_of,
    same_gradients,
    samples_of,
    settings,
    sum_reward,
    update_of,
)

pytestmark = pytest.mark.slow

FULL = {"tuning": "full", "weights": "bf16"}
DISTILL = {"algorithm": "distill", "learning_rate": 1e-2}
HINT = "{prompt} because {answer}"
ROWS = DATA.add_column("answer", ["a", "bb", "ccc", "dd d"])


def lora(model, seed=None):
    """The model with a fresh adapter, or one that has been moved."""
    adapted = add_lora(model, rank=4, alpha=8, dropout=0.0)
    if seed is None:
        return adapted
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return move_adapter(adapted)


@pytest.fixture
def teachers(tiny_model, tiny_tokenizer, tmp_path):
    """Saved teachers by name, and each as a dense model."""
    adapter = lora(tiny_model(), 5)
    adapter.save_pretrained(tmp_path / "adapter")
    wider = tiny_model(seed=3, hidden_size=96, num_hidden_layers=1)
    wider.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    packed = load_model(tmp_path / "model", "nvfp4", torch.float32, "cpu")
    return {
        "base": ("base", tiny_model()),
        "adapter": (f"adapter:{tmp_path / 'adapter'}", load_adapter(tiny_model(), tmp_path / "adapter")),
        "model": (str(tmp_path / "model"), wider),
        "packed model": (str(tmp_path / "model"), packed),
    }


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    """``make(model, name, rewards, **changes)``: a trainer whose engine is scripted."""

    def trainer(model=None, name="run", rewards=None, **changes):
        model = lora(tiny_model(), 2) if model is None else model
        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        args = QeRLConfig(**settings(tmp_path / name, **(DISTILL | changes)))
        return QeRLTrainer(model, rewards, args, ROWS, engine=engine, processing_class=tiny_tokenizer)

    return trainer


def log_p(model, prompt, tokens):
    """Log-probabilities [C, V] behind a prompt, of a pass of that sample alone."""
    logits_TV = model(input_ids=torch.tensor([prompt + tokens])).logits[0]
    return logits_TV[len(prompt) - 1 : -1].log_softmax(-1)


def dense_loss(policy, teacher, samples, hints=None):
    """The reverse KL of all tokens that the loss sees, averaged."""
    total, count = torch.zeros(()), 0
    for at, sample in enumerate(samples):
        with torch.no_grad():
            q_CV = log_p(teacher, hints[at] if hints else sample.prompt, sample.tokens)
        p_CV, mask_C = log_p(policy, sample.prompt, sample.tokens), torch.tensor(sample.loss_mask)
        total = total + ((p_CV.exp() * (p_CV - q_CV)).sum(-1) * mask_C).sum()
        count += sum(sample.loss_mask)
    return total / count


@pytest.mark.parametrize("hinted", [False, True], ids=["same prompt", "hint"])
@pytest.mark.parametrize("name", ["base", "adapter", "model", "packed model"])
def test_each_teacher_gives_what_a_dense_pass_gives(make, teachers, tiny_model, tiny_tokenizer, name, hinted):
    """Values and gradients, with samples that are masked in part; in one pass and in passes of 20 tokens."""
    named, dense = teachers[name]
    twin = lora(tiny_model(), 2)
    changes = {"teacher_prompt": HINT} if hinted else {}
    if name == "model":
        changes["teacher_weights"] = "bf16"
    trainer = make(teacher=named, **changes)
    parts = rollout_of(trainer, [row for row in ROWS for _ in range(GROUP)])
    samples = samples_of(parts)
    samples[1].written = [at % 2 for at in range(len(samples[1].tokens))]
    samples[6].masked = True
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    parts = [replace(parts[0], rollout_tokens=tokens)]
    texts = [f"{row['prompt']} because {row['answer']}" for row in ROWS for _ in range(GROUP)]
    hints = tiny_tokenizer(texts)["input_ids"] if hinted else None
    wanted = dense_loss(twin, dense, samples, hints)
    wanted.backward()
    for limit in (None, 20):
        trainer.updates.retry.max_tokens = limit
        trainer.model.zero_grad()
        loss = update_of(trainer, parts)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert reported(trainer)["distillation/divergence"] == pytest.approx(wanted.item(), rel=1e-5)
        same_gradients(twin, trainer.model)
    frozen = [p for n, p in trainer.model.named_parameters() if ".teacher." in n]
    assert bool(frozen) == (name == "adapter") and all(p.grad is None for p in frozen)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_loss_is_that_of_trls_distillation_trainer(make, tiny_model, tiny_tokenizer, tmp_path, alpha):
    student, teacher = tiny_model(seed=1), tiny_model(seed=3, hidden_size=96)
    teacher.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    args = DistillationConfig(
        str(tmp_path / "trl"), beta=alpha, temperature=0.8, use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False, per_device_train_batch_size=4,
    )  # fmt: skip
    theirs = DistillationTrainer(copy.deepcopy(student), teacher, args, DATA, processing_class=tiny_tokenizer)
    trainer = make(
        student, teacher=str(tmp_path / "model"), temperature=0.8, distillation_alpha=alpha,
        teacher_weights="bf16", **FULL,
    )  # fmt: skip
    parts = rollout_of(trainer)
    inputs = as_batch(parts)
    wanted = theirs.compute_loss(theirs.model.train(), inputs)
    wanted.backward()
    loss = update_of(trainer, parts)
    assert abs(loss.item() - wanted.item()) < 1e-5 * abs(wanted.item())
    same_gradients(theirs.model, trainer.model)


def test_a_teacher_prompt_leaves_the_policys_side_alone(make, teachers):
    """The same samples, whose own log-probabilities are the same to the last bit."""
    named = teachers["model"][0]
    plain, hinted = make(teacher=named), make(teacher=named, teacher_prompt=HINT, name="hinted")
    rows = [row for row in ROWS for _ in range(GROUP)]
    ones, others = (samples_of(rollout_of(trainer, rows)) for trainer in (plain, hinted))
    for one, other in zip(ones, others, strict=True):
        assert (one.prompt, one.tokens, one.teacher_prompt) == (other.prompt, other.tokens, None)
        assert other.teacher_prompt != other.prompt
    assert plain.updates.logprobs(plain.model, ones) == hinted.updates.logprobs(hinted.model, others)


def test_a_teacher_is_mixed_with_rewards_by_its_weight(make, teachers):
    """Gradients are linear in the two losses."""
    found = {}
    for weight in (1.0, 0.25):
        trainer = make(rewards=[sum_reward], teacher=teachers["model"][0], distillation_weight=weight)
        parts = rollout_of(trainer)
        update_of(trainer, parts)
        found[weight] = gradients(trainer.model)
    trainer = make(rewards=[sum_reward], algorithm=None, loss_type="dapo")
    update_of(trainer, rollout_of(trainer))
    rewarded = gradients(trainer.model)
    for name, mixed in found[0.25].items():
        wanted = 0.25 * found[1.0][name] + 0.75 * rewarded[name]
        assert (mixed - wanted).norm() < 1e-5 * wanted.norm()


def test_a_lone_teacher_needs_no_reward(make, teachers):
    trainer = make(teacher=teachers["adapter"][0], max_steps=3)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["distillation/divergence"] > 0 for row in rows] == [True] * 3
    assert not any(name.startswith("reward") for row in rows for name in row)
    with pytest.raises(QeRLError, match="reward_funcs is missing"):
        make(teacher=teachers["adapter"][0], distillation_weight=0.5)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("adapter", {}),
        ("model", {"num_iterations": 2, "teacher_prompt": HINT}),
        ("base", {"teacher_prompt": HINT}),
    ],
)
def test_resume_is_bit_exact(make, teachers, tmp_path, name, changes):
    named = teachers[name][0]
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "teacher": named} | changes
    whole, resumed = make(**options), make(name="resumed", **options)
    whole.train()
    folder = tmp_path / "run" / "checkpoint-3"
    assert not (folder / "teacher").exists()
    resumed.train(resume_from_checkpoint=str(folder))
    assert logged(resumed)[-1] == logged(whole)[-1]
    own = dict(resumed.model.named_parameters())
    assert all(p.equal(own[name]) for name, p in whole.model.named_parameters())


def test_a_folder_of_the_teachers_name_is_left_alone(make, teachers, tmp_path):
    folder = tmp_path / "saved"
    mine = folder / "teacher" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for named in ("adapter", "model"):
        trainer = make(teacher=teachers[named][0], name=named)
        trainer.save_model(str(folder))
        assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]
        assert (folder / "adapter_model.safetensors").is_file()


def test_a_step_without_a_token_to_learn_from_has_gradients_of_zero(make, teachers):
    trainer = make(teacher=teachers["adapter"][0])
    parts = rollout_of(trainer, [row for row in ROWS for _ in range(GROUP)])
    for sample in samples_of(parts):
        sample.masked = True
    assert update_of(trainer, parts).item() == 0
    assert all(not grad.any() for grad in gradients(trainer.model).values())


def test_the_base_of_full_tuning_is_the_model_as_it_was(make, tiny_model):
    trainer = make(tiny_model(), teacher="base", teacher_prompt=HINT, max_steps=2, **FULL)
    trainer.train()
    kept, start = trainer.updates._teacher.model.state_dict(), tiny_model().state_dict()
    assert all(kept[name].equal(start[name]) for name in start)


def test_trained_policies_are_refused_teachers_that_do_not_fit(
    make, teachers, tiny_model, tiny_tokenizer, tmp_path
):
    def saved(name, tokenizer=tiny_tokenizer, **config):
        tiny_model(**config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    with pytest.raises(QeRLError, match="has a vocabulary of 136 and the policy one of 128"):
        make(teacher=saved("larger", vocab_size=136))
    other = copy.deepcopy(tiny_tokenizer)
    content = json.loads(other.backend_tokenizer.to_str())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    other._tokenizer = type(other.backend_tokenizer).from_str(json.dumps(content))
    with pytest.raises(QeRLError, match=r"which the policy has as '[ab]'"):
        make(teacher=saved("words", other))
    with pytest.raises(QeRLError, match="so it has nothing to teach; set teacher_prompt"):
        make(lora(tiny_model()), teacher="base")
    with pytest.raises(QeRLError, match=r"There is no .*adapter_config.json"):
        make(teacher=f"adapter:{tmp_path / 'model'}")
    narrow = add_lora(tiny_model(), rank=4, alpha=8, dropout=0.0, target_modules=["q_proj"])
    with pytest.raises(QeRLError, match="which the adapter in training does not adapt"):
        make(narrow, teacher=teachers["adapter"][0])
    with pytest.raises(QeRLError, match=r"names {right}, which is no column"):
        make(teacher="base", teacher_prompt="{prompt} {right}")
    rows = [row for row in ROWS for _ in range(GROUP)]
    with pytest.raises(QeRLError, match=r"may have \d+ tokens together, and the teacher has 512 positions"):
        rollout_of(make(teacher="base", teacher_prompt="{prompt}" + "x" * 600), rows)
    longest = max(map(len, tiny_tokenizer(list(ROWS["prompt"]))["input_ids"])) + 6 - 1
    rollout_of(make(teacher=saved("fits", max_position_embeddings=longest)), rows)
    with pytest.raises(QeRLError, match=f"the teacher has {longest - 1} positions"):
        rollout_of(make(teacher=saved("short", max_position_embeddings=longest - 1)), rows)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"algorithm": "distill"}, "needs a teacher"),
        ({"teacher": "base"}, "teacher acts with algorithm: distill"),
        ({"distillation_weight": 0.5}, "distillation_weight acts with algorithm: distill"),
        ({"algorithm": "distill", "teacher": "base", "teacher_weights": "bf16"}, "and teacher is base"),
        ({"algorithm": "distill", "teacher": "adapter:x", **FULL}, "needs a policy with one"),
        (
            {"algorithm": "distill", "teacher": "x", "dynamic_sampling_batches": 1},
            "acts on rewards, which have no weight",
        ),
        ({"algorithm": "distill", "teacher": "x", "top_entropy_quantile": 0.2}, "acts on rewards, which"),
        ({"algorithm": "distill", "teacher": "x", "distillation_alpha": 1.5}, "distillation_alpha"),
        ({"algorithm": "distill", "teacher": "x", "distillation_weight": 0.0}, "distillation_weight"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, changes, message):
    with pytest.raises(QeRLError, match=message):
        QeRLConfig(**settings(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"teacher": "adapter:nowhere"}, "There is no nowhere/adapter_config.json"),
        ({"teacher": "./nowhere"}, r"The teacher ./nowhere is a path that does not exist"),
        ({"teacher": "base", "teacher_prompt": "{prompt} {right}"}, r"names {right}, which is no column"),
        ({"teacher": "x", "teacher_weights": "nf4"}, "nf4 weights need"),
    ],
)
def test_a_dry_run_refuses_what_needs_no_model(tiny_run, tmp_path, changes, message):  # noqa: F811
    with pytest.raises(QeRLError, match=message):
        preflight(QeRLConfig(**tiny_run(tmp_path / "run", algorithm="distill", **changes)))


def test_a_teacher_prompt_stands_in_place_of_the_last_users_message():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one {x}"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    row = {"prompt": messages, "answer": 4}
    found = teacher_prompt('{prompt} {answer} {"a": 1}', messages, row)
    assert found == [*messages[:3], {"role": "user", "content": 'three 4 {"a": 1}'}]
    assert messages[3]["content"] == "three"
    assert teacher_prompt(r"{prompt} \boxed{{number}} {{answer}}", "a {{b}}", row) == (
        r"a {{b}} \boxed{number} {answer}"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    with pytest.raises(QeRLError, match="a prompt has one of type list"):
        teacher_prompt("{prompt} hint", parts, row)
    with pytest.raises(QeRLError, match=r"names {answer}, and a row has nothing in that column"):
        teacher_prompt("{prompt} {answer}", "one", {"answer": None})
    with pytest.raises(QeRLError, match="a prompt has no user message"):
        teacher_prompt("{prompt}", messages[:1], row)
    with pytest.raises(QeRLError, match=r"put {prompt} where the message belongs"):
        check_teacher_prompt("{answer}", ["answer"])


def test_a_run_comes_nearer_to_its_teacher(tiny_run, tiny_model, tmp_path):  # noqa: F811
    """`qerl train` on packed weights with real samples; the teacher is an adapter on them."""
    lora(tiny_model(), 5).save_pretrained(tmp_path / "adapter")
    changes = {
        "algorithm": "distill", "teacher": f"adapter:{tmp_path / 'adapter'}", "noise": False, "max_steps": 30,
        "learning_rate": 5e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 12,
        "lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "weight_decay": 0.0, "save_strategy": "no",
        "eval_strategy": "no",
    }  # fmt: skip
    config = QeRLConfig(**tiny_run(tmp_path / "run", **changes))
    assert train(config, Console(quiet=True)).step == 30
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [row["distillation/divergence"] for row in rows if "distillation/divergence" in row]
    assert sum(found[-5:]) < 0.5 * sum(found[:5])
    assert not (tmp_path / "run" / "teacher").exists()
