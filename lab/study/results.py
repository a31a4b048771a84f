"""Results of a study's runs: their curves, the area under the accuracy curve, and each arm's learning rate.

The primary outcome of a run is the area under the curve of its accuracy: clean greedy accuracy on held-out
problems by optimizer step, by trapezoids, divided by the number of steps, so that it is an accuracy too. The
area varies less between seeds than the accuracy at the end (two thirds of its standard deviation in the first
study of noise), and reflects how fast a run learns as well as how far. The accuracy before training is part
of it: between formats, whose untrained models differ, compare the gain over the start too. From the step on
in which a run has diverged its accuracy counts as 0, since its policy is of no use.
"""

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

from lab.study.arms import Arm, Run
from lab.study.followed import Followed
from lab.study.spec import Study, make_study
from qerl.atomic import write_whole
from qerl.errors import QeRLError
from qerl.source import UNKNOWN

ACCURACY = "accuracy"
"""Key of an evaluation: share of the problems that are answered right, greedily and without noise."""

ROLLOUT_ENTROPY = "rollout/entropy"
"""Key of a step: mean entropy of the policy that drew the samples, in nats per token."""

SIGMA = "noise/sigma"
"""Key of a step: standard deviation of its noise, of norms or of logits."""

DIVERGED = "diverged"
"""Key of a step: 1 from the step on in which a run's numbers are not finite, else 0."""

RESULTS_FILE = "results.json.gz"

Values = list[float | None]
"""Numbers by step; None where a number is missing or not finite."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        run: The run.
        steps: Values of each logged key at the steps 1, 2, ...
        eval_at: Steps done at each evaluation.
        evaluations: Values of each key of an evaluation.
        diverged_at: Step in which the run diverged, None for one that did not.
        facts: Commit, date, versions, device and model by which the run was computed.
        followed: The run whose entropy its temperature followed, if any.
    """

    run: Run
    steps: dict[str, Values]
    eval_at: list[int]
    evaluations: dict[str, Values]
    diverged_at: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    followed: Followed | None = None

    @property
    def commit(self) -> str:
        """Commit of the source that computed the run."""
        return str(self.facts.get("commit", UNKNOWN))

    @property
    def accuracy(self) -> list[float]:
        """Accuracy at each evaluation, 0 from the step on in which the run diverged."""
        sound = math.inf if self.diverged_at is None else self.diverged_at
        values = self.evaluations[ACCURACY]
        return [(value or 0.0) if at < sound else 0.0 for at, value in zip(self.eval_at, values, strict=True)]

    @property
    def area(self) -> float:
        """Area under the curve of accuracy, per step."""
        points = list(zip(self.eval_at, self.accuracy, strict=True))
        area = sum((after - at) * (left + right) / 2 for (at, left), (after, right) in pairwise(points))
        return area / self.eval_at[-1]

    def plain(self) -> dict[str, Any]:
        """The result as JSON values; :func:`from_plain` reads them."""
        return {
            "arm": self.run.arm.name,
            "seed": self.run.seed,
            "learning_rate": self.run.learning_rate,
            "diverged_at": self.diverged_at,
            "eval_at": self.eval_at,
            "evaluations": self.evaluations,
            "steps": self.steps,
            "facts": self.facts,
        } | ({"followed": asdict(self.followed)} if self.followed else {})


def from_plain(plain: Mapping[str, Any], arms: Mapping[str, Arm]) -> RunResult:
    """Read a result from JSON values; its arm is one of ``arms``."""
    fields = dict(plain)
    run = Run(arms[fields.pop("arm")], fields.pop("seed"), fields.pop("learning_rate"))
    followed = fields.pop("followed", None)
    return RunResult(run, **fields, followed=Followed(**followed) if followed else None)


def by_key(records: Iterable[Mapping[str, float]]) -> dict[str, Values]:
    """Records of one run as a list of values per key, to six digits; None where missing or not finite."""
    rows = list(records)
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [_digits(row.get(key)) for row in rows] for key in keys}


def _digits(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


@dataclass(frozen=True)
class Results:
    """A study and its finished runs.

    Attributes:
        study: The study.
        runs: Its finished runs.
    """

    study: Study
    runs: list[RunResult]

    def of(self, arm: str, rate: float | None = None, seeds: Sequence[int] | None = None) -> list[RunResult]:
        """Runs of an arm, by learning rate and seed; of one rate or all, and of some seeds or all."""
        found = [
            result
            for result in self.runs
            if result.run.arm.name == arm
            and (rate is None or result.run.learning_rate == rate)
            and (seeds is None or result.run.seed in seeds)
        ]
        return sorted(found, key=lambda result: (result.run.learning_rate, result.run.seed))

    def rate(self, arm: str) -> float | None:
        """The learning rate at which an arm is tested.

        A chosen rate has the largest mean area on the tuning seeds; of equal ones the lowest is chosen. None
        before all tuning runs are finished, and in a sweep, which tests all rates.
        """
        study = self.study
        rates = study.rates(study.arms[arm])
        if len(rates) == 1:
            return rates[0]
        if not study.tunes:
            return None
        areas = {}
        for rate in sorted(rates):
            found = self.of(arm, rate, study.tuning_seeds)
            if len(found) < len(study.tuning_seeds):
                return None
            areas[rate] = fmean(result.area for result in found)
        return max(areas, key=lambda rate: areas[rate])

    def followed_by(self, run: Run) -> Followed | None:
        """Rollouts that a run of an arm with `match_entropy` follows: the other arm's run of the same seed.

        While rates are compared both runs have the same learning rate, else the other arm has its own; None
        before that run is finished.
        """
        study, arm = self.study, run.arm.match_entropy
        assert arm is not None
        compared = not study.tunes or run.seed in study.tuning_seeds
        rate = run.learning_rate if compared else self.rate(arm)
        found = [] if rate is None else self.of(arm, rate, [run.seed])
        if not found:
            return None
        (one,) = found
        return Followed(one.run.name, one.steps[ROLLOUT_ENTROPY], one.steps[SIGMA])

    def sound(self) -> "Results":
        """The results without runs that followed other rollouts than they would follow now."""
        kept = [
            one
            for one in self.runs
            if one.run.arm.match_entropy is None
            or (one.followed is not None and one.followed == self.followed_by(one.run))
        ]
        return Results(self.study, kept)

    def tested(self, arm: str) -> list[RunResult]:
        """An arm's finished runs of test seeds at its learning rate, by seed; none before it is chosen."""
        rate = self.rate(arm)
        return [] if rate is None else self.of(arm, rate, self.study.test_seeds)

    def collapsed(self, result: RunResult) -> bool:
        """Return True if a run ends with an accuracy below the study's `collapse_below`."""
        return result.accuracy[-1] < self.study.collapse_below

    def escaped(self, result: RunResult) -> bool:
        """Return True if a run has not diverged and ends above `escape_above`, which the study must have."""
        assert self.study.escape_above is not None
        value = result.evaluations[self.study.escape_key][-1]
        return result.diverged_at is None and (value or 0.0) > self.study.escape_above


def write_results(results: Results, path: Path) -> None:
    """Write a study with all its curves as compressed JSON, whole or not at all; equal results give equal
    bytes."""
    plain = {"study": results.study.values(), "runs": [result.plain() for result in results.runs]}
    text = json.dumps(plain, allow_nan=False, separators=(",", ":"))
    write_whole(path, gzip.compress(text.encode(), mtime=0))


def portable(content: bytes) -> bytes:
    """The content of a results file without this machine's path to the model; equal results give equal bytes.

    Raises:
        ValueError: The content is not compressed JSON.
        KeyError: The JSON is not that of a study.
    """
    plain = json.loads(gzip.decompress(content))
    spec = plain["study"]
    # A Hub id has a slash too, and is no path.
    if spec["model"][:1] in ("/", ".", "~") or Path(spec["model"]).exists():
        spec["model"] = PurePath(spec["model"]).name
    text = json.dumps(plain, allow_nan=False, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def read_results(path: Path) -> Results:
    """The study in a file that :func:`write_results` wrote.

    Raises:
        QeRLError: The file cannot be read or holds something else.
    """
    try:
        plain = json.loads(gzip.decompress(path.read_bytes()))
        study = make_study(plain["study"])
        return Results(study, [from_plain(one, study.arms) for one in plain["runs"]])
    except (OSError, EOFError, ValueError, LookupError, TypeError, QeRLError) as error:
        raise QeRLError(
            f"{path} holds no results of a study ({error}); name a study's {RESULTS_FILE}."
        ) from error
