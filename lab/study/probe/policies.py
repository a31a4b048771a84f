"""The policies of a probe: models in their formats, with adapters, and the clean runs that make some of them.

Two models are in memory at most, the one that is sampled and the one whose prefixes are read; jobs come
ordered by policy, so each is loaded once or twice.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from lab.study.arms import Arm, Run
from lab.study.batched.trainer import BatchedTrainer, Settings
from lab.study.named import find_model, find_task
from lab.study.probe.spec import Format, Probe
from lab.study.weights import dense_weight
from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.groups import is_quantized
from qerl.lora.adapter import check_adapter, load_adapter
from qerl.models.fingerprint import check_base
from qerl.models.hub import LocalModel
from qerl.models.load import check_format, load_model, load_tokenizer
from qerl.seeding import generator


class Policies:
    """Loads the policies of a probe.

    Args:
        probe: The probe.
        folder: Of the probe; adapters that are trained here are kept in it.
        console: Where it is said what is loaded.
    """

    def __init__(self, probe: Probe, folder: Path, console: Console) -> None:
        self._probe, self._folder, self._console = probe, folder, console
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._loaded: dict[str, nn.Module] = {}
        self._errors: dict[str, dict[str, float]] = {}

    @cached_property
    def model(self) -> LocalModel:
        """The base model, which is fetched or made on the first call."""
        return find_model(self._probe.model)

    def check(self) -> None:
        """Refuse formats and adapters that cannot be loaded here, before anything is.

        Raises:
            QeRLError: One of them.
        """
        check_format(self._probe.weights, self.device)
        for format in self._probe.formats.values():
            check_format(format.weights, self.device)
        for adapter in filter(None, self._probe.policies.values()):
            check_adapter(Path(adapter).expanduser())
            if doubt := check_base(Path(adapter).expanduser(), self._probe.model):
                self._console.print(doubt, markup=False, highlight=False, soft_wrap=True)

    def policy(self, name: str) -> nn.Module:
        """The policy of this name, in the probe's format."""

        def make() -> nn.Module:
            adapter = self._adapter(name)
            model: Any = self._load(Format(self._probe.weights, self._probe.rounding))
            return model if adapter is None else load_adapter(model, adapter)

        return self._kept(f"policy {name}", make)

    def format(self, name: str, draw: int = 0) -> nn.Module:
        """The untrained policy of a format; `draw` counts those with random errors."""

        def make() -> nn.Module:
            format = self._probe.formats[name]
            model = self._load(format)
            if format.error_of is not None:
                if format.error_of not in self._errors:
                    rounded = self._load(self._probe.formats[format.error_of])
                    self._errors[format.error_of] = relative_errors(model, rounded)
                add_errors(model, self._errors[format.error_of], self._probe.seed + draw)
            return model

        return self._kept(f"format {name} {draw}", make)

    @torch.no_grad()
    def error(self, name: str, draw: int) -> float:
        """Relative error (root mean square) of a format's weights against those of the first format."""
        first = next(iter(self._probe.formats))
        reference, model = weights_of(self.format(first)), weights_of(self.format(name, draw))
        off = sum((model[key] - reference[key]).square().sum() for key in reference)
        return float((off / sum(weight.square().sum() for weight in reference.values())) ** 0.5)

    def _kept(self, key: str, make: Callable[[], nn.Module]) -> nn.Module:
        """A model that is in memory, or is made in the place of the one that was not asked for longest."""
        model = self._loaded.pop(key, None)
        if model is None:
            while len(self._loaded) > 1:
                del self._loaded[next(iter(self._loaded))]
            model = make()
        self._loaded[key] = model
        return model

    def _load(self, format: Format) -> PreTrainedModel:
        return load_model(
            self.model, format.weights, dtype=self._dtype, device=self.device, rounding=format.rounding
        )

    def _adapter(self, name: str) -> Path | None:
        if name in self._probe.policies:
            given = self._probe.policies[name]
            return None if given is None else Path(given).expanduser()
        folder = self._folder / "policies" / name
        with FileLock(self._folder / "policies.lock"):
            if not folder.exists():
                self._train()
        return folder

    def _train(self) -> None:
        """Train the clean runs and keep their adapters."""
        training = self._probe.train
        assert training is not None
        self._console.print(
            f"Training {max(training.steps)} clean steps on {training.task}.", highlight=False
        )
        choice = self._probe.tasks[training.task]
        arm = Arm("clean", weights=self._probe.weights, rounding=self._probe.rounding)
        trainer = BatchedTrainer(
            self._load(Format(self._probe.weights, self._probe.rounding)),
            load_tokenizer(self.model),
            find_task(choice.task, choice.task_options),
            [Run(arm, seed, training.learning_rate) for seed in training.seeds],
            Settings(
                steps=max(training.steps),
                prompts_per_step=training.prompts_per_step,
                samples_per_prompt=training.samples_per_prompt,
                max_completion_length=self._probe.max_completion_length,
            ),
        )
        for step in range(1, max(training.steps) + 1):
            for run, (seed, record) in enumerate(zip(training.seeds, trainer.step(), strict=True)):
                if record["diverged"]:
                    raise QeRLError(
                        f"The clean run of seed {seed} diverged in step {step}; lower "
                        "train.learning_rate, or give adapters in policies."
                    )
                if step in training.steps:
                    self._keep(trainer, run, training.policy(seed, step))

    def _keep(self, trainer: BatchedTrainer, run: int, name: str) -> None:
        """Save a run's adapter as a policy, where it is not there yet."""
        folder = self._folder / "policies" / name
        if not folder.exists():
            aside = folder.with_name(f".{name}")
            trainer.save_adapter(run, aside)
            aside.rename(folder)


@torch.no_grad()
def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The dequantised weights [N, K], fp32, of the linears that the formats differ in, by name."""
    return {
        name: dense_weight(module, torch.float32)
        for name, module in base_model(model).named_modules()
        if is_quantized(name) and hasattr(module, "in_features")
    }


def relative_errors(exact: nn.Module, rounded: nn.Module) -> dict[str, float]:
    """Relative error (root mean square) of each matrix of a model against the same one of another."""
    reference, weights = weights_of(exact), weights_of(rounded)
    return {
        name: float((weights[name] - weight).norm() / weight.norm()) for name, weight in reference.items()
    }


@torch.no_grad()
def add_errors(model: nn.Module, errors: Mapping[str, float], seed: int) -> None:
    """Add Gaussian noise to 16-bit or FP32 weights, with these relative errors, in place."""
    for name, error in errors.items():
        weight = base_model(model).get_submodule(name).get_parameter("weight")
        noise = torch.randn(weight.shape, generator=generator("weight errors", seed, name)).to(weight.device)
        rms = weight.float().square().mean().sqrt()
        weight.copy_(weight.float() + error * rms * noise)
