"""What is handed to `QeRLTrainer`: arguments act as in TRL or are refused, none is ignored."""

import copy
import dataclasses
import shutil

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import GRPOConfig

from qerl import add_lora, load_adapter, load_model
from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.arguments import RUN_FIELDS
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.trl.settings import as_ours

ROWS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": "x" * length}] for length in (2, 3, 4, 40, 50, 60)]}
)


def ones(completions, **_):
    return [1.0] * len(completions)


def first_letter(completion_ids, **_):
    return [float(ids[0] % 5) for ids in completion_ids]


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
    "eval_samples": 3,
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
    with pytest.raises(QeRLError, match=f"{name} is set, and nothing here reads it; remove it: "):
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model, tiny_tokenizer):
    """A tiny Llama with its tokenizer, saved."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


IDS = torch.arange(5, 25)[None]

SMALL = {
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_completion_length": 4,
    "report_to": "none",
    "use_cpu": True,
}


@pytest.fixture
def settings(tmp_path):
    def settings(**fields) -> QeRLConfig:
        return QeRLConfig(**({"output_dir": str(tmp_path), "noise": False} | SMALL | fields))

    return settings


def wrapped(model) -> int:
    """Layers with an adapter."""
    return sum(isinstance(module, LoraLinear) for module in model.modules())


# Model and adapter


def test_a_named_model_is_loaded_as_the_settings_say(folder, settings):
    given = settings(lora_r=4, rounding="rtn", lora_target_modules=["q_proj"], max_sequences=2)
    trainer = QeRLTrainer(str(folder), ones, given, ROWS)
    layer = trainer.model.get_base_model().model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, PackedLinear) and layer.base_layer.format.name == "nvfp4"
    assert trainer.model.active_peft_config.r == 4 and wrapped(trainer.model) == 2
    rtn, mse = (
        load_model(folder, "nvfp4", torch.float32, "cpu", kind)(IDS).logits for kind in ("rtn", "mse")
    )
    found = trainer.model.eval()(IDS).logits  # B is zero
    torch.testing.assert_close(found, rtn)
    assert not torch.allclose(found, mse)
    assert trainer.engine.rows_per_call == 2
    assert trainer.args.model == str(folder) and given.model is None
    assert trainer.processing_class.pad_token == "<pad>"


def test_a_named_model_may_be_tuned_as_a_whole(folder, settings):
    trainer = QeRLTrainer(folder, ones, settings(tuning="full", weights="bf16"), ROWS)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_the_name_stands_in_one_place(folder, settings):
    with pytest.raises(QeRLError, match=r"args\.model is other"):
        QeRLTrainer(str(folder), ones, settings(model="other"), ROWS)
    assert QeRLTrainer(str(folder), ones, settings(model=str(folder)), ROWS).args.model == str(folder)


def test_a_peft_config_is_what_peft_makes_of_it(folder, settings, tiny_model):
    config = LoraConfig(
        r=8, lora_alpha=4, use_rslora=True, rank_pattern={"k_proj": 2}, layers_to_transform=[1],
        target_modules=["q_proj", "k_proj"], init_lora_weights=False,
    )  # fmt: skip
    named = QeRLTrainer(str(folder), ones, settings(weights="bf16"), ROWS, peft_config=config)
    in_hand = QeRLTrainer(
        tiny_model("llama"), ones, settings(), ROWS, processing_class=named.processing_class,
        peft_config=config,
    )  # fmt: skip
    theirs = get_peft_model(tiny_model("llama"), config)
    for trainer in (named, in_hand):
        theirs.load_state_dict(trainer.model.state_dict())
        torch.testing.assert_close(trainer.model.eval()(IDS).logits, theirs.eval()(IDS).logits)
        assert trainer.model.peft_config["default"].task_type == "CAUSAL_LM"
        assert (trainer.args.lora_r, trainer.args.lora_alpha) == (8, 4)
        assert trainer.args.lora_target_modules == ["k_proj", "q_proj"]
        assert trainer.args.weights == "bf16"
    assert config.task_type is None, "the user's object is left as it was"


@pytest.mark.parametrize(
    ("targets", "layers", "names"),
    [
        (None, 4, ["q_proj", "v_proj"]),
        ("all-linear", 14, sorted(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))),
        (r".*layers\.1\..*[qk]_proj", 2, ["k_proj", "q_proj"]),
        (["down_proj"], 2, ["down_proj"]),
    ],
)
def test_which_layers_a_peft_config_adapts(folder, settings, targets, layers, names):
    """None leaves it to PEFT: query and value projections."""
    trainer = QeRLTrainer(
        str(folder), ones, settings(), ROWS, peft_config=LoraConfig(r=2, target_modules=targets)
    )
    assert wrapped(trainer.model) == layers
    assert trainer.args.lora_target_modules == names


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (LoraConfig(r=8), {"lora_r": 16}, "lora_r is 16 and peft_config has r 8; remove lora_r"),
        (
            LoraConfig(target_modules=["q_proj"]),
            {"lora_target_modules": ["v_proj"]},
            r"lora_target_modules is \['v_proj'\] and peft_config has target_modules \['q_proj'\]",
        ),
        (
            LoraConfig(),
            {"tuning": "full", "weights": "bf16"},
            "tuning is 'full', which trains no adapter; remove it, or peft_config",
        ),
        (LoraConfig(target_modules=["query"]), {}, "names query, which LlamaForCausalLM does not have"),
        (LoraConfig(use_dora=True), {}, "use_dora needs dense weights, and these are packed"),
        (LoraConfig(init_lora_weights="pissa"), {}, "'pissa' starts from dense weights"),
        (LoraConfig(task_type="SEQ_CLS"), {}, "task_type SEQ_CLS; set it to CAUSAL_LM"),
        (LoraConfig(inference_mode=True), {}, "nothing would be trained"),
        (IA3Config(), {}, "peft_config is a IA3Config; only peft.LoraConfig is supported"),
    ],
)
def test_a_peft_config_that_cannot_be_honoured_is_refused(folder, settings, config, fields, message):
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(str(folder), ones, settings(**fields), ROWS, peft_config=config)


def test_a_model_in_hand_is_described_by_the_settings_that_are_saved(tiny_model, tiny_tokenizer, settings):
    trainer = QeRLTrainer(tiny_model("llama"), ones, settings(), ROWS, processing_class=tiny_tokenizer)
    described = (trainer.args.tuning, trainer.args.weights, trainer.args.dtype)
    assert described == ("full", "bf16", "float32")


def test_what_cannot_be_trained_is_refused(folder, settings, tiny_model, tiny_tokenizer, tmp_path):
    packed = load_model(folder, "nvfp4", torch.float32, "cpu")
    with pytest.raises(QeRLError, match="nvfp4 weights, which cannot be trained"):
        QeRLTrainer(packed, ones, settings(), ROWS)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2))
    with pytest.raises(QeRLError, match="has an adapter already"):
        QeRLTrainer(
            adapted, ones, settings(), ROWS, processing_class=tiny_tokenizer, peft_config=LoraConfig(r=2)
        )
    adapted.save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter")
    with pytest.raises(QeRLError, match="frozen; load it with is_trainable=True"):
        QeRLTrainer(frozen, ones, settings(), ROWS, processing_class=tiny_tokenizer)
    with pytest.raises(QeRLError, match="model is a int; pass a Hub id"):
        QeRLTrainer(3, ones, settings(), ROWS)


def test_a_model_in_hand_stays_as_it_is_where_peft_config_contradicts_the_settings(
    tiny_model, tiny_tokenizer, settings
):
    model = tiny_model("llama")
    with pytest.raises(QeRLError, match="lora_r is 4 and peft_config has r 8; remove lora_r"):
        QeRLTrainer(
            model,
            ones,
            settings(lora_r=4),
            ROWS,
            processing_class=tiny_tokenizer,
            peft_config=LoraConfig(r=8),
        )
    assert not wrapped(model)


def test_an_engine_is_that_of_the_model(folder, settings, tiny_model, tiny_tokenizer):
    other = PortableEngine(tiny_model("llama", seed=1), 0)
    with pytest.raises(QeRLError, match="leave engine out"):
        QeRLTrainer(str(folder), ones, settings(), ROWS, engine=other)
    with pytest.raises(QeRLError, match="samples from another LlamaForCausalLM object"):
        QeRLTrainer(
            tiny_model("llama"), ones, settings(), ROWS, processing_class=tiny_tokenizer, engine=other
        )


# Settings


def test_trls_settings_keep_trls_defaults(folder, tmp_path):
    given = GRPOConfig(output_dir=str(tmp_path), beta=0.1, epsilon=0.1, save_strategy="no", **SMALL)
    args = QeRLTrainer(str(folder), ones, given, ROWS).args
    assert (args.loss_type, args.vllm_importance_sampling_mode) == ("dapo", "sequence_mask")
    assert (args.epsilon, args.epsilon_high, args.beta, args.logging_steps) == (0.1, 0.1, 0.1, 10)
    assert (args.noise, args.overlong_buffer, args.dynamic_sampling_rounds) == (False, 0.0, 0)
    assert (args.num_generations, args.per_device_train_batch_size, args.use_cpu) == (2, 2, True)
    assert (args.weights, args.tuning, args.dtype) == ("nvfp4", "lora", "auto")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_vllm": True}, "use_vllm is not supported: rollouts run on the built-in engine"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is not supported"),
        ({"bf16": False, "fp16": True}, "fp16 is not supported"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps",
          "per_device_eval_batch_size": 2}, "metric_for_best_model is eval_loss, which"),
    ],
)  # fmt: skip
def test_what_is_refused_of_trls_settings(folder, tmp_path, fields, message):
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(str(folder), ones, GRPOConfig(output_dir=str(tmp_path), **SMALL, **fields), ROWS)


@dataclasses.dataclass
class Extended(GRPOConfig):
    mine: int = 0


def test_trls_settings_without_autocast_are_fp32_and_other_classes_are_refused(folder, tmp_path):
    given = GRPOConfig(output_dir=str(tmp_path), bf16=False, **SMALL)
    assert QeRLTrainer(str(folder), ones, given, ROWS).args.dtype == "float32"
    given.model_init_kwargs = {"dtype": "bfloat16"}
    assert QeRLTrainer(str(folder), ones, given, ROWS).args.dtype == "bfloat16"
    with pytest.raises(QeRLError, match=r"Extended has fields that no trainer here reads \(mine\)"):
        as_ours(Extended(output_dir=str(tmp_path), use_cpu=True))


def test_settings_may_be_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    trainer = QeRLTrainer(str(folder), ones, train_dataset=rows)
    assert trainer.args.output_dir == "tiny-llama-GRPO" and trainer.args.noise
    with pytest.raises(QeRLError, match="args is a dict; pass a QeRLConfig"):
        QeRLTrainer(str(folder), ones, {"output_dir": "o"}, rows)


# Data, rewards, optimizer, what is refused


@pytest.mark.parametrize("name", ["quantization_config", "tools", "rollout_func", "environment_factory"])
def test_arguments_that_are_refused(folder, settings, name):
    with pytest.raises(QeRLError, match=f"{name} is not supported: .*; leave it out"):
        QeRLTrainer(str(folder), ones, settings(), ROWS, **{name: [ones]})


def test_arguments_that_are_missing(folder, settings):
    with pytest.raises(QeRLError, match="reward_funcs is missing"):
        QeRLTrainer(str(folder), args=settings(), train_dataset=ROWS)
    with pytest.raises(QeRLError, match="train_dataset is missing"):
        QeRLTrainer(str(folder), ones, settings())
    with pytest.raises(QeRLError, match="train_dataset is a DatasetDict; pass a Dataset"):
        QeRLTrainer(str(folder), ones, settings(), DatasetDict({"train": ROWS}))


def test_a_tokenizer_without_chat_template_serves_plain_prompts(folder, settings, tmp_path, tiny_tokenizer):
    plain = copy.deepcopy(tiny_tokenizer)
    plain.chat_template = None
    tiny = tmp_path / "model"
    shutil.copytree(folder, tiny, ignore=shutil.ignore_patterns("chat_template*", "tokenizer*"))
    plain.save_pretrained(tiny)
    QeRLTrainer(str(tiny), ones, settings(), Dataset.from_dict({"prompt": ["a", "b"]}))
    with pytest.raises(QeRLError, match="has no chat template"):
        QeRLTrainer(str(tiny), ones, settings(), ROWS)


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


def test_several_rewards_columns_and_a_reward_model(folder, settings, tiny_tokenizer, tmp_path):
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
        str(folder), [by_column, str(classifier)],
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
    with pytest.raises(QeRLError, match="No prompt has at most 1 tokens"):
        make(max_prompt_length=1)


def test_the_length_penalty_is_one_of_the_rewards(make):
    trainer = make(overlong_buffer=0.5)
    assert trainer.reward_func_names == ["ones", "soft_overlong_punishment_reward"]
    penalty = trainer.reward_funcs[1]
    ids = [[5] * length for length in (4, 6, 8)]
    assert penalty(prompts=[""] * 3, completions=[""] * 3, completion_ids=ids) == [0.0, -0.5, -1.0]
    assert make().reward_func_names == ["ones"]


def test_noise_of_a_run_that_is_too_short_is_refused_before_the_first_rollout(make):
    del make
    with pytest.raises(QeRLError, match="10 stages but the run only 3 steps"):
        QeRLConfig(output_dir="o", max_steps=3)
    assert QeRLConfig(output_dir="o", max_steps=30).noise_schedule_of(30).sigma(0) == 0.0
    assert torch.tensor(QeRLConfig(output_dir="o").noise_schedule_of(30).sigma(29)) > 0


# An adapter that exists


@pytest.fixture
def adapter(folder, tmp_path):
    """A trained adapter on the model in ``folder``, saved; rank 4."""
    model = add_lora(load_model(folder, "nvfp4", torch.float32, "cpu"), 4, 8, 0.0, ["q_proj", "o_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_goes_on_training(folder, settings, adapter):
    """Its weights begin where they were saved, move, and are the reference of the KL penalty."""
    saved = load_file(adapter / "adapter_model.safetensors")
    given = settings(adapter=str(adapter), beta=0.1, max_steps=2, save_strategy="no", learning_rate=1e-2)
    trainer = QeRLTrainer(str(folder), first_letter, given, ROWS)
    weights = {
        name.replace(".default", ""): parameter
        for name, parameter in trainer.model.named_parameters()
        if ".default." in name
    }
    assert weights.keys() == saved.keys()
    assert all(
        parameter.equal(saved[name]) and parameter.requires_grad for name, parameter in weights.items()
    )
    trainer.train()
    assert any(not parameter.equal(saved[name]) for name, parameter in weights.items())
    reference = {name: p for name, p in trainer.model.named_parameters() if ".ref." in name}
    assert reference and all(p.equal(saved[name.replace(".ref", "")]) for name, p in reference.items())


def test_an_adapter_of_another_model_and_a_second_one_are_refused(
    settings, adapter, tiny_model, tmp_path, folder
):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tiny_model("llama", seed=1).save_pretrained(other)
    with pytest.raises(QeRLError, match="whose norms or embeddings are not those of"):
        QeRLTrainer(str(other), ones, settings(adapter=str(adapter)), ROWS)
    with pytest.raises(QeRLError, match="remove one of them"):
        QeRLTrainer(str(folder), ones, settings(adapter=str(adapter)), ROWS, peft_config=LoraConfig(r=4))


def test_a_peft_model_of_the_users_goes_on_training(folder, settings, adapter):
    model = load_adapter(load_model(folder, "nvfp4", torch.float32, "cpu"), adapter, trainable=True)
    trainer = QeRLTrainer(model, ones, settings(), ROWS)
    assert (trainer.args.lora_r, trainer.args.lora_target_modules) == (4, ["o_proj", "q_proj"])
    assert trainer.processing_class.pad_token == "<pad>"
