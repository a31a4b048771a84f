"""Settings of a run: one flat dataclass.

`QeRLConfig` is TRL's `GRPOConfig` with the fields this project adds (`qerl.settings.fields`): which weights,
which adapter, which task, which noise. Every field is checked when settings are made, from Python, a recipe
or the command line alike (`qerl.settings.recipe`): its type and range by its annotation
(`qerl.settings.checks`), the parents' fields by the table in `qerl.settings.parents`, and what contradicts
what in `qerl.settings.contradictions`.

The fields of a run that are left to the machine are decided when it starts: `qerl.trainer.policy` writes what
the memory plan chose (`tokens_per_forward`, `every_n_layers`) into the settings, so that the config.yaml of
the run has them.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule
from qerl.settings import contradictions
from qerl.settings.adapter import take_saved_adapter
from qerl.settings.checks import checked
from qerl.settings.fields import OWN_NAMES, OWN_TYPES, OwnFields
from qerl.settings.foreign import refuse_unknown
from qerl.settings.kwargs import take_generation_kwargs, take_model_kwargs
from qerl.settings.parents import Refused, Replaced, fate_of, says_as_older, set_newer_names
from qerl.settings.parsed import take_parsed

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "dynamic_sampling_rounds": 0,
        "overlong_buffer": 0.0,
        "signal": "reward",
    },
    "dapo": {
        "epsilon_high": 0.28,
        "dynamic_sampling_rounds": 2,
        "overlong_buffer": 0.2,
        "signal": "accuracy",
    },
}
"""What an algorithm sets where the recipe says nothing.

GRPO's groups and advantages are those of arXiv 2402.03300. DAPO is that of arXiv 2503.14476, sections 3.1
(clip-higher) to 3.4 (soft overlong punishment, whose interval there is a fifth of the longest response).
DAPO's authors punish truncated samples instead of masking them; both at once would leave short wrong answers
with an advantage and nothing against it.
"""

LEARNING_RATES = {"lora": 1e-5, "full": 1e-6}
"""By `tuning`, where nobody says it."""

_EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that ask for nothing."""

_EVALUATED_TOGETHER = 1024
"""Completions of an evaluation's call: twice the rows of the paged engine, which are refilled meanwhile."""

_ENVIRONMENTS_TOGETHER = 64
"""The same where each has an environment, which may be a connection to somewhere."""


Settings = TypeVar("Settings")


class UnknownField(QeRLError, TypeError):
    """A keyword that is no field; a `TypeError`, as a dataclass raises for it."""


def _unknown_in_a_sentence(settings: type[Settings]) -> type[Settings]:
    """The dataclass, which names the nearest field where it is made with a keyword that is none."""
    kind: Any = settings
    made = kind.__init__
    known = [spec.name for spec in dataclasses.fields(kind) if spec.init]

    @functools.wraps(made)
    def init(self: Settings, *values: Any, **fields: Any) -> None:
        try:
            for name in fields:
                refuse_unknown(name, type(self).__name__, known, OWN_NAMES)
        except QeRLError as error:
            raise UnknownField(str(error)) from None
        made(self, *values, **fields)

    kind.__init__ = init
    return settings


@_unknown_in_a_sentence
@dataclass
class QeRLConfig(OwnFields, GRPOConfig):
    """Everything a run needs to know; the fields of `trl.GRPOConfig` and of `TrainingArguments` are valid
    too.

    Attributes:
        replaced: Names of fields that were set and ask for speed alone, in which their default stands again;
            a run says what takes their place (`qerl.settings.parents.replacements`).
    """

    def __post_init__(self) -> None:
        take_parsed(self)
        take_model_kwargs(self)
        take_generation_kwargs(self)
        self.replaced = self._check_fields()
        take_saved_adapter(self)
        contradictions.check(self)
        if self.mask_truncated_completions and self.overlong_buffer is None:
            self.overlong_buffer = 0.0  # masked samples are not punished as well
        for name, value in ALGORITHMS[self.algorithm].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        contradictions.check_ratios(self)
        self._default_rate = self.learning_rate is None
        self.follow_tuning()
        if self.goes_by_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_reward"
        if not torch.cuda.is_available():
            self.dataloader_pin_memory = False  # there is nothing to pin for
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self._evaluated_together(self.environment is not None)
        contradictions.check_evaluation(self)
        rollout = contradictions.take_rollout_size(self)
        set_newer_names(self)
        try:
            super().__post_init__()
        except (ValueError, TypeError, ImportError) as error:
            raise QeRLError(f"The settings contradict each other: {' '.join(str(error).split())}") from error
        self._n_gpu: int = min(self.n_gpu, 1)  # one process drives one GPU; torchrun starts one for each
        contradictions.check_processes(self)
        contradictions.check_rollout_size(self, rollout)
        contradictions.check_groups(self)

    def _evaluated_together(self, environments: bool) -> int:
        """Completions that an evaluation samples at a time where nobody says it: at least one group."""
        group = self.num_generations_eval or self.num_generations or 1
        return group * max(1, (_ENVIRONMENTS_TOGETHER if environments else _EVALUATED_TOGETHER) // group)

    def follow_tuning(self) -> None:
        """`learning_rate` becomes the default for `tuning` where nobody gave one."""
        if self._default_rate:
            self.learning_rate = LEARNING_RATES[self.tuning]

    def make_room_for_environments(self) -> None:
        """The default of `per_device_eval_batch_size` becomes what it is with the field `environment`, for a
        trainer that was handed its environments."""
        if self.per_device_eval_batch_size == self._evaluated_together(False):
            self.per_device_eval_batch_size = self._evaluated_together(True)

    @property
    def goes_by_metric(self) -> bool:
        """Whether something is chosen by the metric of evaluations."""
        by_plateau = self.lr_scheduler_type == "reduce_lr_on_plateau"
        return bool(self.load_best_model_at_end or by_plateau or self.early_stopping_patience)

    def _check_fields(self) -> list[str]:
        """Every field by itself; those of a subclass are its own affair.

        Returns:
            Names of those that are replaced.
        """
        replaced = []
        for spec in dataclasses.fields(QeRLConfig):
            if not spec.init:
                continue
            parent = None if spec.name in OWN_TYPES else fate_of(spec.name)
            value = getattr(self, spec.name)
            if isinstance(parent, Refused):
                default = default_of(spec)
                said = value != default and (default or value not in _EMPTY)
                if said and not says_as_older(self, spec.name):
                    raise QeRLError(f"{spec.name} is not supported: {parent.reason}. Remove it.")
                setattr(self, spec.name, default)
                continue
            value = checked(spec.name, value, parent.type if parent else OWN_TYPES[spec.name])
            if isinstance(parent, Replaced):
                if value != default_of(spec):
                    replaced.append(spec.name)
                value = default_of(spec)
            setattr(self, spec.name, value)
        return replaced

    @property
    def device(self) -> torch.device:
        """Of this process; accelerate's cpu:1 is one that torch loads no checkpoint to."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def evaluates(self) -> bool:
        """Whether the run scores held-out problems, at its start or on the way."""
        return self.eval_on_start or getattr(self.eval_strategy, "value", self.eval_strategy) != "no"

    def noise_schedule_of(self, steps: int) -> NoiseSchedule:
        """sigma by step for a run of so many optimizer steps.

        Raises:
            QeRLError: The run is shorter than the schedule has stages.
        """
        return NoiseSchedule(
            sigma_start=self.noise_sigma_start,
            sigma_end=self.noise_sigma_end,
            stages=self.noise_stages,
            total_steps=steps,
            kind=self.noise_schedule,
        )


def default_of(spec: dataclasses.Field) -> Any:
    """What a field holds where nobody sets it."""
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
