"""A recipe that stops early and keeps its best policy, as a user runs it."""

import pytest
import yaml
from safetensors.torch import load_file

from qerl.cli import main
from qerl.run_folder import ADAPTER_FILE, CONFIG_FILE, read_metrics

pytestmark = pytest.mark.slow

REWARD = """
def falling(completions, trainer_state, **kwargs):
    return [1.0 / (1 + trainer_state.global_step) + 0.01 * i for i in range(len(completions))]
"""


def test_a_recipe_stops_early_and_saves_its_best_checkpoint(tiny_run, tmp_path):
    """The reward falls from the first step on, so the first evaluation is the best one."""
    fields = tiny_run(
        tmp_path / "run", max_steps=12, save_steps=1, early_stopping_patience=2, load_best_model_at_end=True,
        noise=False,
    )  # fmt: skip
    (tmp_path / "falling.py").write_text(REWARD)
    fields["reward_files"] = [f"{tmp_path}/falling.py:falling"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    run = tmp_path / "run"
    logged = [row["eval_reward"] for row in read_metrics(run) if "eval_reward" in row]
    assert len(logged) == 3 and logged[0] == max(logged)
    saved = load_file(run / ADAPTER_FILE)
    best, last = (load_file(run / f"checkpoint-{step}" / ADAPTER_FILE) for step in (1, 3))
    assert all(saved[name].equal(best[name]) for name in saved)
    assert any(not saved[name].equal(last[name]) for name in saved)
    assert "early_stopping_patience: 2" in (run / CONFIG_FILE).read_text()
