"""What TRL is given in place of its own vLLM client and its own order of the data. Tied to trl 1.16."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from trl.trainer.utils import RepeatSampler

from qerl.errors import QeRLError
from qerl.rollout.engine import RolloutResult
from qerl.seeding import derive_seed


class EngineClient:
    """What TRL expects of a vLLM client, answered by the engine.

    Args:
        sample: Samples completions of prompts; the second argument is their number per prompt.
    """

    def __init__(self, sample: Callable[[list[list[int]], int], RolloutResult]) -> None:
        self._sample = sample

    def sync_weights(self) -> None:
        """Nothing to do: the engine runs the trainer's modules."""

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,
        profiler: contextlib.AbstractContextManager,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Completions of prompts that TRL repeats `num_generations` times each; the engine takes them once.

        Raises:
            QeRLError: There are images, or prompts that differ within a group.
        """
        if images is not None:
            raise QeRLError("Only text prompts are supported; the data set has images.")
        once = prompts[::num_generations]
        if prompts != [prompt for prompt in once for _ in range(num_generations)]:
            raise QeRLError(
                f"The samples of a rollout are not {num_generations} of each prompt, side by side; sample "
                "the data with the trainer's own sampler."
            )
        with profiler:
            result = self._sample(once, num_generations)
        ids = [c.token_ids for c in result.completions]
        logprobs = [[[value] for value in c.logprobs] for c in result.completions]
        return prompts, ids, logprobs, None


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler in an order that depends on (seed, epoch) alone: a resume meets the same data."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.set_epoch(self.epoch)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.epoch = epoch
        if self.shuffle:
            self.generator.manual_seed(derive_seed("order", self.seed, epoch))
