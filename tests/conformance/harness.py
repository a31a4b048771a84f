"""TRL's trainer and ours, given the same model, the same settings and the same samples.

Completions and the sampler's log-probabilities are scripted: they depend on the number of the call alone, so
both trainers see the same ones whatever they learn. TRL is fed through its seam for a vLLM client, ours
through an engine. Log-probabilities are drawn from [-7, -3.5], around the tiny model's own, so that the ratio
pi_trainer / pi_sampler lies on both sides of every bound.

Two things are made equal because they differ on purpose: defaults (ours are passed to TRL), and the order of
data and microbatches (TRL shuffles samples over the microbatches of a rollout, ours keeps groups together).
"""

import contextlib
import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from qerl.lora.adapter import add_lora
from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer

GROUP = 4
PROMPTS = ["one two", "three", "four five six", "seven eight", "nine", "ten", "eleven", "a dozen"]
DATA = Dataset.from_dict({"prompt": PROMPTS})

# Four steps of Adam in FP32 differ by rounding, which Adam's division by small gradients enlarges.
SAME = 2e-4

# What both trainers are given; for TRL these are no defaults, for ours most are.
SHARED: dict[str, Any] = {
    "num_generations": GROUP,
    "per_device_train_batch_size": 2 * GROUP,
    "per_device_eval_batch_size": 2 * GROUP,
    "max_completion_length": 6,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "loss_type": "grpo",
    "epsilon_high": 0.2,
    "vllm_importance_sampling_mode": "token_truncate",
    "shuffle_dataset": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
}
# What only ours has.
OWN: dict[str, Any] = {"noise": False}


class Script:
    """Scripted samples; remembers the prompts that it was asked for."""

    def __init__(self, stop: int, vocabulary: int, longest: int) -> None:
        self.stop, self.vocabulary, self.longest = stop, vocabulary, longest
        self.asked: list[list[list[int]]] = []

    def __call__(self, prompts: list[list[int]], samples: int) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probabilities of each sample; about one of six is cut off."""
        draw = torch.Generator().manual_seed(len(self.asked))
        self.asked.append(prompts)
        out = []
        for _ in range(len(prompts) * samples):
            length = int(torch.randint(1, self.longest + 1, (), generator=draw))
            ids = torch.randint(5, 100, (length,), generator=draw).tolist()
            if length < self.longest:
                ids[-1] = self.stop
            out.append((ids, (-3.5 - 3.5 * torch.rand(length, generator=draw)).tolist()))
        return out


class Client:
    """What TRL's trainer expects of a vLLM client."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> tuple:
        samples = self.script(prompts[::num_generations], num_generations)
        return prompts, [ids for ids, _ in samples], [[[p] for p in logps] for _, logps in samples], None


class Engine(RolloutEngine):
    """What ours expects."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def generate(
        self,
        prompts: Any,
        samples_per_prompt: int,
        params: Any,
        norm_offsets: Any = None,
        seeds: Any = None,
    ) -> Any:
        samples = self.script(prompts, samples_per_prompt)
        completions = [Completion(ids, logps, [4.0] * len(ids), "stop") for ids, logps in samples]
        return RolloutResult(completions, 1, sum(len(ids) for ids, _ in samples), 0.5)


@dataclass
class Run:
    """How a run ended.

    Attributes:
        weights: What was trained, by name.
        start: The same before training.
        trainer: The trainer, with its log.
        script: The samples, with the prompts asked for.
    """

    weights: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]
    trainer: GRPOTrainer
    script: Script

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was logged of training steps."""
        return [row for row in self.trainer.state.log_history if "loss" in row]

    def distance(self, other: "Run") -> float:
        """How far two runs' weights are apart, as a share of how far this one went."""
        apart = sum((self.weights[n] - other.weights[n]).square().sum() for n in self.weights)
        went = sum((self.weights[n] - self.start[n]).square().sum() for n in self.weights)
        assert went > 0
        return float((apart / went).sqrt())


@dataclass
class Bench:
    """Makes both trainers from the same start.

    Attributes:
        model: The base model, in FP32; a folder of its own holds it, where TRL finds its reference model.
        tokenizer: Its tokenizer.
        folder: Where runs write.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    runs: dict[str, Run] = field(default_factory=dict)

    def policy(self, tuning: str, dropout: float = 0.0) -> Any:
        """A copy of the model; with LoRA, adapters whose B is zero."""
        model = copy.deepcopy(self.model)
        return model if tuning == "full" else add_lora(model, rank=4, alpha=16, dropout=dropout, seed=1)

    def trainer(
        self, ours: bool, tuning: str, rewards: Any = None, data: Any = DATA, own: Any = None,
        **options: Any,
    ) -> tuple[GRPOTrainer, Script]:  # fmt: skip
        """One of the two trainers, not yet started.

        Args:
            ours: Whether ours.
            tuning: lora or full.
            rewards: Reward functions.
            data: Training set.
            own: Settings that only ours has.
            options: Settings; `eval_dataset` and `callbacks` go to the constructor.
        """
        given = {name: options.pop(name) for name in ("eval_dataset", "callbacks") if name in options}
        values = SHARED | {"output_dir": str(self.folder)} | options
        script = Script(self.tokenizer.eos_token_id, 100, values["max_completion_length"])
        model, rewards = self.policy(tuning), [copy.copy(r) for r in rewards or [sum_reward]]
        given["processing_class"] = self.tokenizer
        if ours:
            full = {"tuning": "full", "weights": "bf16"} if tuning == "full" else {}
            args = QeRLConfig(**(OWN | full | values | (own or {})))
            return QeRLTrainer(model, rewards, args, data, engine=Engine(script), **given), script
        trainer = GRPOTrainer(model, rewards, GRPOConfig(**values), data, **given)
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        trainer.vllm_generation = Client(script)
        return trainer, script

    def run(self, ours: bool, tuning: str = "lora", **options: Any) -> Run:
        """Train, and say how it ended."""
        trainer, script = self.trainer(ours, tuning, **options)
        start = trained(trainer.model)
        with contextlib.redirect_stdout(None):
            trainer.train()
        return Run(trained(trainer.model), start, trainer, script)

    def both(self, **options: Any) -> tuple[Run, Run]:
        """TRL's run and ours, which end with the same weights."""
        theirs, ours = self.run(False, **options), self.run(True, **options)
        assert theirs.script.asked == ours.script.asked
        assert theirs.distance(ours) < SAME
        return theirs, ours

    def default(self, tuning: str) -> Run:
        """TRL's run without any option, made once."""
        if tuning not in self.runs:
            self.runs[tuning] = self.run(False, tuning)
        return self.runs[tuning]


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def sum_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]
