"""Rows, rewards and settings that tests hand to `QeRLTrainer`."""

from pathlib import Path

from datasets import Dataset

from qerl.settings.config import QeRLConfig

ROWS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": "x" * length}] for length in (2, 3, 4, 40, 50, 60)]}
)


def ones(completions, **_):
    return [1.0] * len(completions)


def first_letter(completion_ids, **_):
    return [float(ids[0] % 5) for ids in completion_ids]


SMALL = {
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_completion_length": 4,
    "report_to": "none",
    "use_cpu": True,
}


def run_settings(output: Path, **fields) -> QeRLConfig:
    """Settings of a short run on the CPU without noise."""
    return QeRLConfig(**({"output_dir": str(output), "noise": False} | SMALL | fields))
