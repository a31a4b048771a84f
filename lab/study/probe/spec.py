"""A probe as its YAML file says it.

    kind: probe
    model: HuggingFaceTB/SmolLM2-135M-Instruct
    weights: nvfp4                    # of the perturbed policies
    tasks:
      wp12: {task: arithmetic, task_options: {level: wp12, examples: 2}}
    policies: {start: null, trained: runs/x}       # an adapter's folder, null for none
    train: {task: wp12, steps: [5, 10, 20]}        # more policies: a clean run's adapters after so many steps
    target_kl: [0.005, 0.02, 0.05, 0.1]            # nats per token
    perturbations:
      aqn: {kind: noise}
      relative: {kind: noise, noise_scale: relative}
    formats:                          # compared at temperature 1 and at the entropy of the first
      bf16: {weights: bf16}
      nvfp4: {weights: nvfp4}
      isotropic: {weights: bf16, error_of: nvfp4, draws: 4}

Keys are the fields of `Probe`; each is checked by its annotation, as the settings of a run are.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field

from lab.study.probe.perturb import Perturbation
from qerl.errors import QeRLError
from qerl.settings.checks import Count, Positive, PositiveInt, Seed, Text, checked
from qerl.settings.library import nearest
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, Rounding, WeightFormatName

Record = TypeVar("Record")


@dataclass(frozen=True)
class TaskChoice:
    """A task and its options, as in a recipe."""

    task: Text
    task_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """The weights of an untrained policy.

    Attributes:
        weights, rounding: As in a recipe.
        error_of: Name of another format. The weights get Gaussian noise, drawn once, with the relative error
            (root mean square) that this format has in each matrix: the control for "any error would do".
        draws: How many such policies there are.
    """

    weights: WeightFormatName
    rounding: Rounding = DEFAULT_ROUNDING
    error_of: str | None = None
    draws: PositiveInt = 1


@dataclass(frozen=True)
class Training:
    """Clean runs whose adapters are policies of the probe.

    Attributes:
        task: Name of one of the probe's tasks.
        steps: After how many steps an adapter is kept.
        seeds: Of the runs, one each.
        learning_rate, prompts_per_step, samples_per_prompt: As in a study.
    """

    task: str
    steps: Annotated[list[PositiveInt], Field(min_length=1)]
    learning_rate: Positive = 2e-4
    seeds: Annotated[list[Seed], Field(min_length=1)] = field(default_factory=lambda: [0])
    prompts_per_step: PositiveInt = 8
    samples_per_prompt: Annotated[PositiveInt, Field(ge=2)] = 8

    def policy(self, seed: int, step: int) -> str:
        """Name of the policy that the run of a seed is after a step."""
        return f"seed_{seed}_step_{step}" if len(self.seeds) > 1 else f"step_{step}"


@dataclass(frozen=True)
class Probe:
    """A probe.

    Attributes:
        model: Hub id, local folder or .gguf file.
        tasks: Tasks by name; their held-out problems are sampled, training problems serve the calibration.
        perturbations: Perturbations by name.
        target_kl: Mean KL(sampler || clean) in nats per token that each perturbation is brought to.
        formats: Untrained policies by name; the first is what the others are compared with. Empty for none.
        weights, rounding: Format of the policies that are perturbed.
        policies: Folder of the adapter of each policy, by name; null for the model itself.
        train: More policies, `step_N` each, or `seed_S_step_N` where there are several seeds.
        problems: Held-out problems of each task.
        samples: Samples of each problem.
        max_completion_length: Most new tokens of a sample.
        calibration_problems, calibration_samples: From which strengths are found.
        solution_problems, solution_draws: Worked solutions that are read, and draws of the noise for each.
        prefix_samples: Samples of each problem, written by the first format, along which all are read.
        batch_rows: Most rows of a batch, fewer where a GPU has no memory for them.
        seed: Of samples and noise.
    """

    model: Text
    tasks: dict[str, TaskChoice]
    perturbations: dict[str, Perturbation] = field(default_factory=dict)
    target_kl: list[Positive] = field(default_factory=lambda: [0.005, 0.02, 0.05, 0.1])
    formats: dict[str, Format] = field(default_factory=dict)
    weights: WeightFormatName = DEFAULT_FORMAT
    rounding: Rounding = DEFAULT_ROUNDING
    policies: dict[str, str | None] = field(default_factory=lambda: {"start": None})
    train: Training | None = None
    problems: PositiveInt = 256
    samples: Annotated[PositiveInt, Field(ge=8)] = 64
    max_completion_length: PositiveInt = 24
    calibration_problems: PositiveInt = 64
    calibration_samples: PositiveInt = 8
    solution_problems: Count = 64
    solution_draws: Annotated[PositiveInt, Field(ge=2)] = 16
    prefix_samples: PositiveInt = 8
    batch_rows: PositiveInt = 8192
    seed: Seed = 0

    @property
    def policy_names(self) -> list[str]:
        """All policies, those that are trained here last."""
        train = self.train
        trained = [train.policy(*each) for each in product(train.seeds, train.steps)] if train else []
        return [*self.policies, *trained]

    def values(self) -> dict[str, Any]:
        """The probe as plain values, every default written out; `make_probe` makes the same of them."""
        return dataclasses.asdict(self)


_MAPS: dict[str, type[Any]] = {"tasks": TaskChoice, "perturbations": Perturbation, "formats": Format}


def read_probe(where: str, values: Mapping[str, Any]) -> Probe:
    """The probe that the values of YAML files describe.

    Args:
        where: The files, for the message of an error.
        values: What they hold, `kind` included or not.

    Raises:
        QeRLError: A key is unknown or missing, or a value is wrong; one sentence with file and key.
    """
    try:
        return make_probe({key: value for key, value in values.items() if key != "kind"})
    except QeRLError as error:
        raise QeRLError(f"In the probe {where}: {error}") from None


def make_probe(values: Mapping[str, Any]) -> Probe:
    """The probe of plain values, as :func:`read_probe` without a file."""
    given = dict(values)
    for key, record in _MAPS.items():
        if key in given:
            given[key] = {
                _name(key, name): _record(f"{key}.{name}", record, fields)
                for name, fields in _mapping(key, given[key]).items()
            }
    if given.get("train") is not None:
        given["train"] = _record("train", Training, given["train"])
    for name in _mapping("policies", given.get("policies", {})):
        _name("policies", name)
    probe = _record("", Probe, given)
    if not probe.tasks:
        raise QeRLError("tasks is empty; a probe needs one.")
    for name, format in probe.formats.items():
        if format.error_of is not None and format.error_of not in probe.formats:
            near = nearest(format.error_of, [*probe.formats])
            raise QeRLError(f"formats.{name}.error_of names {format.error_of!r}{near}.")
    if probe.train is not None and probe.train.task not in probe.tasks:
        raise QeRLError(f"train.task names {probe.train.task!r}{nearest(probe.train.task, [*probe.tasks])}.")
    for name, count in Counter(probe.policy_names).items():
        if count > 1:
            raise QeRLError(
                f"{count} policies are called {name!r}; see policies, train.steps and train.seeds."
            )
    return probe


def _record(where: str, record: type[Record], values: Any) -> Record:
    """A dataclass of checked fields; those that are made already are left as they are."""
    types = get_type_hints(record, include_extras=True)
    fields = {}
    for key, value in _mapping(where, values).items():
        name = f"{where}.{key}" if where else str(key)
        if key not in types:
            raise QeRLError(f"the key {name!r} is unknown{nearest(key, [*types])}.")
        made = key in (*_MAPS, "train") and record is Probe
        fields[key] = value if made else checked(name, value, types[key])
    for known in dataclasses.fields(record):  # type: ignore[arg-type]
        required = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if required and known.name not in fields:
            raise QeRLError(f"{where + '.' if where else ''}{known.name} is not set; a probe needs it.")
    return record(**fields)


def _mapping(where: str, values: Any) -> Mapping[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise QeRLError(f"{where} must be a mapping.")
    return values


def _name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise QeRLError(f"the name {name!r} in {where} must be letters, digits, - and _; it names files.")
    return name
