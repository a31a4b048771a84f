"""The settings by group: one declaration for each field, flat names beside them, and groups in recipes."""

from types import SimpleNamespace

import pytest
import yaml
from pydantic import ValidationError

from qerl.errors import QeRLError
from qerl.settings.config import FIELDS, QeRLConfig
from qerl.settings.groups import DECLARED, GROUPS, OWN_NAMES, Run, sentence_of
from qerl.settings.parents import TrainerFields, default_of
from qerl.settings.recipe import load_config, read_recipe, resolved

MINIMAL = {"model": "m", "task": "gsm8k", "output_dir": "o", "report_to": "none"}


def test_each_field_is_declared_in_one_group_with_a_sentence_and_a_default():
    names = [name for group in GROUPS.values() for name in group.flat()]
    assert len(names) == len(set(names)) == len(DECLARED)
    assert {*OWN_NAMES} == {*names} - {*TrainerFields.model_fields}
    for name in OWN_NAMES:
        assert sentence_of(name).endswith("."), name
        assert default_of(FIELDS[name]) == DECLARED[name].default, name


def test_the_groups_hold_the_settings_as_they_are():
    config = QeRLConfig(**MINIMAL, temperature=0.7, noise=True, noise_stages=4, save_strategy="epoch")
    groups = config.groups
    assert (groups.model.name, groups.data.task, groups.sampling.temperature) == ("m", "gsm8k", 0.7)
    assert (groups.noise.enabled, groups.noise.stages, groups.run.save_strategy) == (True, 4, "epoch")
    assert groups.loss.epsilon_high == 0.05, "what nobody said is filled in"
    assert groups.noise.schedule_of(8).sigma(0) == config.noise_schedule_of(8).sigma(0) == 0.0
    config.temperature = 0.5
    assert (config.groups.sampling.temperature, groups.sampling.temperature) == (0.5, 0.7)
    with pytest.raises(ValidationError):
        groups.sampling.temperature = 1.0


def test_a_default_that_can_change_is_each_settings_own():
    one, other = QeRLConfig(**MINIMAL), QeRLConfig(**MINIMAL)
    one.task_options["level"] = "wp1"
    assert other.task_options == DECLARED["task_options"].default == {}


def test_a_recipe_may_write_a_group_as_a_mapping(tmp_path):
    flat, grouped = tmp_path / "flat.yaml", tmp_path / "grouped.yaml"
    flat.write_text(yaml.safe_dump(MINIMAL | {"temperature": 0.7, "noise": True, "noise_sigma_start": 0.02,
                                              "save_steps": 5, "beta": 0.1}))  # fmt: skip
    grouped.write_text(
        "model: {name: m}\ndata: {task: gsm8k}\nsampling: {temperature: 0.7}\nloss: {beta: 0.1}\n"
        "noise: {enabled: true, sigma_start: 0.02}\nrun: {save_steps: 5, output_dir: o}\nreport_to: none\n"
    )
    assert read_recipe(grouped) == read_recipe(flat)
    assert resolved(load_config([grouped], {})) == resolved(load_config([flat], {}))
    later = tmp_path / "later.yaml"
    later.write_text("noise: false\nsampling: {top_p: 0.9}\n")
    config = load_config([grouped, later], {"temperature": 0.8})
    assert (config.noise, config.noise_sigma_start, config.temperature, config.top_p) == (
        False,
        0.02,
        0.8,
        0.9,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noise: {sigma_strt: 1}", "in noise, has the unknown key 'sigma_strt'; did you mean 'sigma_start'"),
        ("sampling: {lora_r: 1}", "in sampling, has the unknown key 'lora_r'"),
        ("temperature: 1.0\nsampling: {temperature: 0.7}", "sets temperature twice"),
        ("sampling: 3", "unknown key 'sampling'"),
        ("sampling: {temperature: hot}", "temperature is 'hot'; it must be a number"),
        ("noise: {sigma_start: 1.0e-2}", "noise_sigma_start is set, but noise is not"),
    ],
)
def test_mistakes_in_a_group_of_a_recipe(tmp_path, text, message):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(QeRLError, match=message):
        load_config([tmp_path / "own.yaml"], MINIMAL)


def test_a_field_that_the_installed_transformers_lacks_is_unset_in_its_group():
    older = SimpleNamespace(**vars(QeRLConfig(**MINIMAL)))
    del older.hub_revision
    run = Run.of(older)
    assert run.hub_revision is None and run.output_dir == "o"
