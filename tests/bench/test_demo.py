"""The benchmarks that play: rows of demos, and agents beside the built-in loop."""

import json
from pathlib import Path

import pytest
import torch

from bench import agents, demo
from qerl.cli import main
from qerl.demo import Demo
from qerl.errors import QeRLError
from qerl.eval.policy import Policy
from qerl.models.decide import Loading
from qerl.models.hub import LocalModel
from tests.support.agents import SayingEngine
from tests.support.models import make_tiny_tokenizer

RECIPE = """
model: a/model
weights: bf16
task: arithmetic
task_options: {{level: wp1-99x99, examples: 1, calculator: true}}
environment: endpoint:{folder}/agent.py:play
num_generations: 2
max_completion_length: 60
"""
LOOP = RECIPE.replace("endpoint:{folder}/agent.py:play", "calculator")
AGENT = """
import openai


def play(endpoint, row):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    said = client.chat.completions.create(model=endpoint.model, messages=row["prompt"])
    if {raises}:
        raise ValueError("it fails")
    return float(len(said.choices[0].message.content))
"""


class Score:
    problems = 128

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy


def test_seeds_of_a_demo_add_up_in_one_file(tmp_path, monkeypatch):
    taken = []

    def run_demo(config, console):
        taken.append((config.seed, config.task))
        return Demo(Score(0.25), Score(0.25 + config.seed / 10), 90.0)

    monkeypatch.setattr(demo, "run_demo", run_demo)
    out = tmp_path / "found.json"
    demo.main(["demo-tools", "--seed", "1", "2", "--out", str(out)])
    demo.main(["demo-tools", "--seed", "3", "--note", "alone", "--out", str(out)])
    found = json.loads(out.read_text())
    rows = found.pop("rows")
    assert not found, "each row says where it comes from"
    assert [row["command"].split(" --out")[0] for row in rows] == [
        *["python -m bench demo demo-tools --seed 1 2"] * 2,
        "python -m bench demo demo-tools --seed 3 --note alone",
    ]
    assert taken == [(1, "arithmetic"), (2, "arithmetic"), (3, "arithmetic")]
    assert [row["gain_points"] for row in rows] == [10.0, 20.0, 30.0]
    assert [row["note"] for row in rows] == ["", "", "alone"] and {row["minutes"] for row in rows} == {1.5}


def test_agents_and_the_loop_play_the_same_problems(tmp_path, monkeypatch):
    tokenizer = make_tiny_tokenizer()
    prompts = []

    def say(row, so_far):
        prompts.append(tuple(row.prompt))
        return "#### 12"

    policy = Policy(None, tokenizer, SayingEngine(tokenizer, say), (tokenizer.eos_token_id,), None)
    loading = Loading(LocalModel("a model", Path()), None, "bf16", None, torch.float32)
    monkeypatch.setattr(Loading, "as_json", lambda self: {"model": self.model.name})
    monkeypatch.setattr("qerl.eval.run.decide", lambda source, choices: loading)
    monkeypatch.setattr(agents, "load", lambda loading, console: policy)
    for name, text in (("agent.py", AGENT), ("a.yaml", RECIPE), ("loop.yaml", LOOP)):
        (tmp_path / name).write_text(text.format(folder=tmp_path, raises=False))
    out = tmp_path / "found.json"
    beside = ["--beside", str(tmp_path / "loop.yaml"), "--prompts", "3", "--repeats", "1"]
    agents.main([str(tmp_path / "a.yaml"), *beside, "--out", str(out)])
    loop, led = json.loads(out.read_text())["rows"]
    assert loop["ratio"] == loop["cpu_ratio"] == 1.0 and loop["failed"] == led["failed"] == 0
    assert led["seconds"] > loop["seconds"] and led["ratio"] > 1
    assert len(set(prompts)) == 3, "both play the same three problems, token by token"
    assert led["drawn_tokens"] == loop["drawn_tokens"] and led["drawn_tokens"][0] > 0

    (tmp_path / "agent.py").write_text(AGENT.format(raises=True))
    agents.main([str(tmp_path / "a.yaml"), *beside, "--out", str(out)])
    assert [row["failed"] for row in json.loads(out.read_text())["rows"]] == [0, 6]

    other = LOOP.format(folder=tmp_path).replace("num_generations: 2", "num_generations: 4")
    (tmp_path / "loop.yaml").write_text(other)
    with pytest.raises(QeRLError, match=r"num_generations is 2 in .*a.yaml and 4 in .*loop.yaml"):
        agents.main([str(tmp_path / "a.yaml"), *beside])


def test_an_interrupted_demo_is_said_and_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run_demo", lambda config, console: None)
    with pytest.raises(QeRLError, match="interrupted; its row is not written"):
        demo.main(["demo", "--out", str(tmp_path / "found.json")])
    assert not (tmp_path / "found.json").exists()
    monkeypatch.setattr("qerl.demo.run_demo", lambda config, console: None)
    assert main(["demo"]) == 130


@pytest.mark.slow
def test_a_client_and_the_loop_play_turns_of_the_same_lengths(llama_folder, tmp_path):
    out = tmp_path / "found.json"
    small = {
        "layers": 1,
        "prompts": 2,
        "samples": 3,
        "turns": 3,
        "drawn": 6,
        "prompt": 8,
        "repeats": 3,  # medians: a thread may have work left from another way
        "rank": 2,
    }
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    agents.main(["--shape", "smollm2", "--tokenizer", str(llama_folder), *words, "--out", str(out)])
    loop, led, elsewhere = found = json.loads(out.read_text())["rows"]
    assert [row["environment"] for row in found] == ["calls", "openai", "openai in a process"]
    assert [row["failed"] for row in found] == [0, 0, 0]
    assert 0 <= loop["cpu_seconds_of"]["endpoint"] < led["cpu_seconds_of"]["endpoint"]
    assert elsewhere["cpu_seconds_of"]["calls"] < led["cpu_seconds_of"]["calls"]
    assert all(sum(row["cpu_seconds_of"].values()) < 1.1 * row["cpu_seconds"] + 0.1 for row in found)
    assert elsewhere["drawn_tokens"] == led["drawn_tokens"] == loop["drawn_tokens"]
    assert 2 * 3 * 3 * 3 <= led["drawn_tokens"][0] <= 2 * 3 * 3 * 9  # turns of 3 to 9 tokens


def test_two_recipes_or_a_shape(capsys):
    for words in ([], ["demo"], ["demo", "--shape", "7b"], ["--beside", "demo"]):
        with pytest.raises(SystemExit):
            agents.main(words)
        assert "give either a recipe and --beside RECIPE, or --shape" in capsys.readouterr().err
