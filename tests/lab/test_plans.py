"""The plans of lab/studies: commands of the README are whole, and seeds are fresh."""

import gzip
import json
import re
from itertools import combinations

import pytest

from bench.result import RESULTS
from lab.__main__ import main
from lab.study.library import FOLDER, known
from lab.study.spec import joined, read_study
from lab.writers.question_tables import STUDIES
from qerl import yaml12
from qerl.settings.library import read_mapping

README = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)
NAMES = {"matched words words-doses": "matched-words", "matched testbed-chain": "matched-testbed-chain",
         "matched testbed-lock": "matched-testbed-lock", "worked worked-problems": "worked"}  # fmt: skip
"""Results of the plans whose names are not their last word."""

CELL = {"task_options": {"kind": "chain", "length": 4, "prior": 0.01, "reward": "deceptive"}}


def values_of(words):
    """A study of named files, with stand-ins for the arms that a fit gives."""
    values = {}
    for word in words:
        if not word.endswith(".yaml"):
            values = joined(values, read_mapping(FOLDER / f"{word}.yaml", "study"), word)
    return values


def fitted(values):
    """Arms that are compared and not there yet."""
    compared = {arm for pairs in values.get("comparisons", {}).values() for pair in pairs for arm in pair}
    return {
        arm: {"temperature_stages": [1, 1.1]} if arm.startswith("temperature") else
        {"noise": True, "noise_sigma_stages": [0, 0.01]}
        for arm in sorted(compared - values["arms"].keys())
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_a_study(command, tmp_path, monkeypatch, capsys):
    words, values = command.split(), values_of(command.split())
    missing = fitted(values)
    assert bool(missing) == any(word.startswith("runs/") for word in words)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for word in words:
        if word.endswith(".yaml"):
            (tmp_path / word).write_text(yaml12.dump({"arms": missing} if missing else CELL))
    assert main(["study", *words, "--dry_run"]) == 0
    assert "side by side" in capsys.readouterr().out


def test_every_file_is_in_the_readme_and_every_planned_study_is_a_command():
    quoted = " ".join(re.findall(r"`([^`\n]+)`", README))
    named = {word.strip("-") for word in re.findall(r"[a-z0-9-]+", quoted)}
    assert not known().keys() - named
    assert {result_of(command) for command in COMMANDS} >= set(STUDIES)


def result_of(command):
    words = [word for word in command.split() if not word.endswith(".yaml")]
    return NAMES.get(" ".join(words), words[-1])


def seeds_of(study):
    """Task and seeds of a study; levels of word problems are one task, kinds of the testbed are two."""
    options = study.get("task_options") or {}
    return (study["task"], options.get("kind")), {*study["test_seeds"], *study.get("tuning_seeds", ())}


def all_seeds():
    """Seeds by task of plans, of fits, of lab/trained, and of results, by where they stand."""
    for command in COMMANDS:
        values = values_of(command.split())
        if result_of(command) in STUDIES:
            values["arms"] = {**values["arms"], **fitted(values)}
            yield f"plan {result_of(command)}", *seeds_of(read_study(command, values).values())
    for names in (["doses", "testbed-chain"], ["doses", "testbed-lock"], ["words", "doses"],
                  ["doses", "worked-problems"], ["replicate"], ["replicate-doses"]):  # fmt: skip
        yield f"plan {' '.join(names)}", *seeds_of(values_of(names))
    for file in sorted(FOLDER.with_name("trained").glob("*.yaml")):
        plan = read_mapping(file, "plan")
        lists = (plan["seeds"], plan.get("later_seeds", ()), plan.get("tuning", {}).get("seeds", ()))
        task = plan.get("settings", {}).get("task", "arithmetic")
        yield f"trained {file.stem}", (task, None), {seed for seeds in lists for seed in seeds}
    for file in sorted(RESULTS.glob("*.json.gz")):
        study = json.loads(gzip.decompress(file.read_bytes())).get("study")
        if study and "test_seeds" in study:
            yield f"results {file.name.partition('.')[0]}", *seeds_of(study)


def test_no_plan_has_seeds_that_something_else_of_its_task_has_used():
    found = list(all_seeds())
    assert len({where for where, *_ in found if where.startswith("plan ")}) == 13
    assert any(where.startswith("results noise") for where, *_ in found)
    for (where, task, seeds), (other, its, theirs) in combinations(found, 2):
        own = where.removeprefix("plan ") == other.removeprefix("results ")  # a plan that has run
        if where.startswith("plan ") and task == its and not own:
            assert not seeds & theirs, f"{where} and {other} both have seed {min(seeds & theirs)}"
