"""A study as its YAML file describes it: what all runs share, the arms, and which arms are compared.

    model: HuggingFaceTB/SmolLM2-135M-Instruct
    task: arithmetic
    task_options: {level: wp12, examples: 2}
    steps: 40
    learning_rates: [1.0e-4, 2.0e-4]
    tuning_seeds: 8                   # a number of seeds or a list; they choose each arm's learning rate
    test_seeds: 32                    # what is reported
    all_arms: {weights: nvfp4}        # beneath every arm's own fields
    arms:
      none: {}
      aqn: {noise: true}
    comparisons:
      primary: [[aqn, none]]          # the first minus the second, seed by seed

Keys are the fields of `Study`, and for an arm those of `Arm`; each is checked by its annotation, like the
settings of a run. An unknown key is an error that names the nearest known one. Without tuning seeds every
test seed runs at every learning rate; with several rates this is a sweep, which chooses none, so its arms
cannot be compared.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Annotated, Any, get_type_hints

from pydantic import Field

from lab.study.arms import Arm, Run, contradiction
from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule
from qerl.settings.checks import Count, Positive, PositiveInt, Seed, Share, Text, checked
from qerl.settings.library import nearest

FIRST_TUNING_SEED = 1000
"""The first tuning seed if `tuning_seeds` is a number; test seeds begin at 0."""

Seeds = Annotated[list[Seed], Field(min_length=1)]
Pair = Annotated[list[Text], Field(min_length=2, max_length=2)]


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        model: Hub id, local folder or .gguf file.
        task: Name of the task, as in a recipe.
        task_options: Keyword arguments of the task.
        steps: Optimizer steps of each run.
        prompts_per_step: Groups per step.
        samples_per_prompt: Samples per group.
        max_completion_length: Maximum number of new tokens per sample.
        learning_rates: The grid; each arm trains at each of these rates, unless it has a rate or a grid of
            its own.
        tuning_seeds: Seeds on which an arm's learning rate is chosen: the rate with the largest mean area
            under the curve. Empty for a single rate, or for a sweep.
        test_seeds: Seeds that are reported, at the chosen learning rate. None of them is a tuning seed.
        eval_steps: Steps between two evaluations; one more is before the first step and one after the last.
        eval_samples: Held-out problems of an evaluation, answered greedily without noise.
        final_completions: Samples per problem that the last evaluation draws besides, for pass@k; 0 for none.
        runs_per_batch: Maximum number of runs that are computed side by side.
        tokens_per_forward: Maximum number of tokens in one forward pass of the update, over all runs of a
            batch.
        rows_at_once: Maximum number of samples that an evaluation decodes at once, over all runs of a batch.
            Their keys stay allocated.
        collapse_below: A run whose last accuracy is below this has collapsed.
        escape_above: A run whose last value of `escape_key` is above this has escaped (see
            `lab.study.endpoints`); None for a study that counts collapses.
        escape_key: Key of an evaluation, as `accuracy` or `accuracy/steps_2`.
        equivalence: Difference of areas under the curve that does not matter.
        arms: The arms by name.
        comparisons: Pairs of arms by family; a family is shown and drawn together. p values are corrected for
            the number of all pairs.
    """

    model: Text
    task: Text
    arms: dict[str, Arm]
    task_options: dict[str, Any] = field(default_factory=dict)
    steps: PositiveInt = 40
    prompts_per_step: PositiveInt = 8
    samples_per_prompt: Annotated[PositiveInt, Field(ge=2)] = 8
    max_completion_length: PositiveInt = 24
    learning_rates: Annotated[list[Positive], Field(min_length=1)] = field(default_factory=lambda: [1e-4])
    tuning_seeds: list[Seed] = field(default_factory=list)
    test_seeds: Seeds = field(default_factory=lambda: list(range(8)))
    eval_steps: PositiveInt = 4
    eval_samples: PositiveInt = 256
    final_completions: Count = 0
    runs_per_batch: PositiveInt = 32
    tokens_per_forward: PositiveInt = 32768
    rows_at_once: PositiveInt = 2048
    collapse_below: Share = 0.4
    escape_above: Share | None = None
    escape_key: Text = "accuracy"
    equivalence: Positive = 0.02
    comparisons: dict[str, list[Pair]] = field(default_factory=dict)

    @property
    def tunes(self) -> bool:
        """Whether learning rates are chosen, for all arms that have none of their own."""
        return bool(self.tuning_seeds) and len(self.learning_rates) > 1

    def rates(self, arm: Arm) -> list[float]:
        """The learning rates at which an arm trains."""
        if arm.learning_rate is not None:
            return [arm.learning_rate]
        return arm.learning_rates or self.learning_rates

    def chooses(self, arm: Arm) -> bool:
        """Whether the learning rate of an arm is chosen."""
        return self.tunes and len(self.rates(arm)) > 1

    @property
    def eval_at(self) -> list[int]:
        """Numbers of steps done at which runs are evaluated."""
        return [*range(0, self.steps, self.eval_steps), self.steps]

    def tuning_runs(self, arm: Arm) -> list[Run]:
        """The runs that choose an arm's learning rate, seeds of one rate next to each other."""
        if not self.chooses(arm):
            return []
        return [Run(arm, seed, rate) for rate, seed in product(self.rates(arm), self.tuning_seeds)]

    def test_runs(self, arm: Arm, rate: float | None) -> list[Run]:
        """The runs of an arm that are reported.

        Args:
            arm: The arm.
            rate: The chosen learning rate; None where none is chosen, for all rates.
        """
        rates = self.rates(arm) if rate is None else [rate]
        return [Run(arm, seed, rate) for rate, seed in product(rates, self.test_seeds)]

    def count(self, arm: Arm) -> int:
        """Number of all runs of an arm."""
        tested = 1 if self.chooses(arm) else len(self.rates(arm))
        return len(self.tuning_runs(arm)) + tested * len(self.test_seeds)

    def values(self) -> dict[str, Any]:
        """The study as plain values, every default included; `make_study` makes the same study from them."""
        plain = dataclasses.asdict(self)
        for arm in plain["arms"].values():
            del arm["name"]
        return plain


_ARM_TYPES = get_type_hints(Arm, include_extras=True)
_TYPES = get_type_hints(Study, include_extras=True)
_NOT_FIELDS = ("all_arms",)
_OF_LOGITS = ("noise_target_kl", "noise_sigma_start", "noise_sigma_end", "noise_stages", "noise_schedule")
"""Fields by which noise on logits is driven to a KL."""


def read_study(file: str, values: Mapping[str, Any]) -> Study:
    """The study that the values of a YAML file describe.

    Args:
        file: Name of the file, or of several, for error messages.
        values: Content of the file.

    Raises:
        QeRLError: A key is unknown or missing, a value is wrong, or two contradict each other; one sentence
            with file and key.
    """
    try:
        study = make_study(values)
        for name, arm in study.arms.items():
            own = {key: getattr(arm, key) for key in values["arms"][name] or ()}
            idle = [key for key, value in own.items() if key in _idle(arm) and value != getattr(Arm, key)]
            if idle:
                raise QeRLError(f"arms.{name}.{idle[0]} does nothing without `noise: true`; add that.")
            if arm.match_entropy is not None and not study.arms[arm.match_entropy].scheduled:
                raise QeRLError(
                    f"arms.{name}.match_entropy names {arm.match_entropy}, which has no noise that begins "
                    "after clean steps; give the arm a fixed temperature instead."
                )
        return study
    except QeRLError as error:
        raise QeRLError(f"In the study {file}: {error}") from None


def joined(one: Mapping[str, Any], other: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Merge the values of files: keys of the later file override earlier ones, arms and comparisons are
    united.

    Args:
        one: Values of the earlier files.
        other: Values of a later file.
        file: Name of the later file, for error messages.

    Raises:
        QeRLError: An arm or a family of comparisons has the same name in both and is not the same.
    """
    both = {**one, **other}
    for key in ("arms", "comparisons"):
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            for name in first.keys() & second.keys():
                if first[name] != second[name]:
                    raise QeRLError(
                        f"In the study {file}: {key}.{name} has other values in an earlier file; rename it."
                    )
            both[key] = {**first, **second}
    return both


def make_study(values: Mapping[str, Any]) -> Study:
    """Make a study from plain values; :func:`read_study` checks more."""
    known = [*_TYPES, *_NOT_FIELDS]
    for key in values:
        if key not in known:
            raise QeRLError(f"the key {key!r} is unknown{nearest(key, known)}.")
    for key in ("model", "task", "arms"):
        if values.get(key) is None:
            raise QeRLError(f"{key} is not set; a study needs it.")
    given = {key: value for key, value in values.items() if key not in ("arms", *_NOT_FIELDS)}
    for key, first in (("tuning_seeds", FIRST_TUNING_SEED), ("test_seeds", 0)):
        if isinstance(given.get(key), int) and not isinstance(given[key], bool):
            given[key] = list(range(first, first + checked(key, given[key], Count)))
    fields = {key: checked(key, value, _TYPES[key]) for key, value in given.items()}
    study = Study(arms=dict(_arms(values["arms"], values.get("all_arms", {}))), **fields)
    _check_seeds_and_rates(study)
    _check_arms(study)
    _check_comparisons(study)
    return study


def _arms(arms: Any, shared: Any) -> Iterator[tuple[str, Arm]]:
    if not isinstance(arms, dict) or not arms:
        raise QeRLError("arms must be a mapping of names to fields, with at least one arm.")
    base = _fields("all_arms", shared)
    for name, own in arms.items():
        if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
            raise QeRLError(f"the arm's name {name!r} must be letters, digits, - and _; it names files.")
        yield name, Arm(name=name, **base | _fields(f"arms.{name}", own))


def _idle(arm: Arm) -> Sequence[str]:
    """Noise fields that do nothing in an arm."""
    acting = _OF_LOGITS if arm.logits_noise else ()
    return [key for key in _ARM_TYPES if key.startswith("noise_") and not arm.noise and key not in acting]


def _fields(where: str, values: Any) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise QeRLError(f"{where} must be a mapping of an arm's fields to values.")
    known = [key for key in _ARM_TYPES if key != "name"]
    for key in values:
        if key not in known:
            raise QeRLError(f"{where} has the unknown field {key!r}{nearest(key, known)}.")
    return {key: checked(f"{where}.{key}", value, _ARM_TYPES[key]) for key, value in values.items()}


def _check_seeds_and_rates(study: Study) -> None:
    for key in ("tuning_seeds", "test_seeds", "learning_rates"):
        values = getattr(study, key)
        if len(set(values)) < len(values):
            raise QeRLError(f"{key} lists a value twice; list each once.")
    if both := sorted(set(study.tuning_seeds) & set(study.test_seeds)):
        raise QeRLError(
            f"{both[0]} is both a tuning seed and a test seed; a rate must not be chosen on reported runs."
        )
    if study.comparisons and len(study.learning_rates) > 1 and not study.tunes:
        raise QeRLError(
            "comparisons of several learning_rates need tuning_seeds, which choose one for each arm."
        )
    if study.eval_steps > study.steps:
        raise QeRLError(f"eval_steps is {study.eval_steps}, more than the {study.steps} steps of a run.")


def _check_arms(study: Study) -> None:
    for name, arm in study.arms.items():
        if wrong := contradiction(arm, study.samples_per_prompt):
            raise QeRLError(f"the arm {name} {wrong}.")
        if arm.learning_rates is not None and not study.tunes:
            raise QeRLError(
                f"arms.{name}.learning_rates is a grid, but the study does not tune; set its tuning_seeds "
                "and several learning_rates."
            )
        if len(set(arm.learning_rates or ())) < len(arm.learning_rates or ()):
            raise QeRLError(f"arms.{name}.learning_rates lists a value twice; list each once.")
        if arm.scheduled and arm.noise_sigma_stages is None:
            try:
                NoiseSchedule(
                    arm.noise_sigma_start,
                    arm.noise_sigma_end,
                    arm.noise_stages,
                    study.steps,
                    arm.noise_schedule,
                )
            except QeRLError as error:
                raise QeRLError(f"arms.{name}: {error}") from None
        for key in ("temperature_stages", "noise_sigma_stages"):
            if (stages := len(getattr(arm, key) or [])) > study.steps:
                raise QeRLError(
                    f"arms.{name}.{key} has {stages} stages, more than the {study.steps} steps of a run."
                )
        if arm.match_entropy is not None:
            followed = study.arms.get(arm.match_entropy)
            if followed is None:
                raise QeRLError(
                    f"arms.{name}.match_entropy names the arm {arm.match_entropy!r}, which does not exist"
                    f"{nearest(arm.match_entropy, [*study.arms])}."
                )
            if followed.match_entropy is not None:
                raise QeRLError(
                    f"arms.{name}.match_entropy names {followed.name}, which itself has match_entropy; name "
                    "another arm."
                )
            if study.rates(followed) != study.rates(arm):
                raise QeRLError(
                    f"arms.{name}.match_entropy names {followed.name}, but their learning rates differ; "
                    "set the same for both."
                )


def _check_comparisons(study: Study) -> None:
    for family, pairs in study.comparisons.items():
        for pair in pairs:
            for name in pair:
                if name not in study.arms:
                    raise QeRLError(
                        f"comparisons.{family} names the arm {name!r}, which does not exist"
                        f"{nearest(name, [*study.arms])}."
                    )
            if pair[0] == pair[1]:
                raise QeRLError(f"comparisons.{family} compares {pair[0]} with itself.")
            if pairs.count(pair) > 1:
                raise QeRLError(f"comparisons.{family} names the pair {pair} twice.")
