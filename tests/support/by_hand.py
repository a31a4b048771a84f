"""One optimizer step of a LoRA adapter on a dense model, written out in torch alone.

Nothing of the project computes here: adapted weights are W + alpha / r B A, sequences run one after another,
losses are their formulas, and so is the first step of AdamW.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.func import functional_call

from qerl.update.losses import Datum

ALPHA = 32
PREFIX = "base_model.model."

Adapter = Mapping[str, torch.Tensor]
"""A and B by their names in PEFT's files."""

HandLoss = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
"""The loss of a sequence, of its targets' log-probabilities and its inputs."""


def logprobs(model: torch.nn.Module, adapter: Adapter, data: Sequence[Datum]) -> list[torch.Tensor]:
    """Log-probabilities of the targets of each datum, with their graph."""
    weights = {}
    for name, a_RI in adapter.items():
        if not name.endswith("lora_A.weight"):
            continue
        b_OR = adapter[name.replace("lora_A", "lora_B")]
        of = name.removeprefix(PREFIX).replace("lora_A.weight", "weight")
        weights[of] = model.get_parameter(of).detach() + ALPHA / len(a_RI) * b_OR @ a_RI
    found = []
    for datum in data:
        logits_TV = functional_call(model, weights, (datum.tokens[None],)).logits[0]
        targets_T = datum.inputs["target_tokens"]
        found.append(logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0])
    return found


def step(
    model: torch.nn.Module, adapter: Adapter, data: Sequence[Datum], loss: HandLoss, lr: float, eps: float
) -> dict[str, torch.Tensor]:
    """The adapter after AdamW's first step without weight decay, whose corrected moments are g and g^2."""
    trained = {name: matrix.clone().requires_grad_() for name, matrix in adapter.items()}
    found = logprobs(model, trained, data)
    total = sum(loss(logps_T, datum.inputs) for logps_T, datum in zip(found, data, strict=True))
    gradients = torch.autograd.grad(total, [*trained.values()])
    return {
        name: adapter[name] - lr * gradient / (gradient.square().sqrt() + eps)
        for name, gradient in zip(trained, gradients, strict=True)
    }


def cross_entropy(p: torch.Tensor, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return -(x["weights"] * p).sum()


def importance_sampling(p: torch.Tensor, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return -((p - x["logprobs"]).exp() * x["advantages"]).sum()


def ppo(p: torch.Tensor, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    r, a = (p - x["logprobs"]).exp(), x["advantages"]
    return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum()


def cispo(p: torch.Tensor, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return -((p - x["logprobs"]).exp().clamp(0, 4).detach() * p * x["advantages"]).sum()


def dro(p: torch.Tensor, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return -(p * x["advantages"] - 0.05 / 2 * (p - x["logprobs"]) ** 2).sum()


def gspo(p: torch.Tensor, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    a, drawn = x["advantages"], x["sequence_ratio_mask"] == 1
    s = (p - x["logprobs"])[drawn].mean().detach().exp() * (p - p.detach()).exp()
    return -torch.minimum(s * a, s.clamp(0.9997, 1.0004) * a).sum()


LOSSES: dict[str, HandLoss] = {
    each.__name__: each for each in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)
}
