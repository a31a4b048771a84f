"""A run's folder may be anybody's: what it names runs only if the user names it again."""

import json
import shlex

import pytest
import yaml
from rich.console import Console

from qerl.cli import eval_command
from qerl.environments import registry as environments
from qerl.errors import QeRLError
from qerl.eval.policy import choices_of
from qerl.eval.request import Request
from qerl.eval.run import _task, _turns, answer
from qerl.models.decide import Source
from qerl.tasks import registry as tasks
from qerl.user_code import foreign_code, named_again


@pytest.fixture
def folder(tmp_path):
    """A function that makes the folder of an adapter with these settings, and a file that marks its run."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    def make(**settings):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        return tmp_path

    yield make
    assert not (tmp_path / "ran").exists()


def turns(choices):
    name, _ = _task(Request(), choices)
    return _turns(Request(), choices, name)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"task": "{evil}:Task"}, ["--task", "{evil}:Task"]),
        (
            {"task": "mixture", "task_options": {"a": {"task": "{evil}:Task"}}},
            ["--task_options", '{"a": {"task": "{evil}:Task"}}'],
        ),
        ({"task": "mixture", "task_options": {"{evil}:Task": {}}}, ["--task_options", '{"{evil}:Task": {}}']),
        ({"task": "arithmetic", "tools": ["calculator", "{evil}:f"]}, ["--tools", "calculator", "{evil}:f"]),
        ({"task": "arithmetic", "environment": "{evil}:Task"}, ["--environment", "{evil}:Task"]),
        (
            {
                "task": "arithmetic",
                "environment": "openenv:http://evil:8000",
                "environment_options": {"action_field": "text"},
            },
            ["--environment", "openenv:http://evil:8000"],
        ),
        ({"task": "verifiers:evil"}, ["--task", "verifiers:evil"]),
    ],
)
def test_code_that_the_folder_of_a_run_names_is_refused_with_what_to_type(folder, tmp_path, settings, flags):
    def at(value):
        return json.loads(json.dumps(value).replace("{evil}", str(tmp_path / "evil.py")))

    choices = choices_of(Source("m", folder(**at(settings))))
    with pytest.raises(QeRLError, match="may come from anyone") as refused:
        turns(choices)
    assert f"name it yourself with {shlex.join(at(flags))}." in str(refused.value)


def test_a_task_that_the_user_names_does_not_bring_tools_of_the_run(folder, tmp_path):
    task = f"{tmp_path / 'evil.py'}:Task"
    settings = folder(task=task, tools=["calculator"], environment=task)
    choices = choices_of(Source("m", settings))
    assert _task(Request(task=task), choices) == (task, {})
    with pytest.raises(QeRLError, match=r"name it yourself with --environment .*evil.py:Task"):
        _turns(Request(task=task), choices, task)
    assert _turns(Request(task=task, environment=task), choices, task)["tools"] == ["calculator"]


def test_generate_takes_no_such_task_for_its_system_message(folder, tmp_path):
    source = Source("m", folder(task=f"{tmp_path / 'evil.py'}:Task"))
    with pytest.raises(QeRLError, match="give the system message with --system"):
        answer(source, "Hello", Request(), Console(quiet=True))


def test_the_printed_command_names_again_what_evaluation_would_refuse(tmp_path):
    settings = {"task": "my/t.py:T", "task_options": {"n": 3}, "tools": ["calculator", "my/f.py:f"]}
    command = eval_command("m", tmp_path, "lora", again=named_again(settings))
    assert "--task my/t.py:T --tools calculator my/f.py:f --out" in command


def test_every_family_of_names_either_brings_code_or_is_known_to_bring_none():
    families = {*tasks.FAMILIES, *environments.FAMILIES}
    assert {f for f in families if foreign_code(f"{f}:x")} == {"openenv", "verifiers"}
    assert families - {"openenv", "verifiers"} == {"jsonl", "code", "demonstrations"}
