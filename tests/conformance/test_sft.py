"""Supervised fine-tuning: losses, gradients and weights of several steps are those of TRL's `SFTTrainer`."""

import contextlib
import copy
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
    "Adam": (  # its epsilon is above the rounding of gradients, by which it would divide
        PAIRS,
        {"optim": "adamw_torch", "adam_epsilon": 1e-4, "weight_decay": 0.1, "learning_rate": 1e-3},
    ),
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
    assert went > 0 and float((apart / went).sqrt()) < SAME


@pytest.mark.parametrize("case", CASES)
def test_several_steps_are_those_of_trl(bench, case):
    check_same(bench, "lora", *CASES[case])


def test_several_steps_of_all_weights(bench):
    check_same(bench, "full", PAIRS, {"gradient_accumulation_steps": 2})


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_assistants_tokens_are_those_of_trl_with_a_template_that_marks_them_and_without(bench):
    """TRL needs the marks; the same template without them gives the same by its prefixes."""
    unmarked, marked = copy.deepcopy(bench), copy.deepcopy(bench)
    marked.tokenizer.chat_template = MARKED
    only = {"assistant_only_loss": True, "gradient_accumulation_steps": 2}
    theirs, _, wanted = run(marked, False, "lora", CHATS, only)
    for ours in (marked, unmarked):
        trainer, _, found = run(ours, True, "lora", CHATS, only)
        assert logged(trainer, "loss") == pytest.approx(logged(theirs, "loss"), rel=SAME)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-8, rtol=SAME) for name in wanted)


def test_gradients_of_a_step_are_those_of_trl(bench, monkeypatch):
    """Before the optimizer and its clipping."""
    seen: list[dict[str, torch.Tensor]] = []
    step = torch.optim.SGD.step

    def spy(self, *args, **kwargs):
        seen.append({f"{i}": p.grad.clone() for g in self.param_groups for i, p in enumerate(g["params"])})
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    options = {"max_steps": 2, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
    for ours in (False, True):
        run(bench, ours, "lora", PAIRS, options)
    for wanted, found in zip(seen[:2], seen[2:], strict=True):
        scale = max(float(gradient.abs().max()) for gradient in wanted.values())
        assert scale > 1e-3
        assert all(float((found[i] - wanted[i]).abs().max()) < SAME * scale for i in wanted)


def test_held_out_loss_of_one_batch_is_that_of_trl(bench):
    options = {"per_device_eval_batch_size": len(WORDS)}
    losses = []
    for ours in (False, True):
        own = options | ({"num_generations_eval": 1} if ours else {})
        losses.append(made(bench, ours, "lora", PAIRS, own, eval_dataset=PAIRS).evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=SAME)
