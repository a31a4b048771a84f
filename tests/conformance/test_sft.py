"""Supervised fine-tuning: losses, gradients and weights of several optimizer steps are those of TRL's `SFTTrainer`."""

import contextlib
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from qerl.settings.config import QeRLConfig
from qerl.trainer.sft import QeRLSFTTrainer
from tests.conformance.harness import Bench, trained

SAME = 1e-5

SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "optim": "sgd",  # Adam divides by small gradients, which enlarges rounding
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "shuffle_dataset": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


WORDS = ["one", "two and three", "four", "five six seven eight", "nine", "ten is more than nine", "a dozen"]
CHATS = Dataset.from_dict(
    {
        "messages": [
            [user(word), assistant(f"{word}!" * n), user("more"), assistant(word)]
            for n, word in enumerate(WORDS, 1)
        ]
    }
)
PAIRS = Dataset.from_dict(
    {
        "prompt": [[user(word)] for word in WORDS],
        "completion": [[assistant(f"{word}!" * n)] for n, word in enumerate(WORDS, 1)],
    }
)
TEXTS = Dataset.from_dict(
    {"prompt": WORDS, "completion": [f" {word}!" * n for n, word in enumerate(WORDS, 1)]}
)
ALL = {"assistant_only_loss": False}
CASES = {
    "messages, every token": (CHATS, ALL),
    "a prompt and its completion": (PAIRS, {}),
    "prompts count, too": (PAIRS, {"completion_only_loss": False}),
    "text": (TEXTS, {}),
    "microbatches of unlike length": (PAIRS, {"gradient_accumulation_steps": 2}),
    "one demonstration a microbatch": (
        PAIRS,
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    ),
    "cut": (PAIRS, {"max_length": 30}),
    "Adam": (PAIRS, {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3}),
}


def made(bench: Bench, ours: bool, tuning: str, rows: Dataset, options: dict[str, Any], **given: Any) -> Any:
    values = SHARED | {"output_dir": str(bench.folder), "num_train_epochs": 2} | options
    model, given = bench.policy(tuning), {"processing_class": bench.tokenizer, "train_dataset": rows} | given
    if ours:
        full = {"tuning": "full", "weights": "bf16"} if tuning == "full" else {}
        return QeRLSFTTrainer(model, args=QeRLConfig(**full, **values, algorithm="sft"), **given)
    return SFTTrainer(model, args=SFTConfig(**values, train_sampling_strategy="sequential"), **given)


def run(
    bench: Bench, ours: bool, tuning: str, rows: Dataset, options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    trainer = made(bench, ours, tuning, rows, options)
    start = trained(trainer.model)
    with contextlib.redirect_stdout(None):
        trainer.train()
    return trainer, start, trained(trainer.model)


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def check_same(bench: Bench, tuning: str, rows: Dataset, options: dict[str, Any]) -> None:
    theirs, start, wanted = run(bench, False, tuning, rows, options)
    ours, _, found = run(bench, True, tuning, rows, options)
    for name in ("loss", "grad_norm"):  # the first step's is that of the untrained model
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=SAME)
    assert len(logged(ours, "loss")) >= 4
    went = sum((wanted[n] - start[n]).square().sum() for n in wanted)
    apart = sum((wanted[n] - found[n]).square().sum() for n in wanted)
    assert went > 0 and float((apart / went).sqrt()) < (1e-3 if "optim" in options else SAME)


@pytest.mark.parametrize("case", CASES)
def test_several_steps_are_those_of_trl(bench, case):
    check_same(bench, "lora", *CASES[case])


def test_several_steps_of_all_weights(bench):
    check_same(bench, "full", PAIRS, {"gradient_accumulation_steps": 2})
