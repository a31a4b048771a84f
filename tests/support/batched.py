"""What tests of batched runs share: a task whose rewards differ, an arm, a batch of runs, and the trainer."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from lab.study.arms import Arm, Run
from lab.study.batched.adapters import Adapters
from lab.study.batched.trainer import BatchedTrainer, Settings
from qerl.lora.adapter import add_lora
from qerl.rewards.text import completion_text
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.tasks.base import Task
from qerl.tasks.formats import get_format
from qerl.tasks.guard import judges_alone
from qerl.trainer.grpo import QeRLTrainer
from tests.support.models import make_tiny_model, make_tiny_tokenizer, pack

RATE = 1e-2
SIZES = {"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 4, "max_completion_length": 6}
TOKENIZER = make_tiny_tokenizer()
SYSTEM = {"role": "system", "content": "Say anything at all."}
"""Makes what all prompts share the larger part of each."""


class Sums(Task):
    """The reward of a text is a number from 0 to 4, different within most groups of random texts."""

    strata = "steps"

    def __init__(self) -> None:
        super().__init__("sums", get_format("hashes"))

    def train(self) -> Dataset:
        questions = ["one two", "three", "four five six", "seven eight", "nine", "ten eleven"]
        return Dataset.from_list(
            [
                {"prompt": [SYSTEM, {"role": "user", "content": text}], "answer": str(i), "steps": i % 2 + 1}
                for i, text in enumerate(questions)
            ]
        )

    test = train

    @property
    def rewards(self) -> list[Any]:
        @judges_alone
        def accuracy(prompts, completions, **_):
            return [float(sum(map(ord, completion_text(text))) % 5) for text in completions]

        return [accuracy]


def matrices_of(adapters: Adapters, storage_SE: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the first run has in a tensor laid out as the adapters, by the names of PEFT's parameters."""
    found = {}
    for place, adapted in zip(adapters.places, adapters.views(storage_SE).products, strict=True):
        for name, a, b in zip(place.names, adapted.a[0].chunk(len(place.names)), adapted.b, strict=True):
            found[f"base_model.model.{name}.lora_A.default.weight"] = a
            found[f"base_model.model.{name}.lora_B.default.weight"] = b[0]
    return found


def with_adapter(model, adapters: Adapters, run: int):
    """A model of transformers with the adapter of a run, as PEFT computes it."""
    targets = list({name.rpartition(".")[2] for place in adapters.places for name in place.names})
    adapted = get_peft_model(
        model, LoraConfig(r=adapters.rank, lora_alpha=adapters.rank, target_modules=targets)
    )
    parameters = {name: one for name, one in adapted.named_parameters() if "lora_" in name}
    found = matrices_of(adapters, adapters.values_SE[run:])
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(found[name])
    return adapted


def tiny_base(family: str = "llama"):
    """A tiny random model with packed projections, the same in each call."""
    return pack(make_tiny_model(family))


def an_arm(**changes: Any) -> Arm:
    """An arm with strong noise in the second half of its four steps."""
    values = {"name": "arm", "lora_r": 4, "noise": True, "noise_stages": 2, "noise_sigma_start": 0.05}
    return Arm(**(values | changes))


def full_arm(**changes: Any) -> Arm:
    """An arm of full tuning."""
    return Arm(**({"name": "full", "tuning": "full", "weights": "bf16"} | changes))


def a_batch(
    *runs: Run,
    family: str = "llama",
    followed=None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> BatchedTrainer:
    """A batch on a tiny model; one run of `an_arm` if none is given."""
    chosen = runs or (Run(an_arm(), 7, RATE),)
    settings = Settings(**(SIZES | changes))
    base = make_tiny_model(family) if chosen[0].arm.tuning == "full" else tiny_base(family)
    return BatchedTrainer(base.to(device, dtype), TOKENIZER, Sums(), chosen, settings, followed)


def the_trainer(folder: Path, seed: int, family: str = "llama", **changes: Any) -> QeRLTrainer:
    """The project's trainer with the settings of a run of `a_batch`."""
    task, model = Sums(), add_lora(tiny_base(family), 4, 4, 0.0, seed=seed)
    values = {
        "output_dir": str(folder), "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 4,
        "max_completion_length": 6, "loss_type": "grpo", "gradient_checkpointing": False, "use_cpu": True,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "adam_beta2": 0.99, "seed": seed,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "noise": True, "noise_stages": 2,
        "noise_sigma_start": 0.05,
    }  # fmt: skip
    return QeRLTrainer(
        model, task.rewards, QeRLConfig(**(values | changes)), task.train(),
        engine=PortableEngine(model, TOKENIZER.pad_token_id), processing_class=TOKENIZER,
    )  # fmt: skip
