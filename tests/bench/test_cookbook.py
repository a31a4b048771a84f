"""The benchmark of the cookbook's recipe: its arms, what it reads of them, and runs that fail or hang."""

import json

import pytest
import torch

from bench import cookbook
from bench.__main__ import main

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.headers["X-API-Key"] == sys.argv[sys.argv.index("--api_key") + 1]
        self.send_response(200)
        self.end_headers()
        names = [{"model_name": "m.gguf"}, {"model_name": "/folder of " + " ".join(sys.argv)}]
        self.wfile.write(json.dumps({"supported_models": names}).encode())
server = HTTPServer(("127.0.0.1", 0), Handler)
print(f"export TINKER_BASE_URL=http://127.0.0.1:{server.server_port} TINKER_API_KEY=x", flush=True)
server.serve_forever()
"""

RECIPE = """
import json, sys, time
from pathlib import Path
said = dict(argument.split("=", 1) for argument in sys.argv[1:])
assert said["model_name"].startswith("/folder") and said["base_url"].startswith("http://127")
folder = Path(said["log_path"])
folder.mkdir()
if said["learning_rate"] == "0.0" and "--noise_steps" in said["model_name"]:
    raise SystemExit("the control has had enough")
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(int(said["max_steps"])):
        reward = step * float(said["learning_rate"])
        print(json.dumps({"env/all/reward/total": reward, "time/total": 0.5}), file=file, flush=True)
    print(json.dumps({"tokens/cumulative/sampled": 3}), file=file, flush=True)
time.sleep(60 if folder.name == "plain-control-1" else 0)
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    (tmp_path / "fake_server.py").write_text(SERVER)
    (tmp_path / "fake_recipe.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(cookbook, "SERVER", "fake_server")
    monkeypatch.setattr(cookbook, "RECIPE", "fake_recipe")
    monkeypatch.setattr(cookbook, "PACKAGES", ("torch",))
    return ["cookbook", "--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "found.json")]


@pytest.mark.slow
def test_every_arm_runs_and_what_fails_or_hangs_is_said(told, tmp_path, capsys):
    options = ["--runs", "2", "--steps", "3", "--learning_rate", "2", "--servers", "2"]
    options += ["--threads", "1", "--minutes", "0.1"]
    with pytest.raises(SystemExit, match=r"^error: 2 of 8 runs failed"):
        main([*told, *options])
    found = json.loads((tmp_path / "found.json").read_text())
    arms = [(row["noise"], row["learning_rate"], row["run"], row["reward"]) for row in found["rows"]]
    assert arms == [
        (False, 2.0, 0, [0, 2, 4]), (False, 0.0, 0, [0, 0, 0]), (False, 2.0, 1, [0, 2, 4]),
        (False, 0.0, 1, [0, 0, 0]), (True, 2.0, 0, [0, 2, 4]), (True, 0.0, 0, []),
        (True, 2.0, 1, [0, 2, 4]), (True, 0.0, 1, []),
    ]  # fmt: skip
    ends = ["finished"] * 3 + ["ended after its time"] + ["finished", "failed"] * 2
    assert [row["status"] for row in found["rows"]] == ends
    assert found["rows"][0]["step_seconds"] == [0.5] * 3 and found["rows"][0]["kl_sample_train"] == []
    assert (found["steps"], found["servers"], found["dtype"]) == (3, 2, "auto")
    assert found["rows"][0]["recipe_seconds"] < found["rows"][3]["recipe_seconds"]
    if not torch.cuda.is_available():
        assert "4 servers, threads of each: 1" in found["machine"]
    said = capsys.readouterr().out
    assert "aqn-control-0 ended with 1" in said and "the control has had enough" in said
    assert "plain-control-1 is stopped after 3 steps, because time is up" in said
    assert "plain-learn-0 ended with 0" in said


@pytest.mark.slow
def test_controls_may_be_fewer(told, tmp_path):
    main([*told, "--runs", "2", "--controls", "1", "--steps", "2", "--noise", "none"])
    found = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["learning_rate"] > 0, row["run"]) for row in found] == [(True, 0), (False, 0), (True, 1)]


def test_a_server_that_ends_is_told_with_its_log(told, tmp_path, capsys):
    (tmp_path / "fake_server.py").write_text("raise SystemExit('no such model')")
    assert main(told) == 2
    said = capsys.readouterr().err
    assert "server-plain-0 ended with 1" in said and "no such model" in said
