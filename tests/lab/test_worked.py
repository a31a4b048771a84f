"""Long worked solutions: right to the last line, and from the recipe to a study of its model."""

import json
import re

import pytest

from lab.__main__ import main as lab
from lab.study.library import FOLDER
from lab.study.named import find_task
from lab.study.spec import joined, read_study
from lab.worked.task import Worked
from qerl import yaml12
from qerl.cli import main as qerl
from qerl.errors import QeRLError
from qerl.settings.library import read_mapping

DOSES = {"arms": {
    "aqn_03": {"noise": True, "correction": "none", "noise_sigma_stages": [0, 0.02]},
    "sample_03": {"noise": True, "noise_per": "sample", "noise_sigma_stages": [0, 0.02]},
    "temperature_03": {"temperature_stages": [1, 1.2]},
}}  # fmt: skip


def test_each_line_of_a_solution_is_right_and_goes_on_from_the_last():
    task = Worked(train_size=200, test_size=50)
    seen = set()
    for row in task.demonstrations():
        (said,) = row["completion"]
        *lines, end = said["content"].split("\n")
        value = None
        for line in lines:
            first, sign, second, result = re.fullmatch(r"(\d+) ([+*-]) (\d+) = (\d+)", line).groups()
            assert value is None or int(first) == value
            value = {"+": int(first) + int(second), "-": int(first) - int(second),
                     "*": int(first) * int(second)}[sign]  # fmt: skip
            assert value == int(result) >= 1
        assert end == f"#### {value}" == f"#### {row['answer']}" and len(lines) == row["steps"]
        seen.add(len(lines))
    assert seen == {4, 5, 6}
    prompts = [{row["prompt"][-1]["content"] for row in rows} for rows in (task.train(), task.test())]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == 50
    with pytest.raises(QeRLError, match="use 1 <= shortest <= longest"):
        Worked(5, 4)


def test_the_plan_is_whole_with_its_doses():
    values = DOSES
    for name in ("worked", "worked-problems"):
        values = joined(values, read_mapping(FOLDER / f"{name}.yaml", "study"), name)
    study = read_study("x", values)
    assert isinstance(find_task(study.task, study.task_options), Worked)
    assert study.max_completion_length > 63 and min(study.test_seeds) == 420 and len(study.test_seeds) == 32
    assert sum(map(len, study.comparisons.values())) == 5


@pytest.mark.slow
def test_a_study_begins_with_what_the_recipe_makes(llama_folder, tmp_path):
    """A tiny model in the place of SmolLM2, and few steps."""
    words = f"--model {llama_folder} --max_steps 2 --save_steps 1 --eval_steps 2 --eval_samples 4"
    words += " --per_device_train_batch_size 2 --use_cpu true --report_to none"
    options = ["--task_options", "{train_size: 16, test_size: 8}"]
    assert qerl(["train", "lab/worked/sft.yaml", *words.split(), *options,
                 "--output_dir", str(tmp_path / "sft")]) == 0  # fmt: skip
    small = {
        "model": str(tmp_path / "sft" / "checkpoint-1"), "task_options": {"train_size": 16, "test_size": 8},
        "steps": 2, "eval_steps": 1, "eval_samples": 4, "max_completion_length": 4, "test_seeds": 2,
        "prompts_per_step": 2, "samples_per_prompt": 2,
    }  # fmt: skip
    for name, content in (("doses", DOSES), ("small", small)):
        (tmp_path / f"{name}.yaml").write_text(yaml12.dump(content))
    files = ["worked", "worked-problems", str(tmp_path / "doses.yaml"), str(tmp_path / "small.yaml")]
    assert lab(["study", *files, "--output_dir", str(tmp_path / "out")]) == 0
    found = [json.loads(path.read_text()) for path in (tmp_path / "out" / "runs").iterdir()]
    assert len(found) == 6 * 2 and {run["eval_at"][-1] for run in found} == {2}
    assert any(run["steps"]["noise/sigma"][1] == 0.02 for run in found if run["arm"] == "sample_03")
