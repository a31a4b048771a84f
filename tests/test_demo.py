"""The demo's settings, and how it plays with an environment; the demo itself runs in `make demo`."""

import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qerl.cli import main
from qerl.demo import conversation, one_microbatch, score_demo
from qerl.environments import get_environment
from qerl.eval.policy import Policy
from qerl.models.decide import Loading
from qerl.models.hub import LocalModel
from qerl.settings.recipe import changed, load_config
from qerl.tasks import get_task
from tests.support.agents import SayingEngine
from tests.support.models import make_tiny_tokenizer


def test_one_microbatch_is_the_same_step() -> None:
    several = load_config(["demo"], {})
    one = changed(several, one_microbatch(several))
    samples = several.per_device_train_batch_size * several.gradient_accumulation_steps
    assert (one.per_device_train_batch_size, one.gradient_accumulation_steps) == (samples, 1)
    assert one.generation_batch_size == several.generation_batch_size == samples
    assert one_microbatch(load_config(["demo"], {"steps_per_generation": 16})) == {}


def test_changed_settings_are_the_others_with_a_field_replaced() -> None:
    before = load_config(["demo"], {})
    after = changed(before, {"seed": 7})
    differ = {name for name, value in after.to_dict().items() if before.to_dict()[name] != value}
    assert differ == {"seed"}
    assert before.seed != 7


def multiplies(row, so_far: str) -> str:
    """Multiplies the numbers of every problem with the calculator, and states what it was told."""
    told = re.findall(r"(\d+)\D*$", so_far)
    if "=" in so_far:
        return f"#### {told[0]}"
    first, second = re.findall(r"\d+", make_tiny_tokenizer().decode(row.prompt))[-2:]
    return f"{first} * {second} ="


@pytest.fixture
def policy_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tiny_tokenizer()
    policy = Policy(None, tokenizer, SayingEngine(tokenizer, multiplies), (tokenizer.eos_token_id,), None)
    loading = Loading(LocalModel("a model", Path()), None, "nvfp4", None, torch.float32)
    monkeypatch.setattr(Loading, "as_json", lambda self: {"model": self.model.name})
    monkeypatch.setattr("qerl.eval.run.decide", lambda source, choices: loading)
    monkeypatch.setattr("qerl.demo.load", lambda loading, console: policy)


def test_the_demo_with_tools_plays_and_prints_conversations(policy_that_multiplies: None, capsys) -> None:
    config = load_config(["demo-tools"], {"eval_samples": 24, "max_completion_length": 400})
    result = score_demo(config, None, Console(width=200))
    problems = get_task(config.task, **config.task_options).test().select(range(24))
    products = sum(bool(re.search("each|packs|Each", row["prompt"][-1]["content"])) for row in problems)
    assert 0 < products < 24 and result.problems == 24
    assert result.accuracy == products / 24
    printed = capsys.readouterr().out
    assert len(re.findall(r"model  \d+ \* \d+ =\n *environment  \d+\n *model  #### \d+", printed)) == 3


def test_a_conversation_names_who_speaks() -> None:
    said = [{"role": "assistant", "content": "1 + 1 =\n"}, {"role": "user", "content": "2"}]
    assert conversation("One and one?", said).split("\n")[1:3] == [
        "       model  1 + 1 = / ",
        " environment  2",
    ]


def test_the_demo_with_tools_has_an_environment_and_worked_turns_for_it() -> None:
    config = load_config(["demo-tools"], {})
    get_environment(config.environment, config.environment_options)()
    assert config.task_options["calculator"]


def test_the_flag_chooses_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr("qerl.demo.run_demo", lambda config, console: ran.append(config.environment) or True)
    assert main(["demo", "--tools", "--seed", "1"]) == main(["demo"]) == 0
    assert ran == ["calculator", None]
