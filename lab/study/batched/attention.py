"""Attention within a group: prompts by themselves, samples to their prompt and themselves.

A prompt is computed and held once for the samples that continue it. The queries of all of them meet its
keys in one product, and their own keys in another; the softmax goes over both. So the keys of a prompt are
read once per decode step and not once per sample, and an update needs no mask over whole groups. The same
function serves both, so a sampler and its trainer differ by the order of sums at most.

Scores are written out, in fp32: for completions of some hundred tokens that is little, for thousands it would
be the largest tensor of all.

Legend: U prompts (of all runs), n samples of each, C queries of a sample, O keys of its own, P tokens of the
longest prompt, H query heads, G key heads, Q query heads that share a key head, W width of a head.
"""

import torch
from torch.nn import functional as F


def attend_prompts(q_UPHW: torch.Tensor, k_UPGW: torch.Tensor, v_UPGW: torch.Tensor) -> torch.Tensor:
    """Causal attention [U, P, H W] of prompts, which are padded behind their last token."""
    q, k, v = (x.transpose(1, 2) for x in (q_UPHW, k_UPGW, v_UPGW))
    out_UHPW = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out_UHPW.transpose(1, 2).flatten(2)


def by_head(x_UnOGW: torch.Tensor) -> torch.Tensor:
    """Keys or values of samples as `attend_samples` reads them, [U, G, n, O, W]."""
    return x_UnOGW.permute(0, 3, 1, 2, 4)


def attend_samples(
    q_UnCHW: torch.Tensor,
    prompt: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    hidden_UP: torch.Tensor,
    hidden_CO: torch.Tensor,
) -> torch.Tensor:
    """Attention [U, n, C, H W] of samples.

    Args:
        q_UnCHW: Queries.
        prompt: Keys and values of the prompts, [U, G, P, W].
        own: Keys and values of the samples, [U, G, n, O, W].
        hidden_UP: True behind the end of a prompt.
        hidden_CO: True where a query does not see the sample's own key.
    """
    (k_UGPW, v_UGPW), (k_UGnOW, v_UGnOW) = prompt, own
    u, n, c, heads, width = q_UnCHW.shape
    groups, tokens = k_UGPW.shape[1], k_UGPW.shape[2]
    shared = heads // groups
    q = q_UnCHW.unflatten(3, (groups, shared)).permute(0, 3, 1, 4, 2, 5)  # U G n Q C W
    q_own = q.reshape(u, groups, n, shared * c, width) * width**-0.5
    q_prompt = q_own.reshape(u, groups, n * shared * c, width)
    on_prompt = (q_prompt @ k_UGPW.mT).float().masked_fill(hidden_UP[:, None, None], -torch.inf)
    on_own = (q_own @ k_UGnOW.mT).float().unflatten(3, (shared, c)).masked_fill(hidden_CO, -torch.inf)
    scores = torch.cat([on_prompt.view(u, groups, n, shared * c, tokens), on_own.flatten(3, 4)], dim=-1)
    weights = scores.softmax(dim=-1).to(q.dtype)
    on_prompt, on_own = weights.split([tokens, k_UGnOW.shape[3]], dim=-1)
    out = (on_prompt.reshape(u, groups, n * shared * c, tokens) @ v_UGPW).view_as(q_own) + on_own @ v_UGnOW
    return out.view(u, groups, n, shared, c, width).permute(0, 2, 4, 1, 3, 5).reshape(u, n, c, heads * width)
