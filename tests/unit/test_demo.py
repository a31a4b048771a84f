"""The demo's settings; the demo itself runs in `make demo`."""

from pathlib import Path

from qerl.demo import one_microbatch
from qerl.settings.recipe import load_config

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def test_one_microbatch_is_the_same_step() -> None:
    several, one = load_config([RECIPE], {}), load_config([RECIPE], {})
    one_microbatch(one)
    samples = several.per_device_train_batch_size * several.gradient_accumulation_steps
    assert (one.per_device_train_batch_size, one.gradient_accumulation_steps) == (samples, 1)
    given = {"per_device_train_batch_size": samples, "gradient_accumulation_steps": 1}
    assert one.to_dict() == load_config([RECIPE], given).to_dict()
