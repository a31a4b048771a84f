"""The tables of recipes and steps through the server say what their results hold."""

import json

import pytest

from lab.writers import serve_tables
from qerl.errors import QeRLError

HEAD = {"commit": "abcdef0", "date": "2026-11-23 05:00 UTC", "command": "python -m bench cookbook"}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.result.RESULTS", tmp_path)

    def write(name, found, **shared):
        (tmp_path / f"{name}.json").write_text(json.dumps({**HEAD, **shared, "rows": found}))

    return write


def arm(noise, rate, run, rewards):
    found = {"engine": "portable", "noise": noise, "learning_rate": rate, "run": run, "status": "finished"}
    return {**found, "reward": rewards, "correct": [0.5 * reward for reward in rewards]}


SHARED = {
    "machine": "32 CPU cores", "groups": 8, "group_size": 4, "max_tokens": 12, "rank": 32, "steps": 10,
    "versions": {"tinker-cookbook": "0.6.1", "tinker": "0.38.0"},
}  # fmt: skip


def test_learning_stands_beside_its_control(results):
    found = [
        arm(False, 0.0, 0, [0.0] * 10),
        arm(False, 3e-4, 0, [0.0] * 4 + [9.0] + [0.8] * 4 + [7.0]),
        arm(False, 3e-4, 1, [0.2] * 4 + [9.0] * 2 + [0.4] * 4),
        arm(True, 3e-4, 0, [0.1] * 9) | {"status": "ended after its time"},  # a step before the others
    ]
    results("cpu", found, **SHARED)
    lines = serve_tables.learning("cpu").splitlines()
    assert lines[2:5] == [
        "| CPU | no | 0 | 0.000 (0.000 to 0.000) | 0.000 (0.000 to 0.000) | 0.000 (0.000 to 0.000) | "
        "0.000 (0.000 to 0.000) |",
        "| CPU | no | 0.0003 | 0.100 (0.000 to 0.200) | 1.675 (0.800 to 2.550) | 0.050 (0.000 to 0.100) | "
        "0.837 (0.400 to 1.275) |",
        "| CPU | yes | 0.0003 | 0.100 (0.100 to 0.100) | 0.100 (0.100 to 0.100) | 0.050 (0.050 to 0.050) | "
        "0.050 (0.050 to 0.050) |",
    ]
    runs = "2 runs that learn and 1 of learning rate 0 with each setting of noise"
    assert f"8 problems x 4 samples, {runs}, the 9 of 10 steps that all of them made" in lines[-1]
    assert "32 CPU cores" in lines[-1]


def test_servers_of_others_stand_beside_ours(results):
    def server(name, weights, seconds, **more):
        steps = [{"total_s": 9.0}, *({"total_s": one} for one in seconds)]
        found = {"server": name, "weights": weights, "warm_up": 1, "steps": steps, "client": "0.38.0"}
        found |= {"sample_s": 1.0, "update_s": 2.0, "total_s": 3.0, "tokens_per_s": 99.6, "lora_rank": 8}
        return found | {"prompts": 2, "samples": 3, "prompt_tokens": 4, "completion_tokens": 5} | more

    other = server("other 1.0", "bf16", [6.0], total_s=6.25, settings={"train_micro_batch_size": 7})
    results("rivals", [server("ours", "nvfp4", [3.0, 3.0]), other], gpu="NVIDIA H200")
    lines = serve_tables.rivals("rivals").splitlines()
    assert lines[2:4] == [
        "| ours | NVFP4 | 1.00 | 2.00 | 3.00 | 100 |",
        "| other 1.0 | 16-bit | 1.00 | 2.00 | 6.25 | 100 |",
    ]
    assert "medians of 2 and 1 steps behind the first" in lines[-1] and "7 sequences a pass" in lines[-1]
    said = serve_tables.rival_numbers("rivals")
    assert (said["serve-rival-ours"](), said["serve-rival-theirs"]()) == ("3.0 s", "6.2 s")


@pytest.mark.parametrize("status", ["failed", None])
def test_runs_that_failed_are_refused(results, status):
    found = [arm(False, 0.0, 0, [0.0] * 10), arm(False, 3e-4, 0, [0.0] * 10) | {"status": status}]
    results("cpu", found, **SHARED)
    with pytest.raises(QeRLError, match=r"^1 of 2 runs in cpu\.json failed"):
        serve_tables.learning("cpu")


def test_begin_and_end_do_not_overlap(results):
    results("cpu", [arm(False, 0.0, 0, [0.0] * 10), arm(True, 0.0, 0, [0.0] * 7)], **SHARED)
    with pytest.raises(QeRLError, match=r"cpu\.json have 7 steps in common"):
        serve_tables.learning("cpu")


STEP = {
    "shape": "7b", "weights": "nvfp4", "lora_rank": 32, "prompts": 16, "samples": 8, "prompt_tokens": 256,
    "completion_tokens": 1024, "gpu": "NVIDIA H200", "tokens_per_forward": 4096, "every_n_layers": 29,
}  # fmt: skip
TRAINED = STEP | {"rollout_s": 4.0, "update_s": 6.0, "total_s": 10.0, "peak_gb": 50.0, "steps": [{}] * 4}
SERVED = STEP | {
    "sample_s": 5.0, "update_s": 6.5, "total_s": 11.5, "peak_gb": 51.0, "allocated_gb": 49.5,
    "planned_gb": 52.0, "adapters": 1,
    "steps": [{}] * 3, "held_tokens_per_forward": 4096, "held_every_n_layers": 29,
}  # fmt: skip


def test_a_step_stands_beside_the_trainers(results):
    results("step", [TRAINED | {"completion_tokens": 512, "total_s": 1.0}, TRAINED])
    results("one", [SERVED])
    results("more", [SERVED | {"adapters": 8, "steps": [{}], "total_s": 99.0}])
    lines = serve_tables.steps("step", "one", "more").splitlines()
    assert lines[2:5] == [
        "| `qerl train` | 4.00 | 6.00 | 10.00 | | 50.0 | | |",
        "| `qerl serve`, 1 adapter | 5.00 | 6.50 | 11.50 | 1.15 | 51.0 | 49.5 | 52.0 |",
        "| `qerl serve`, 8 adapters | | | | | 51.0 | 49.5 | 52.0 |",
    ]
    assert "H200, 2026-11-23, commit abcdef0" in lines[-1]
    for said in (
        "4096 tokens at a time, no layer computed",
        "of one client",
        "segments that torch's allocator keeps",
        "of 3 steps, for `qerl train` of 4",
    ):
        assert said in lines[-1]


@pytest.mark.parametrize(
    ("trained", "more", "said"),
    [
        ({"tokens_per_forward": 8192}, {}, "step.json has 0 rows with .*tokens_per_forward 4096"),
        ({"every_n_layers": 1}, {}, "step.json has 0 rows with .*every_n_layers 29"),
        ({}, {"tokens_per_forward": 8192, "held_tokens_per_forward": 8192}, "differ in tokens_per_forward"),
        (
            {},
            {"held_tokens_per_forward": 2048},
            "With 8 adapters tokens_per_forward was 4096 and became 2048",
        ),
        ({}, {"held_every_n_layers": 1}, "With 8 adapters every_n_layers was 29 and became 1"),
    ],
)
def test_steps_that_are_not_the_same_are_not_compared(results, trained, more, said):
    results("step", [TRAINED | trained])
    results("one", [SERVED])
    results("more", [SERVED | {"adapters": 8} | more])
    with pytest.raises(QeRLError, match=said):
        serve_tables.steps("step", "one", "more")
