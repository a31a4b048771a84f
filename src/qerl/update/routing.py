"""Routing replay: the update uses the experts that the sampler chose.

A router compares nearly equal numbers, and the sampler and the trainer round differently, so now and then the
same token goes to different experts. The importance ratio then compares two different networks, and measures
more than the change of the last step. Here the routers of a model get the experts that the sampler chose for
each token of the row; the weights of the experts still come from the trainer's router logits, with their
gradient. Tokens without known choices (tool output, samples of another engine) keep those of the trainer's
router.

A router's own code runs, except that `torch.topk` in it returns the given choices. So a family needs no code
here, as long as its router calls `torch.topk` once.

Routing replay is that of Zheng et al., arXiv 2507.18071, section 5.3, and Ma et al., arXiv 2510.11370.

Shapes: L tokens of the row, M mixtures of the model, C experts per token, E experts.
"""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import experts_of
from qerl.families.sizes import Sizes
from qerl.families.table import why_not_described

_MIXERS = ("self_attn", "linear_attn")
"""Names of the modules that a decoder layer may have before its MLP: attention or a delta net."""


class _Given(TorchFunctionMode):
    """Context in which `torch.topk` returns the elements at the given indices.

    Args:
        choices_LC: int16, -1 where unknown.
        replays: False to keep the router's own choices and only count differences.
    """

    def __init__(self, choices_LC: torch.Tensor, replays: bool) -> None:
        super().__init__()
        self._choices_LC, self._replays = choices_LC, replays
        self.calls = 0
        self.counts_2 = choices_LC.new_zeros(2, dtype=torch.int64)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        self.calls += 1
        own_LC, choices_LC = found.indices, self._choices_LC.long()
        known_LC = choices_LC >= 0
        same_LC = (choices_LC[:, :, None] == own_LC[:, None, :]).any(-1)
        self.counts_2 = torch.stack([(known_LC & ~same_LC).sum(), known_LC.sum()])
        if not self._replays:
            return found
        chosen_LC = torch.where(known_LC, choices_LC, own_LC)
        return args[0].gather(-1, chosen_LC), chosen_LC


class Routing:
    """Routing replay of a model, with a count of choices that the trainer's routers would have made
    differently in passes with a gradient.

    Args:
        model: The transformers model as it trains, of a described family.
        replays: Whether routers use the given choices.
    """

    def __init__(self, model: nn.Module, replays: bool = True) -> None:
        self._replays = replays
        self._counts: list[torch.Tensor] = []
        found = list(_routers(model))
        for number, (router, layer) in enumerate(found):
            router.forward = types.MethodType(self._forward(number), router)
            mixer = next(child for name, child in layer.named_children() if name in _MIXERS)
            mixer.register_forward_pre_hook(self._take(number), with_kwargs=True)
        self._choices: list[torch.Tensor | None] = [None] * len(found)

    def take_counts(self) -> tuple[int, int]:
        """Return the numbers of differing and of all known choices since the last call."""
        counts_N2, self._counts = self._counts, []
        differ, known = torch.stack(counts_N2).sum(0).tolist() if counts_N2 else (0, 0)
        return differ, known

    def _take(self, number: int) -> Any:
        """Return a hook for a layer's attention or delta net, which gets the layer's keyword arguments. It
        runs before the router, and again if the layer is recomputed; a hook of the layer itself would not."""

        def take(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
            choices_LMC = kwargs.get("choices")
            self._choices[number] = None if choices_LMC is None else choices_LMC[:, number]

        return take

    def _forward(self, number: int) -> Any:
        def forward(router: Any, *args: Any, **kwargs: Any) -> Any:
            choices_LC = self._choices[number]
            if choices_LC is None:
                return type(router).forward(router, *args, **kwargs)
            with _Given(choices_LC, self._replays) as given:
                out = type(router).forward(router, *args, **kwargs)
            if given.calls != 1 and self._replays:
                raise QeRLError(
                    f"{type(router).__name__} calls torch.topk {given.calls} times, so the sampler's choice "
                    "of experts cannot be replayed; set replay_routing: false."
                )
            # Passes for reference or old log-probabilities do not count.
            if given.calls == 1 and torch.is_grad_enabled():
                self._counts.append(given.counts_2)
            return out

        return forward


def routing_of(model: PreTrainedModel, replays: bool) -> Routing | None:
    """Return the routing of a mixture of a described family (`qerl.families.table`), whose engine may keep
    choices; None for other models."""
    described = why_not_described(model.config.get_text_config(decoder=True)) is None
    return Routing(model, replays) if described and any(experts_of(model)) else None


def _routers(model: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Yield the router of each mixture, and its decoder layer."""
    mlp = Sizes.of(model.config.get_text_config(decoder=True)).mixture
    assert mlp is not None
    for name, _ in experts_of(model):
        layer = model.get_submodule(name.removesuffix(f".{mlp.EXPERTS}"))
        yield layer.get_submodule(mlp.router), layer
