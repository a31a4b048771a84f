"""Samples of a mixture with the experts that their engine chose, and what a model's routers choose."""

import torch

from qerl.rollout.engine import SamplingParams
from qerl.update.head import score
from qerl.update.packed_row import Sample


def samples_of_engine(engine, prompts, samples=2):
    """Completions of five tokens: one round of steps."""
    found = engine.generate(prompts, samples, SamplingParams(max_tokens=5, seed=1)).completions
    return [
        Sample(prompts[i // samples], c.token_ids, c.logprobs, c.entropies, i // samples, choices=c.choices)
        for i, c in enumerate(found)
    ]


def routers_of(model):
    """Of all mixtures, in order."""
    mlps = [layer.mlp for layer in model.get_base_model().model.layers]
    return [getattr(mlp, name) for mlp in mlps for name in ("gate", "router") if hasattr(mlp, name)]


def own_choices(model, row, by_segment=False):
    """What the routers choose on a row, [L, M, C], by transformers' own code."""
    routers = routers_of(model)
    found = []
    hooks = [router.register_forward_hook(lambda *called: found.append(called[2][2])) for router in routers]
    logps, _ = score(model, model.get_base_model(), row, by_segment)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1), logps


def without(samples):
    return [Sample(s.prompt, s.tokens, s.logprobs, s.entropies, group=s.group) for s in samples]
