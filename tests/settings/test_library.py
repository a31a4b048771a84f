"""The recipes of the package: each parses, says what it needs, and fits where its header says it does."""

import json
import re
from pathlib import Path

import pytest

from qerl.cli import main
from qerl.errors import QeRLError
from qerl.kernels.cards import CARDS
from qerl.plan.command import plan_command
from qerl.plan.gpu import planned_gpu
from qerl.plan.propose import fits
from qerl.settings.config import QeRLConfig
from qerl.settings.library import FOLDER, packaged, read_header, recipe_file
from qerl.settings.recipe import load_config, read_recipe

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MODELS = [name for name, path in packaged().items() if path.parent.name == "models"]
SIZES = {f"qwen2.5-{size}": size for size in ("3b", "7b", "14b", "32b")}
"""Sizes that the plan knows by another name than the recipe's."""


def recipes_of(kind: str) -> list[str]:
    return [name for name, path in packaged().items() if path.parent.name == kind]


def test_names_are_unique_and_every_file_has_one():
    assert len(packaged()) == len([*FOLDER.rglob("*.yaml")])


@pytest.mark.parametrize("name", packaged())
def test_a_header_has_every_key(name):
    header = read_header(packaged()[name])
    assert all(vars(header).values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", recipes_of("variants"))
@pytest.mark.parametrize("task", recipes_of("tasks"))
def test_every_combination_is_a_run(task, variant, model):
    assert load_config([task, variant, model], {}).model == read_recipe(packaged()[model])["model"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "variant", [name for name in recipes_of("variants") if not name.endswith(("aqn", "distill"))]
)
def test_a_warm_up_takes_every_model_and_every_variant_without_noise_or_teacher(variant, model):
    assert load_config(["gsm8k-sft", variant, model], {}).algorithm == "sft"


def test_a_warm_up_has_its_own_learning_rate_unless_its_variant_has_one_of_the_paper():
    rates = {
        variant: load_config(["gsm8k-sft", variant, "qwen2.5-7b"], {}).learning_rate
        for variant in ("nvfp4-lora", "mxfp4-lora", "bf16-full", "bf16-lora", "nf4-lora")
    }
    assert rates == {
        "nvfp4-lora": 2e-4, "mxfp4-lora": 2e-4, "bf16-full": 2e-5, "bf16-lora": 5e-6, "nf4-lora": 5e-6,
    }  # fmt: skip
    assert load_config(["gsm8k", "nvfp4-aqn", "qwen2.5-7b"], {}).learning_rate == 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_model_fits_on_the_gpus_of_its_header_and_on_no_other(name, console):
    cards, _, by = read_header(packaged()[name]).hardware.partition(" GB")
    said, variant = {int(size) for size in re.findall(r"\d+", cards)}, by.rpartition(" ")[2]
    sizes = SIZES.get(name, name)
    planned = {
        gpu for gpu in (24, 32, 48, 80) if fits(plan_command(sizes, ["gsm8k", variant], {}, gpu, console))
    }
    assert said == planned


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes_of("cards"))
def test_models_up_to_14b_fit_on_a_card_with_its_recipe(name, console):
    """Groups of 8 with at least 4096 tokens a sample, planned for its size and its smallest card."""
    settings = read_recipe(packaged()[name])
    assert settings["num_generations"] == 8 and settings["max_completion_length"] >= 4096
    size = int(name.removesuffix("gb"))
    sold = [gpu for card in CARDS.values() for gpu, gib in card.gpus if 0.9 * size < gib < size]
    gpu = min([size, *sold], key=lambda one: planned_gpu(one).capacity)
    assert f"CUDA GPU of {size} GB" in read_header(packaged()[name]).hardware
    for model in ("7b", "qwen3-8b", "qwen3.5-9b", "llama3.1-8b", "mistral-7b", "14b", "qwen3-14b"):
        for task, variant in (("gsm8k", "nvfp4-aqn"), ("gsm8k", "nf4-lora"), ("bigmath", "mxfp4-lora")):
            plan = plan_command(model, [task, variant, name], {}, gpu, console)
            assert fits(plan), f"{model} {task} {variant} on {gpu}"
            assert plan.work.group == 8 and plan.work.microbatch == 8


@pytest.fixture
def console():
    from rich.console import Console

    return Console(quiet=True)


def test_times_are_measured():
    timed = {name: read_header(path).time for name, path in packaged().items()}
    measured = {"demo": "demo-cpu.json", "demo-tools": "demo-tools-cpu.json"}
    assert {name for name, time in timed.items() if time != "not measured"} == set(measured)
    for name, file in measured.items():
        rows = json.loads((RESULTS / file).read_text())["rows"]
        minutes = [run["minutes"] for run in rows if run["commit"] == rows[-1]["commit"]]
        assert timed[name].startswith(f"{min(minutes)} to {max(minutes)} minutes")


def test_a_word_is_a_name_or_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").write_text("")  # a file of this name hides no recipe
    assert recipe_file("gsm8k") == packaged()["gsm8k"]
    assert recipe_file("mine.yaml") == Path("mine.yaml")
    assert recipe_file("folder/mine") == Path("folder/mine")
    with pytest.raises(QeRLError, match=r"no recipe named 'nvfp4-aqm'; did you mean 'nvfp4-aqn'"):
        recipe_file("nvfp4-aqm")
    with pytest.raises(QeRLError, match=r"no recipe named 'zzz'; see `qerl recipes`"):
        recipe_file("zzz")


def test_a_header_that_lacks_a_key_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("# about: a thing\n# needs: all\n# time: long\nseed: 3\n")
    with pytest.raises(ValueError, match="begins with"):
        read_header(tmp_path / "x.yaml")


def test_the_list_names_every_recipe(capsys):
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert packaged().keys() <= set(printed.split())
    assert "time: " in printed and "not measured" not in printed


def test_the_list_says_how_recipes_are_named_together_and_has_a_line_for_a_model(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qerl train TASK VARIANT MODEL [CARD]")
    assert "qwen3-32b Qwen/Qwen3-32B 32 48 80" in [" ".join(line.split()) for line in lines]
    for model in MODELS:
        words = [model, read_recipe(packaged()[model])["model"]]
        assert sum(line.split()[:2] == words for line in lines) == 1


@pytest.mark.parametrize("words", ["24gb gsm8k nvfp4-lora qwen2.5-7b", "gsm8k 24gb nvfp4-lora qwen2.5-7b"])
def test_a_card_before_other_recipes_is_refused(words, capsys):
    assert main(["train", *words.split(), "--dry_run"]) == 2
    before = words.split()[words.split().index("24gb") + 1]
    said = " ".join(capsys.readouterr().err.split())
    assert f"24gb comes before {before}, which may undo its settings; name 24gb last." in said


def test_a_card_may_be_followed_by_a_file_of_the_user_and_by_another_card(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("gradient_accumulation_steps: 4\n")
    given = ["gsm8k", "nvfp4-lora", "qwen2.5-7b", "24gb"]
    assert load_config([*given, str(mine)], {}).gradient_accumulation_steps == 4
    assert load_config([*given, "32gb"], {}).max_completion_length == 8192


def test_the_demo_is_complete():
    assert QeRLConfig(**(read_recipe(packaged()["demo"]) | {"seed": 1})).task == "arithmetic"
