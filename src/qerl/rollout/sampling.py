"""From logits to one token for each sequence, with the log-probability it was drawn with.

Tokens are drawn by inverting the cumulative distribution at one uniform number. Each sequence has its own
stream of uniforms, keyed by (seed, prompt, sample), and uses exactly one number per token, so what a sequence
draws does not depend on which others share its batch, when they finish, or how the work was cut into waves.
``torch.multinomial`` could not promise that: it takes numbers from one stream for the whole batch.

Order of the filters: temperature, then top-k, then top-p over what top-k left, then min-p. They decide which
tokens can be drawn; log-probabilities are those before them (`qerl.rollout.engine.Completion` says why).

Shapes: B sequences, V vocabulary, C candidates (the most probable tokens, descending).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from qerl.rollout.engine import SamplingParams
from qerl.seeding import derive_seed

# top-p needs the most probable tokens in order, but rarely many of them. 64 x 49,152 logits on 2 cores: 15 ms
# for these candidates, 116 ms for a full sort.
_CANDIDATES = 1024


class Drawn(NamedTuple):
    """One token for each sequence.

    Attributes:
        tokens_B: int64 token ids; without meaning where ``finite_B`` is false.
        logprobs_B: fp32 log-probability in nats, under the distribution at temperature, before truncation.
        entropies_B: fp32 entropy in nats of the distribution at temperature, before truncation.
        finite_B: False where a logit was NaN or infinite.
    """

    tokens_B: torch.Tensor
    logprobs_B: torch.Tensor
    entropies_B: torch.Tensor
    finite_B: torch.Tensor


def uniform_streams(sequences: Iterable[tuple[int, int, int]], length: int) -> torch.Tensor:
    """Uniform numbers for each sequence, one per token that it may draw.

    Args:
        sequences: (seed of the rollout, prompt index, sample index) of each.
        length: Numbers wanted; a longer stream begins with the shorter one.

    Returns:
        fp64 [sequences, length] in [0, 1) on the CPU.
    """
    keys = list(sequences)
    streams = torch.empty(len(keys), length, dtype=torch.float64)
    stream = torch.Generator()  # one, because to make a generator takes longer than to seed it
    for row, (seed, prompt, sample) in zip(streams.unbind(), keys, strict=True):
        stream.manual_seed(derive_seed("sample", seed, prompt, sample))
        torch.rand(length, generator=stream, out=row)
    return streams


def draw_tokens(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, params: SamplingParams) -> Drawn:
    """Draw the next token of each sequence.

    Args:
        logits_BV: Logits of the last position, any floating dtype; computed in fp32.
        uniforms_B: fp64 in [0, 1), one for each sequence; unused when greedy.
        params: Temperature and filters. Greedy (temperature 0) ignores the filters.
    """
    temperature = params.temperature or 1.0
    full_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    probs_BV = full_BV.exp()
    entropies_B = -torch.linalg.vecdot(probs_BV, full_BV)
    if params.temperature == 0:
        tokens_B = full_BV.argmax(dim=-1)
    else:
        left_BV = truncate(full_BV, params)
        tokens_B = _invert_cdf(probs_BV if left_BV is full_BV else left_BV.exp(), uniforms_B)
    logprobs_B = full_BV.gather(-1, tokens_B[:, None])[:, 0]
    # A single NaN or infinite logit makes the entropy NaN (0 * -inf included), which saves a pass over V.
    return Drawn(tokens_B, logprobs_B, entropies_B, entropies_B.isfinite())


def draw_rows(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, params: Sequence[SamplingParams]) -> Drawn:
    """Draw the next token of each sequence by its own parameters; see `draw_tokens`.

    Rows with the same temperature and filters are drawn together, and mostly all are of that kind.
    """
    kinds: dict[tuple[float, ...], list[int]] = {}
    for row, own in enumerate(params):
        kinds.setdefault((own.temperature, own.top_p, own.top_k, own.min_p), []).append(row)
    if len(kinds) == 1:
        return draw_tokens(logits_BV, uniforms_B, params[0])
    parts = [draw_tokens(logits_BV[rows], uniforms_B[rows], params[rows[0]]) for rows in kinds.values()]
    drawn = [row for rows in kinds.values() for row in rows]
    places_B = torch.tensor(drawn, device=logits_BV.device).argsort()
    return Drawn(*(torch.cat(column)[places_B] for column in zip(*parts, strict=True)))


def truncate(logprobs_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities in which the tokens that top-k, top-p and min-p leave out are -inf.

    The most probable token always stays. With top-p a token stays when the tokens before it have less mass
    than ``top_p``, so the kept set is the smallest that reaches it.

    Args:
        logprobs_BV: fp32 log-probabilities at temperature.
        params: The filters; when all of them are off the input itself is returned.

    Returns:
        fp32 [B, V]: unchanged where a token stays, so they no longer sum to one; -inf for the others.
    """
    if not params.filtered:
        return logprobs_BV
    candidates_BC, tokens_BC = _candidates(logprobs_BV, params)
    kept_BC = torch.ones_like(candidates_BC, dtype=torch.bool)
    if params.top_p < 1:
        probs_BC = candidates_BC.double().exp()
        if params.top_k > 0:
            probs_BC /= probs_BC.sum(dim=-1, keepdim=True)
        kept_BC &= probs_BC.cumsum(dim=-1) - probs_BC < params.top_p
    if params.min_p > 0:
        kept_BC &= candidates_BC >= candidates_BC[:, :1] + math.log(params.min_p)
    kept_BC[:, 0] = True
    candidates_BC = candidates_BC.masked_fill(~kept_BC, -torch.inf)
    return torch.full_like(logprobs_BV, -torch.inf).scatter(-1, tokens_BC, candidates_BC)


def _candidates(logprobs_BV: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids of all tokens the filters can keep, descending."""
    vocabulary = logprobs_BV.shape[-1]
    if 0 < params.top_k < vocabulary:
        return logprobs_BV.topk(params.top_k, dim=-1)
    # On a GPU, asking whether the candidates suffice would make the host wait, which a captured decode step
    # cannot.
    if params.top_p < 1 and not logprobs_BV.is_cuda:
        values_BC, tokens_BC = logprobs_BV.topk(min(_CANDIDATES, vocabulary), dim=-1)
        if bool((values_BC.double().exp().sum(dim=-1) >= params.top_p).all()):
            return values_BC, tokens_BC
    return torch.sort(logprobs_BV, dim=-1, descending=True)


def _invert_cdf(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative probability exceeds the uniform; never one of probability zero."""
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    # fp32 probabilities sum to 1 only within 1e-6, so the uniform is scaled to the sum that there is.
    target_B1 = uniforms_B[:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    # NaN rows land behind the end; a valid id lets the rest of the batch go on.
    tokens_B1.clamp_(max=probs_BV.shape[-1] - 1)
    # On a GPU, to ask whether a row needs what follows would make the host wait; it is done for every row.
    if not probs_BV.is_cuda and not bool((probs_BV.gather(-1, tokens_B1) == 0).any()):
        return tokens_B1[:, 0]
    # A product that rounds up to the whole sum, or a parallel sum that is not monotonic in its last bit.
    possible_BV = probs_BV > 0
    after_BV = possible_BV & (cdf_BV > target_B1)
    last_B = probs_BV.shape[-1] - 1 - possible_BV.byte().flip(-1).argmax(dim=-1)
    mended_B = torch.where(after_BV.any(dim=-1), after_BV.byte().argmax(dim=-1), last_B)
    return torch.where(probs_BV.gather(-1, tokens_B1)[:, 0] == 0, mended_B, tokens_B1[:, 0])
