"""Settings, data, rewards and optimizers handed to `QeRLTrainer` act as in TRL or are refused."""

import copy
import dataclasses
import functools
import json
import shutil

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback
from trl import GRPOConfig

from qerl import add_lora
from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig, as_ours
from qerl.trainer.arguments import RUN_FIELDS
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.rewards import one_for_each
from tests.support.arguments import ROWS, SMALL, first_letter, ones, run_settings


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def make(lora: bool = True, rewards=ones, acted_on=(), **fields) -> QeRLTrainer:
        model = tiny_model("llama")
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
        args = QeRLConfig(
            output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, noise=False,
            max_completion_length=8, report_to="none", use_cpu=True, **fields,
        )  # fmt: skip
        engine = PortableEngine(model, 0)
        return QeRLTrainer(
            model, rewards, args, ROWS, engine=engine, processing_class=tiny_tokenizer, acted_on=acted_on
        )

    return make


SOURCES = {
    "model": "some/model",
    "task": "gsm8k",
    "task_options": {"level": "wp1"},
    "reward_files": ["a.py:f"],
    "judge": {"url": "http://127.0.0.1:1/v1", "model": "m"},
    "eval_samples": 3,
    "tools": ["a.py:f"],
    "environment": "calculator",
    "environment_options": {"x": 1},
    "rounding": "rtn",
    "adapter": None,  # set below: it must exist
    "max_sequences": 1,
    "kv_cache_dtype": "fp8",
    "resume_from_checkpoint": True,
}


@pytest.mark.parametrize(("name", "value"), SOURCES.items())
def test_a_field_that_names_a_source_is_refused(make, name, value, tmp_path):
    if name == "adapter":
        add_lora(make(lora=False).model, 32, 32, 0.0).save_pretrained(tmp_path / "saved")
        value = str(tmp_path / "saved")
    with pytest.raises(QeRLError, match=rf"{name} has no effect here \(.+\); remove it\."):
        make(**{name: value})
    make(acted_on=RUN_FIELDS, **{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "mxfp4"}, "weights is 'mxfp4' and the model that was handed in has 'bf16'"),
        ({"weights": "bf16", "tuning": "full"}, "tuning is 'full' and the model .* has 'lora'"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16' and the model .* has 'float32'"),
        ({"lora_r": 8}, "lora_r is 8 and the model .* has 4"),
        ({"lora_alpha": 16}, "lora_alpha is 16 and the model .* has 8"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1 and the model .* has 0.0"),
        (
            {"lora_target_modules": ["q_proj"]},
            r"lora_target_modules is \['q_proj'\] and .* has \['q_",
        ),
    ],
)
def test_a_field_that_contradicts_the_model_is_refused(make, fields, message):
    with pytest.raises(QeRLError, match=message):
        make(**fields)


def test_what_agrees_with_the_model_is_accepted(make):
    make(lora_r=4, lora_alpha=8, lora_target_modules=["v_proj", "q_proj"], dtype="float32", weights="bf16")
    make(lora=False, tuning="full", weights="bf16")
    with pytest.raises(QeRLError, match="lora_r is set and the model that was handed in has no LoRA adapter"):
        make(lora=False, lora_r=4)


def test_every_field_of_a_run_is_decided():
    described = {"weights", "tuning", "dtype", "max_prompt_length", "lora_r", "lora_alpha", "lora_dropout"}
    assert SOURCES.keys() | described | {"lora_target_modules"} == RUN_FIELDS


@pytest.fixture
def settings(tmp_path):
    return functools.partial(run_settings, tmp_path)


# Settings


def test_trls_settings_keep_trls_defaults(llama_folder, tmp_path):
    given = GRPOConfig(output_dir=str(tmp_path), beta=0.1, epsilon=0.1, save_strategy="no", **SMALL)
    args = QeRLTrainer(str(llama_folder), ones, given, ROWS).args
    assert (args.loss_type, args.vllm_importance_sampling_mode) == ("dapo", "sequence_mask")
    assert (args.epsilon, args.epsilon_high, args.beta, args.logging_steps) == (0.1, 0.1, 0.1, 10)
    assert (args.noise, args.overlong_buffer, args.dynamic_sampling_batches) == (False, 0.0, 0)
    assert (args.num_generations, args.per_device_train_batch_size, args.use_cpu) == (2, 2, True)
    assert (args.weights, args.tuning, args.dtype) == ("nvfp4", "lora", "auto")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty has no effect in QeRL"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs has num_beams, which is not supported"),
        ({"vllm_structured_outputs_regex": "a"}, "regex has no effect in QeRL"),
        ({"bf16": False, "fp16": True}, "fp16 has no effect in QeRL"),
    ],
)
def test_what_is_refused_of_trls_settings(llama_folder, tmp_path, fields, message):
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(str(llama_folder), ones, GRPOConfig(output_dir=str(tmp_path), **SMALL, **fields), ROWS)


@pytest.mark.slow
def test_what_asks_for_speed_is_answered_in_one_line(llama_folder, tmp_path, caplog):
    speed = {
        "use_vllm": True,
        "vllm_mode": "server",
        "use_liger_kernel": True,
        "cache_implementation": "static",
    }
    speed |= {
        "generation_kwargs": {"top_k": 5, "do_sample": True},
        "accelerator_config": {"non_blocking": True},
    }
    given = GRPOConfig(output_dir=str(tmp_path), save_strategy="no", **SMALL, **speed)
    trainer = QeRLTrainer(str(llama_folder), ones, given, ROWS)
    (line,) = [
        record.getMessage() for record in caplog.records if "built-in replacements" in record.getMessage()
    ]
    assert "cache_implementation, use_vllm, vllm_mode: rollouts run on the built-in engine" in line
    assert "use_liger_kernel: the update has fused layers" in line
    assert trainer.args.top_k == 5 and trainer.args.accelerator_config.non_blocking
    trainer.train()
    assert trainer.state.global_step > 0


@dataclasses.dataclass
class Extended(GRPOConfig):
    mine: int = 0


@pytest.mark.slow
def test_trls_settings_without_autocast_are_fp32_and_other_classes_are_refused(llama_folder, tmp_path):
    given = GRPOConfig(output_dir=str(tmp_path), bf16=False, **SMALL)
    assert QeRLTrainer(str(llama_folder), ones, given, ROWS).args.dtype == "float32"
    given.model_init_kwargs = {"dtype": "bfloat16"}
    assert QeRLTrainer(str(llama_folder), ones, given, ROWS).args.dtype == "bfloat16"
    with pytest.raises(QeRLError, match=r"Extended has fields that no trainer here reads \(mine\)"):
        as_ours(Extended(output_dir=str(tmp_path), use_cpu=True))


def test_settings_may_be_left_out(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny-llama"
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    trainer = QeRLTrainer(str(folder), ones, train_dataset=rows)
    assert trainer.args.output_dir == "tiny-llama-GRPO" and not trainer.args.noise
    with pytest.raises(QeRLError, match="args is a dict; pass a QeRLConfig"):
        QeRLTrainer(str(folder), ones, {"output_dir": "o"}, rows)


# Data, rewards, optimizer, what is refused


def test_a_quantization_config_is_refused(llama_folder, settings):
    with pytest.raises(QeRLError, match=r"quantization_config is not supported: .*; leave it out"):
        QeRLTrainer(str(llama_folder), ones, settings(), ROWS, quantization_config=[ones])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"callbacks": TrainerCallback()}, "callbacks is a TrainerCallback; pass a list"),
        ({"callbacks": [3]}, "callbacks has the type int; each must be a TrainerCallback"),
        ({"engine": object()}, "engine is a object; leave it out"),
        (
            {"reward_funcs": "no/such/model"},
            r"reward_funcs names no/such/model, and no reward model is found there",
        ),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 numbers, and there are 1 reward functions;"),
        (
            {"reward_weights": [1.0], "overlong_buffer": 0.5},
            r"has 1 numbers, and there are 2 .*, the length penalty \(overlong_buffer\) among them",
        ),
    ],
)
def test_arguments_of_another_kind(llama_folder, settings, given, message):
    fields = {name: given.pop(name) for name in ("reward_weights", "overlong_buffer") if name in given}
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(
            str(llama_folder), **{"reward_funcs": ones} | given, args=settings(**fields), train_dataset=ROWS
        )


@pytest.mark.slow
def test_a_column_of_any_other_name_reaches_the_rewards(llama_folder, settings):
    seen = []

    def reward(completions, **columns):
        seen.extend(columns["self"])
        return [0.0] * len(completions)

    rows = ROWS.add_column("self", list(range(6)))
    QeRLTrainer(str(llama_folder), reward, settings(max_steps=1, save_strategy="no"), rows).train()
    assert seen


def test_arguments_that_are_missing(llama_folder, settings):
    with pytest.raises(QeRLError, match="reward_funcs is missing"):
        QeRLTrainer(str(llama_folder), args=settings(), train_dataset=ROWS)
    with pytest.raises(QeRLError, match="train_dataset is missing"):
        QeRLTrainer(str(llama_folder), ones, settings())
    with pytest.raises(QeRLError, match="train_dataset is a DatasetDict; pass a Dataset"):
        QeRLTrainer(str(llama_folder), ones, settings(), DatasetDict({"train": ROWS}))


def test_a_tokenizer_without_chat_template_serves_plain_prompts(
    llama_folder, settings, tmp_path, tiny_tokenizer
):
    plain = copy.deepcopy(tiny_tokenizer)
    plain.chat_template = None
    tiny = tmp_path / "model"
    shutil.copytree(llama_folder, tiny, ignore=shutil.ignore_patterns("chat_template*", "tokenizer*"))
    plain.save_pretrained(tiny)
    QeRLTrainer(str(tiny), ones, settings(), Dataset.from_dict({"prompt": ["a", "b"]}))
    with pytest.raises(QeRLError, match="has no chat template; use an instruction-tuned model"):
        QeRLTrainer(str(tiny), ones, settings(), ROWS)
    with pytest.raises(QeRLError, match="processing_class has no chat template; set its chat_template, or"):
        QeRLTrainer(str(tiny), ones, settings(), ROWS, processing_class=plain)


@pytest.mark.slow
def test_an_optimizer_of_the_users_steps(tiny_model, tiny_tokenizer, settings):
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)
    trainer = QeRLTrainer(
        model, first_letter, settings(max_steps=1, save_strategy="no"), ROWS,
        processing_class=tiny_tokenizer, optimizers=(optimizer, schedule),
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    assert any(not p.equal(b) for p, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
    other = torch.optim.SGD(tiny_model("llama").parameters(), lr=1.0)
    with pytest.raises(QeRLError, match="has parameters that the policy does not train"):
        QeRLTrainer(model, ones, settings(), ROWS, processing_class=tiny_tokenizer, optimizers=(other, None))


def test_rewards_and_their_tokenizers_may_stand_in_tuples(make, tiny_tokenizer):
    trainer = make(rewards=(ones, first_letter), overlong_buffer=0.5)
    assert trainer.reward_func_names == ["ones", "first_letter", "soft_overlong_punishment_reward"]
    assert one_for_each((None, tiny_tokenizer), (ones, first_letter), trainer.reward_funcs) == [
        *(None, tiny_tokenizer, None)
    ]


@pytest.mark.slow
def test_several_rewards_columns_and_a_reward_model(llama_folder, settings, tiny_tokenizer, tmp_path):
    """A reward model has its own tokenizer; the length penalty, which the settings add, has none."""
    classifier = tmp_path / "judge"
    LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, num_labels=1, pad_token_id=0,
        )
    ).save_pretrained(classifier)  # fmt: skip
    seen = []

    def by_column(completions, hint, **_):
        seen.extend(hint)
        return [float(h) for h in hint]

    rows = Dataset.from_dict({"prompt": ["a", "b", "c", "d"], "hint": [1, 2, 3, 4]})
    trainer = QeRLTrainer(
        str(llama_folder), [by_column, str(classifier)],
        settings(overlong_buffer=0.5, reward_weights=[1.0, 2.0, 0.5], max_steps=1, save_strategy="no"), rows,
        reward_processing_classes=[None, tiny_tokenizer], callbacks=[],
        eval_dataset={"one": rows.select([0]), "two": rows.select([1])},
    )  # fmt: skip
    assert trainer.reward_func_names == ["by_column", "judge", "soft_overlong_punishment_reward"]
    assert trainer.reward_processing_classes[1:] == [tiny_tokenizer, None]
    trainer.train()
    assert len(seen) == 2 and len(set(seen)) == 1
    row = next(row for row in trainer.state.log_history if "reward" in row)
    parts = [row[f"rewards/{name}/mean"] for name in trainer.reward_func_names]
    assert row["reward"] == pytest.approx(parts[0] + 2 * parts[1] + 0.5 * parts[2], abs=1e-5)


def test_long_prompts_are_left_out(make):
    trainer = make(max_prompt_length=40)
    assert [len(row["prompt"][0]["content"]) for row in trainer.train_dataset] == [2, 3, 4]
    assert len(make().train_dataset) == 6
    with pytest.raises(QeRLError, match="None of the 6 training prompts has at most 1 tokens"):
        make(max_prompt_length=1)


@pytest.mark.parametrize(
    "sets", [lambda rows: rows, lambda rows: {"hard": rows}, lambda rows: rows.to_iterable_dataset()]
)
def test_long_prompts_are_left_out_of_evaluation_too(llama_folder, settings, caplog, sets):
    given = settings(max_prompt_length=40)
    trainer = QeRLTrainer(str(llama_folder), ones, given, ROWS, eval_dataset=sets(ROWS))
    held_out = trainer.eval_dataset
    name = next(iter(held_out)) if isinstance(held_out, dict) else None
    rows = trainer.get_eval_dataloader(name).dataset
    assert {len(row["prompt"][0]["content"]) for row in rows} == {2, 3, 4}
    if not isinstance(held_out, IterableDataset):
        name = f" of {name!r}" if name else ""
        assert f"3 of 6 evaluation prompts{name} are longer than 40 tokens and are left out." in caplog.text


def test_what_every_process_finds_is_said_by_the_first(make, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    make(max_prompt_length=40)
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    make(max_prompt_length=40)
    assert caplog.text.count("3 of 6 training prompts are longer") == 1


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_in_float16_is_refused(tiny_model, tiny_tokenizer, settings, adapted):
    model = tiny_model("llama").half()
    config = LoraConfig(r=4) if adapted else None
    message = "The model that was handed in is float16, in which small gradients vanish; load it with dtype="
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(model, ones, settings(), ROWS, processing_class=tiny_tokenizer, peft_config=config)


def test_code_of_a_tokenizer_runs_where_it_is_trusted(llama_folder, settings, tmp_path):
    folder = shutil.copytree(llama_folder, tmp_path / "llama")
    code = "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast): pass\n"
    (folder / "mine.py").write_text(code)
    file = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}, "tokenizer_class": "Mine"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(
        QeRLError, match=r"The tokenizer of .* it brings its own code, which runs only with trust_remote_code"
    ):
        QeRLTrainer(str(folder), ones, settings(), ROWS)
    trusting = settings(model_init_kwargs={"trust_remote_code": True})
    assert QeRLTrainer(str(folder), ones, trusting, ROWS).processing_class.pad_token == "<pad>"


def test_the_length_penalty_is_one_of_the_rewards(make):
    trainer = make(overlong_buffer=0.5)
    assert trainer.reward_func_names == ["ones", "soft_overlong_punishment_reward"]
    penalty = trainer.reward_funcs[1]
    ids = [[5] * length for length in (4, 6, 8)]
    assert penalty(prompts=[""] * 3, completions=[""] * 3, completion_ids=ids) == [0.0, -0.5, -1.0]
    assert make().reward_func_names == ["ones"]


@pytest.mark.parametrize(
    ("train_set", "eval_set", "message"),
    [
        (
            ROWS.rename_column("prompt", "question"),
            None,
            r"train_dataset has no column `prompt`, only question;",
        ),
        (ROWS, {"easy": ROWS.rename_column("prompt", "q")}, r"eval_dataset 'easy' has no column `prompt`"),
        (ROWS.add_column("completions", ["x"] * 6), None, r"train_dataset has the column 'completions', and"),
        (ROWS, "rows.json", "eval_dataset is a str; pass a Dataset or IterableDataset"),
        (ROWS, {"easy": [{"prompt": "x"}]}, "eval_dataset 'easy' is a list; pass a Dataset"),
        (ROWS, ROWS.select([]), "eval_dataset has no row"),
        (IterableDataset.from_generator(lambda: iter(())), None, "is an IterableDataset that yields no rows"),
    ],
)
def test_rows_that_no_trainer_can_read(llama_folder, settings, train_set, eval_set, message):
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(str(llama_folder), ones, settings(max_steps=1), train_set, eval_set)


def test_a_stream_says_nothing_of_the_length_of_a_run(llama_folder, settings):
    with pytest.raises(QeRLError, match="whose length is unknown; set max_steps"):
        QeRLTrainer(str(llama_folder), ones, settings(), ROWS.to_iterable_dataset())


def test_a_stream_to_evaluate_on_stays_as_it_was_given(llama_folder, settings):
    parts = [{"prompt": [{"role": "user", "content": [{"type": "text", "text": text}]}]} for text in "ab"]
    sets = {"parts": Dataset.from_list(parts).to_iterable_dataset(), "rows": ROWS.to_iterable_dataset()}
    trainer = QeRLTrainer(str(llama_folder), ones, settings(), ROWS, sets)
    assert all(trainer.eval_dataset[name] is rows for name, rows in sets.items())
    assert trainer.evaluate().keys() >= {"eval_parts_reward", "eval_rows_reward"}
    assert trainer.evaluate(sets["parts"])["eval_reward"] == 1.0
    with pytest.raises(QeRLError, match="eval_dataset has no column `prompt`"):
        trainer.evaluate(ROWS.rename_column("prompt", "q").to_iterable_dataset())


@pytest.mark.slow
def test_fewer_rows_than_a_rollout_takes_make_no_run_without_a_step(llama_folder, settings):
    few = ROWS.select(range(1))
    trainer = QeRLTrainer(str(llama_folder), ones, settings(per_device_train_batch_size=4), few)
    with pytest.raises(QeRLError, match="A step needs 2 prompts but train_dataset has 1; give it more"):
        trainer.train()


@pytest.mark.slow
def test_a_token_that_the_model_does_not_embed_is_refused(llama_folder, settings, tiny_tokenizer):
    larger = copy.deepcopy(tiny_tokenizer)
    larger.add_tokens([f"<new{i}>" for i in range(1000)])
    rows = Dataset.from_dict({"prompt": ["a", "a <new999>"]})
    trainer = QeRLTrainer(str(llama_folder), ones, settings(max_steps=2), rows, processing_class=larger)
    with pytest.raises(
        QeRLError, match=r"A prompt has the token id \d+ and the model embeds \d+ tokens; give"
    ):
        trainer.train()
