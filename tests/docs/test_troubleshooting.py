"""What docs/troubleshooting.md tells to look at is logged and explained, what it tells to set is a field."""

import re
from pathlib import Path

import pytest
import yaml

from qerl.cli import main
from qerl.errors import QeRLError
from qerl.run_folder import read_metrics
from qerl.settings.recipe import check_key
from tests.support.training_page import is_explained

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_NAME = re.compile(r"`([a-z_]+(?:/\w+)*)(?:: [^`]+)?`")

OTHERS = {"answer_format", "at_once", "format", "update_path"}
"""Options of tasks and judges, a reward, and a fact of a run's first line."""

OF_OTHER_RUNS = {"routing/differ", "staleness/mean"}
"""Metrics of mixtures of experts, and of rows refilled across steps."""


METRICS = {
    name for name in _NAME.findall(PAGE.replace("NAME", "digits")) if "/" in name or is_explained(name)
}


def test_every_metric_that_is_named_is_explained():
    assert {"sampling/kl", "entropy", "completions/clipped_ratio", "time/update"} < METRICS
    assert not {name for name in METRICS if not is_explained(name)}


def test_everything_else_that_is_named_is_a_field():
    for name in set(_NAME.findall(PAGE)) - METRICS - OTHERS - {"rewards/NAME/failed", "rewards/NAME/mean"}:
        try:
            check_key(name, "The page")
        except QeRLError as error:
            pytest.fail(str(error))


@pytest.mark.slow
def test_every_metric_that_is_named_is_logged(tiny_run, tmp_path):
    rejects = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.5}
    replaces = {"dynamic_sampling_batches": 2, "signal": "reward"}
    short = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "beta": 0.01}
    fields = tiny_run(tmp_path / "run", **short, **rejects, **replaces)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    logged = {name for row in read_metrics(tmp_path / "run") for name in row}
    assert logged >= METRICS - OF_OTHER_RUNS
