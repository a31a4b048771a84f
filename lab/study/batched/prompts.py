"""The prompts of all runs as the first part of a token stream.

Prompts of a task often begin with the same tokens: its instruction and worked examples. If this prefix is the
larger part, and all prompts of a run are computed with the same norm weights, it is computed once per run,
and the rest of each prompt attends to it as a sample attends to its prompt. Keys and values are returned as
those of whole prompts, so callers that continue a prompt are not affected.

Legend: S runs, U prompts of a run, T tokens of the longest prompt, F tokens that all share, E = T - F
others, L = F + U E tokens of a run's stream, H query heads, G key heads, W width of a head, D hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lab.study.batched.attention import attend_prompts, attend_samples, bias_of
from lab.study.batched.norms import Norms


@dataclass(frozen=True)
class Prompts:
    """Prompts of S runs.

    Attributes:
        ids_SUT: Tokens, padded behind their end.
        lengths_SU: Number of tokens of each prompt.
        shared: F; less than the length of the shortest prompt.
    """

    ids_SUT: torch.Tensor
    lengths_SU: torch.Tensor
    shared: int

    def copies(self, number: int) -> "Prompts":
        """Repeat each prompt."""
        ids, lengths = (x.repeat_interleave(number, dim=1) for x in (self.ids_SUT, self.lengths_SU))
        return Prompts(ids, lengths, self.shared)

    @property
    def ids_SL(self) -> torch.Tensor:
        """Token ids of the stream."""
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
        """The bias of `attend`, the same for all layers; None without shared tokens. See `bias_of`."""
        if not self.shared:
            return None
        device = self.ids_SUT.device
        at_E = torch.arange(self.ids_SUT.shape[2] - self.shared, device=device)
        nothing_1F = torch.zeros(1, self.shared, dtype=torch.bool, device=device)
        return bias_of(nothing_1F, at_E > at_E[:, None], 1, sharing, dtype)

    @property
    def parts(self) -> list[int]:
        """Number of tokens of each part of the stream: those that all prompts share, if any, and the rest."""
        prompts, width = self.ids_SUT.shape[1:]
        return [*([self.shared] if self.shared else []), prompts * (width - self.shared)]

    def attend(
        self,
        q: Sequence[torch.Tensor],
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Causal attention [S, part of L, H W] of each part, and keys and values of whole prompts
        [S, U, G, T, W].

        Args:
            q, k, v: Queries, keys and values of each of `parts`, [S, part of L, H, W] and [S, part of L, G,
                W].
            bias: See `bias`.
        """
        (s, u, width), shared = self.ids_SUT.shape, self.shared
        q_SUEHW, *kv = (x[-1].unflatten(1, (u, width - shared)) for x in (q, k, v))
        keys, values = (x.transpose(2, 3) for x in kv)
        if bias is None:
            out = attend_prompts(*(x.flatten(0, 1) for x in (q_SUEHW, *kv)))
            return [out.unflatten(0, (s, u)).flatten(1, 2)], keys, values
        keys, values = (
            torch.cat([x[0].transpose(1, 2)[:, None].expand(-1, u, -1, -1, -1), own], dim=3)
            for x, own in ((k, keys), (v, values))
        )
        out = attend_samples(q_SUEHW[:, :, None], keys.flatten(0, 1), values.flatten(0, 1), bias)
        return [attend_prompts(q[0], k[0], v[0]), out.flatten(1, 3)], keys, values

    def ends(self, x_SLD: torch.Tensor) -> torch.Tensor:
        """Select from a stream [S, L, D] the last token of each prompt, [S, U, D]."""
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
    """Number of first tokens of all prompts to compute once per run; 0 if too few are equal or norms differ.

    Args:
        prompts: Token ids by run and prompt.
        norms: Norm weights of the prompts.
    """
    every = [prompt if isinstance(prompt, list) else list(prompt) for run in prompts for prompt in run]
    shortest = min(map(len, every))
    pairs = zip(min(every), max(every), strict=False)  # between which all others lie
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), shortest)
    common = min(same, shortest - 1)
    return common if len(set(norms.of_prompt_R)) == 1 and 2 * common > shortest else 0
