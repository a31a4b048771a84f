"""Selection of the norms that get noise, and their weights w + Z.

Three decisions, each against a way in which this went wrong elsewhere:

- Norms are found by data flow, not by class: a norm is perturbed if its output enters a linear layer. A list
  of class names goes stale with each new family and then silently perturbs nothing; finding nothing is an
  error here.
- Noisy norms are FP32, weight and product. In bf16 the spacing just above 1 is 2^-7: w + Z is w for Z of
  5e-4, and x_hat * (w + Z) is x_hat * w if x_hat was rounded to bf16 before.
- Clean weights are never written. The norm gets another Parameter for as long as there is noise; nothing can
  accumulate, and the clean tensor is the same object with the same bits afterwards.

A norm behind attention or MLP (all of OLMo 2 and 3, every second one of Gemma 2 to 4) gets no noise. In front
of a linear W it is noise of W: W diag(w + Z) has each column scaled. Behind a block its output is added to
the residual stream, and Z would scale what the block adds for all later layers. That is noise of no linear:
what the last one of the block gives is normalised before.

A norm that is given a gate beside its input (behind the recurrence of a gated delta net) gets none either:
its weight is one for all heads, so Z would move as many columns of the linear behind it together.

The experts of a mixture count as one linear, since tokens are gathered before each expert multiplies them; so
the norm in front of them and of their router gets noise. Given up: experts that are one tensor, in a model
that the caller has built; a norm that only they and a router read is not perturbed.
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
    """Names of the norms whose output feeds a linear layer, found by running two tokens through the model.

    A norm is a module without children whose only parameter is a 1-D ``weight``. It counts when memory that
    it returned is the input of a module with ``in_features`` and ``out_features`` (nn.Linear, packed linears
    and LoRA wrappers have both) outside the output embedding. That leaves out q_norm/k_norm, whose output
    goes to the rotary embedding, norms after a block, whose output goes into a sum, and the final norm. Norms
    that are called with a gate as well are left out, too.

    Modes, RNG state and parameters of the model are as before afterwards.

    Returns:
        Qualified names inside the base model (see ``qerl.families.parts.base_model``), in module order.

    Raises:
        QeRLError: There is no such norm, so noise would do nothing.
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
    """True for a module without children whose only parameter is a 1-D ``weight``."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        parameters.keys() == {"weight"}
        and parameters["weight"].ndim == 1
        and next(module.children(), None) is None
    )


def _norms_feeding(
    base: PreTrainedModel, norms: Mapping[str, nn.Module], linears: list[nn.Module]
) -> set[str]:
    """Names of the norms whose output, or a view of it, enters one of the linears."""
    producer: dict[int, str] = {}
    found: set[str] = set()
    alive = []  # freed memory would go to the next tensor, which would then pass for the norm's output

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
    """Mark a norm that, given an FP32 weight, computes in FP32 by itself and rounds once at its end."""
    object.__setattr__(norm, _TAKES_FLOAT32, True)


def _weight(norm: nn.Module) -> nn.Parameter:
    return norm.get_parameter("weight")


@contextmanager
def noisy_norms(model: nn.Module, offsets: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside the block the named norms have w + Z in place of w.

    Each norm holds an FP32 Parameter w + Z meanwhile, computes in FP32 and returns the dtype of its input.
    The clean Parameter objects return when the body ends, also when it raises; they are never written.

    Args:
        model: The model, PEFT-wrapped or not.
        offsets: Z by norm name, as ``AdaptiveNoise.offsets`` returns it, or [B, 1, D] with a Z for each row
            of a batch [B, T, D]; empty leaves the model as it is.

    Raises:
        QeRLError: A name that the model does not have, or a Z of another width than the norm's weight.
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
    """Hooks that let a norm compute in FP32 and round once, to the dtype that came in, at the end.

    A norm fed with bf16 rounds x_hat to bf16 before it multiplies (as transformers' do), and a bf16 number
    times 1 + 5e-4 rounds back to itself, whatever the precision of the weight. Rounded once, the product
    keeps Z on average: about one entry in ten moves by a whole spacing.
    """

    def widen(self, _norm: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._dtype = args[0].dtype
        return args[0].to(torch.promote_types(self._dtype, torch.float32)), *args[1:]

    def narrow(self, _norm: nn.Module, _args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.to(self._dtype)
