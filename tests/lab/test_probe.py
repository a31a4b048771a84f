"""A probe from its YAML to its page: cells, what is kept of an interrupted one, and what is refused."""

import io
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lab.study.command import study_command
from lab.study.probe import command
from lab.study.probe.policies import add_errors, relative_errors, weights_of
from lab.study.probe.spec import make_probe, read_probe
from lab.study.probe.store import RESULTS_FILE, Store, read_results
from lab.study.probe.summary import read_rows
from qerl import yaml12
from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.run_folder import ADAPTER_FILE
from tests.support.models import move_adapter, pack

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)

TEXT = """
kind: probe
model: {model}
tasks: {{wp: {{task: arithmetic, task_options: {{level: wp12, examples: 0, test_size: 6, train_size: 4}}}}}}
policies: {{start: null, trained: {adapter}}}
perturbations:
  aqn: {{kind: noise}}
  hot: {{kind: temperature}}
formats:
  bf16: {{weights: bf16}}
  nvfp4: {{weights: nvfp4, rounding: rtn}}
  any: {{weights: bf16, error_of: nvfp4}}
target_kl: [0.02, 0.1]
problems: 6
samples: 8
max_completion_length: 4
calibration_problems: 4
calibration_samples: 4
solution_problems: 3
solution_draws: 2
prefix_samples: 2
"""


@pytest.fixture(scope="module")
def probe_file(tiny_model, tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    model = tiny_model("llama", max_position_embeddings=1024)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    move_adapter(add_lora(model, rank=2, alpha=2, dropout=0.0)).save_pretrained(folder / "adapter")
    file = folder / "tiny.yaml"
    file.write_text(TEXT.format(model=folder / "model", adapter=folder / "adapter"))
    return file


def run(file: Path, folder: Path, console: Console = QUIET, **changes) -> int:
    values = yaml12.load(file.read_text()) | changes
    return command.run_probe(str(file), values, folder, None, False, console)


@pytest.fixture(scope="module")
def finished(probe_file) -> Path:
    folder = probe_file.parent / "out"
    assert run(probe_file, folder) == 0
    return folder


def met_or_at_a_step(target, calibrated, curve):
    """Whether the target was met within 5 %, or lies in a step of the curve, narrowed to 2 %.

    Texts of so few tokens change in steps: from one strength to one 0.35 % above, the KL was seen to go from
    .0173 to .0227. What is taken then must be the nearer end of the step.
    """
    if calibrated == pytest.approx(target, rel=0.05):
        return True
    points = sorted(curve)
    around = [(a, b) for a, b in pairwise(points) if a[1] <= target <= b[1]]
    nearest = min((value for _, value in points), key=lambda value: abs(value - target))
    return calibrated == nearest and any(b[0] / a[0] < 1.02 for a, b in around)


def test_what_counts_as_calibrated():
    assert met_or_at_a_step(0.02, 0.0205, [])
    step = [(0.02869, 0.01729), (0.02879, 0.02271), (0.0694, 0.098)]
    assert met_or_at_a_step(0.02, 0.01729, step) and not met_or_at_a_step(0.02, 0.02271, step)
    assert not met_or_at_a_step(0.05, 0.02271, step), "not narrowed"


def test_a_probe_measures_what_it_says(finished):
    results = read_results(finished / RESULTS_FILE)
    cells = results["cells"]
    assert len(cells) == 2 * (2 + 2 * 2) + 1 + 2 + 2
    for name, cell in cells.items():
        assert len(cell["numbers"]["right"]) == 6 and max(cell["numbers"]["right"]) <= 8, name
        if cell.get("target"):
            assert met_or_at_a_step(**{key: cell[key] for key in ("target", "calibrated", "curve")}), name
            assert len(set(cell["solutions"]["problem"])) == 3
    assert len(results["strata"]["wp"]) == 6 and set(results["strata"]["wp"]) <= {"steps_1", "steps_2"}
    numbers = {row.cell: row.numbers for row in read_rows(results)}
    clean = numbers["start-wp-clean"]
    assert clean["kl"].value == pytest.approx(0, abs=1e-6) and clean["ess"].value == pytest.approx(
        1, abs=1e-5
    )
    assert numbers["start-wp-aqn-0.1"]["kl"].value == pytest.approx(0.1, rel=0.6)
    assert numbers["start-wp-aqn-0.1"]["kl"].value != numbers["trained-wp-aqn-0.1"]["kl"].value
    first, other, noise = (numbers[f"format-wp-{name}-0-plain"] for name in ("bf16", "nvfp4", "any"))
    assert first["prefix_more"].value == 0 and first["prefix_kl"].value == pytest.approx(0, abs=1e-5)
    assert other["prefix_kl"].value > 0.001 and noise["prefix_kl"].value > 0.001
    assert other["error"].value == pytest.approx(noise["error"].value, rel=0.05) and first["error"].value == 0
    for name in ("nvfp4", "any"):
        matched = cells[f"format-wp-{name}-0-matched"]
        assert matched["calibrated"] == pytest.approx(matched["target_entropy"], rel=0.031)
        assert matched["temperature"] != 1


def test_policies_are_adapters_of_a_clean_run(probe_file, tmp_path):
    """Each step's adapter is another policy; what is trained already is not trained again."""
    train = {"task": "wp", "steps": [1, 2], "prompts_per_step": 4, "samples_per_prompt": 2}
    probe = read_probe("", yaml12.load(probe_file.read_text()) | {"train": train})
    policies = command.Policies(probe, tmp_path, QUIET)
    assert probe.policy_names == ["start", "trained", "step_1", "step_2"]
    policies.policy("step_2")
    kept = [(tmp_path / "policies" / name / ADAPTER_FILE).stat().st_mtime_ns for name in ("step_1", "step_2")]
    said = Console(file=io.StringIO())
    adapted = command.Policies(probe, tmp_path, said).policy("step_1")
    assert "Training" not in said.file.getvalue()
    assert kept[0] == (tmp_path / "policies" / "step_1" / ADAPTER_FILE).stat().st_mtime_ns
    assert any("lora_B" in name for name, _ in adapted.named_parameters())


def test_clean_runs_of_several_seeds(probe_file, tmp_path):
    train = {"task": "wp", "steps": [1, 2], "seeds": [3, 5], "prompts_per_step": 4, "samples_per_prompt": 2}
    values = yaml12.load(probe_file.read_text()) | {"policies": {}, "train": train}
    probe = read_probe("", values)
    names = ["seed_3_step_1", "seed_3_step_2", "seed_5_step_1", "seed_5_step_2"]
    assert probe.policy_names == names
    command.Policies(probe, tmp_path, QUIET).policy("seed_5_step_2")
    adapters = [(tmp_path / "policies" / name / ADAPTER_FILE).read_bytes() for name in names]
    assert adapters[0] != adapters[2] and adapters[1] != adapters[3]
    alone = read_probe("", values | {"train": train | {"seeds": [5]}})
    command.Policies(alone, tmp_path / "alone", QUIET).policy("step_2")
    kept = load_file(tmp_path / "alone" / "policies" / "step_2" / ADAPTER_FILE)
    for name, tensor in load_file(tmp_path / "policies" / names[3] / ADAPTER_FILE).items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-3, atol=1e-5)
    with pytest.raises(QeRLError, match=r"2 policies are called 'seed_3_step_1'"):
        read_probe("", values | {"train": train | {"seeds": [3, 3]}})


def test_the_page_and_the_figures_come_from_the_results_alone(finished, tmp_path):
    page = (finished / "probe.html").read_text()
    assert "aqn, 0.1 nats" in page and "://" not in page
    (tmp_path / "copy.json.gz").write_bytes((finished / "results.json.gz").read_bytes())
    command.draw_probe(tmp_path / "copy.json.gz", tmp_path, tmp_path / "figures", QUIET)
    assert (tmp_path / "probe.html").read_text() == page
    assert (tmp_path / "figures" / "probe-wp-formats-prefix_more.svg").read_text().startswith("<svg xmlns=")


def test_an_interrupted_probe_goes_on(probe_file, finished, tmp_path):
    """Stopped within a job: what is measured stays as it is, and the rest comes out as if never stopped."""

    class Interrupted(Console):
        """Presses Ctrl-C when the fourth cell is reported."""

        def print(self, *objects, **options):
            super().print(*objects, **options)
            if "4 of 6 cells" in str(objects[0]):
                raise KeyboardInterrupt

    small = {"formats": {}, "policies": {"start": None}}
    with pytest.raises(KeyboardInterrupt):
        run(probe_file, tmp_path, Interrupted(quiet=True), **small)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "cells").iterdir()}
    assert len(kept) == 4 and "Unfinished: 2 cells are missing" in (tmp_path / "probe.html").read_text()
    assert run(probe_file, tmp_path, **small) == 0
    assert all((tmp_path / "cells" / name).read_bytes() == content for name, content in kept.items())
    whole = read_results(finished / RESULTS_FILE)["cells"]
    for name, cell in read_results(tmp_path / RESULTS_FILE)["cells"].items():
        assert cell["numbers"] == whole[name]["numbers"], name
        if "calibrated" in cell:
            assert cell["strength"] == pytest.approx(whole[name]["strength"], rel=0.03)
    seconds = (tmp_path / "probe.html").stat().st_mtime_ns
    assert run(probe_file, tmp_path, **small) == 0, "nothing is left to measure"
    assert (tmp_path / "probe.html").stat().st_mtime_ns >= seconds


def test_what_cannot_be_compared_yet_is_left_out(finished):
    results = read_results(finished / RESULTS_FILE)
    rows = {row.cell: row.numbers for row in read_rows(results)}
    for name in ("start-wp-clean", "trained-wp-clean-reference", "format-wp-bf16-0-plain"):
        del results["cells"][name]
    part = {row.cell: row.numbers for row in read_rows(results)}
    lost = {name: rows[name].keys() - part[name].keys() for name in part}
    assert lost["start-wp-aqn-0.02"] >= {"success", "gain", "per_nat", "hard"}
    assert lost["trained-wp-aqn-0.02"] == {"hard", "hard_clean"}
    assert lost["format-wp-nvfp4-0-plain"] >= {"success", "gain", "entropy_more", "prefix_more"}
    assert part["start-wp-aqn-0.02"]["kl"] == rows["start-wp-aqn-0.02"]["kl"]


def test_another_number_of_rows_at_once_is_the_same_probe(probe_file, finished):
    cells = {path.name: path.stat().st_mtime_ns for path in (finished / "cells").iterdir()}
    assert run(probe_file, finished, batch_rows=64) == 0
    assert cells == {path.name: path.stat().st_mtime_ns for path in (finished / "cells").iterdir()}


def test_a_folder_is_drawn_without_its_model(finished, tmp_path):
    assert study_command([str(finished)], tmp_path, None, False, QUIET) == 0
    assert "aqn, 0.1 nats" in (tmp_path / "probe.html").read_text()


def test_a_claimed_job_is_left_to_its_process(probe_file, tmp_path):
    small = {"formats": {}, "policies": {"start": None}, "perturbations": {}}
    probe = read_probe("", yaml12.load(probe_file.read_text()) | small)
    fingerprint = checkpoint_fingerprint(probe_file.parent / "model")
    store = Store(tmp_path, {"probe": probe.values(), "fingerprint": fingerprint})
    with store.claimed("start-wp-clean") as mine:
        assert mine and run(probe_file, tmp_path, **small) == 0
    assert not list((tmp_path / "cells").iterdir()) and not (tmp_path / RESULTS_FILE).exists()


def test_a_folder_of_another_probe_is_refused(probe_file, finished):
    before = (finished / "probe.json").read_bytes()
    with pytest.raises(QeRLError, match="holds another probe: its probe is another one"):
        run(probe_file, finished, seed=5)
    assert (finished / "probe.json").read_bytes() == before


def test_results_alone_are_not_written_over(probe_file, finished, tmp_path):
    kept, values = (finished / RESULTS_FILE).read_bytes(), yaml12.load(probe_file.read_text())
    (tmp_path / RESULTS_FILE).write_bytes(kept)
    for dry_run in (True, False):
        with pytest.raises(QeRLError, match=f"has {RESULTS_FILE} without the cells"):
            command.run_probe("", values, tmp_path, None, dry_run, QUIET)
        (tmp_path / "probe.json").write_bytes((finished / "probe.json").read_bytes())
    assert (tmp_path / RESULTS_FILE).read_bytes() == kept


def test_a_dry_run_measures_nothing(probe_file, tmp_path, capsys):
    values = yaml12.load(probe_file.read_text())
    assert command.run_probe("", values, tmp_path / "x", None, True, Console()) == 0
    assert "17 cells in 9 jobs" in capsys.readouterr().out and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem": 3}, r"the key 'problem' is unknown \(did you mean 'problems'\?\)\.$"),
        ({"samples": 4}, "samples is 4; it must be at least 8"),
        ({"tasks": {}}, "tasks is empty"),
        ({"tasks": {"wp": {}}}, "tasks.wp.task is not set"),
        (
            {"perturbations": {"a": {"kind": "noise", "noise_scal": 1}}},
            "'perturbations.a.noise_scal' is unknown",
        ),
        ({"perturbations": {"a": {"kind": "nose"}}}, "perturbations.a.kind is 'nose'; it must be 'noise'"),
        ({"perturbations": {"a/b": {"kind": "noise"}}}, "the name 'a/b' in perturbations"),
        ({"formats": {"a": {"weights": "bf16", "error_of": "b"}}}, "formats.a.error_of names 'b'"),
        ({"train": {"task": "nowhere", "steps": [1]}}, "train.task names 'nowhere'"),
        ({"target_kl": [0]}, "target_kl"),
    ],
)
def test_mistakes_in_a_probe_are_one_sentence(change, message):
    values = {"model": "m", "tasks": {"wp": {"task": "arithmetic"}}} | change
    with pytest.raises(QeRLError, match=message) as caught:
        read_probe("p.yaml", values)
    assert str(caught.value).startswith("In the probe p.yaml: ")


def test_values_make_the_same_probe_again(probe_file):
    probe = read_probe("", yaml12.load(probe_file.read_text()))
    assert make_probe(json.loads(json.dumps(probe.values()))) == probe


def test_random_errors_are_as_large_as_those_of_the_format(tiny_model):
    exact, rounded, noisy = tiny_model(), pack(tiny_model()), tiny_model()
    errors = relative_errors(exact, rounded)
    assert len(errors) == 14 and min(errors.values()) > 0.05 and max(errors.values()) < 0.2
    add_errors(noisy, errors, seed=0)
    assert relative_errors(exact, noisy) == pytest.approx(errors, rel=0.03)
    before, after = weights_of(exact), weights_of(noisy)
    assert (
        abs(float((after["model.layers.0.mlp.up_proj"] - before["model.layers.0.mlp.up_proj"]).mean())) < 0.01
    )


def test_estimates_by_hand():
    """Two problems with 8 samples: half right and none right, clean; 6 and 2 under the perturbation."""
    cell = {"policy": "p", "task": "t", "what": "a", "target": 0.1, "strength": 1.0, "numbers": {
        "problem": [0, 1], "right": [6, 2], "answers": [3, 4], "tokens": [10, 30], "kl": [1.0, 3.0],
        "entropy": [10.0, 60.0], "entropy_pi": [10.0, 60.0], "ratio": [10.0, 30.0],
        "ratio_squared": [20.0, 60.0], "ess": [0.5, 0.7],
    }}  # fmt: skip
    clean = {
        **cell,
        "what": "clean",
        "target": None,
        "numbers": {**cell["numbers"], "right": [4, 0], "answers": [5, 4], "entropy": [5.0, 15.0]},
    }
    reference = {**clean, "numbers": {**cell["numbers"], "right": [5, 0]}}
    cells = {"p-t-clean": clean, "p-t-clean-reference": reference, "p-t-a-0.1": cell}
    rows = {
        row.what: row.numbers
        for row in read_rows({"cells": cells, "probe": {"samples": 8}, "strata": {"t": ["one", "two"]}})
    }
    found = rows["a"]
    assert found["pass@1"].value == 0.5 and found["success"].value == 0.25 and found["solved"].value == 1.0
    assert found["pass@4"].value == pytest.approx((1 + 1 - 15 / 70) / 2)
    assert found["kl"].value == 0.1 and found["entropy_more"].value == pytest.approx(70 / 40 - 20 / 40)
    assert found["gain"].value == pytest.approx(math.log(2)) and found["per_nat"].value == pytest.approx(
        10 * math.log(2)
    )
    assert found["hard"].value == 0.25 and found["hard_clean"].value == 0, "the second problem alone is hard"
    assert found["ess_token"].value == pytest.approx(40**2 / (40 * 80)) and found[
        "ess"
    ].value == pytest.approx(0.6)
    assert found["success/one"].value == 0.25 and found["pass@1/two"].value == 0.25
    assert found["solved_more"].value == 0.5 and found["answers_more"].value == -1.0
    assert found["success"].low == pytest.approx(0.25) and found["pass@1"].low == pytest.approx(0.25)
    assert "success" not in rows["clean"] and np.isfinite(rows["clean"]["pass@1"].value)
