"""What a perturbation of the sampler is, and how it is applied to the rows of a batch.

A perturbation has one strength, the number that is calibrated: sigma of the noise on the norms, the standard
deviation of the noise on the logits, or by how much the temperature exceeds 1. Each row of a batch has a
strength of its own, so several strengths are measured in one pass and clean rows (strength 0) stand beside
noisy ones.

A *unit* is what shares one draw of noise. In training all samples of a step share it. Here each problem is a
step of its own: its samples share a draw, and the problems of a cell have as many draws as there are
problems. A group, which is what GRPO compares, sees the same as in training, and an interval over problems
covers the draws as well.

Shapes: B rows, D width of a norm, W widths of all noisy norms together, U units, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from qerl.families.parts import base_model
from qerl.noise.norms import find_noise_norms
from qerl.seeding import derive_seed

Kind = Literal["noise", "logits_noise", "temperature"]
Unit = tuple[int, int]
"""Problem and sample of a draw; the sample is -1 where a problem's samples share it."""


@dataclass(frozen=True)
class Perturbation:
    """A kind of perturbation, without its strength.

    Attributes:
        kind: `noise` on the norms' weights, `logits_noise` on the logits (one number per token id, kept for
            the whole completion), or `temperature`.
        noise_scale: As in `lab.study.arms.Arm`: Z = sigma eps (`absolute`) or sigma |w| eps (`relative`).
        noise_per: One draw for the samples of a problem (`step`) or one for each `sample`.
        noise_where: Whether the norms' noise acts on prompts too (`all`) or on completions only (`decode`).
    """

    kind: Kind
    noise_scale: Literal["absolute", "relative"] = "absolute"
    noise_per: Literal["step", "sample"] = "step"
    noise_where: Literal["all", "decode"] = "all"

    @property
    def on_norms(self) -> bool:
        """Whether the forward pass differs from the clean one, and not only what is done with its logits."""
        return self.kind == "noise"

    @property
    def range(self) -> tuple[float, float]:
        """Strengths between which the calibration looks."""
        return (1e-4, 2.0) if self.on_norms else (1e-2, 4.0)

    def unit(self, problem: int, sample: int) -> Unit:
        """The unit to which a sample belongs."""
        return (problem, sample if self.noise_per == "sample" else -1)

    def logits(
        self, logits_BV: torch.Tensor, strengths_B: torch.Tensor, bias_BV: torch.Tensor | None
    ) -> torch.Tensor:
        """The sampler's logits, from those of its forward pass.

        Args:
            logits_BV: fp32.
            strengths_B: fp32.
            bias_BV: Standard normal numbers for `logits_noise`, else None.
        """
        if self.kind == "temperature":
            return logits_BV / (1 + strengths_B)[:, None]
        return logits_BV if bias_BV is None else logits_BV + strengths_B[:, None] * bias_BV


CLEAN = Perturbation("temperature")
"""At strength 0, which is temperature 1."""


def normals(seed: int, what: str, units: Sequence[Unit], width: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers fp32 [U, width], a row for each unit, from the coordinates of the unit alone.

    They are drawn on the device, whose generator decides the numbers: a CPU and a GPU draw others.
    """
    drawn = torch.empty(len(units), width, device=device)
    stream = torch.Generator(device)
    for row, (problem, sample) in zip(drawn, units, strict=True):
        stream.manual_seed(derive_seed(what, seed, problem, sample))
        row.normal_(generator=stream)
    return drawn


class NormNoise:
    """Z for each row of a batch, of the norms that `qerl.noise` perturbs.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not.

    Attributes:
        width: W, the widths of these norms together.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_model(model)
        self._weights = {
            name: base.get_submodule(name).get_parameter("weight") for name in find_noise_norms(model)
        }
        self.width = sum(weight.numel() for weight in self._weights.values())

    def offsets(
        self,
        eps_UW: torch.Tensor,
        units_B: torch.Tensor,
        strengths_B: torch.Tensor,
        scale: Literal["absolute", "relative"],
    ) -> dict[str, torch.Tensor]:
        """Z by name of its norm, fp32 [B, 1, D], as `qerl.noise.norms.noisy_norms` takes it.

        Args:
            eps_UW: Standard normal numbers of each unit.
            units_B: int64, the unit of each row; of no effect where the strength is 0.
            strengths_B: fp32, sigma of each row.
            scale: As in `Perturbation`.
        """
        parts = eps_UW.split([weight.numel() for weight in self._weights.values()], dim=1)
        offsets = {}
        for (name, weight_D), eps_UD in zip(self._weights.items(), parts, strict=True):
            z_BD = eps_UD[units_B] * strengths_B[:, None]
            if scale == "relative":
                z_BD *= weight_D.detach().float().abs()
            offsets[name] = z_BD[:, None]
        return offsets
