"""Drawing of the noise vectors of a step.

Z depends on (seed, step, index of the norm) and, if relative, on the norm's weight: every rank draws the same
Z, and so does a run resumed at a step.

**Absolute or relative.** The paper's Z = sigma eps has the same scale in all norms, but their weights differ:
in SmolLM2-135M the median |w| is 0.02 before the first attention and 1 or more in late layers, so a sigma of
1e-2 is 45 % noise in one layer and 1 % in another. Relative noise, Z = sigma |w| eps, scales every channel of
the next weight by 1 + sigma eps, so one sigma means the same in every model.
"""

from typing import Literal

import torch
from torch import nn

from qerl.families.parts import base_model
from qerl.noise.norms import find_noise_norms
from qerl.noise.schedule import NoiseSchedule
from qerl.seeding import generator

NoiseScale = Literal["absolute", "relative"]


def unit_noise(width: int, seed: int, step: int, index: int) -> torch.Tensor:
    """Draw eps ~ N(0, I) of one norm: [width], fp32 on the CPU.

    Args:
        width: Width of the norm's weight.
        seed: Seed of the run.
        step: 0-based optimizer step.
        index: Index of the norm in the result of `find_noise_norms`.
    """
    return torch.randn(width, generator=generator("noise", seed, step, index))


def magnitude(norm: nn.Module) -> torch.Tensor:
    """Measure |w| of a norm by running it: [width], fp32 on the CPU.

    The input has alternating signs, which normalisation leaves unchanged: a norm that multiplies by 1 + w
    (Gemma's) has the magnitude |1 + w|.
    """
    weight = norm.get_parameter("weight")
    signs = torch.ones(1, weight.numel(), device=weight.device)
    signs[:, 1::2] = -1
    with torch.no_grad():
        # Calls the class's own forward, because a fused kernel that replaces it may round to 16 bits.
        return type(norm).forward(norm, signs)[0].abs().float().cpu()


class AdaptiveNoise:
    """Draws the noise vectors of each step for the norms of one model.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not. It is run once on two tokens.
        schedule: sigma by step.
        seed: Seed of the run; eps depends only on it, the step, and the index of the norm.
        scale: ``absolute``, Z = sigma eps, as in the paper; or ``relative``, Z = sigma |w| eps.

    Attributes:
        norm_names: Qualified names of the perturbed norms inside the base model, in module order.

    Raises:
        QeRLError: No norm before a linear layer was found.
    """

    def __init__(
        self, model: nn.Module, schedule: NoiseSchedule, seed: int, scale: NoiseScale = "absolute"
    ) -> None:
        self.schedule = schedule
        self.seed = seed
        self.scale = scale
        self.norm_names = find_noise_norms(model)
        base = base_model(model)
        self._norms = [base.get_submodule(name) for name in self.norm_names]

    def offsets(self, step: int) -> dict[str, torch.Tensor]:
        """Return Z of one optimizer step by norm name, each [width], fp32 on the CPU; empty if sigma is 0.

        Args:
            step: 0-based global step; the same step gives the same noise in every process.
        """
        sigma = self.schedule.sigma(step)
        if sigma == 0:
            return {}
        return {
            name: self._unit(index, norm, step) * sigma
            for index, (name, norm) in enumerate(zip(self.norm_names, self._norms, strict=True))
        }

    def _unit(self, index: int, norm: nn.Module, step: int) -> torch.Tensor:
        """Return Z of a norm at sigma 1."""
        eps = unit_noise(norm.get_parameter("weight").numel(), self.seed, step, index)
        return eps if self.scale == "absolute" else eps * magnitude(norm)
