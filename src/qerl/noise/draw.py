"""The noise vectors of a step.

Z depends on (seed, step, index of the norm) and, where it is relative, on the norm's weight: every rank draws
the same, and so does a run resumed at a step.

**Absolute or relative.** The paper's Z = sigma eps is the same in all norms, whose weights are not: in
SmolLM2-135M the median |w| is 0.02 before the first attention and 1 and more in late layers, so a sigma
of 1e-2 is 45 % noise in one layer and 1 % in another. Relative noise, Z = sigma |w| eps, is the same share of
every channel of the next weight (1 + sigma eps), and one sigma means the same in every model.
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
    """eps ~ N(0, I) of one norm, [width], fp32 on the CPU.

    Args:
        width: Of the norm's weight.
        seed, step: Of the run, and the 0-based optimizer step.
        index: Of the norm among those that `find_noise_norms` finds.
    """
    return torch.randn(width, generator=generator("noise", seed, step, index))


def magnitude(norm: nn.Module) -> torch.Tensor:
    """|w| of a norm by what it does with its input, [width], fp32 on the CPU.

    It is measured on alternating signs, which are their own normalised values: a norm that multiplies with
    1 + w (Gemma's) has the magnitude |1 + w|.
    """
    weight = norm.get_parameter("weight")
    signs = torch.ones(1, weight.numel(), device=weight.device)
    signs[:, 1::2] = -1
    with torch.no_grad():
        # The class's own code, as a fused kernel in its place may round to 16 bits.
        return type(norm).forward(norm, signs)[0].abs().float().cpu()


class AdaptiveNoise:
    """Draws the noise vectors of each step for the norms of one model.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not. It is run once on two tokens.
        schedule: sigma by step.
        seed: With the step and the index of the norm the only thing that eps depends on.
        scale: ``absolute``, Z = sigma eps, as in the paper; or ``relative``, Z = sigma |w| eps.

    Attributes:
        norm_names: Perturbed norms in module order, named as inside the base model.

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
        """Z of one optimizer step by norm name, each fp32 on the CPU, of the norm's width; empty where sigma
        is 0.

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
        """Z of a norm at sigma 1."""
        eps = unit_noise(norm.get_parameter("weight").numel(), self.seed, step, index)
        return eps if self.scale == "absolute" else eps * magnitude(norm)
