"""Selection of the norms that get noise, and replacement of their weights by w + Z.

Three decisions, each against a known failure of other implementations:

- Norms are found by data flow, not by class: a norm is perturbed if its output enters a linear layer. A list
  of class names goes stale with each new family and then silently perturbs nothing; finding nothing is an
  error here.
- Noisy norms are FP32, weight and product. In bf16 the spacing just above 1 is 2^-7: w + Z equals w for Z of
  5e-4, and x_hat * (w + Z) equals x_hat * w if x_hat was rounded to bf16 before.
- Clean weights are never written. The norm gets another Parameter while there is noise; nothing can
  accumulate, and the clean tensor is the same object with the same bits afterwards.

A norm after attention or MLP (all of OLMo 2 and 3, every second one of Gemma 2 to 4) gets no noise. Before a
linear W, Z is noise on W: W diag(w + Z) has each column scaled. After a block, the norm's output is added to
the residual stream, so Z would scale the block's contribution for all later layers. That is not noise on any
linear: the output of the block's last linear is normalised before Z applies.

A norm that takes a gate as a second input (after the recurrence of a gated delta net) gets none either: all
heads share its weight, so Z would scale the corresponding columns of the next linear together.

The experts of a mixture count as one linear, since tokens are gathered before each expert multiplies them; so
the norm before the experts and their router gets noise. Given up: experts stored as one tensor, in a model
that the caller has built; a norm that feeds only such experts and a router is not perturbed.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import Experts
from qerl.families.parts import base_model, eval_mode

_TAKES_FLOAT32 = "_qerl_takes_float32_weight"


def find_noise_norms(model: nn.Module) -> list[str]:
    """Return the names of norms whose output feeds a linear layer, by running two tokens through the model.

    A norm is a module without children whose only parameter is a 1-D ``weight``. It is selected if its output
    memory is the input of experts or of a module with ``in_features`` and ``out_features`` (nn.Linear, packed
    linears and LoRA wrappers have both) outside the output embedding. This excludes q_norm/k_norm, whose
    output goes to the rotary embedding, norms after a block, whose output goes into a sum, and the final
    norm. Norms that are called with a gate are excluded, too.

    Modes, RNG state and parameters of the model are unchanged afterwards.

    Returns:
        Qualified names inside the base model (see ``qerl.families.parts.base_model``), in module order.

    Raises:
        QeRLError: There is no such norm, so noise would have no effect.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    head_modules = set(head.modules()) if head is not None else set()
    norms = {name: module for name, module in base.named_modules() if is_norm(module)}
    linears = [
        m
        for m in base.modules()
        if isinstance(m, Experts) or (hasattr(m, "in_features") and hasattr(m, "out_features"))
    ]
    found = _norms_feeding(base, norms, [linear for linear in linears if linear not in head_modules])
    if not found:
        raise QeRLError(
            f"No RMSNorm in front of a linear layer was found in {type(base).__name__}, so noise cannot be "
            "added; turn noise off for this model."
        )
    return [name for name in norms if name in found]


def is_norm(module: nn.Module) -> bool:
    """Return True for a module without children whose only parameter is a 1-D ``weight``."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        parameters.keys() == {"weight"}
        and parameters["weight"].ndim == 1
        and next(module.children(), None) is None
    )


def _norms_feeding(
    base: PreTrainedModel, norms: Mapping[str, nn.Module], linears: list[nn.Module]
) -> set[str]:
    """Return the names of the norms whose output, or a view of it, enters one of the linears."""
    producer: dict[int, str] = {}
    found: set[str] = set()
    alive = []  # otherwise freed memory could be reused by another tensor and mistaken for a norm's output

    def record(name: str, _norm: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if len(args) > 1:  # a gate
            return
        alive.append(output)
        producer[output.untyped_storage().data_ptr()] = name

    def look_up(_linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        name = producer.get(args[0].untyped_storage().data_ptr())
        if name is not None:
            found.add(name)

    with ExitStack() as stack:
        for name, norm in norms.items():
            stack.callback(norm.register_forward_hook(partial(record, name)).remove)
        for linear in linears:
            stack.callback(linear.register_forward_pre_hook(look_up).remove)
        stack.enter_context(eval_mode(base))
        stack.enter_context(torch.no_grad())
        base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=base.device), use_cache=False)
    return found


def takes_float32_weight(norm: nn.Module) -> None:
    """Mark a norm that computes in FP32 and rounds once at the end if its weight is FP32."""
    object.__setattr__(norm, _TAKES_FLOAT32, True)


def _weight(norm: nn.Module) -> nn.Parameter:
    return norm.get_parameter("weight")


@contextmanager
def noisy_norms(model: nn.Module, offsets: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace the weight w of the named norms by w + Z inside the context.

    Each norm then holds an FP32 Parameter w + Z, computes in FP32 and returns the dtype of its input. The
    clean Parameter objects are restored when the body ends or raises; they are never written.

    Args:
        model: The model, PEFT-wrapped or not.
        offsets: Z by norm name, as ``AdaptiveNoise.offsets`` returns it, or [B, 1, D] with one Z per row of a
            batch [B, T, D]; empty leaves the model unchanged.

    Raises:
        QeRLError: The model has no norm of a given name, or a Z has another width than its norm's weight.
    """
    base = base_model(model)
    modules = dict(base.named_modules())
    with ExitStack() as stack:
        for name, offset in offsets.items():
            norm = modules.get(name)
            if norm is None or _weight(norm).shape != offset.shape[-1:]:
                raise QeRLError(
                    f"{type(base).__name__} has no norm {name!r} of width {offset.shape[-1]} to add noise "
                    "to; draw the noise with an AdaptiveNoise built for this model."
                )
            stack.enter_context(_noisy(norm, offset))
        yield


@contextmanager
def _noisy(norm: nn.Module, offset: torch.Tensor) -> Iterator[None]:
    clean = _weight(norm)
    noisy = nn.Parameter(clean.detach().float() + offset.to(clean.device), requires_grad=False)
    handles = []
    if not getattr(norm, _TAKES_FLOAT32, False):
        precision = _InFloat32()
        handles = [
            norm.register_forward_pre_hook(precision.widen),
            norm.register_forward_hook(precision.narrow),
        ]
    norm.weight = noisy
    try:
        yield
    finally:
        norm.weight = clean
        for handle in handles:
            handle.remove()


class _InFloat32:
    """Hooks that make a norm compute in FP32 and round once, at the end, to the dtype of its input.

    A norm with bf16 input rounds x_hat to bf16 before it multiplies (as those of transformers do), and a bf16
    number times 1 + 5e-4 rounds back to itself, whatever the precision of the weight. Rounded only once, the
    product keeps Z on average: about one entry in ten moves by a whole spacing.
    """

    def widen(self, _norm: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._dtype = args[0].dtype
        return args[0].to(torch.promote_types(self._dtype, torch.float32)), *args[1:]

    def narrow(self, _norm: nn.Module, _args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.to(self._dtype)
