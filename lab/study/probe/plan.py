"""Which cells a probe has, and in which order they are measured.

A *job* is what shares a calibration: a policy and a task under one perturbation, at all targets. Jobs are
ordered by policy, which is loaded once.
"""

from dataclasses import dataclass
from itertools import product

from lab.study.probe.spec import Probe


@dataclass(frozen=True)
class Job:
    """Cells of one policy and task.

    Attributes:
        policy: Name of the policy; None for an untrained one in a format.
        task: Name of the task.
        what: Name of the perturbation or format, or `clean`.
        draw: Of a format with random errors.
    """

    policy: str | None
    task: str
    what: str
    draw: int = 0

    @property
    def name(self) -> str:
        """Of its lock, and the beginning of its cells' names."""
        if self.policy is None:
            return f"format-{self.task}-{self.what}-{self.draw}"
        return f"{self.policy}-{self.task}-{self.what}"


def jobs_of(probe: Probe) -> list[Job]:
    """All jobs of a probe, formats first, each policy's together."""
    formats = [
        Job(None, task, name, draw)
        for name, format in probe.formats.items()
        for draw, task in product(range(format.draws), probe.tasks)
    ]
    whats = ["clean", *probe.perturbations]
    return formats + [Job(*names) for names in product(probe.policy_names, probe.tasks, whats)]


def cells_of(probe: Probe, job: Job) -> list[str]:
    """Names of a job's cells.

    A clean job has two, with other random numbers: one that the perturbed cells are compared with, which has
    their numbers, and one that says beforehand which problems are hard.
    """
    if job.policy is None:
        first = job.what == next(iter(probe.formats))
        return [f"{job.name}-{part}" for part in (["plain"] if first else ["plain", "matched"])]
    if job.what == "clean":
        return [job.name, f"{job.name}-reference"]
    return [f"{job.name}-{target:g}" for target in probe.target_kl]


def all_cells(probe: Probe) -> list[str]:
    """Names of all cells of a probe, in the order in which they are measured."""
    return [name for job in jobs_of(probe) for name in cells_of(probe, job)]
