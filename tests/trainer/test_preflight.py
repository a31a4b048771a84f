"""What has to be tried before a run: task, reward files, reporters, optimizer and schedule."""

import pytest

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer.preflight import preflight

ARITHMETIC = {"model": "nowhere/at-all", "task": "arithmetic", "output_dir": "o", "report_to": "none"}
ARITHMETIC |= {"max_steps": -1, "per_device_train_batch_size": 8, "num_generations": 8}


def test_nothing_is_loaded_for_sound_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    (tmp_path / "r.py").write_text("def f(completions, **_): return [0.0] * len(completions)")
    fields = {"reward_files": f"{tmp_path}/r.py:f", "lr_scheduler_type": "cosine_with_min_lr"}
    fields |= {"lr_scheduler_kwargs": {"min_lr": 1e-7}, "optim": "adamw_torch", "warmup_steps": 0.1}
    fields |= {"environment": "guess_number", "tool_timeout": 3}
    parts = preflight(QeRLConfig(**(ARITHMETIC | fields)))
    assert parts.rewards[-1].__name__ == "f"
    assert len(parts.rewards) == len(parts.task.rewards) + 1
    assert type(parts.environment_factory()).__name__ == "GuessNumber"
    assert preflight(QeRLConfig(**(ARITHMETIC | {"tools": "calculator"}))).tools[0](expression="6*7") == "42"
    for name in ("gsm8k", "bigmath", "dapo-math"):
        preflight(QeRLConfig(**(ARITHMETIC | {"task": name})))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "gsm9k"}, "gsm8k"),
        ({"task_options": {"levle": "wp1"}}, "level"),
        ({"task_options": {"level": 3}}, "level"),
        ({"task": "jsonl:/nowhere.jsonl"}, "nowhere.jsonl"),
        ({"reward_files": "nowhere.py:f"}, "does not exist"),
        ({"reward_files": "a"}, "not of the form PATH.py:function"),
        ({"tools": "nowhere.py:f"}, "The tool file nowhere.py does not exist"),
        ({"tools": "abacus"}, "The tool 'abacus' is unknown"),
        ({"environment": "chess"}, "The environment 'chess' is unknown"),
        ({"environment": "calculator", "environment_options": {"x": 1}}, "do not fit Calculator"),
        ({"environment": "calculator", "tools": "calculator"}, "cannot be combined with tools"),
        ({"environment_options": {"x": 1}}, "there is no environment"),
        (
            {"reward_weights": [1.0]},
            "reward_weights has 1 numbers for 2 reward functions: .*; give one number for each",
        ),
        ({"report_to": "wandb"}, "wandb, which is not installed"),
        ({"optim": "galore_adamw"}, "optimizer galore_adamw cannot be made"),
        ({"optim_args": "foo"}, "cannot be made .*; mend optim or optim_args"),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"x": 1}},
            "schedule cosine cannot be made .*; mend lr_scheduler_type",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "schedule cosine_with_min_lr cannot be made"),
        ({"model": "./nowhere"}, "The model ./nowhere is a path that does not exist"),
        ({"weights": "nf4", "use_cpu": True}, "nf4 weights need a CUDA device"),
        (
            {"kv_cache_dtype": "fp8", "use_cpu": True},
            r"cannot run \(the model is not on a CUDA device\); set kv_cache_dtype: auto",
        ),
        (
            {"backward_dtype": "fp8", "use_cpu": True},
            "fp8 is not available here: the model is not on a CUDA device; set backward_dtype: auto",
        ),
        ({"task_options": {"train_size": 0}}, "no problems"),
        (
            {"task_options": {"train_size": 3}, "gradient_accumulation_steps": 4},
            "A step needs 4 prompts but the task arithmetic has 3; give it more",
        ),
        (
            {
                "task_options": {"train_size": 12},
                "gradient_accumulation_steps": 4,
                "num_train_epochs": 2,
                "noise": True,
            },
            "10 stages but the run only 6 steps",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused(fields, message):
    with pytest.raises(QeRLError, match=message):
        preflight(QeRLConfig(**(ARITHMETIC | fields)))
