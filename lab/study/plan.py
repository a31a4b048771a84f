"""The unfinished runs of a study, as batches that are computed side by side.

A batch is up to `runs_per_batch` runs of one arm: first those that choose its learning rate, all rates and
tuning seeds side by side, then its test seeds at the chosen rate. An arm that follows another arm's entropy
waits for that arm, and is computed again if the curves of that arm have changed.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from lab.study.arms import Run
from lab.study.followed import Followed
from lab.study.store import Store


@dataclass(frozen=True)
class Batch:
    """Runs that are computed side by side.

    Attributes:
        name: Name of the batch's files.
        title: Name in messages.
        runs: The runs, finished or not.
        followed: For each run the rollouts that its temperature follows; None for none.
    """

    name: str
    title: str
    runs: list[Run]
    followed: list[Followed | None]

    def of(self, chosen: Sequence[int]) -> "Batch":
        """The batch with some of its runs, by index."""
        return Batch(
            self.name, self.title, [self.runs[i] for i in chosen], [self.followed[i] for i in chosen]
        )


@dataclass(frozen=True)
class Plan:
    """The runs of a study that remain to be computed.

    Attributes:
        batches: Batches with an unfinished run, all of which can be computed now.
        waiting: Whether more batches follow when some of these are finished.
        open: Number of unfinished runs, waiting ones included.
    """

    batches: list[Batch]
    waiting: bool
    open: int


def make_plan(store: Store) -> Plan:
    """Plan what remains to be computed in a folder, from its finished runs."""
    study, results = store.study, store.results()
    batches: list[Batch] = []
    waiting, open_ = False, 0
    done = {result.run.name for result in results.runs}
    for arm in study.arms.values():
        rate = results.rate(arm.name)
        phases = [("tuning", study.tuning_runs(arm)), ("test", study.test_runs(arm, rate))]
        if study.chooses(arm) and rate is None:  # the rate of the test seeds is not known yet
            phases.pop()
            waiting, open_ = True, open_ + len(study.test_seeds)
        for phase, runs in phases:
            missing = sum(run.name not in done for run in runs)
            open_ += missing
            followed = [results.followed_by(run) if arm.match_entropy else None for run in runs]
            if missing and arm.match_entropy and None in followed:
                waiting = True
            elif missing:
                whole = Batch(f"{arm.name}-{phase}", f"{arm.name}, {phase}", runs, followed)
                batches += _parts(whole, study.runs_per_batch, done)
    return Plan(batches, waiting, open_)


def _parts(whole: Batch, size: int, done: Collection[str]) -> Iterator[Batch]:
    """Split the runs of an arm into batches, without those whose runs are all done."""
    starts = range(0, len(whole.runs), size)
    for i, start in enumerate(starts):
        part = whole.of(range(start, min(start + size, len(whole.runs))))
        if all(run.name in done for run in part.runs):
            continue
        rates = dict.fromkeys(run.learning_rate for run in part.runs)
        title = whole.title + (f" {i + 1} of {len(starts)}" if len(starts) > 1 else "")
        title += f", learning rate {', '.join(f'{rate:g}' for rate in rates)}"
        yield replace(part, name=f"{whole.name}-{i}", title=title)
