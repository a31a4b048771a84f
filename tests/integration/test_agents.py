"""Tools and environments in runs: the examples of docs/agents.md, as they stand."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer.run import train
from tests.support.agents import tool_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


@pytest.fixture
def examples(tmp_path) -> dict[str, Path]:
    """The page's blocks of Python as files, by the name that each begins with."""
    files = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        name = block.splitlines()[0].removeprefix("# ")
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 15
        files[name] = tmp_path / name
        files[name].write_text(block)
    return files


SHORT = {"max_steps": 2, "save_strategy": "no", "eval_steps": 2, "noise_stages": 2}


def test_an_environment_of_the_docs_trains(examples, tiny_run, tmp_path):
    fields = tiny_run(tmp_path / "run", **SHORT, max_completion_length=60, max_tool_calling_iterations=6)
    fields |= {"environment": f"{examples['game.py']}:HigherLower", "temperature": 2.0}
    train(QeRLConfig(**fields), Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2
    assert all("rewards/HigherLower/mean" in row and row["rollout/turns"] >= 1 for row in steps)
    assert any("eval_rewards/HigherLower/mean" in row for row in rows)


def test_a_tool_of_the_docs_trains(examples, tiny_run, tmp_path):
    fields = tiny_run(tmp_path / "run", **SHORT) | {"tools": f"{examples['tools.py']}:multiply"}
    with pytest.raises(QeRLError, match=r"The chat template of .* has no tools"):
        train(QeRLConfig(**fields), Console(quiet=True))
    tool_tokenizer().save_pretrained(fields["model"])
    config = json.loads((Path(fields["model"]) / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (Path(fields["model"]) / "config.json").write_text(json.dumps(config))
    train(QeRLConfig(**fields), Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["tools/call_frequency"] for row in rows if "loss" in row] == [0.0, 0.0]
