"""The demo's settings; the demo itself runs in `make demo`."""

from qerl.demo import fewer_stages, one_microbatch
from qerl.settings.recipe import changed, load_config


def test_one_microbatch_is_the_same_step() -> None:
    several = load_config(["demo"], {})
    one = changed(several, one_microbatch(several))
    samples = several.per_device_train_batch_size * several.gradient_accumulation_steps
    assert (one.per_device_train_batch_size, one.gradient_accumulation_steps) == (samples, 1)
    assert one.generation_batch_size == several.generation_batch_size == samples
    assert one_microbatch(load_config(["demo"], {"steps_per_generation": 16})) == {}


def test_changed_settings_are_the_others_with_a_field_replaced() -> None:
    before = load_config(["demo"], {})
    after = changed(before, {"seed": 7})
    differ = {name for name, value in after.to_dict().items() if before.to_dict()[name] != value}
    assert differ == {"seed"}
    assert before.seed != 7


def test_a_demo_made_shorter_has_fewer_stages_of_noise() -> None:
    assert fewer_stages("demo", {"max_steps": 2}) == {"noise_stages": 2}
    load_config(["demo"], {"max_steps": 2} | fewer_stages("demo", {"max_steps": 2}))
    assert fewer_stages("demo", {"max_steps": 30}) == fewer_stages("demo", {}) == {}
    assert (
        fewer_stages("demo", {"max_steps": 2, "noise_stages": 3}) == {}
    )  # what is said is checked, not changed
