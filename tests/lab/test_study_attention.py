"""Attention of batched studies: its gradients are those of plain attention, and added in a fixed order."""

import pytest
import torch
from torch.nn import functional as F

from lab.study.batched.attention import attend_prompts, attend_samples, bias_of

PROMPTS, FRONT, SAMPLES, OWN, HEADS, GROUPS, WIDTH = 2, 5, 3, 4, 4, 2, 8
HIDDEN_UP = torch.arange(FRONT) >= torch.tensor([[FRONT], [FRONT - 2]])
HIDDEN_CO = torch.arange(OWN) > torch.arange(OWN)[:, None]
SIZES = {
    "samples": [(SAMPLES, OWN, HEADS, WIDTH), (GROUPS, FRONT + SAMPLES * OWN, WIDTH)],
    "prompts": [(FRONT, HEADS, WIDTH), (FRONT, GROUPS, WIDTH)],
}


def arguments(of: str) -> list[torch.Tensor]:
    """Queries, keys and values."""
    queries, keys = SIZES[of]
    return [torch.randn(PROMPTS, *size, dtype=torch.float64) for size in (queries, keys, keys)]


def attend(of: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if of == "prompts":
        return attend_prompts(q, k, v)
    return attend_samples(q, k, v, bias_of(HIDDEN_UP, HIDDEN_CO, SAMPLES, HEADS // GROUPS, q.dtype))


def plain(of: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same by torch's attention, sample by sample."""
    if of == "prompts":
        each = (x.transpose(1, 2) for x in (q, k, v))
        return (
            F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )
    out = q.new_empty(PROMPTS, SAMPLES, OWN, HEADS * WIDTH)
    for prompt in range(PROMPTS):
        for sample in range(SAMPLES):
            at = [*range(FRONT), *range(FRONT + sample * OWN, FRONT + (sample + 1) * OWN)]
            seen = ~torch.cat([HIDDEN_UP[prompt].expand(OWN, -1), HIDDEN_CO], dim=1)
            found = F.scaled_dot_product_attention(
                q[prompt, sample].transpose(0, 1), k[prompt, :, at], v[prompt, :, at], seen, enable_gqa=True
            )
            out[prompt, sample] = found.transpose(0, 1).flatten(1)
    return out


@pytest.mark.parametrize("of", SIZES)
@pytest.mark.parametrize("trained", [(0, 1, 2), (0, 2), (1,)], ids=str)
def test_it_is_plain_attention_with_its_gradients(of, trained):
    qkv = arguments(of)
    wanted = [qkv[at].requires_grad_() for at in trained]
    out, expected = attend(of, *qkv), plain(of, *qkv)
    pull = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    found, gradients = (torch.autograd.grad(each, wanted, pull) for each in (out, expected))
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("of", SIZES)
def test_its_backward_pass_alone_asks_for_a_fixed_order(of, monkeypatch):
    asked = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            asked.append(torch.are_deterministic_algorithms_enabled())
            return q.clone()

        @staticmethod
        def backward(ctx, gradient):
            asked.append(torch.are_deterministic_algorithms_enabled())
            return gradient

    of_torch = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *kv, **more: of_torch(Watched.apply(q), *kv, **more)
    )
    attend(of, *(x.requires_grad_() for x in arguments(of))).sum().backward()
    assert asked == [False, True] and not torch.are_deterministic_algorithms_enabled()
