"""Which parts of a model's update run on this project's kernels, and why others do not.

A kernel computes one formula. If a module computes another one, or autograd needs something that the kernel
does not provide (a gradient for a norm's weight, dropout in front of an adapter), the module keeps its own
code: correct, but slower and with more memory. The cost depends on the model and on settings, so a run logs
its path at its start, and its metrics record it.

Modules are measured against the kernels' formulas, because a list of class names or families goes stale with
each new one. Norms are found by structure, as noise finds them (`qerl.noise.norms.is_norm`), and one norm of
each class is run. Attention and MLPs are run with random tensors in place of their linears' outputs: the
inputs of attention show whether heads are only rotated in between, the input of the last linear whether the
MLP has the kernel's gate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from qerl.families.experts import Expert, Experts, experts_of
from qerl.families.layer import Attention, GatedMLP, names
from qerl.families.parts import eval_mode, layers_with_state
from qerl.fp4.linear import PackedLinear
from qerl.kernels.flash import why_not_flash4
from qerl.kernels.limits import MAX_HEAD
from qerl.lora.experts import LINEARS, why_not_together
from qerl.lora.product import NO_ADAPTER, why_not_fused
from qerl.noise.norms import is_norm
from qerl.seeding import generator

JOINED, _JOINED_QKV = names((GatedMLP.JOINED, Attention.JOINED))

_FAILURES = (TypeError, AttributeError, ValueError, KeyError, RuntimeError)  # of a module run by itself
_RECORDER = "qerl_recorder"

NO_GPU = "its kernels need a CUDA GPU"


@dataclass(frozen=True)
class Share:
    """Number of modules of one kind that run on the project's kernels, out of all of that kind.

    Attributes:
        fused, total: Numbers of modules.
        why_not: Reason for the first module that does not; empty if all do.
    """

    fused: int
    total: int
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.fused}/{self.total}" + (f" ({self.why_not})" if self.why_not else "")


@dataclass(frozen=True)
class UpdatePath:
    """The code path of a run's update: which layers run on the project's kernels.

    Attributes:
        attention: Layers whose attention reads segments of the packed row instead of a dense mask.
        norms: RMSNorms.
        rotary: Layers whose rotary kernel reads q, k and v directly from their joint product.
        mlps: SwiGLU blocks.
        mixtures: Layers whose experts are multiplied by grouped products.
        products: Linear layers computed as one product with their adapter; none in full tuning.
        unfit: Why no kernel can run this model on its device and in its dtype; empty if they can.
        delta_nets: Layers that carry a state instead of attention.
        why_not_flash4: Why attention of long rows is FlashAttention-2; empty if it is FlashAttention-4.
        has_wide_heads: Whether a layer has heads too wide for either.
        fp8_gradients: Number of layers whose input gradients come from products in FP8.
    """

    attention: Share
    norms: Share
    rotary: Share
    mlps: Share
    products: Share
    mixtures: Share = Share(0, 0)
    delta_nets: Share = Share(0, 0)
    unfit: str = ""
    why_not_flash4: str = ""
    has_wide_heads: bool = False
    fp8_gradients: int = 0

    @property
    def by_segment(self) -> bool:
        """True if attention reads segments of the packed row instead of a dense mask."""
        return not self.unfit and not self.attention.why_not

    @property
    def is_slow(self) -> bool:
        """True if attention, adapted layers or experts lack their kernels on a GPU, which costs time and
        memory."""
        missing = self.unfit or self.attention.why_not or self.products.why_not or self.mixtures.why_not
        return self.unfit != NO_GPU and bool(missing)

    def record(self) -> dict[str, str]:
        """Return the path as written to metrics.jsonl."""
        if self.unfit:
            return {"kernels": f"none ({self.unfit})"}
        parts = {
            "attention": self.attention,
            "norms": self.norms,
            "rotary embeddings": self.rotary,
            "MLPs": self.mlps,
            "mixtures": self.mixtures,
            "adapted layers": self.products,
            "gated delta nets": self.delta_nets,
        }
        kernel = f"FlashAttention-2 ({self.why_not_flash4})"
        kernel = kernel if self.why_not_flash4 else "FlashAttention-4 for long rows without windows or sinks"
        kernel += ", memory-efficient attention for heads above 256 columns" if self.has_wide_heads else ""
        flash = {"attention kernel": kernel} if self.by_segment else {}
        fp8 = {"gradients in FP8": f"{self.fp8_gradients} layers"} if self.fp8_gradients else {}
        return {name: str(share) for name, share in parts.items() if share.total} | flash | fp8

    def sentence(self) -> str:
        """Return the path as the sentence that a run logs at its start."""
        if self.unfit:
            return f"The update runs on plain PyTorch: {self.unfit}."
        parts = ", ".join(f"{name} {share}" for name, share in self.record().items())
        return f"The update runs on fused kernels: {parts}."


def why_unfit(model: PreTrainedModel) -> str:
    """Return why no kernel of the update can run a model on its device, in its dtype; empty if they can."""
    if model.device.type != "cuda":
        return NO_GPU
    if model.dtype not in (torch.bfloat16, torch.float16):
        found = str(model.dtype).removeprefix("torch.")
        return f"its kernels need bfloat16 and the model is {found}; set dtype: bfloat16, or load it so"
    return ""


def find_path(model: PreTrainedModel, why_dense_masks: str | None) -> UpdatePath:
    """Return the path on which :func:`qerl.update.fused.fuse` puts a model.

    Args:
        model: The transformers model on its training device, adapters included.
        why_dense_masks: Why its attention reads dense masks; None if it reads segments.
    """
    with_state = layers_with_state(model.config)
    layers, nets = with_state.count(False), with_state.count(True)
    heads = [why_dense_masks or turned_heads(module) for module in attentions(model)]
    return UpdatePath(
        attention=Share(0, layers, why_dense_masks) if why_dense_masks else Share(layers, layers),
        norms=_share([why_not_norm(norm, formula) for norm, formula in norms(model)]),
        rotary=_share([found if isinstance(found, str) else None for found in heads]),
        mlps=_share([why_not_swiglu(module) for module in mlps(model)]),
        mixtures=_share([why_not_grouped(module) for _, module in experts_of(model)]),
        products=_share(
            [why_not_fused(m, training=True) for m in model.modules() if isinstance(m, BaseTunerLayer)]
        ),
        delta_nets=Share(nets, nets),
        unfit=(unfit := why_unfit(model)),
        why_not_flash4="" if unfit or why_dense_masks else why_not_flash4(model.device),
        has_wide_heads=any((getattr(m, "head_dim", None) or 0) > MAX_HEAD for m in model.modules()),
    )


def _share(reasons: list[str | None]) -> Share:
    left = [reason for reason in reasons if reason]
    return Share(len(reasons) - len(left), len(reasons), left[0] if left else "")


class RMSNorm(NamedTuple):
    """Parameters of an RMSNorm's formula, as arguments of the kernel."""

    eps: float
    added: float
    rounds_unit: bool


def norms(model: nn.Module) -> Iterator[tuple[nn.Module, RMSNorm | None]]:
    """Yield the model's norms, each with the RMSNorm formula of its class; None if it has another formula."""
    measured: dict[type, RMSNorm | None] = {}
    for module in model.modules():
        if is_norm(module):
            if type(module) not in measured:
                measured[type(module)] = _rms_norm(module)
            yield module, measured[type(module)]


def eps_of_gated(norm: Any) -> float | None:
    """Return a norm's epsilon if its own code computes ``w * rmsnorm(x) * silu(gate)``, as the kernel does;
    None for another formula or a weight that trains."""
    eps = getattr(norm, "variance_epsilon", None)
    if eps is None or norm.weight.requires_grad:
        return None
    x, gate = (each.to(norm.weight.device) for each in _drawn(norm.weight.numel(), norm.weight.numel()))
    try:
        with torch.no_grad():
            found = type(norm).forward(norm, x, gate)
    except _FAILURES:
        return None
    unit = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    exact = norm.weight.float() * unit * functional.silu(gate)
    return eps if (found.float() - exact).norm() <= 1e-2 * exact.norm() else None


def why_not_norm(norm: nn.Module, formula: RMSNorm | None) -> str | None:
    """Return why a norm keeps its own code; None if the kernel computes it."""
    if formula is None and eps_of_gated(norm) is not None:
        return None
    if formula is None:
        return f"{type(norm).__name__} is no plain RMSNorm"
    return "their weights train" if norm.get_parameter("weight").requires_grad else None


def _rms_norm(norm: Any) -> RMSNorm | None:
    """Return the RMSNorm formula that a norm's own code computes; None for another formula."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if eps is None:
        return None
    x = torch.randn(3, norm.weight.numel(), generator=generator("norm")) + 0.5  # its mean is not 0
    x = x.to(norm.weight.device, norm.weight.dtype)
    weight, wide = norm.weight.detach(), x.float()
    unit = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    try:
        with torch.no_grad():
            found, rounded = (type(norm).forward(norm, given).float() for given in (wide, x))
    except _FAILURES:  # it takes more than x, a gate for one
        return None
    for added in (0.0, 1.0):
        exact = (added + weight.float()) * unit
        if (found - exact).norm() <= 1e-2 * exact.norm():
            twice = (added + weight) * unit.to(x.dtype)
            once = exact.to(x.dtype)
            return RMSNorm(eps, added, bool((rounded - twice).norm() <= (rounded - once).norm()))
    return None


def attentions(model: nn.Module) -> Iterator[nn.Module]:
    """The model's attention modules."""
    return (m for m in model.modules() if _has(m, *names(Attention.PLACES["qkv"])) or _has(m, _JOINED_QKV))


def turned_heads(attention: Any) -> dict[str, Any] | str:
    """Return the keyword arguments (a scale, a window, sinks) with which an attention module calls attention,
    if it only rotates whole heads of q and k before the call; else why it keeps its own code."""
    if _has(attention, _JOINED_QKV):
        return "q, k and v are one linear layer"
    projections = {name: getattr(attention, name) for name in names(Attention.PLACES["qkv"])}
    for layer in projections.values():
        if reason := why_not_fused(layer, training=True):
            return reason
    config, size = getattr(attention, "config", None), getattr(attention, "head_dim", None)
    if config is None or size is None:
        return f"{type(attention).__name__} is not known"
    if (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "the rotary embedding covers only a part of each head"
    *outputs, cos, sin = _drawn(*(layer.out_features for layer in projections.values()), size, size)
    far = torch.arange(1, 5)[None] << 20  # so far out that a scale of queries by position shows
    calls: list[Any] = []

    def record(*called: Any, **settings: Any) -> tuple[torch.Tensor, None]:
        calls.append((called[1:4], settings))
        return called[1].transpose(1, 2), None

    before, ALL_ATTENTION_FUNCTIONS[_RECORDER] = config._attn_implementation, record
    config._attn_implementation = _RECORDER
    try:
        with _in_place_of_linears(attention, dict(zip(projections, outputs, strict=True))):
            given = {"hidden_states": cos, "position_embeddings": (cos, sin), "position_ids": far}
            type(attention).forward(attention, attention_mask=None, **given)
    except _FAILURES:
        calls.clear()
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[_RECORDER]
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in outputs)
    if len(calls) != 1 or not all(map(_equal, calls[0][0], (*apply_rotary_pos_emb(q, k, cos, sin), v))):
        return "heads are not just rotated before attention"
    return {name: x for name, x in calls[0][1].items() if name not in ("dropout", "position_ids")}


def mlps(model: nn.Module) -> Iterator[nn.Module]:
    """Return the model's gated MLPs, with gate and up as two linears or one; experts are left out."""
    gate_up, down = (names(places) for places in GatedMLP.PLACES.values())
    either = (*gate_up, *down), (JOINED, *down)
    return (
        m
        for m in model.modules()
        if any(_has(m, *linears) for linears in either) and not isinstance(m, Expert)
    )


def gate_of(mlp: Any) -> str:
    """Return the activation of an MLP that computes ``down(activation(gate x) * up x)``; empty for others."""
    gate, up = (3 * x for x in _drawn(64, 64))
    linears = *names(GatedMLP.PLACES["gate_up"]), JOINED
    try:
        with _in_place_of_linears(
            mlp, dict(zip(linears, (gate, up, torch.cat((gate, up), -1)), strict=True))
        ):
            found = type(mlp).forward(mlp, up)
    except _FAILURES:
        return ""
    exact = {"silu": functional.silu(gate), "gelu": functional.gelu(gate, approximate="tanh")}
    return next((name for name, gated in exact.items() if _equal(found, gated * up)), "")


def why_not_swiglu(mlp: nn.Module) -> str | None:
    """Return why an MLP keeps its own code; None if the kernel computes its gate."""
    return None if gate_of(mlp) else f"{type(mlp).__name__} has no SiLU or tanh-GELU gate"


def why_not_grouped(experts: Experts) -> str | None:
    """Return why a layer's experts are computed one by one; None if grouped products compute them."""
    if reason := why_not_together(experts):
        return reason
    for name in LINEARS:
        first = cast(nn.Module, experts[0]._modules[name])
        reason = why_not_fused(first, first.training) if isinstance(first, BaseTunerLayer) else None
        if reason not in (None, NO_ADAPTER):
            return reason
        for expert in experts:
            linear = cast(nn.Module, expert._modules[name])
            if isinstance(linear, BaseTunerLayer):
                linear = cast(nn.Module, linear._modules["base_layer"])
            if type(linear) not in (PackedLinear, nn.Linear):
                return f"an expert has a {type(linear).__name__}"
            if any(each is not None and each.requires_grad for each in linear._parameters.values()):
                return "an expert's own weights or biases train"
    return None


def _drawn(*columns: int) -> list[torch.Tensor]:
    """Return a random tensor [1, 4, columns], of four tokens, for each number of columns."""
    rng = generator("modules")
    return [torch.randn(1, 4, n, generator=rng) for n in columns]


def _equal(found: Any, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@contextmanager
def _in_place_of_linears(module: nn.Module, outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Make some linears of a module return given tensors inside the block, and all others their input."""
    linears = {name: m for name, m in module.named_children() if hasattr(m, "out_features")}
    given: dict[str, Any] = {name: lambda x, name=name: outputs.get(name, x) for name in linears}
    with torch.no_grad(), eval_mode(module):
        module._modules.update(given)
        try:
            yield
        finally:
            module._modules.update(linears)


def _has(module: nn.Module, *names: str) -> bool:
    return module._modules.keys() >= set(names)
