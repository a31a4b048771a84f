"""What is trained is what is scored: settings travel from a run to eval, generate and the printed command."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from safetensors.torch import load_file, save_file

from qerl.cli import main
from qerl.models import hub
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.recipe import load_config
from qerl.trainer.run import build

pytestmark = pytest.mark.slow

ONE_STEP = {"max_steps": 1, "save_steps": 1, "noise": False, "eval_strategy": "no"}


def trained(tiny_run, tmp_path, capsys, **changes):
    """Run folder of one step and the command that its last line says."""
    run = tmp_path / "a run"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_run(run, **(ONE_STEP | changes))))
    assert main(["train", str(recipe)]) == 0
    return run, capsys.readouterr().out.strip().splitlines()[-1].partition("Score it with: ")[2]


def score(command, capsys):
    """Result of an evaluation and what it printed."""
    words = shlex.split(command) if isinstance(command, str) else command
    assert main(words[1:]) == 0
    return json.loads((words_out(words) / "result.json").read_text()), capsys.readouterr().out


def words_out(words):
    return Path(words[words.index("--out") + 1])


def jsonl(tmp_path):
    lines = [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(12)]
    path = tmp_path / "my problems.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"task": f"jsonl:{path}", "task_options": {"test_size": 3, "answer_format": "number"}}


OWN = """
from datasets import Dataset
from qerl.tasks import Task, get_format


class Own(Task):
    def __init__(self, test_size):
        super().__init__("own", get_format("number"))
        self.test_size = test_size

    def train(self):
        rows = [{"prompt": self.prompt(f"{i} + 1?"), "answer": str(i + 1)} for i in range(8)]
        return Dataset.from_list(rows)

    def test(self):
        return self.train().select(range(self.test_size))
"""


def own(tmp_path):
    path = tmp_path / "my task.py"
    path.write_text(OWN)
    return {"task": f"{path}:Own", "task_options": {"test_size": 3}}


ARITHMETIC = {"task_options": {"level": "wp2", "examples": 0, "train_size": 6, "test_size": 5}}


@pytest.mark.parametrize(
    ("task", "changes", "expected"),
    [
        (jsonl, {"weights": "bf16"}, {"weights": "bf16", "rounding": None}),
        (own, {"weights": "bf16"}, {"weights": "bf16"}),
        (lambda _: ARITHMETIC, {"rounding": "rtn"}, {"weights": "nvfp4", "rounding": "rtn"}),
        (
            lambda _: ARITHMETIC,
            {"tuning": "full", "weights": "bf16", "dtype": "bfloat16", "learning_rate": 1e-3},
            {"weights": "bf16", "dtype": "bfloat16"},
        ),
    ],
    ids=["lora-jsonl", "lora-own", "lora-arithmetic", "full"],
)
def test_the_printed_command_scores_what_was_trained(tiny_run, tmp_path, capsys, task, changes, expected):
    settings = task(tmp_path) | changes
    run, command = trained(tiny_run, tmp_path, capsys, **settings)
    result, said = score(command, capsys)
    source = result["source"]
    assert {name: source[name] for name in expected} == expected
    assert source["task_options"] == settings["task_options"]
    assert result["problems"] == settings["task_options"]["test_size"]
    assert result["settings"]["max_tokens"] == 8
    assert f"weights {expected['weights']}" in said and str(run / "config.yaml") in said
    assert "Settings: " in said and "temperature 0.0 (default)" in said
    assert said.count("dtype ") == 1
    assert "The run sampled at temperature 1.0." in said


def test_checkpoints_and_trainers_made_in_python_say_the_same(tiny_run, tmp_path, capsys):
    fields = tiny_run(tmp_path / "run", **ONE_STEP, weights="mxfp4", chat_template_kwargs={"style": "plain"})
    trainer, _ = build(load_config([], fields), Console(quiet=True))
    trainer.train()
    trainer.save_model()
    model = ["qerl", "eval", fields["model"], "--adapter"]
    run = tmp_path / "run"
    for i, folder in enumerate((run, run / "checkpoint-1")):
        result, _ = score([*model, str(folder), "--out", str(tmp_path / f"scores{i}")], capsys)
        assert result["source"]["weights"] == "mxfp4"
        assert result["source"]["chat_template_kwargs"] == {"style": "plain"}
    (run / "checkpoint-1" / "config.yaml").unlink()
    words = ["--weights", "nvfp4", "--task", "arithmetic", "--max_tokens", "4", "--limit", "2"]
    out = ["--out", str(tmp_path / "flags")]
    result, said = score([*model, str(run / "checkpoint-1"), *words, *out], capsys)
    assert result["source"]["weights"] == "nvfp4" and "weights nvfp4" in said and "(from --weights)" in said
    assert (result["settings"]["max_tokens"], result["problems"]) == (4, 2)
    assert result["source"]["task_options"] == fields["task_options"], "the run's, one folder up"
    assert main(["generate", fields["model"], "hello", "--adapter", str(run)]) == 0
    assert "weights mxfp4" in capsys.readouterr().out


def test_adapters_of_another_base_or_rounding_or_with_nan_are_refused(
    tiny_run, tiny_model, tiny_tokenizer, tmp_path, capsys
):
    run, _ = trained(tiny_run, tmp_path, capsys)
    model = tmp_path / "model"

    def refused(name, message, *words):
        assert main(["eval", str(name), "--adapter", str(run), *words]) == 2
        printed = capsys.readouterr().err
        assert message in printed and "Traceback" not in printed

    other = tmp_path / "other"
    tiny_model("llama", seed=1).save_pretrained(other)
    tiny_tokenizer.save_pretrained(other)
    refused(other, "was trained on")
    merged = tmp_path / "merged"  # norms and embeddings stay as they were
    shutil.copytree(model, merged)
    tensors = load_file(merged / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.1
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    for name, doubt in ((merged, True), (model, False)):
        assert main(["eval", str(name), "--adapter", str(run), "--limit", "1"]) == 0
        assert ("this one is added on top" in capsys.readouterr().out) == doubt
    (run / "policy.json").unlink()
    refused(other, "was trained on")
    for method in ("rtn", "mse"):
        assert main(["quantize", str(model), str(tmp_path / method), "--rounding", method]) == 0
    refused(tmp_path / "rtn", "packed with rtn rounding")
    moved = model.rename(tmp_path / "moved")
    for name in (moved, tmp_path / "mse"):
        assert main(["eval", str(name), "--adapter", str(run), "--limit", "1"]) == 0
    assert "so QeRL cannot check that" in capsys.readouterr().out
    file = run / "checkpoint-1" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["eval", str(moved), "--adapter", str(run / "checkpoint-1")]) == 2
    assert "diverged" in capsys.readouterr().err
    moved.rename(model)
    words = [str(tmp_path / "recipe.yaml"), "--max_steps", "2", "--resume_from_checkpoint", "true"]
    assert main(["train", *words]) == 2
    assert "diverged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"- 1", b"a: [", b"\xff\xfe", b"weights: 3", b"task_options: [1]"])
def test_a_damaged_config_beside_an_adapter_is_one_sentence(tmp_path, capsys, content):
    (tmp_path / "config.yaml").write_bytes(content)
    assert main(["eval", "nowhere", "--adapter", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "config.yaml" in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *[(["--task_options", text], "--task_options") for text in ("[1]", "null", "", "{a: [", "{1: 2}")],
        (["--chat_template_kwargs", "3"], "--chat_template_kwargs"),
        (["--temperature", "nan"], "nan must be at least 0"),
        (["--temperature", "inf"], "inf must be at least 0"),
        (["--limit", "0"], "0 must be at least 1"),
        (["--limit", "-1"], "-1 must be at least 1"),
        (["--samples", "0"], "0 must be at least 1"),
        (["--max_tokens", "0"], "0 must be at least 1"),
        (["--top_p", "nan"], "nan must be"),
        (["--samples", "2", "--temperature", "0"], "samples is 2 with temperature 0, at which all samples"),
    ],
)
def test_mistakes_in_flags_are_one_sentence_before_anything_is_loaded(words, message, capsys):
    try:
        status = main(["eval", "nowhere", "--task", "arithmetic", *words])
    except SystemExit as left:  # argparse, below its usage
        status = left.code
    assert status == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_task_must_come_from_somewhere_once_the_model_is_one(tmp_path, capsys, monkeypatch):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("no network, not cached")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    assert main(["eval", "models/nope"]) == 2
    assert "models/nope was not found" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    assert main(["eval", str(tmp_path)]) == 2
    assert f"`qerl eval a/b --adapter {tmp_path}`" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert main(["eval", str(tmp_path)]) == 2
    assert "No task is given" in capsys.readouterr().err


def test_a_file_of_problems_is_looked_at_before_the_model(capsys):
    assert main(["eval", "nowhere", "--task", "jsonl:nope.jsonl"]) == 2
    assert "The data file nope.jsonl cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["eval", "owner/model"], ["generate", "owner/model", "hello"]])
def test_an_adapter_that_is_not_there_is_named_first(words, tmp_path, capsys):
    assert main([*words, "--adapter", str(tmp_path / "none")]) == 2
    assert f"There is no {tmp_path / 'none' / 'adapter_config.json'}" in capsys.readouterr().err


def test_a_prompt_that_is_no_text(capsys):
    assert main(["generate", "nowhere", "caf\udce9"]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_ctrl_c_leaves_a_folder_that_the_same_command_goes_on_with(tiny_run, tmp_path, capsys, monkeypatch):
    tiny_run(tmp_path / "run")
    options = "{level: wp1, examples: 0, test_size: 6}"
    command = ["eval", str(tmp_path / "model"), "--task", "arithmetic", "--task_options", options]
    command += ["--max_tokens", "4", "--samples", "32", "--out", str(tmp_path / "scores")]
    generate, calls = PortableEngine.generate, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PortableEngine, "generate", interrupted)
        assert main(command) == 130
    assert "64 of 192 completions are kept" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--seed", "1"]) == 2
    assert "with seed 0, not 1" in capsys.readouterr().err
    assert main(command) == 0
    assert main(command) == 2
    assert "finished evaluation" in capsys.readouterr().err


def test_out_is_tried_before_the_model_is_loaded(tiny_run, tmp_path, capsys, monkeypatch):
    tiny_run(tmp_path / "run")
    monkeypatch.setattr("qerl.eval.run.load", lambda *_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    command = ["eval", str(tmp_path / "model"), "--task", "arithmetic", "--limit", "1", "--out"]
    assert main([*command, str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_code_that_comes_with_a_model_runs_only_where_the_flag_says_so(tiny_run, tmp_path, capsys):
    """A run that trusted it does not make its readers trust it; the printed command says the flag."""
    model = tmp_path / "model"
    code = "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast): pass\n"
    (model / "mine.py").write_text(code)
    file = model / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}, "tokenizer_class": "Mine"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    run, command = trained(tiny_run, tmp_path, capsys, trust_remote_code=True)
    assert "--trust_remote_code true" in command
    score(command, capsys)
    words = [str(model), "--adapter", str(run), "--max_tokens", "2"]
    for asked in (["eval", *words, "--limit", "1"], ["generate", str(model), "hello", *words[1:]]):
        assert main(asked) == 2
        assert "brings its own code, which runs only with trust_remote_code" in capsys.readouterr().err
        assert main([*asked, "--trust_remote_code", "true"]) == 0
