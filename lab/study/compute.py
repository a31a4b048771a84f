"""Trainers of a study's batches, on the study's model, task and data.

The base model is loaded once per format of weights and kept until an arm needs another format, so arms of one
format should be adjacent in the study's file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lab.study.arms import Arm, Run
from lab.study.batched.trainer import BatchedTrainer, Settings
from lab.study.followed import Followed
from lab.study.named import find_model, find_task
from lab.study.runner import BatchTrainer
from lab.study.spec import Study
from qerl import __version__
from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.load import check_format, load_model, load_tokenizer


class StudyMake:
    """Makes the trainers of a study's batches, on the GPU where there is one.

    Args:
        study: The study.

    Attributes:
        facts: Versions, device, dtype and the model's fingerprint, for the record of each run.

    Raises:
        QeRLError: The model or task is not found, the task has too few held-out problems, or the format of an
            arm is not available on this machine.
    """

    def __init__(self, study: Study) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        for arm in study.arms.values():
            check_format(arm.weights, self.device)
        self.model = find_model(study.model)
        self.tokenizer = load_tokenizer(self.model)
        self.task = find_task(study.task, study.task_options)
        self.task.opening = Chat(self.tokenizer).opening
        problems = self.task.test()
        if len(problems) < study.eval_samples:
            raise QeRLError(
                f"eval_samples is {study.eval_samples}, but the task {study.task} has only {len(problems)} "
                "held-out problems; lower eval_samples."
            )
        self.problems = problems.select(range(study.eval_samples))
        self.settings = Settings(
            steps=study.steps,
            prompts_per_step=study.prompts_per_step,
            samples_per_prompt=study.samples_per_prompt,
            max_completion_length=study.max_completion_length,
            tokens_per_forward=study.tokens_per_forward,
            rows_at_once=study.rows_at_once,
        )
        self.facts: Mapping[str, Any] = {
            "qerl": __version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "dtype": str(self.dtype).removeprefix("torch."),
            "fingerprint": checkpoint_fingerprint(self.model.folder),
        }
        self._held: tuple[Any, PreTrainedModel] | None = None

    def __call__(self, runs: Sequence[Run], followed: Sequence[Followed | None]) -> BatchTrainer:
        """Make a trainer of these runs, which are of one arm."""
        base = self._base(runs[0].arm)
        trainer = BatchedTrainer(base, self.tokenizer, self.task, runs, self.settings, followed)
        return _OnProblems(trainer, self.problems)

    def _base(self, arm: Arm) -> PreTrainedModel:
        format = (arm.weights, arm.rounding)
        if self._held is None or self._held[0] != format:
            self._held = None  # frees the former model first
            self._held = (
                format,
                load_model(self.model, arm.weights, self.dtype, self.device, rounding=arm.rounding),
            )
        return self._held[1]


class _OnProblems:
    """A batch's trainer that evaluates on the study's held-out problems."""

    def __init__(self, trainer: BatchedTrainer, problems: Any) -> None:
        self.trainer = trainer
        self.problems = problems
        self.step = trainer.step
        self.state = trainer.state
        self.load_state = trainer.load_state

    def evaluate(self, samples: int) -> list[dict[str, float]]:
        return self.trainer.evaluate(self.problems, samples)
