"""The demo's settings; the demo itself runs in `make demo`."""

from qerl.demo import one_microbatch
from qerl.settings.recipe import load_config


def test_one_microbatch_is_the_same_step() -> None:
    several, one = load_config(["demo"], {}), load_config(["demo"], {})
    one_microbatch(one)
    samples = several.per_device_train_batch_size * several.gradient_accumulation_steps
    assert (one.per_device_train_batch_size, one.gradient_accumulation_steps) == (samples, 1)
    given = {"per_device_train_batch_size": samples, "gradient_accumulation_steps": 1}
    assert one.to_dict() == load_config(["demo"], given).to_dict()
