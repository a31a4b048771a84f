"""Experts of a mixture as separate linears: `mlp.experts.3.gate_proj`, as most checkpoints name them.

transformers keeps the experts of a layer in two parameters [E, ., .], and merges a checkpoint's matrices into
them as it loads. Here a module whose experts are linears under the checkpoint's names replaces them. So code
for linears works for experts: they are quantised one by one as they are loaded, with scales of their own;
read packed as they were published; adapted by PEFT one by one; and saved under the names that other programs
expect. This costs four modules per expert, 25,000 in a model of 30B.

Some checkpoints hold merged experts, gpt-oss in 16 bits or as blocks of MXFP4. These are split on reading
(`separated`): each matrix of an expert is a view of the tensor in the file.

The router stays transformers' own, in 16 bits and frozen: it is a thousandth of the layer.

Given up: saving experts merged again.

Shapes: T tokens, K experts of each token, E experts, D hidden size, I intermediate size.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qerl.families.layer import Clamp


class Gate(nn.Module):
    """``act(gate) up``.

    Args:
        act: The activation.
    """

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act_fn = act

    def forward(self, gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, I]."""
        inner_TI: torch.Tensor = self.act_fn(gate_TI) * up_TI
        return inner_TI


class ClampedGate(nn.Module):
    """Inner activation of an expert by `qerl.families.layer.Clamp`."""

    def __init__(self, clamp: Clamp) -> None:
        super().__init__()
        self.clamp = clamp

    def forward(self, gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, I]."""
        inner_TI: torch.Tensor = _Clamped.apply(gate_TI, up_TI, self.clamp)
        return inner_TI


class _Clamped(torch.autograd.Function):
    """Activation that keeps only gate and up for its backward pass, and recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, gate_TI: torch.Tensor, up_TI: torch.Tensor, clamp: Clamp) -> torch.Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        ctx.clamp = clamp
        return _clamped(gate_TI, up_TI, clamp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TI: torch.Tensor) -> Any:
        gate_TI, up_TI = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            inner_TI = _clamped(gate_TI, up_TI, ctx.clamp)
        return *torch.autograd.grad(inner_TI, (gate_TI, up_TI), grad_TI), None


def _clamped(gate_TI: torch.Tensor, up_TI: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    gate_TI, up_TI = gate_TI.clamp(max=clamp.limit), up_TI.clamp(-clamp.limit, clamp.limit)
    return (up_TI + 1) * (gate_TI * (gate_TI * clamp.slope).sigmoid())


class Expert(nn.Module):
    """``down(gated(gate x, up x))``.

    Args:
        hidden: D.
        intermediate: I.
        gated: Module that combines gate and up, shared by all experts.
        bias: Whether its linears have biases.
        device, dtype: Device and dtype of the weights.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        gated: nn.Module,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        like: Any = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, **like)
        self.up_proj = nn.Linear(hidden, intermediate, **like)
        self.down_proj = nn.Linear(intermediate, hidden, **like)
        self.gated = gated

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        out_TD: torch.Tensor = self.down_proj(self.gated(self.gate_proj(x_TD), self.up_proj(x_TD)))
        return out_TD


class Experts(nn.ModuleList):
    """The experts of a layer; replaces transformers' module and is called like it."""

    def forward(self, x_TD: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, D] of each token's experts.

        Tokens are sorted by expert, so that each expert multiplies all of its tokens at once. Each token's
        results are added in the order of its experts, which depends neither on timing nor on other tokens.

        Args:
            x_TD: Input.
            expert_TK: Index of the experts of each token.
            weight_TK: Factor of each expert's result.
        """
        chosen = expert_TK.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self)).tolist()
        parts = x_TD[order // expert_TK.shape[1]].split(counts)
        # An adapted expert without tokens gets gradients of zero, not None: other processes may have tokens.
        always = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        results = [
            expert(part) if len(part) or always else part for expert, part in zip(self, parts, strict=True)
        ]
        sorted_TD = torch.cat(results)
        out_TKD = torch.empty_like(sorted_TD).index_copy(0, order, sorted_TD).unflatten(0, expert_TK.shape)
        out_TD: torch.Tensor = (out_TKD * weight_TK[..., None]).sum(dim=1)
        return out_TD.to(x_TD.dtype)


def separate_experts(model: nn.Module) -> None:
    """Replace transformers' experts by `Experts` without weights, in a model on the meta device."""
    for name, module in _merged(model):
        if _why_not(module) is None:
            experts, hidden, intermediate = _sizes(module)
            clamp = _clamp(module)
            gated = ClampedGate(clamp) if clamp else Gate(module.act_fn)
            like = {"device": module.down_proj.device, "dtype": module.down_proj.dtype}
            made = (Expert(hidden, intermediate, gated, _has_bias(module), **like) for _ in range(experts))
            model.set_submodule(name, Experts(made))


def why_not_separable(model: nn.Module) -> str | None:
    """Return why :func:`separate_experts` has left experts of this model merged; None if it left none."""
    return next((f"{name}, which {_why_not(module)}" for name, module in _merged(model)), None)


def _why_not(module: Any) -> str | None:
    """Return why transformers' experts cannot be separated, as the end of a sentence; None if they can."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    biases = {"gate_up_proj_bias", "down_proj_bias"} if _has_bias(module) else set()
    if shapes.keys() != {"gate_up_proj", "down_proj"} | biases:
        return f"has the parameters {', '.join(sorted(shapes))}"
    experts, hidden, intermediate = _sizes(module)
    wanted = (2 * intermediate, hidden)
    if shapes["gate_up_proj"] != (experts, *(wanted[::-1] if _is_transposed(module) else wanted)):
        return f"has a gate_up_proj of the shape {list(shapes['gate_up_proj'])}"
    own_gate = type(module).__module__ == getattr(module, "_apply_gate", nn.Module.forward).__module__
    if own_gate and _clamp(module) is None:
        return "has a gate of its own"
    return None


def _clamp(module: Any) -> Clamp | None:
    """Return gpt-oss's gate; None for other modules, some of which have a ``limit`` of another meaning."""
    if not (hasattr(module, "alpha") and hasattr(module, "limit") and _has_bias(module)):
        return None
    return Clamp(module.alpha, module.limit)


def _sizes(module: Any) -> tuple[int, int, int]:
    """(E, D, I) of transformers' module."""
    experts, hidden, intermediate = module.down_proj.shape
    return (experts, intermediate, hidden) if _is_transposed(module) else (experts, hidden, intermediate)


def _is_transposed(module: Any) -> bool:
    """Return True if the input dimension of the weights comes before the output dimension."""
    return bool(getattr(module, "is_transposed", False))


def _has_bias(module: Any) -> bool:
    return bool(getattr(module, "has_bias", False))


class Layout(NamedTuple):
    """How a checkpoint holds merged experts.

    Attributes:
        transposed: True for [E, inputs, outputs], which holds for 16 bits only; else [E, outputs, inputs].
        alternating: True if outputs of gate and up alternate; else all outputs of gate come first.
    """

    transposed: bool
    alternating: bool


_LAYOUTS = {
    "gpt_oss": Layout(transposed=True, alternating=True),
    "qwen3_5_moe_text": Layout(transposed=False, alternating=False),
}
"""Layouts by ``model_type`` of the text decoder; checkpoints of other types name each expert."""

_MERGED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias|)")
_OF_EXPERT = {"": "weight", "_blocks": "weight_packed", "_scales": "weight_scale", "_bias": "bias"}


def separated(model_type: str, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a tensor of merged experts into named views of each expert's matrix, block scales or bias; yield
    any other tensor as it is.

    Args:
        model_type: ``model_type`` of the text decoder.
        name: Name of the tensor in the causal LM.
        tensor: As stored; may be on the meta device.
    """
    layout, found = _LAYOUTS.get(model_type), _MERGED.fullmatch(name)
    if layout is None or found is None:
        yield name, tensor
        return
    place, linear, kind = found.groups()
    for number, own in enumerate(tensor):
        if kind == "_blocks":
            own = own.flatten(1)  # two codes a byte, in blocks of 32
        if kind == "" and layout.transposed:
            own = own.T
        parts = {linear: own}
        if linear == "gate_up_proj":
            gate, up = (own[::2], own[1::2]) if layout.alternating else own.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up}
        for each, part in parts.items():
            yield f"{place}.{number}.{each}.{_OF_EXPERT[kind]}", part


def whole_of_blocks(model_type: str, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape in 16 bits of merged experts that a checkpoint holds as blocks of 32 codes.

    Args:
        model_type: ``model_type`` of the text decoder.
        name: Name of the blocks, ends in ``_blocks``.
        shape: Shape of the blocks, [E, outputs, inputs / 32, 16].
    """
    experts, outputs, blocks, _ = shape
    sides = (outputs, 32 * blocks)
    transposed = _LAYOUTS[model_type].transposed
    return name.removesuffix("_blocks"), (experts, *(sides[::-1] if transposed else sides))


def experts_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Experts]]:
    """Yield the `Experts` of a model with their names, without visiting the thousands of modules in them."""
    for name, child in model.named_children():
        if isinstance(child, Experts):
            yield f"{prefix}{name}", child
        else:
            yield from experts_of(child, f"{prefix}{name}.")


@torch.no_grad()
def own_memory(experts: Experts) -> None:
    """Copy weights that were read as strided views of merged experts into memory of their own."""
    for tensor in (*experts.parameters(), *experts.buffers()):
        if not tensor.is_contiguous():
            tensor.data = tensor.contiguous()


def _merged(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that still hold merged experts."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and not isinstance(module, Experts)
    ]
