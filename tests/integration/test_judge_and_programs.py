"""Rewards from a judge and from programs in whole runs, as docs/training.md writes them."""

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.rewards import judge as judge_module
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.run import train
from tests.support.chat_server import chat_server
from tests.support.sandbox import needs_sandbox
from tests.support.training_page import shown

pytestmark = pytest.mark.slow

ONE_STEP = {"max_steps": 1, "save_strategy": "no", "noise": False, "eval_strategy": "no", "reward_files": []}


def metrics(fields: dict) -> dict:
    folder = train(QeRLConfig(**fields), Console(quiet=True)).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "reward" in row]
    return row


@needs_sandbox
def test_the_documented_task_of_programs_trains(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my").mkdir()
    Path("my/programs.jsonl").write_text(shown("Programs as answers", "json") * 2)
    recipe = yaml.safe_load(shown("Programs as answers"))
    recipe |= {"num_generations": 4}
    row = metrics(tiny_run(tmp_path / "run", **ONE_STEP) | recipe)
    assert row["rewards/tests_passed/mean"] == 0
    assert row["rewards/tests_passed/failed"] == 0


def test_the_documented_judge_is_asked_and_pays(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    recipe = yaml.safe_load(shown("A judge"))
    with chat_server(lambda body: "It is clear.\nScore: 4") as served:
        recipe["judge"]["url"] = served.url
        row = metrics(tiny_run(tmp_path / "run", **ONE_STEP) | recipe)
    assert row["rewards/judge/mean"] == pytest.approx(0.4)
    assert row["rewards/judge/failed"] == 0
    assert len(served.requests) == 4
    asked = served.requests[0]["messages"][0]["content"]
    assert asked.startswith("A user asked: ") and "####" not in asked.partition("The reply was")[0]
    assert served.headers[0]["Authorization"] == "Bearer sesame"
    kept = (tmp_path / "run" / "config.yaml").read_text()
    assert "JUDGE_API_KEY" in kept and "sesame" not in kept
    assert list(Path("runs/replies").rglob("*.json"))


def test_a_judge_that_is_down_ends_the_run_with_a_sentence(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(judge_module, "_FIRST_PAUSE_S", 0.01)
    with chat_server(lambda body: (503, b"no model is loaded")) as served:
        judge = {"url": served.url, "model": "m", "tries": 2}
        fields = tiny_run(tmp_path / "run", **ONE_STEP, judge=judge)
        with pytest.raises(QeRLError) as ended:
            metrics(fields)
        assert str(ended.value) == (
            "The reward function 'judge' failed on all 4 samples of a step; its first error is "
            f"ConnectionError: the judge at {served.url}, asked 2 times, answers 503 'no model is loaded'. "
            "Mend it, or set reward_errors: tolerate to go on without it."
        )
        row = metrics(fields | {"reward_errors": "tolerate", "output_dir": str(tmp_path / "other")})
    assert row["rewards/judge/failed"] == 1
    assert row["rewards/accuracy/failed"] == 0


def test_a_model_on_this_projects_engine_judges_a_run(tiny_run, tiny_model, tiny_tokenizer, tmp_path):
    engine = PortableEngine(tiny_model("llama"), tiny_tokenizer.pad_token_id)

    def reply(body: dict) -> str:
        ids = Chat(tiny_tokenizer).ids(body["messages"])
        result = engine.generate([ids], 1, SamplingParams(max_tokens=body["max_tokens"], temperature=1.0))
        return tiny_tokenizer.decode(result.completions[0].token_ids, skip_special_tokens=True)

    with chat_server(reply) as served:
        judge = {"url": served.url, "model": "tiny", "prompt": "{completion}", "score": "([0-9])"}
        more = {"scores": [0, 9], "request": {"max_tokens": 40}, "at_once": 1}
        row = metrics(tiny_run(tmp_path / "run", **ONE_STEP, judge=judge | more))
    assert len(served.requests) == 4
    assert 0 <= row["rewards/judge/mean"] <= 1
    assert row["rewards/judge/failed"] < 1
