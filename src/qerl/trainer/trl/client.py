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
        sample: Samples completions of prompts: those of each group once, the number of samples of a group,
            and False; or those of each sample, that number, and True.
        may_differ: Whether an environment may show the samples of a group different prompts.
    """

    def __init__(
        self, sample: Callable[[list[list[int]], int, bool], RolloutResult], may_differ: bool = False
    ) -> None:
        self._sample, self._may_differ = sample, may_differ

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
            QeRLError: There are images, or prompts that differ within a group and must not.
        """
        if images is not None:
            raise QeRLError("Only text prompts are supported; the data set has images.")
        once = prompts[::num_generations]
        differ = prompts != [prompt for prompt in once for _ in range(num_generations)]
        if differ and not self._may_differ:
            raise QeRLError(
                f"The samples of a rollout are not {num_generations} of each prompt, side by side; sample "
                "the data with the trainer's own sampler."
            )
        with profiler:
            result = self._sample(prompts if differ else once, num_generations, differ)
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
