"""The choice of a rollout's prompts: the order of the data, replacements by a curriculum, and the fresh
prompts of dynamic sampling.

Every process makes the choice for all processes, from the same draws and the same gathered rows, and takes
its own part.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset

from qerl.seeding import problem_key
from qerl.settings.config import QeRLConfig
from qerl.trainer.curriculum import Curriculum
from qerl.trainer.dynamic_sampling import FreshPrompts, prompt_of

SHARE_FILE = "groups_with_signal.json"

Row = dict[str, Any]


class PromptChoice:
    """The prompts of a trainer's rollouts, for runs with a curriculum or dynamic sampling.

    Args:
        args: Settings of the run.
        dataset: The training rows.
        accelerator: Of the run.

    Attributes:
        share: Share of groups with a signal in the last rollout with dynamic sampling; 1 before the first.
    """

    def __init__(self, args: QeRLConfig, dataset: Dataset, accelerator: Accelerator) -> None:
        self._accelerator, self._size, self.share = accelerator, args.num_generations or 1, 1.0
        self._curriculum = Curriculum(dataset, args.curriculum_floor, args.seed) if args.curriculum else None
        chances = self._curriculum.chances if self._curriculum is not None else None
        self._fresh = FreshPrompts(dataset, args.seed, chances)
        self._step, self._rollouts = -1, 0  # of the last call of `chosen`

    @property
    def learns(self) -> bool:
        """True if the outcome of a rollout changes the prompts of later ones."""
        return self._curriculum is not None

    def chosen(self, inputs: list[Row], step: int) -> tuple[list[Row], dict[str, float]]:
        """Return the rows to sample instead of the proposed ones, and the metrics to log.

        Args:
            inputs: Rows of this process that the order of the data proposes, repeated per sample.
            step: Optimizer step, the key by which a resumed run makes the same draws.
        """
        self._rollouts = self._rollouts + 1 if step == self._step else 0
        self._step = step
        own = inputs[:: self._size]
        proposed: list[Row] = gather_object(own)
        self._fresh.note(step, [prompt_of(row) for row in proposed])
        if self._curriculum is None:
            return inputs, {}
        chosen = self._curriculum.choose(proposed, self._fresh, step, self._rollouts)
        passed_over = sum(row is not other for row, other in zip(chosen, proposed, strict=True))
        logged = {
            "curriculum/passed_over": passed_over / len(proposed),
            "curriculum/settled": float(self._curriculum.settled),
        }
        return self._of_this_process(chosen, len(own)), logged

    def others(self, groups: int) -> list[Row]:
        """Draw rows for further groups of this process in the current step, each repeated per sample."""
        drawn = self._fresh.draw(groups * self._accelerator.num_processes)
        return self._of_this_process(drawn, groups)

    def observe(self, inputs: list[Row], settled: Sequence[bool | None]) -> None:
        """Update the curriculum with the outcome of a rollout; only if `learns`.

        Args:
            inputs: The rows that this process sampled, as `chosen` returns them; their number may differ
                between processes.
            settled: For each of its groups, whether the samples were all right or all wrong; None if none
                was judged.
        """
        assert self._curriculum is not None
        own = zip((problem_key(row) for row in inputs[:: self._size]), settled, strict=True)
        self._curriculum.observe(*zip(*gather_object(list(own)), strict=True))

    def save(self, folder: Path) -> None:
        """Write the share and the curriculum's counts into a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SHARE_FILE).write_text(json.dumps(self.share), encoding="utf-8")
        if self._curriculum is not None:
            self._curriculum.save(folder)

    def load(self, folder: Path) -> None:
        """Read the state that `save` wrote; call before the first rollout."""
        if (file := folder / SHARE_FILE).is_file():
            self.share = float(json.loads(file.read_text(encoding="utf-8")))
        if self._curriculum is not None:
            self._curriculum.load(folder)

    def _of_this_process(self, rows: Sequence[Row], groups: int) -> list[Row]:
        start = self._accelerator.process_index * groups
        return [row for row in rows[start : start + groups] for _ in range(self._size)]
