"""Recipes: every combination is valid, and mistakes get one clear sentence."""

import dataclasses
import inspect
from itertools import product
from types import SimpleNamespace

import pytest
import yaml
from trl import GRPOConfig, ModelConfig, ScriptArguments
from trl.scripts.grpo import GRPOScriptArguments

from qerl.cli import main
from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig, check_processes
from qerl.settings.foreign import INSTEAD
from qerl.settings.recipe import (
    FIELDS,
    changed,
    dump,
    left_out,
    load_config,
    parse_value,
    read_recipe,
    resolved,
)

PAPER = [
    *product(["gsm8k"], ["qwen2.5-3b", "qwen2.5-7b"]),
    *product(["bigmath"], ["qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"]),
]
VARIANTS = ["bf16-lora", "nf4-lora", "nvfp4-lora", "nvfp4-aqn", "bf16-aqn", "mxfp4-lora", "bf16-full"]
MINIMAL = {"model": "m", "task": "gsm8k", "output_dir": "o"}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("task", "model"), PAPER)
def test_every_run_of_the_paper_parses(task, model, variant):
    config = load_config([task, model, variant], {})
    assert config.output_dir == f"runs/{task}-{model}-{variant}"
    groups = config.generation_batch_size / config.num_generations
    assert groups == 128, "prompts a rollout (paper, Table 4)"
    assert (config.tuning == "full") == (variant == "bf16-full")
    assert config.noise == (variant.endswith("-aqn"))


def test_the_dump_of_a_run_is_a_recipe_that_gives_the_same_run(tmp_path):
    config = load_config(["demo"], {"algorithm": "dapo", "steps_per_generation": 8})
    (tmp_path / "config.yaml").write_text(dump(config))
    again = load_config([tmp_path / "config.yaml"], {})
    assert dump(again) == dump(config)
    assert again.generation_batch_size == config.generation_batch_size


NEEDED = {"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
NEEDED |= {"temperature": 1.0, "seed": 42, "max_completion_length": 512, "learning_rate": 1e-5}


def test_a_dump_has_what_was_set_and_what_every_reader_needs(tmp_path):
    needed = resolved(QeRLConfig(**MINIMAL))
    assert {name: needed[name] for name in NEEDED} == NEEDED
    set_to_defaults = {"top_p": 1.0, "weight_decay": 0.0, "beta": 0.0, "clip_cov_lb": 1.0}
    assert not set_to_defaults.keys() & needed.keys()
    recipe, saved = tmp_path / "own.yaml", tmp_path / "config.yaml"
    recipe.write_text(yaml.safe_dump(MINIMAL | {"sampling": {"top_p": 1.0}, "weight_decay": 0.0}))
    config = load_config([recipe], {"beta": 0.0, "clip_cov_lb": 1.0, "min_p": None})
    saved.write_text(dump(config))
    for each in (config, changed(config, {}), load_config([saved], {})):
        assert resolved(each) == needed | set_to_defaults
        assert resolved(changed(each, {"adam_beta1": 0.9})) == needed | set_to_defaults | {"adam_beta1": 0.9}


def test_a_dump_does_not_depend_on_the_order_of_fields(tmp_path):
    fields = MINIMAL | {"top_p": 1.0, "seed": 42, "weight_decay": 0.0, "noise": True, "beta": 0.1}
    texts = set()
    for number, order in enumerate((fields, dict(reversed(fields.items())))):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(order, sort_keys=False))
        texts |= {dump(load_config([tmp_path / f"{number}.yaml"], {})), dump(load_config([], order))}
    assert len(texts) == 1


def test_a_dump_leaves_out_fields_of_other_losses_and_algorithms():
    of_others = {
        "clip_cov": {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
        "kl_cov": {"kl_cov_ratio", "ppo_kl_coef"},
        "distill": {"teacher", "teacher_weights", "distillation_alpha", "distillation_weight"},
        "sft": {"max_length", "completion_only_loss", "assistant_only_loss"},
    }
    of_any = set().union(*of_others.values())
    assert not of_any & resolved(QeRLConfig(**MINIMAL)).keys()
    for name, fields in of_others.items():
        said = {"loss_type" if name.endswith("_cov") else "algorithm": name}
        said |= {"teacher": "base"} if name == "distill" else {}
        assert of_any & resolved(QeRLConfig(**MINIMAL, **said)).keys() == fields


@pytest.mark.parametrize(
    "said",
    [
        *({"loss_type": name} for name in ("dppo_kl", "dapo", "clip_cov")),
        *({"algorithm": name} for name in ("dapo", "gspo", "sft")),
        {"epsilon": 0.1, "loss_type": "dppo_kl"},
        {"noise": True, "seed": 1, "lr_scheduler_type": "cosine"},
        {},
    ],
)
def test_what_a_dump_leaves_out_is_known(said):
    config = QeRLConfig(**MINIMAL, **said)
    written = resolved(config)
    absent = left_out(written)
    held = {name: value for name, value in config.groups.fields() if name != "generation_batch_size"}
    assert not absent.keys() & written.keys()
    assert {name: (written | absent)[name] for name in held} == held


def test_noise_is_off_and_one_flag_turns_on_the_papers():
    noise = {name: value for name, value in resolved(QeRLConfig(**MINIMAL)).items() if "noise" in name}
    assert not noise["noise"]
    uncorrected = QeRLConfig(**MINIMAL, noise=True, vllm_importance_sampling_correction=False)
    for config in (QeRLConfig(**MINIMAL, noise=True), uncorrected):
        assert {name: getattr(config, name) for name in noise} == noise | {"noise": True}
    schedule = uncorrected.noise_schedule_of(100)
    assert [schedule.sigma(step) for step in (9, 10, 99)] == [0.0, 1e-2, pytest.approx(5e-4)]
    assert (noise["noise_scale"], noise["noise_schedule"]) == ("absolute", "exponential")


SCHEDULE = {"noise_sigma_start": 0.02, "noise_sigma_end": 1e-3, "noise_stages": 5, "noise_schedule": "linear"}


@pytest.mark.parametrize(
    "fields",
    [
        {"noise_stages": 10, "noise_sigma_start": 1e-2, "noise_sigma_end": 5e-4},  # the defaults
        *({name: value} for name, value in SCHEDULE.items()),
        {"noise_scale": "absolute"},
    ],
)
def test_who_sets_a_field_of_the_noise_says_whether_there_is_any(tmp_path, fields):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(yaml.safe_dump(MINIMAL | fields))
    for given in ([recipe], {}), ([], MINIMAL | fields):
        with pytest.raises(QeRLError, match=r"noise_\w+ is set, but noise is not"):
            load_config(*given)
    assert load_config([recipe], {"noise": True}).noise
    assert not load_config([recipe], {"noise": False}).noise


def test_a_tuned_schedule_may_stand_beside_noise_that_is_off(tmp_path):
    recipe, saved = tmp_path / "own.yaml", tmp_path / "config.yaml"
    recipe.write_text(yaml.safe_dump(MINIMAL | SCHEDULE | {"noise": True}))
    config = load_config([recipe], {"noise": False})
    saved.write_text(dump(config))
    for other in (load_config([saved], {}), changed(config, {}), QeRLConfig(**MINIMAL, **SCHEDULE)):
        assert resolved(other) == resolved(config)
    assert not config.noise and config.noise_stages == 5


def test_algorithm_fills_only_what_is_unset():
    assert load_config([], MINIMAL).loss_type == "dppo_kl"
    config = load_config([], MINIMAL | {"algorithm": "dapo"})
    assert (config.loss_type, config.epsilon_high, config.mask_truncated_completions) == ("dapo", 0.28, False)
    assert (config.dynamic_sampling_batches, config.overlong_buffer, config.signal) == (2, 0.2, "accuracy")
    config = load_config([], MINIMAL | {"algorithm": "dapo", "mask_truncated_completions": True})
    assert config.overlong_buffer == 0, "truncated samples are masked or punished, not both"
    config = load_config(
        [], MINIMAL | {"algorithm": "dapo", "epsilon_high": 0.4, "dynamic_sampling_batches": 0}
    )
    assert (config.epsilon_high, config.dynamic_sampling_batches, config.loss_type) == (0.4, 0, "dapo")


PAPERS = {
    "grpo": {"loss_type": "grpo", "beta": 0.0, "epsilon_high": 0.2, "use_bias_correction_kl": True},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "dynamic_sampling_batches": 2},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "overlong_buffer": 0.2, "signal": "accuracy"},
    "dppo": {"loss_type": "dppo_tv", "epsilon": 0.2, "epsilon_high": 0.2, "delta": 20.0}
    | {"use_rollout_logprobs": True, "scale_rewards": "none", "dynamic_sampling_batches": 0},
}


@pytest.mark.parametrize("name", PAPERS)
def test_an_algorithm_sets_what_its_paper_sets(name, tmp_path):
    """And what is written is read again as the same."""
    config = load_config([], MINIMAL | {"algorithm": name})
    assert {field: getattr(config, field) for field in PAPERS[name]} == PAPERS[name]
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump(config))
    for again in (load_config([saved], {}), QeRLConfig(**MINIMAL, algorithm=name)):
        assert resolved(again) == resolved(config)
    assert load_config([], MINIMAL | {"algorithm": name, "scale_rewards": "batch"}).scale_rewards == "batch"
    assert changed(config, {"beta": 0.3}).beta == 0.3


TRLS = ("loss_type", "epsilon", "delta", "importance_sampling_level", "scale_rewards", "beta")


@pytest.mark.parametrize(
    "said",
    [
        {"loss_type": "dapo"},
        {"epsilon_high": 0.28},
        {"importance_sampling_level": "token"},
        {"vllm_importance_sampling_correction": False},
        {"vllm_importance_sampling_clip_max": 2.0},
    ],
)
def test_beside_what_bounds_a_ratio_the_loss_is_trls(said):
    config, theirs = load_config([], MINIMAL | said), GRPOConfig(output_dir="x", bf16=False)
    for name in (*TRLS, "use_bias_correction_kl"):
        assert getattr(config, name) == getattr(theirs, name)
    assert (config.use_rollout_logprobs, config.loss_agg_mode, config.kl_tau) == (False, None, 0.0)
    assert config.epsilon_high == said.get("epsilon_high", 0.2)


def test_without_either_the_loss_is_the_one_that_learned_best():
    loss = {"loss_type": "dppo_kl", "epsilon": 0.05, "epsilon_high": 0.05, "delta": 20.0}
    loss |= {"use_rollout_logprobs": True, "scale_rewards": "group", "importance_sampling_level": "token"}
    for said in ({}, {"loss_type": "dppo_kl"}, {"noise": True}):
        config = load_config([], MINIMAL | said)
        assert {name: getattr(config, name) for name in loss} == loss


# What earlier versions wrote of these fields into a config.yaml without any of them in the recipe.
EARLIER = {
    "0.2": {"algorithm": "grpo", "epsilon_high": 0.2, "overlong_buffer": 0.0, "dynamic_sampling_batches": 0},
    "0.3 before presets of papers": {"algorithm": "grpo", "loss_type": "dapo", "epsilon_high": 0.2}
    | {"overlong_buffer": 0.0, "dynamic_sampling_batches": 0, "signal": "reward"},
    "0.3 before dppo_kl was the default": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2}
    | {"importance_sampling_level": "token", "use_rollout_logprobs": False},
    "0.3 of demonstrations": {"algorithm": "sft", "loss_type": "dapo", "epsilon": 0.2}
    | {"use_rollout_logprobs": False, "importance_sampling_level": "token"},
}


def test_a_saved_config_takes_another_loss(tmp_path):
    """With that loss's own bounds, though the file names the default's."""
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump(load_config([], MINIMAL)))
    for said in ({"loss_type": "dapo"}, {"algorithm": "gspo"}, {"loss_type": "cispo", "epsilon_high": 5.0}):
        expected = resolved(load_config([], MINIMAL | said))
        assert resolved(load_config([saved], said)) == expected
        assert resolved(changed(load_config([], MINIMAL), said)) == expected


@pytest.mark.parametrize("version", EARLIER)
def test_a_config_of_an_earlier_version_means_what_it_meant(version):
    """Both left out what was the default there and in TRL; the loss of 0.2 was that of its algorithm."""
    config = load_config([], MINIMAL | EARLIER[version])
    defaults = {"beta": 0.0, "use_bias_correction_kl": True, "epsilon": 0.2, "scale_rewards": "group"}
    meant = {"loss_type": "grpo"} | defaults | EARLIER[version]
    assert {name: getattr(config, name) for name in meant} == meant


@pytest.mark.parametrize(
    ("fields", "bounds"),
    [
        ({"algorithm": "cispo", "loss_type": "dapo"}, (0.2, 0.2, None)),
        ({"algorithm": "dapo", "loss_type": "dppo_kl"}, (0.05, 0.05, None)),
        ({"algorithm": "gspo", "importance_sampling_level": "token"}, (0.2, 0.2, None)),
        ({"algorithm": "dppo", "loss_type": "dppo_kl"}, (0.05, 0.05, 20.0)),
        ({"algorithm": "dppo", "loss_type": "vespo"}, (0.2, 0.2, None)),
        ({"algorithm": "cispo", "loss_type": "dapo", "epsilon": 0.1}, (0.1, 0.1, None)),
        ({"algorithm": "dapo", "loss_type": "dapo"}, (0.2, 0.28, None)),
        ({"loss_type": "clip_cov"}, (1.0, 1.0, None)),
    ],
)
def test_bounds_of_an_algorithm_stay_with_its_ratio(fields, bounds, tmp_path):
    config = load_config([], MINIMAL | fields)
    (tmp_path / "config.yaml").write_text(dump(config))
    for each in (config, load_config([tmp_path / "config.yaml"], {})):
        assert (each.epsilon, each.epsilon_high, each.delta) == bounds


def test_a_file_of_an_earlier_version_may_say_rounds_of_dynamic_sampling(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL | {"dynamic_sampling_rounds": 3}))
    assert load_config([tmp_path / "config.yaml"], {}).dynamic_sampling_batches == 3
    with pytest.raises(QeRLError, match="its name is dynamic_sampling_batches now"):
        load_config([], MINIMAL | {"dynamic_sampling_rounds": 3})


def test_a_divergence_has_a_threshold_of_its_own_kind():
    for fields in ({"loss_type": "dppo_kl"}, {"loss_type": "dppo_kl", "algorithm": "dppo"}):
        config = load_config([], MINIMAL | fields)
        assert (config.epsilon, config.epsilon_high, config.use_rollout_logprobs) == (0.05, 0.05, True)
    config = load_config([], MINIMAL | {"loss_type": "dppo_tv", "use_rollout_logprobs": False})
    assert (config.epsilon_high, config.use_rollout_logprobs) == (0.2, False)


def test_later_recipes_win_and_the_command_line_wins_over_all(tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(MINIMAL | {"lora_r": 4, "seed": 1}))
    (tmp_path / "b.yaml").write_text("lora_r: 8\nlearning_rate: 1e-5\n")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"], {"seed": 3})
    assert (config.lora_r, config.seed, config.learning_rate) == (8, 3, 1e-5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("true", True),
        ("null", None),
        ("[a, 1e3]", ["a", 1000.0]),
        ("{level: wp1}", {"level": "wp1"}),
    ],
)
def test_command_line_values_are_yaml(text, value):
    assert parse_value(text, "--x") == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_rank": 8}, "did you mean 'lora_r'"),
        ({"learning_rat": 8}, "did you mean 'learning_rate'"),
        ({"model_name_or_path": "m"}, "unknown key 'model_name_or_path'; its name here is model."),
        ({"dataset_name": "d"}, "unknown key 'dataset_name'; set task, which names the data"),
        ({"dataset": "d.jsonl"}, "unknown key 'dataset'; set task, .*--task jsonl:PATH"),
        ({"weights": "int4"}, "weights is 'int4'; it must be 'nvfp4'"),
        ({"tuning": "full"}, "cannot train packed nvfp4 weights"),
        ({"bf16": True}, r"^bf16 has no effect in QeRL .* \(false\); remove it, and set dtype"),
        ({"model": None}, "model is not set"),
        ({"use_vllm": "yes"}, "use_vllm is .yes.; it must be true or false"),
        (
            {"gradient_checkpointing_kwargs": {"every_n_layers": 0}},
            r"gradient_checkpointing_kwargs\[every_n_layers\] is 0; it must be at least 1",
        ),
        ({"signal": "loud"}, "signal is 'loud'; it must be 'accuracy' or 'reward'"),
        (
            {"mask_truncated_completions": True, "overlong_buffer": 0.2},
            "leaves out the samples that overlong_buffer punishes",
        ),
        *(
            (
                {"vllm_importance_sampling_mode": mode},
                f"is '{mode}'; it moved from the trainer to the studies in",
            )
            for mode in ("token_one_sided", "token_balance")
        ),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(QeRLError, match=message):
        load_config([], MINIMAL | fields)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("learning_rat", r"^QeRLConfig has the unknown key 'learning_rat'; did you mean 'learning_rate'\?$"),
        ("lora_rank", "did you mean 'lora_r'"),
        ("load_in_4bit", "set weights, which says how the model is quantised"),
    ],
)
def test_a_keyword_that_is_no_field_is_a_type_error_in_a_sentence(field, message):
    with pytest.raises(QeRLError, match=message) as caught:
        QeRLConfig(output_dir="x", **{field: 8})
    assert isinstance(caught.value, TypeError)
    names = [spec.name for spec in dataclasses.fields(QeRLConfig) if spec.init]
    assert list(inspect.signature(QeRLConfig).parameters) == names


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("noise_target_kl", 0.03, "it moved from the trainer to the studies in lab/"),
        ("noise_share", 0.5, "it moved from the trainer to the studies in lab/"),
        ("noise_in_loss", True, "it moved from the trainer to the studies in lab/"),
        ("speculative_tokens", 3, "speculative decoding .* was dropped; leave it out.$"),
    ],
)
def test_a_field_that_is_none_any_more_is_refused_unless_it_asks_for_nothing(tmp_path, field, value, reason):
    """A run of QeRL 0.2 has written all fields into its config.yaml, which is a recipe."""
    written = tmp_path / "config.yaml"
    nothing = {"noise_target_kl": None, "noise_share": 1.0, "noise_in_loss": False, "speculative_tokens": 0}
    nothing |= {"early_rewards": True}
    written.write_text(dump(QeRLConfig(**MINIMAL, noise=True)) + yaml.safe_dump(nothing))
    assert load_config([written], {}) == QeRLConfig(**MINIMAL, noise=True)
    written.write_text(yaml.safe_dump(MINIMAL | {"noise": True, field: value}))
    message = f"the unknown key '{field}'; {reason}"
    with pytest.raises(QeRLError, match=f"^The recipe .* has {message}"):
        load_config([written], {})
    with pytest.raises(QeRLError, match=f"^QeRLConfig has {message}"):
        QeRLConfig(**MINIMAL, noise=True, **{field: value})


@pytest.mark.parametrize("words_of", [ModelConfig, ScriptArguments, GRPOScriptArguments])
def test_words_of_trls_scripts_are_fields_or_say_what_to_do_instead(words_of):
    words = {spec.name for spec in dataclasses.fields(words_of)}
    assert words <= FIELDS.keys() | INSTEAD.keys()
    assert not FIELDS.keys() & INSTEAD.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "gsm8k", "--gpu", "80"], "unknown key 'gpu'; `qerl plan` takes it, as --gpu."),
        (["train", "gsm8k", "--use_peft"], "unknown key 'use_peft'; adapters are trained unless tuning"),
        (["train", "gsm8k", "--load-in-4bit", "true"], "unknown key 'load_in_4bit'; set weights"),
        (["train", "gsm8k", "--lr", "1e-5"], "unknown key 'lr'; its name here is learning_rate."),
        (["train", "gsm8k", "--max_new_tokens", "20"], "its name here is max_completion_length."),
        (
            ["train", "gsm8k", "lora_r=8"],
            "'lora_r=8' is no recipe; a field is set with two dashes: --lora_r 8.",
        ),
        (["plan", "7b", "model=a/b"], "a field is set with two dashes: --model a/b."),
        (
            ["train", "gsm8k", "-lora_r", "8"],
            "`qerl train` does not take -lora_r 8; `qerl train --help` says",
        ),
        (["eval", "m", "--gpu", "80"], "`qerl eval` does not take --gpu 80; `qerl eval --help` says"),
        (
            ["eval", "m", "--max_new_tokens", "80"],
            "does not take --max_new_tokens 80 (did you mean '--max_tokens'?);",
        ),
        (["--colour", "train"], "does not take --colour"),
        (["tarin", "gsm8k"], "There is no command 'tarin' (did you mean 'train'"),
        (["zebra"], "There is no command 'zebra'; `qerl --help` lists the commands."),
        (["train"], "model is not set; pass --model, or name recipes, for example gsm8k"),
        (["train", "gsm8k"], "model is not set; pass --model, or name the recipe of a model, too"),
        (["train", "qwen2.5-7b"], "task is not set; add it to the recipe or pass --task."),
    ],
)
def test_words_of_another_command_or_program(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(QeRLError, match=r"is a folder; give a \.yaml file"):
        load_config([tmp_path], {})
    (tmp_path / "config.yaml").write_text("seed: 3")
    with pytest.raises(QeRLError, match=f"is a folder; give {tmp_path}/config.yaml, its run's settings"):
        load_config([tmp_path], {})
    with pytest.raises(QeRLError, match="cannot be read"):
        read_recipe(tmp_path / "missing.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(QeRLError, match="must be a mapping"):
        read_recipe(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(QeRLError, match="not valid YAML"):
        read_recipe(tmp_path / "bad.yaml")
    (tmp_path / "key.yaml").write_text("maxsteps: 3\n")
    with pytest.raises(QeRLError, match=r"key.yaml has the unknown key 'maxsteps'; did you mean 'max_steps'"):
        read_recipe(tmp_path / "key.yaml")


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 1024),
        ({"num_generations": 6}, 1020),
        ({"num_generations_eval": 1}, 1024),
        ({"environment": "calculator"}, 64),
    ],
)
def test_an_evaluation_samples_whole_groups_for_all_rows_of_the_engine(changes, size):
    assert (
        QeRLConfig(**(MINIMAL | {"per_device_train_batch_size": 24} | changes)).per_device_eval_batch_size
        == size
    )


def test_processes_that_would_each_train_alone_are_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    check_processes(SimpleNamespace(world_size=2))
    with pytest.raises(QeRLError, match=r"2 processes were started where there is no GPU, .* use_cpu: true"):
        check_processes(SimpleNamespace(world_size=1))


def test_environments_handed_to_a_trainer_leave_fewer_completions_to_an_evaluation():
    config, chosen = QeRLConfig(**MINIMAL), QeRLConfig(**(MINIMAL | {"per_device_eval_batch_size": 512}))
    assert config.per_device_eval_batch_size == 1024
    for each in (config, chosen):
        each.make_room_for_environments()
    assert config.per_device_eval_batch_size == 64 and chosen.per_device_eval_batch_size == 512


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 1e-5),
        ({"tuning": "full", "weights": "bf16"}, 1e-6),
        ({"learning_rate": 1e-6}, 1e-6),
        ({"learning_rate": 0.0}, 0.0),
        ({"algorithm": "sft"}, 2e-4),
        ({"algorithm": "sft", "tuning": "full", "weights": "bf16"}, 2e-5),
        ({"algorithm": "sft", "learning_rate": 1e-6}, 1e-6),
    ],
)
def test_the_learning_rate_follows_the_tuning_where_nobody_says_it(given, expected):
    assert QeRLConfig(**MINIMAL, **given).learning_rate == expected
