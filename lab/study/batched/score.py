"""Log-probabilities and entropies of completions under the policies of S runs.

A prompt is computed once for the samples that share it, as in the sampler, with the sampler's attention. The
stream of a run has its prompts first and then its completions without their last tokens, which predict
nothing. Only tokens that count go through the output head, which is the trainer's (`qerl.update.head`).

Legend: S runs (s of a piece), P prompts of a run, U = P times the ways in which each is computed, n samples
of each of those, R samples of a run, C tokens of a completion, T tokens of a prompt, L tokens of a stream,
M tokens that count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lab.study.batched.attention import attend_samples, bias_of, by_head
from lab.study.batched.model import BatchedModel
from lab.study.batched.norms import Norms
from lab.study.batched.prompts import Prompts, pad_prompts, shared_tokens
from lab.study.batched.sampler import Samples
from lab.study.batched.trained import Weights
from qerl.kernels.tensors import upload
from qerl.update.head import Head, Transform, logps_and_entropies


@dataclass(frozen=True)
class Piece:
    """Some prompts of some runs, with all of their samples, that go through the model at once."""

    runs: slice
    prompts: slice
    samples: slice


@dataclass(frozen=True)
class Texts:
    """Completions of S runs, cut to the longest.

    Attributes:
        per_prompt: Samples of each prompt.
        prompts: Token ids by run and prompt.
        ids_SPT, lengths_SP: The prompts, padded behind their end, and their lengths.
        tokens_SRC, mask_SRC: Completions, and which of their tokens count.
        counts_SRC: The mask on the CPU.
    """

    per_prompt: int
    prompts: list[list[list[int]]]
    ids_SPT: torch.Tensor
    lengths_SP: torch.Tensor
    tokens_SRC: torch.Tensor
    mask_SRC: torch.Tensor
    counts_SRC: torch.Tensor

    @classmethod
    def of(cls, samples: Samples, device: torch.device) -> "Texts":
        """The completions of a rollout; waits for the mask to be computed."""
        counts_SRC = samples.mask_SRC.cpu()
        longest = max(2, int(counts_SRC.sum(dim=-1).max()))
        width = max(len(prompt) for run in samples.prompts for prompt in run)
        padded = pad_prompts(samples.prompts, width, 0, device)
        tokens, mask = samples.tokens_SRC[..., :longest], samples.mask_SRC[..., :longest]
        return cls(samples.per_prompt, samples.prompts, *padded, tokens, mask, counts_SRC[..., :longest])

    def pieces(self, tokens_at_once: int) -> Iterator[Piece]:
        """Split all prompts of all runs into pieces of at most this many tokens per forward pass, or of 1
        prompt.

        Pieces are nearly equal, so that none is much smaller than the one that needs the most memory.
        """
        runs, prompts = self.lengths_SP.shape
        tokens = self.ids_SPT.shape[2] + self.per_prompt * (self.tokens_SRC.shape[2] - 1)
        runs_at_once = _even(runs, tokens_at_once // (tokens * prompts))
        prompts_at_once = _even(prompts, tokens_at_once // tokens)
        for run in range(0, runs, runs_at_once):
            for prompt in range(0, prompts, prompts_at_once):
                last = min(prompt + prompts_at_once, prompts)
                yield Piece(
                    slice(run, min(run + runs_at_once, runs)),
                    slice(prompt, last),
                    slice(prompt * self.per_prompt, last * self.per_prompt),
                )


def _even(number: int, most: int) -> int:
    """Part size when a number is split into the fewest parts of at most `most`, or of 1 if that is larger."""
    parts = -(-number // max(1, most))
    return -(-number // parts)


def score_piece(
    model: BatchedModel,
    texts: Texts,
    piece: Piece,
    weights: Weights,
    norms: Norms,
    temperatures: Sequence[float],
    entropy_has_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [s, R, C] of a piece, zero outside the mask.

    Args:
        weights: Trained weights of the piece's runs.
        norms: Weights of the norms, of all runs and samples.
        temperatures: Temperature of each run, by which its logits are divided.
        entropy_has_gradient: Whether entropies are differentiated, too.
    """
    norms = norms.of_runs(piece.runs).of_samples(piece.samples)
    n = norms.sharing(texts.per_prompt)
    copies = texts.per_prompt // n
    at = piece.runs, piece.prompts
    shared = shared_tokens([run[piece.prompts] for run in texts.prompts[piece.runs]], norms)
    prompts = Prompts(texts.ids_SPT[at], texts.lengths_SP[at], shared).copies(copies)
    tokens_sRC = texts.tokens_SRC[piece.runs, piece.samples]
    s, samples, columns = tokens_sRC.shape
    x_sLD = _layers(model, prompts, tokens_sRC[..., :-1], weights, norms, n)
    front = prompts.ids_SL.shape[1]
    first_sR1D = prompts.ends(x_sLD[:, :front]).repeat_interleave(n, dim=1)[:, :, None]
    others_sROD = x_sLD[:, front:].unflatten(1, (samples, columns - 1))
    hidden = torch.cat([first_sR1D, others_sROD], dim=2).flatten(0, 2)
    counts = texts.counts_SRC[piece.runs, piece.samples]
    index_M = upload(counts.flatten().nonzero()[:, 0], model.device)
    heads, own, tokens = model.heads(weights), list(temperatures[piece.runs]), [len(index_M)]
    if len(heads) > 1 or len(set(own)) > 1:
        heads, tokens = heads * (s // len(heads)), counts.flatten(1).sum(dim=1).tolist()
    hidden_MD, labels_M = hidden.index_select(0, index_M), tokens_sRC.flatten()[index_M]
    each = zip(heads, own[: len(heads)], hidden_MD.split(tokens), labels_M.split(tokens), strict=True)
    parts = []
    for (final_D, weight_VD), temperature, x_mD, labels_m in each:
        head = Head(weight_VD, transform=Transform(temperature=temperature))
        normed_mD = model.norm(x_mD, final_D)
        parts.append(logps_and_entropies(normed_mD, head, labels_m, entropy_has_gradient))
    logps_M, entropies_M = (torch.cat(found) for found in zip(*parts, strict=True))
    zeros = logps_M.new_zeros(s * samples * columns)
    logps, entropies = (zeros.index_put((index_M,), values) for values in (logps_M, entropies_M))
    return logps.view(s, -1, columns), entropies.view(s, -1, columns)


@torch.no_grad()
def score(
    model: BatchedModel,
    texts: Texts,
    norms: Norms,
    temperatures: Sequence[float],
    tokens_at_once: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [S, R, C] of completions, without gradient."""
    logps, entropies = (torch.zeros(texts.mask_SRC.shape, device=model.device) for _ in range(2))
    trained = model.trained
    trained.refresh()
    for piece in texts.pieces(tokens_at_once):
        weights = trained.views(trained.cast_SE[piece.runs])
        at = piece.runs, piece.samples
        logps[at], entropies[at] = score_piece(model, texts, piece, weights, norms, temperatures)
    return logps, entropies


def _layers(
    model: BatchedModel,
    prompts: Prompts,
    inputs_sRO: torch.Tensor,
    weights: Weights,
    norms: Norms,
    n: int,
) -> torch.Tensor:
    """Output of the last layer for prompts and completions, [s, L, D]."""
    (s, u, width), (_, samples, own) = prompts.ids_SUT.shape, inputs_sRO.shape
    ids_sL, at_O = prompts.ids_SL, torch.arange(own, device=model.device)
    at_sRO = prompts.lengths_SU.repeat_interleave(n, dim=1)[..., None] + at_O
    at_sL = torch.cat([prompts.positions_L.expand(s, -1), at_sRO.flatten(1)], dim=1)
    cosine, sine = model.angles(width + own)
    at_T = torch.arange(width, device=model.device)
    hidden_UT = (at_T >= prompts.lengths_SU[..., None]).flatten(0, 1)
    kind = model.sharing, model.dtype
    bias, bias_of_prompts = bias_of(hidden_UT, at_O > at_O[:, None], n, *kind), prompts.bias(*kind)

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (*q_parts, q), (*k_parts, k), (*v_parts, v) = (
            x.split([*prompts.parts, samples * own], dim=1) for x in (q, k, v)
        )
        outs, keys, values = prompts.attend(q_parts, k_parts, v_parts, bias_of_prompts)
        q, k, v = (x.unflatten(1, (u, n, own)) for x in (q, k, v))
        k, v = (torch.cat([front, by_head(x)], dim=3) for front, x in ((keys, k), (values, v)))
        of_samples = attend_samples(q, k.flatten(0, 1), v.flatten(0, 1), bias)
        return torch.cat([*outs, of_samples.flatten(1, 3)], dim=1)

    variants, tokens = prompts.segments(norms.of_prompt_R[::n])
    weight = norms.weight([*variants, *norms.of_own_R], [*tokens, *[own] * samples])
    x_sLD = model.embed(torch.cat([ids_sL, inputs_sRO.flatten(1)], dim=1), weights)
    return model.layers(x_sLD, (cosine[at_sL], sine[at_sL]), attend, weights, weight)
