"""The noise of a trainer's rollouts: Z by step, sigma by its target, and what of it a checkpoint keeps.

Everything is a function of settings, seed, step and, where noise is relative, the weights |w| of the norms,
but one number: the gain that `qerl.noise.target` has learned from KLs of earlier steps. It is the same on
every rank, because the KL is that of all ranks.
"""

import contextlib
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from torch import nn

from qerl.noise.draw import AdaptiveNoise
from qerl.noise.norms import noisy_norms
from qerl.noise.target import KLTarget, TargetState
from qerl.rollout.engine import NormOffsets
from qerl.settings.config import QeRLConfig
from qerl.trainer.batch import STEP_KEY, Batch

NOISE_FILE = "noise.json"
"""In a checkpoint: what was learned of sigma."""


class _Learned(TargetState):
    """What was learned, and what it is a factor of."""

    noise_scale: str
    noise_sigma_start: float


class RolloutNoise:
    """The noise of a trainer's rollouts; none where the settings say so.

    Args:
        args: Settings of the run.
        model: The policy, PEFT-wrapped or not. It is run once on two tokens, when noise is first asked for.
        steps: Says how many optimizer steps the run has; asked when noise is first asked for.
    """

    def __init__(self, args: QeRLConfig, model: nn.Module, steps: Callable[[], int]) -> None:
        self._args, self._model, self._steps = args, model, steps
        self._restored: _Learned | None = None
        self._kept: tuple[int, NormOffsets] | None = None

    @cached_property
    def _draws(self) -> AdaptiveNoise:
        schedule = self._args.noise_schedule_of(self._steps())
        return AdaptiveNoise(self._model, schedule, self._args.seed, self._args.noise_scale)

    @cached_property
    def _target(self) -> KLTarget | None:
        if not self._args.noise or self._args.noise_target_kl is None:
            return None
        target = KLTarget(self._draws.schedule, self._args.noise_target_kl)
        # A gain of sigma in units of the weights says nothing of sigma in shares of them.
        if self._restored is not None and self._restored["noise_scale"] == self._args.noise_scale:
            target.restore(self._restored, self._restored["noise_sigma_start"])
        return target

    def _gain(self, step: int) -> float:
        return 1.0 if self._target is None else self._target.gain_for_rollout(step)

    def for_rollout(self, step: int) -> tuple[NormOffsets, dict[str, float]]:
        """Z for the rollout of a 0-based optimizer step, empty where there is none, and what is logged."""
        if not self._args.noise:
            return {}, {}
        gain = self._gain(step)
        offsets = self._draws.offsets(step, gain)
        logged = {"noise/sigma": self._draws.schedule.sigma(step) * gain, "noise/norms": float(len(offsets))}
        if self._target is not None:
            logged["noise/kl_target"] = self._target.at(step)
        return offsets, logged

    @property
    def is_shared(self) -> bool:
        """Whether noise is only in a share of each group's samples."""
        return self._args.noise_share < 1.0

    def noisy_samples(self, of: int) -> int:
        """Number of noisy samples among those of a prompt, in a step with noise."""
        return round(of * self._args.noise_share)

    def sampled(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Inside the block the policy has the noise of the rollout of this step, which was just sampled."""
        return noisy_norms(self._model, self._draws.offsets(step, self._gain(step)))

    def in_loss(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Inside the block the policy has the noise of the batch's rollout, if the loss is to have it."""
        if not self._args.noise_in_loss:
            return contextlib.nullcontext()
        step = int(batch[STEP_KEY])
        if self._kept is None or self._kept[0] != step:  # many microbatches ask for one rollout's
            self._kept = step, self._draws.offsets(step)
        return noisy_norms(self._model, self._kept[1])

    def observe(self, kl: float) -> None:
        """Learn from KL(sampler || trainer) of a step's noisy samples, nats per token of all processes."""
        if self._target is not None:
            self._target.observe(kl)

    def save(self, folder: Path) -> None:
        """Write what was learned into a checkpoint."""
        if self._target is not None:
            folder.mkdir(parents=True, exist_ok=True)
            learned: _Learned = {
                **self._target.state(),
                "noise_scale": self._args.noise_scale,
                "noise_sigma_start": self._args.noise_sigma_start,
            }
            (folder / NOISE_FILE).write_text(json.dumps(learned), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on with what a checkpoint had learned; to be called before the first rollout.

        sigma goes on as it was where the schedule starts from another one, and anew in other units.
        """
        file = folder / NOISE_FILE
        if file.is_file():
            self._restored = json.loads(file.read_text(encoding="utf-8"))
