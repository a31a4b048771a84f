"""The prompts of all runs as the front part of a stream of tokens.

Most of a prompt is the same in all problems of a task: its instruction and worked examples. Where that is the
larger part, and all prompts of a run are computed with the same norm weights, it stands once per run, and the
rest of each prompt attends to it as samples attend to their prompt. Keys and values come out as those of
whole prompts, so whoever continues one need not know.

Legend: S runs, U prompts of a run, T tokens of the longest prompt, F tokens that all share, E = T - F
others, L = F + U E tokens of a run's stream, H query heads, G key heads, W width of a head, D hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lab.study.batched.attention import attend_prompts, attend_samples, bias_of, by_head
from lab.study.batched.norms import Norms


@dataclass(frozen=True)
class Prompts:
    """Prompts of S runs.

    Attributes:
        ids_SUT: Tokens, padded behind their end.
        lengths_SU: How many each has.
        shared: F; less than the shortest prompt has.
    """

    ids_SUT: torch.Tensor
    lengths_SU: torch.Tensor
    shared: int

    def copies(self, number: int) -> "Prompts":
        """Each prompt several times."""
        ids, lengths = (x.repeat_interleave(number, dim=1) for x in (self.ids_SUT, self.lengths_SU))
        return Prompts(ids, lengths, self.shared)

    @property
    def ids_SL(self) -> torch.Tensor:
        """The stream."""
        return torch.cat(
            [self.ids_SUT[:, 0, : self.shared], self.ids_SUT[:, :, self.shared :].flatten(1)], dim=1
        )

    @property
    def positions_L(self) -> torch.Tensor:
        """Position of each token of the stream in its prompt."""
        at_T = torch.arange(self.ids_SUT.shape[2], device=self.ids_SUT.device)
        return torch.cat([at_T[: self.shared], at_T[self.shared :].repeat(self.ids_SUT.shape[1])])

    def segments(self, variants: Sequence[int]) -> tuple[list[int], list[int]]:
        """Norm variant and number of tokens of each segment of the stream, given the variants of prompts."""
        prompts, width = self.ids_SUT.shape[1:]
        front = [(variants[0], self.shared)] if self.shared else []
        both = [*front, *((variant, width - self.shared) for variant in variants)]
        assert len(both) == len(front) + prompts
        return [variant for variant, _ in both], [tokens for _, tokens in both]

    def bias(self, sharing: int, dtype: torch.dtype) -> torch.Tensor | None:
        """What `attend` needs of all layers; see `bias_of`."""
        if not self.shared:
            return None
        (_, prompts, width), device = self.ids_SUT.shape, self.ids_SUT.device
        at_E = torch.arange(width - self.shared, device=device)
        nothing_1F = torch.zeros(1, self.shared, dtype=torch.bool, device=device)
        return bias_of(nothing_1F, at_E > at_E[:, None], prompts, sharing, dtype)

    def attend(
        self, q_SLHW: torch.Tensor, k_SLGW: torch.Tensor, v_SLGW: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Causal attention [S, L, H W], and keys and values of whole prompts in parts, [S U, G, T, W] when
        they are put together."""
        (s, u, width), shared = self.ids_SUT.shape, self.shared
        if bias is None:
            q, k, v = (x.reshape(s * u, width, *x.shape[2:]) for x in (q_SLHW, k_SLGW, v_SLGW))
            return attend_prompts(q, k, v).view(s, u * width, -1), [k.transpose(1, 2)], [v.transpose(1, 2)]
        others = width - shared
        front, rest = zip(
            *(x.split([shared, u * others], dim=1) for x in (q_SLHW, k_SLGW, v_SLGW)), strict=True
        )
        first = [x.transpose(1, 2) for x in front[1:]]
        own = [x.unflatten(1, (u, others)) for x in rest]
        both = [torch.cat([one, by_head(x)], dim=2) for one, x in zip(first, own[1:], strict=True)]
        on_rest = attend_samples(own[0], *both, bias)
        keys, values = (
            [one.repeat_interleave(u, dim=0), x.transpose(2, 3).flatten(0, 1)]
            for one, x in zip(first, own[1:], strict=True)
        )
        return torch.cat([attend_prompts(*front), on_rest.flatten(1, 2)], dim=1), keys, values

    def ends(self, x_SLD: torch.Tensor) -> torch.Tensor:
        """What stands in a stream [S, L, D] where each prompt ends, [S, U, D]."""
        x_SUED = x_SLD[:, self.shared :].unflatten(1, (self.ids_SUT.shape[1], -1))
        last = (self.lengths_SU - self.shared - 1)[..., None, None].expand(-1, -1, 1, x_SLD.shape[-1])
        return x_SUED.gather(2, last)[:, :, 0]


def pad_prompts(
    prompts: Sequence[Sequence[Sequence[int]]], width: int, pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of all runs, padded behind their end [S, P, T], and their lengths [S, P]; int64."""
    lengths = np.array([[len(prompt) for prompt in run] for run in prompts])
    ids = np.full((*lengths.shape, width), pad)
    for own, run in zip(ids, prompts, strict=True):  # row by row, because torch reads nested lists slowly
        for row, prompt in zip(own, run, strict=True):
            row[: len(prompt)] = prompt
    return torch.from_numpy(ids).to(device), torch.from_numpy(lengths).to(device)


def shared_tokens(prompts: Sequence[Sequence[Sequence[int]]], norms: Norms) -> int:
    """How many first tokens of all prompts are to be computed once per run; 0 where they differ or are few.

    Args:
        prompts: Token ids by run and prompt.
        norms: By which they are computed.
    """
    every = [prompt if isinstance(prompt, list) else list(prompt) for run in prompts for prompt in run]
    shortest = min(map(len, every))
    pairs = zip(min(every), max(every), strict=False)  # between which all others lie
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), shortest)
    common = min(same, shortest - 1)
    return common if len(set(norms.of_prompt_R)) == 1 and 2 * common > shortest else 0
