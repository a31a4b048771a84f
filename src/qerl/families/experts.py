"""Experts of a mixture as linears of their own: `mlp.experts.3.gate_proj`, as checkpoints name them.

transformers keeps the experts of a layer in two parameters [E, ., .], and merges a checkpoint's matrices into
them as it loads. Here a module takes their place whose experts are linears under the checkpoint's names. All
that is done to linears is thereby done to experts: they are quantised one by one as they arrive, with scales
of their own; read packed as they were published; adapted by PEFT one by one; and saved under the names under
which others look for them. It costs four modules per expert, 25,000 in a model of 30B.

The router stays transformers' own, in 16 bits and frozen: it is a thousandth of the layer.

Given up: experts that are published as one tensor (gpt-oss, Qwen3.5 and 3.6), whose parts have no names.

Shapes: T tokens, K experts of each token, E experts, D hidden size, I intermediate size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Expert(nn.Module):
    """``down(act(gate x) * up x)``.

    Args:
        hidden: D.
        intermediate: I.
        act: The activation.
        device, dtype: Of the weights.
    """

    def __init__(
        self, hidden: int, intermediate: int, act: nn.Module, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)
        self.act_fn = act

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        inner_TI: torch.Tensor = self.act_fn(self.gate_proj(x_TD)) * self.up_proj(x_TD)
        out_TD: torch.Tensor = self.down_proj(inner_TI)
        return out_TD


class Experts(nn.ModuleList):
    """The experts of a layer, in the place of transformers' module and called as that."""

    def forward(self, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """The weighted sum [T, D] of each token's experts.

        Tokens are sorted by expert, so that each is multiplied with all of its tokens at once. Each token's
        results are added in the order of its experts, which depends neither on timing nor on other tokens.

        Args:
            x_TD: Input.
            expert_TK: Index of the experts of each token.
            weight_TK: What the result of each is multiplied with.
        """
        chosen = expert_TK.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self)).tolist()
        parts = x_TD[order // expert_TK.shape[1]].split(counts)
        # An adapted expert without tokens has gradients of zero, not none: other processes may have some.
        always = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        results = [
            expert(part) if len(part) or always else part for expert, part in zip(self, parts, strict=True)
        ]
        sorted_TD = torch.cat(results)
        out_TKD = torch.empty_like(sorted_TD).index_copy(0, order, sorted_TD).unflatten(0, expert_TK.shape)
        out_TD: torch.Tensor = (out_TKD * weight_TK[..., None]).sum(dim=1)
        return out_TD.to(x_TD.dtype)


def separate_experts(model: nn.Module) -> None:
    """Put `Experts` without weights in the place of transformers' modules, in a model on the meta device."""
    for name, module in _merged(model):
        if _why_not(module) is None:
            experts, _, hidden = module.gate_up_proj.shape
            like = {"device": module.gate_up_proj.device, "dtype": module.gate_up_proj.dtype}
            made = (Expert(hidden, module.down_proj.shape[-1], module.act_fn, **like) for _ in range(experts))
            model.set_submodule(name, Experts(made))


def why_not_separable(model: nn.Module) -> str | None:
    """Why experts of this model cannot be linears of their own, after :func:`separate_experts`; else None."""
    return next((f"{name}, which {_why_not(module)}" for name, module in _merged(model)), None)


def _why_not(module: Any) -> str | None:
    """Why the experts of transformers' module cannot be separated, as the end of a sentence; else None."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"}:
        return f"has the parameters {', '.join(sorted(shapes))}"
    experts, hidden, intermediate = shapes["down_proj"]
    if shapes["gate_up_proj"] != (experts, 2 * intermediate, hidden):
        return f"has a gate_up_proj of the shape {list(shapes['gate_up_proj'])}"
    if type(module).__module__ == getattr(module, "_apply_gate", nn.Module.forward).__module__:
        return "has a gate of its own"
    return None


def experts_of(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Names and modules of a model's separate experts."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Experts))


def _merged(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules that hold experts in one parameter each."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and not isinstance(module, Experts)
    ]
