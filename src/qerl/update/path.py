"""Which parts of a model's update run on this project's kernels, and why others do not.

A kernel serves one formula. Where a module computes another one, or where autograd needs what the kernel does
not give (a gradient for a norm's weight, dropout in front of an adapter), the module is left as it is: right,
slower and larger. What that costs depends on the model and on settings, so a run says at its start which path
it takes, and its metrics keep it.

Norms are found as noise finds them, by structure (`qerl.noise.norms.is_norm`), and one of each class is
measured against the kernel's formula: a list of class names goes stale with each new family. Attention that
turns its heads goes by the family (`qerl.families.table`), because nothing short of its source says what
else it does between the product of q, k and v and the rotary embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from qerl.families.layer import Attention, GatedMLP, names
from qerl.families.table import FAMILIES
from qerl.kernels.flash import why_not_flash4
from qerl.lora.product import why_not_fused
from qerl.noise.norms import is_norm
from qerl.seeding import generator

_SILU = ("SiLU", "SiLUActivation")

NO_GPU = "its kernels need a CUDA GPU"


@dataclass(frozen=True)
class Share:
    """How many modules of one kind run on the project's kernels.

    Attributes:
        fused, total: Numbers of modules.
        why_not: Reason of the first module that does not, empty where all do.
    """

    fused: int
    total: int
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.fused}/{self.total}" + (f" ({self.why_not})" if self.why_not else "")


@dataclass(frozen=True)
class UpdatePath:
    """What the update of a run computes with.

    Attributes:
        attention: Layers whose attention reads segments of the packed row instead of a dense mask.
        norms: RMSNorms.
        rotary: Layers whose rotary embedding takes q, k and v as one product leaves them.
        mlps: SwiGLU blocks.
        products: Layers with an adapter that are one product with it; none in full tuning.
        unfit: Why no kernel can serve this model where it is; empty where they can.
        why_not_flash4: Why attention of long rows is FlashAttention-2; empty where it is FlashAttention-4.
    """

    attention: Share
    norms: Share
    rotary: Share
    mlps: Share
    products: Share
    unfit: str = ""
    why_not_flash4: str = ""

    @property
    def by_segment(self) -> bool:
        """Whether attention reads segments of the packed row instead of a dense mask."""
        return not self.unfit and not self.attention.why_not

    @property
    def is_slow(self) -> bool:
        """Whether attention or adapted layers lack their kernels on a GPU, which costs time and memory."""
        return self.unfit != NO_GPU and bool(self.unfit or self.attention.why_not or self.products.why_not)

    def record(self) -> dict[str, str]:
        """The path as metrics.jsonl keeps it."""
        if self.unfit:
            return {"kernels": f"none ({self.unfit})"}
        parts = {
            "attention": self.attention,
            "norms": self.norms,
            "rotary embeddings": self.rotary,
            "MLPs": self.mlps,
            "adapted layers": self.products,
        }
        kernel = f"FlashAttention-2 ({self.why_not_flash4})"
        kernel = kernel if self.why_not_flash4 else "FlashAttention-4 for long rows"
        flash = {"attention kernel": kernel} if self.by_segment else {}
        return {name: str(share) for name, share in parts.items() if share.total} | flash

    def sentence(self) -> str:
        """The path as a run says it at its start."""
        if self.unfit:
            return f"The update runs on plain PyTorch: {self.unfit}."
        parts = ", ".join(f"{name} {share}" for name, share in self.record().items())
        return f"The update runs on fused kernels: {parts}."


def why_unfit(model: PreTrainedModel) -> str:
    """Why no kernel of the update can serve a model where it is; empty where they can."""
    if model.device.type != "cuda":
        return NO_GPU
    if model.dtype not in (torch.bfloat16, torch.float16):
        found = str(model.dtype).removeprefix("torch.")
        return f"its kernels need bfloat16 and the model is {found}; set dtype: bfloat16, or load it so"
    return ""


def find_path(model: PreTrainedModel, why_dense_masks: str | None) -> UpdatePath:
    """The path on which :func:`qerl.update.fused.fuse` puts a model.

    Args:
        model: The transformers model where it trains, adapters included.
        why_dense_masks: Why its attention reads dense masks; None where it reads segments.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return UpdatePath(
        attention=Share(0, layers, why_dense_masks) if why_dense_masks else Share(layers, layers),
        norms=_share([why_not_norm(norm, measured) for norm, measured in norms(model)]),
        rotary=_share([why_dense_masks or why_not_rotary(module) for module in attentions(model)]),
        mlps=_share([why_not_swiglu(module) for module in mlps(model)]),
        products=_share(
            [why_not_fused(m, training=True) for m in model.modules() if isinstance(m, BaseTunerLayer)]
        ),
        unfit=(unfit := why_unfit(model)),
        why_not_flash4="" if unfit or why_dense_masks else why_not_flash4(model.device),
    )


def _share(reasons: list[str | None]) -> Share:
    left = [reason for reason in reasons if reason]
    return Share(len(reasons) - len(left), len(reasons), left[0] if left else "")


def norms(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The model's norms, each with whether its class computes the kernel's RMSNorm."""
    measured: dict[type, bool] = {}
    for module in model.modules():
        if is_norm(module):
            if type(module) not in measured:
                measured[type(module)] = _computes_rms_norm(module)
            yield module, measured[type(module)]


def why_not_norm(norm: nn.Module, computes_rms_norm: bool) -> str | None:
    """Why a norm keeps its own code; None where the kernel computes it."""
    if not computes_rms_norm:
        return f"{type(norm).__name__} is no plain RMSNorm"
    return "their weights train" if norm.get_parameter("weight").requires_grad else None


def _computes_rms_norm(norm: Any) -> bool:
    """Whether a norm's own code gives ``w x / sqrt(mean(x^2) + eps)``, but for rounding."""
    eps = getattr(norm, "variance_epsilon", None)
    if eps is None:
        return False
    x = torch.randn(3, norm.weight.numel(), generator=generator("norm")) + 0.5  # its mean is not 0
    x = x.to(norm.weight.device)
    weight = norm.weight.detach().float()
    exact = weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    try:
        with torch.no_grad():
            found = type(norm).forward(norm, x).float()
        return bool((found - exact).norm() <= 1e-2 * exact.norm())
    except (TypeError, AttributeError, ValueError, RuntimeError):  # it takes more than x, a gate for one
        return False


def attentions(model: nn.Module) -> Iterator[nn.Module]:
    """The model's attention modules."""
    return (m for m in model.modules() if _has(m, *names(Attention.PLACES["qkv"])))


def why_not_rotary(attention: Any) -> str | None:
    """Why an attention module turns its heads by its own code; None where the kernel does."""
    family = FAMILIES.get(getattr(getattr(attention, "config", None), "model_type", ""))
    if family is None:
        return f"{type(attention).__name__} is not known"
    if not family.fused_qkv:
        return "heads are normalised before they are turned"
    rope = getattr(attention.config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a part of each head is not turned"
    projections = [getattr(attention, name) for name in names(Attention.PLACES["qkv"])]
    return next(filter(None, (why_not_fused(layer, training=True) for layer in projections)), None)


def mlps(model: nn.Module) -> Iterator[nn.Module]:
    """The model's gated MLPs."""
    linears = [name for places in GatedMLP.PLACES.values() for name in names(places)]
    return (m for m in model.modules() if _has(m, *linears))


def why_not_swiglu(mlp: Any) -> str | None:
    """Why an MLP keeps its own code; None where the kernel computes its activation."""
    kind = type(getattr(mlp, "act_fn", None)).__name__
    return None if kind in _SILU else f"the activation is {kind}"


def _has(module: nn.Module, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)
