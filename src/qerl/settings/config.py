"""Settings of a run as one flat dataclass, made by scripts, recipes and the command line.

`QeRLConfig` is TRL's `GRPOConfig` with the fields of `qerl.settings.groups`, by their flat names. Settings
from Python, a recipe or the command line (`qerl.settings.recipe`) are all read as groups, which checks every
field and refuses contradictions; `qerl.settings.parents` has the fields of the parent classes that have no
effect here.

Fields that depend on the machine are decided when a run starts: `qerl.trainer.policy` writes the choices of
the memory plan (`tokens_per_forward`, `every_n_layers`) into the settings, so that the config.yaml of the run
has them.
"""

import copy
import dataclasses
import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

import torch
from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule
from qerl.settings.adapter import take_kwargs, take_saved_adapter
from qerl.settings.algorithms import ALGORITHMS, CLIPPED, EPSILON, OF_RATIO, UNSAID
from qerl.settings.checks import checked
from qerl.settings.foreign import refuse_unknown
from qerl.settings.groups import DECLARED, OWN_NAMES, Noise, Settings, evaluates, sentence_of
from qerl.settings.parents import (
    NEWER_NAMES,
    REFUSED,
    REPLACED,
    default_of,
    set_newer_names,
    shown,
)

LEARNING_RATES = {"lora": 1e-5, "full": 1e-6}
"""Learning rates by `tuning`, if `learning_rate` is unset."""

SFT_LEARNING_RATES = {"lora": 2e-4, "full": 2e-5}
"""The same with ``algorithm: sft``: the rate of TRL's `SFTConfig` for all weights, which is too small for
adapters, and ten times that for adapters, as in RL."""

_EVALUATED_TOGETHER = 1024
"""Completions per call of an evaluation: twice the rows of the paged engine, which are refilled meanwhile."""

_ENVIRONMENTS_TOGETHER = 64
"""The same if each completion has an environment, which may be a network connection."""

_TYPES_OF_PARENTS = get_type_hints(GRPOConfig)


def refusal(name: str, default: Any) -> str:
    """Return in a sentence why a field cannot be set; empty if it can."""
    if name in REFUSED:
        instead = f", and {REFUSED[name]}" if REFUSED[name] else ""
        return (
            f"{name} has no effect in QeRL and must keep its default ({shown(default)}); remove it{instead}."
        )
    if name in DECLARED or name in REPLACED:
        return ""
    return (
        f"{name} is a field of TRL or transformers that this version of QeRL does not know, and must keep "
        f"its default ({shown(default)}); remove it."
    )


def _take_defaults(config: Any) -> list[str]:
    """Reset fields without effect to their defaults; return the replaced ones that had another value.

    Raises:
        QeRLError: A field that must keep its default has another value.
    """
    replaced = []
    for name, spec in FIELDS.items():
        value, default = getattr(config, name), default_of(spec)
        if name in REPLACED:
            if checked(name, value, REPLACED[name].type) != default:
                replaced.append(name)
        elif sentence := refusal(name, default):
            older = NEWER_NAMES.get(name)
            copied = older is not None and value == getattr(config, older)  # as finished settings have it
            if not copied and _says_something(value, default):
                raise QeRLError(sentence)
        else:
            continue
        setattr(config, name, default)
    return replaced


def _says_something(value: Any, default: Any) -> bool:
    if default == "no" and value is False:  # as transformers reads it
        return False
    return value != default and bool(default or value not in (None, "", [], {}))


class UnknownField(QeRLError, TypeError):
    """Error for a keyword that is no field; also a `TypeError`, which a dataclass would raise."""


def _flat_field(name: str) -> tuple[str, Any, Any]:
    """Return name, type and definition of a group's field for a dataclass.

    Scripts for TRL make settings with its `TrlParser`, or transformers' `HfArgumentParser`. Both pass a
    field's metadata to argparse, which accepts only `help`, and know few types: those of the parents' own
    fields, and a mapping as JSON text.
    """
    info = DECLARED[name]
    held = info.annotation
    type_ = dict[str, Any] | str | None if get_origin(held) is dict else held
    default = info.default
    made: Any = {"default": default}
    if isinstance(default, list | dict):
        made = {"default_factory": functools.partial(copy.copy, default)}
    return name, _TYPES_OF_PARENTS.get(name, type_), field(**made, metadata={"help": sentence_of(name)})


if TYPE_CHECKING:
    OwnFields: Any
else:
    OwnFields = dataclasses.make_dataclass(
        "OwnFields", map(_flat_field, OWN_NAMES), namespace={"__module__": __name__}
    )


@dataclass
class QeRLConfig(OwnFields, GRPOConfig):
    """All settings of a run; the fields of `trl.GRPOConfig` and of `TrainingArguments` are valid too.

    Attributes:
        replaced: Names of fields that were set, ask only for speed or memory, and were reset to their
            defaults; a run logs what takes their place (`qerl.settings.parents.replacements`).
        given: Names of fields that a recipe or the command line set (`qerl.settings.recipe`), which are
            written into config.yaml even if they have their defaults; empty for settings made in Python.
    """

    def __post_init__(self) -> None:
        take_kwargs(self)
        self.replaced = _take_defaults(self)
        self.given: frozenset[str] = frozenset()
        for name, value in Settings.of(self).fields():
            if name in FIELDS:
                setattr(self, name, value)
        take_saved_adapter(self)
        self._fill_in()
        rollout: int | None = self.generation_batch_size
        if self.steps_per_generation is not None:  # TRL takes one of the two and computes the other
            self.generation_batch_size: int | None = None
        set_newer_names(self)
        demonstrations = self.algorithm == "sft"
        if demonstrations:  # TRL asks for whole groups
            self.__dict__.update(steps_per_generation=self.num_generations)
        try:
            super().__post_init__()
        except (ValueError, TypeError, ImportError) as error:
            raise QeRLError(f"The settings contradict each other: {' '.join(str(error).split())}") from error
        if demonstrations:
            self.__dict__.update(steps_per_generation=1, generation_batch_size=None)
        self._n_gpu: int = min(self.n_gpu, 1)  # one process drives one GPU; torchrun starts one for each
        check_processes(self)
        if rollout not in (None, self.generation_batch_size):
            raise QeRLError(
                f"generation_batch_size is {rollout}, and steps_per_generation = {self.steps_per_generation} "
                f"makes it {self.generation_batch_size}; remove one of the two."
            )
        Settings.of(self)

    def _fill_in(self) -> None:
        """Set the unset fields whose defaults depend on other fields."""
        demonstrations = self.algorithm == "sft"
        preset = UNSAID if self.algorithm is None else ALGORITHMS[self.algorithm]
        unsaid = dict(self._unsaid_loss() if preset is UNSAID and not demonstrations else preset)
        loss_type = self.loss_type or unsaid["loss_type"]
        by_divergence = loss_type in ("dppo_tv", "dppo_kl")
        level = self.importance_sampling_level or unsaid["importance_sampling_level"]
        if (loss_type, level) != (unsaid["loss_type"], unsaid["importance_sampling_level"]):
            # The preset's bounds are for another ratio; delta holds for either divergence.
            others = ("epsilon_high",) if by_divergence else ("epsilon_high", "delta")
            unsaid = {name: value for name, value in unsaid.items() if name not in others}
            unsaid["epsilon"] = CLIPPED["epsilon"]
        if by_divergence:
            unsaid["use_rollout_logprobs"] = True
        unsaid["epsilon"] = EPSILON.get(loss_type, unsaid["epsilon"])
        epsilon = unsaid["epsilon"] if self.epsilon is None else self.epsilon
        if not demonstrations:
            unsaid = {"epsilon_high": epsilon} | unsaid
        unsaid["per_device_eval_batch_size"] = self._evaluated_together(self.environment is not None)
        if self.mask_truncated_completions:
            unsaid["overlong_buffer"] = 0.0  # masked samples are not punished as well
        if self.goes_by_metric:
            unsaid["metric_for_best_model"] = "eval_loss" if demonstrations else "eval_reward"
        for name, value in unsaid.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._default_rate = self.learning_rate is None
        self.follow_tuning()
        if not torch.cuda.is_available():
            self.dataloader_pin_memory = False  # there is nothing to pin for

    def _unsaid_loss(self) -> dict[str, Any]:
        """Return the defaults of the loss if no algorithm sets one: see `UNSAID` and `OF_RATIO`."""
        said = any(getattr(self, name) != default_of(FIELDS[name]) for name in OF_RATIO)
        ours = not said if self.loss_type is None else self.loss_type == UNSAID["loss_type"]
        return UNSAID if ours else CLIPPED

    @property
    def groups(self) -> Settings:
        """The settings as they are now, by group."""
        return Settings.of(self)

    def _evaluated_together(self, environments: bool) -> int:
        """Return the default number of completions sampled at a time in evaluations: at least one group."""
        group = self.num_generations_eval or self.num_generations
        return group * max(1, (_ENVIRONMENTS_TOGETHER if environments else _EVALUATED_TOGETHER) // group)

    def follow_tuning(self) -> None:
        """Set `learning_rate` to the default for `tuning`, unless the user set it."""
        if self._default_rate:
            rates = SFT_LEARNING_RATES if self.algorithm == "sft" else LEARNING_RATES
            self.learning_rate: float | None = rates[self.tuning]

    def make_room_for_environments(self) -> None:
        """Replace a default `per_device_eval_batch_size` by that with the field `environment`, for a trainer
        that was given its environments."""
        if self.per_device_eval_batch_size == self._evaluated_together(False):
            self.per_device_eval_batch_size: int | None = self._evaluated_together(True)

    @property
    def goes_by_metric(self) -> bool:
        """True if the evaluation metric decides the best model, the learning rate or an early stop."""
        by_plateau = self.lr_scheduler_type == "reduce_lr_on_plateau"
        return bool(self.load_best_model_at_end or by_plateau or self.early_stopping_patience)

    @property
    def device(self) -> torch.device:
        """Device of this process; cpu instead of accelerate's cpu:1, to which torch loads no checkpoint."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def evaluates(self) -> bool:
        """True if the run scores held-out problems, at its start or on the way."""
        return evaluates(self)

    def noise_schedule_of(self, steps: int) -> NoiseSchedule:
        """Return the schedule of sigma for a run of ``steps`` optimizer steps.

        Raises:
            QeRLError: The run is shorter than the schedule has stages.
        """
        return Noise.of(self).schedule_of(steps)


FIELDS = {spec.name: spec for spec in dataclasses.fields(QeRLConfig) if spec.init}


def _unknown_in_a_sentence(made: Any) -> Any:
    """Wrap the constructor so that an unknown keyword raises an error with the nearest field's name."""

    @functools.wraps(made)
    def init(self: QeRLConfig, *values: Any, **fields: Any) -> None:
        try:
            for name in fields:
                refuse_unknown(name, type(self).__name__, FIELDS, OWN_NAMES)
        except QeRLError as error:
            raise UnknownField(str(error)) from None
        made(self, *values, **fields)

    return init


QeRLConfig.__init__ = _unknown_in_a_sentence(QeRLConfig.__init__)  # type: ignore[method-assign]


def check_processes(config: Any) -> None:
    """Raise if several processes run without a GPU and without use_cpu, since each would train alone.

    Raises:
        QeRLError: A launcher started more processes than work together.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if started > 1 and config.world_size == 1:
        raise QeRLError(
            f"{started} processes were started where there is no GPU, and each would train by itself; set "
            "use_cpu: true, which lets them train together on the CPU."
        )


_NOT_COPIED = {"bf16", "generation_batch_size", "output_dir"}


def as_ours(args: GRPOConfig, **own: Any) -> QeRLConfig:
    """Convert a TRL config to settings that train as TRL would.

    The fields of a `GRPOConfig` act as TRL's documentation says, with TRL's defaults where ours differ
    (masking of whole sequences by their importance weight, a learning rate of 1e-6 also for adapters, a log
    line every ten steps), and nothing is added that TRL does not know. The model's format and adapter
    (weights, LoRA rank) have `QeRLConfig`'s defaults, since a `GRPOConfig` has no fields for them.

    A dataclass does not tell which fields were set, and `GRPOConfig` derives some from others, so a field
    counts as set if it differs from that of a `GRPOConfig` without arguments. Two fields are not copied:
    ``bf16``, which is on by default there, is autocast, which does not exist here, and
    ``generation_batch_size`` follows from the other batch sizes.

    Args:
        args: TRL's settings.
        own: Fields of `QeRLConfig` that the caller knows, such as ``tuning`` of a model in hand.

    Raises:
        QeRLError: A field is set that is refused, or the class has fields of its own.
    """
    theirs = {spec.name: spec for spec in dataclasses.fields(GRPOConfig) if spec.init}
    added = sorted({spec.name for spec in dataclasses.fields(args)} - theirs.keys())
    if added:
        raise QeRLError(
            f"{type(args).__name__} has fields that no trainer here reads ({', '.join(added)}); use "
            "QeRLConfig or TRL's GRPOConfig."
        )
    plain = GRPOConfig(output_dir=args.output_dir, bf16=False)  # whose default needs a GPU
    values: dict[str, Any] = {"output_dir": args.output_dir}
    for name, spec in theirs.items():
        value = getattr(args, name)
        if name not in _NOT_COPIED and (
            value != getattr(plain, name) or default_of(spec) != default_of(FIELDS[name])
        ):
            values[name] = value
    return QeRLConfig(**(values | own))
