"""Which prompts a rollout samples: those of the data's order, unless a curriculum gives their place away, and
the fresh ones of dynamic sampling.

Every process decides for all of them, from the same draws and the same gathered rows, and takes its own part.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset

from qerl.settings.config import QeRLConfig
from qerl.trainer.curriculum import Curriculum, key_of
from qerl.trainer.dynamic_sampling import FreshPrompts, prompt_of

SHARE_FILE = "groups_with_signal.json"

Row = dict[str, Any]


class PromptChoice:
    """The prompts of a trainer's rollouts, for runs with a curriculum or dynamic sampling.

    Args:
        args: Settings of the run.
        dataset: The training rows.
        accelerator: Knows the processes.

    Attributes:
        share: Of groups that had a signal in the last rollout that looked for them.
    """

    def __init__(self, args: QeRLConfig, dataset: Dataset, accelerator: Accelerator) -> None:
        self._accelerator, self._size, self.share = accelerator, args.num_generations or 1, 1.0
        self._curriculum = Curriculum(dataset, args.curriculum_floor, args.seed) if args.curriculum else None
        chances = self._curriculum.chances if self._curriculum is not None else None
        self._fresh = FreshPrompts(dataset, args.seed, chances)
        self._step, self._rollouts = -1, 0  # of the rollout that was chosen last

    @property
    def learns(self) -> bool:
        """Whether what came of a rollout changes what later ones sample."""
        return self._curriculum is not None

    def chosen(self, inputs: list[Row], step: int) -> tuple[list[Row], dict[str, float]]:
        """The rows to sample in place of those that the order of the data proposes, and what is logged.

        Args:
            inputs: The proposed rows of this process, each as often as it is sampled, side by side.
            step: Optimizer step, by which a resumed run makes the same draws.
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
        """Rows of that many further groups of this process, each as often as it is sampled, in the step of
        the last rollout."""
        drawn = self._fresh.draw(groups * self._accelerator.num_processes)
        return self._of_this_process(drawn, groups)

    def observe(self, inputs: list[Row], settled: Sequence[bool | None]) -> None:
        """Tell the curriculum of a run that `learns` what came of a rollout.

        Args:
            inputs: The rows that this process sampled, as `chosen` gives them; processes may differ in how
                many.
            settled: Of its groups: whether their samples were all right or all wrong.
        """
        assert self._curriculum is not None
        own = zip((key_of(row) for row in inputs[:: self._size]), settled, strict=True)
        self._curriculum.observe(*zip(*gather_object(list(own)), strict=True))

    def save(self, folder: Path) -> None:
        """Write what was learned of the problems into a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SHARE_FILE).write_text(json.dumps(self.share), encoding="utf-8")
        if self._curriculum is not None:
            self._curriculum.save(folder)

    def load(self, folder: Path) -> None:
        """Go on with what a checkpoint had learned; to be called before the first rollout."""
        if (file := folder / SHARE_FILE).is_file():
            self.share = float(json.loads(file.read_text(encoding="utf-8")))
        if self._curriculum is not None:
            self._curriculum.load(folder)

    def _of_this_process(self, rows: Sequence[Row], groups: int) -> list[Row]:
        start = self._accelerator.process_index * groups
        return [row for row in rows[start : start + groups] for _ in range(self._size)]
