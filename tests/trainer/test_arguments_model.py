"""The model, peft_config, engine and adapter that `QeRLTrainer` is given."""

import functools
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from safetensors.torch import load_file
from trl import GRPOConfig

from qerl import add_lora, load_adapter, load_model
from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear
from qerl.rollout.portable.engine import PortableEngine
from qerl.trainer.grpo import QeRLTrainer
from tests.support.arguments import ROWS, SMALL, first_letter, ones, run_settings
from tests.support.models import move_adapter

IDS = torch.arange(5, 25)[None]


@pytest.fixture
def settings(tmp_path):
    return functools.partial(run_settings, tmp_path)


def wrapped(model) -> int:
    """Layers with an adapter."""
    return sum(isinstance(module, LoraLinear) for module in model.modules())


# Model and adapter


@pytest.mark.slow
def test_a_named_model_is_loaded_as_the_settings_say(llama_folder, settings):
    given = settings(lora_r=4, rounding="rtn", lora_target_modules=["q_proj"], max_sequences=2)
    trainer = QeRLTrainer(str(llama_folder), ones, given, ROWS)
    layer = trainer.model.get_base_model().model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, PackedLinear) and layer.base_layer.format.name == "nvfp4"
    assert trainer.model.active_peft_config.r == 4 and wrapped(trainer.model) == 2
    rtn, mse = (
        load_model(llama_folder, "nvfp4", torch.float32, "cpu", kind)(IDS).logits for kind in ("rtn", "mse")
    )
    found = trainer.model.eval()(IDS).logits  # B is zero
    torch.testing.assert_close(found, rtn)
    assert not torch.allclose(found, mse)
    assert trainer.engine.rows_per_call == 2
    assert trainer.args.model == str(llama_folder) and given.model is None
    assert trainer.processing_class.pad_token == "<pad>"


def test_a_named_model_may_be_tuned_as_a_whole(llama_folder, settings):
    trainer = QeRLTrainer(llama_folder, ones, settings(tuning="full", weights="bf16"), ROWS)
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_the_name_stands_in_one_place(llama_folder, settings):
    with pytest.raises(QeRLError, match=r"args\.model is other"):
        QeRLTrainer(str(llama_folder), ones, settings(model="other"), ROWS)
    assert QeRLTrainer(str(llama_folder), ones, settings(model=str(llama_folder)), ROWS).args.model == str(
        llama_folder
    )


def test_a_model_is_not_trained_into_its_own_folder(llama_folder, settings):
    files = sorted(llama_folder.iterdir())
    with pytest.raises(QeRLError, match="output_dir is the folder of the model"):
        QeRLTrainer(str(llama_folder), ones, settings(output_dir=str(llama_folder / ".")), ROWS)
    assert sorted(llama_folder.iterdir()) == files


def test_a_hub_that_is_not_there_is_said_before_the_first_step(llama_folder, settings, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(QeRLError, match=r"The repository of push_to_hub cannot be made \(.*hf auth login"):
        QeRLTrainer(str(llama_folder), ones, settings(push_to_hub=True), ROWS)


def test_a_peft_config_is_what_peft_makes_of_it(llama_folder, settings, tiny_model):
    config = LoraConfig(
        r=8, lora_alpha=4, use_rslora=True, rank_pattern={"k_proj": 2}, layers_to_transform=[1],
        target_modules=["q_proj", "k_proj"], init_lora_weights=False,
    )  # fmt: skip
    named = QeRLTrainer(str(llama_folder), ones, settings(weights="bf16"), ROWS, peft_config=config)
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
def test_which_layers_a_peft_config_adapts(llama_folder, settings, targets, layers, names):
    """None leaves it to PEFT: query and value projections."""
    trainer = QeRLTrainer(
        str(llama_folder), ones, settings(), ROWS, peft_config=LoraConfig(r=2, target_modules=targets)
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
        (LoraConfig(lora_dropout=1.0), {}, "so adapters get no input; set it below 1"),
        (LoraConfig(modules_to_save=["q_proj"]), {}, "modules_to_save has q_proj, and the weight of model"),
        (LoraConfig(modules_to_save=["mlp"]), {}, "modules_to_save has mlp, and the weight of model"),
        (LoraConfig(task_type="SEQ_CLS"), {}, "task_type SEQ_CLS; set it to CAUSAL_LM"),
        (LoraConfig(inference_mode=True), {}, "nothing would be trained"),
        (IA3Config(), {}, "peft_config is a IA3Config; only peft.LoraConfig is supported"),
    ],
)
def test_a_peft_config_that_cannot_be_honoured_is_refused(llama_folder, settings, config, fields, message):
    with pytest.raises(QeRLError, match=message):
        QeRLTrainer(str(llama_folder), ones, settings(**fields), ROWS, peft_config=config)


def test_a_model_in_hand_is_described_by_the_settings_that_are_saved(tiny_model, tiny_tokenizer, settings):
    trainer = QeRLTrainer(tiny_model("llama"), ones, settings(), ROWS, processing_class=tiny_tokenizer)
    described = (trainer.args.tuning, trainer.args.weights, trainer.args.dtype)
    assert described == ("full", "bf16", "float32")


def test_the_learning_rate_follows_what_is_trained(tiny_model, tiny_tokenizer, settings, tmp_path):
    def rate(args, **given):
        given = {"processing_class": tiny_tokenizer} | given
        return QeRLTrainer(tiny_model("llama"), ones, args, ROWS, **given).args.learning_rate

    lora, theirs = {"peft_config": LoraConfig(r=2)}, GRPOConfig(output_dir=str(tmp_path), **SMALL)
    assert rate(settings()) == 1e-6
    assert rate(settings(learning_rate=1e-5)) == 1e-5
    assert rate(settings(), **lora) == 1e-5
    assert rate(theirs, **lora) == 1e-6


def test_what_cannot_be_trained_is_refused(llama_folder, settings, tiny_model, tiny_tokenizer, tmp_path):
    packed = load_model(llama_folder, "nvfp4", torch.float32, "cpu")
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
    with pytest.raises(QeRLError, match="LlamaModel that was handed in has no output head"):
        QeRLTrainer(tiny_model("llama").model, ones, settings(), ROWS, processing_class=tiny_tokenizer)
    with pytest.raises(QeRLError, match="is on the meta device, where weights have no values"):
        QeRLTrainer(tiny_model("llama").to("meta"), ones, settings(), ROWS, processing_class=tiny_tokenizer)
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


def test_an_engine_is_that_of_the_model(llama_folder, settings, tiny_model, tiny_tokenizer):
    other = PortableEngine(tiny_model("llama", seed=1), 0)
    with pytest.raises(QeRLError, match="leave engine out"):
        QeRLTrainer(str(llama_folder), ones, settings(), ROWS, engine=other)
    with pytest.raises(QeRLError, match="samples from another LlamaForCausalLM object"):
        QeRLTrainer(
            tiny_model("llama"), ones, settings(), ROWS, processing_class=tiny_tokenizer, engine=other
        )


# An adapter that exists


@pytest.fixture
def adapter(llama_folder, tmp_path):
    """A trained adapter on the model in ``llama_folder``, saved; rank 4."""
    base = load_model(llama_folder, "nvfp4", torch.float32, "cpu")
    model = move_adapter(add_lora(base, 4, 8, 0.0, ["q_proj", "o_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.slow
def test_an_adapter_goes_on_training(llama_folder, settings, adapter):
    """Its weights begin where they were saved, move, and are the reference of the KL penalty."""
    saved = load_file(adapter / "adapter_model.safetensors")
    given = settings(adapter=str(adapter), beta=0.1, max_steps=2, save_strategy="no", learning_rate=1e-2)
    trainer = QeRLTrainer(str(llama_folder), first_letter, given, ROWS)
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
    settings, adapter, tiny_model, tmp_path, llama_folder
):
    other = tmp_path / "other"
    shutil.copytree(llama_folder, other)
    tiny_model("llama", seed=1).save_pretrained(other)
    with pytest.raises(QeRLError, match="whose norms or embeddings are not those of"):
        QeRLTrainer(str(other), ones, settings(adapter=str(adapter)), ROWS)
    with pytest.raises(QeRLError, match="remove one of them"):
        QeRLTrainer(
            str(llama_folder), ones, settings(adapter=str(adapter)), ROWS, peft_config=LoraConfig(r=4)
        )


@pytest.mark.slow
def test_a_peft_model_of_the_users_goes_on_training(llama_folder, settings, adapter):
    model = load_adapter(load_model(llama_folder, "nvfp4", torch.float32, "cpu"), adapter, trainable=True)
    trainer = QeRLTrainer(model, ones, settings(), ROWS)
    assert (trainer.args.lora_r, trainer.args.lora_target_modules) == (4, ["o_proj", "q_proj"])
    assert trainer.processing_class.pad_token == "<pad>"
