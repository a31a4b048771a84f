"""Rollouts of S runs at once.

Prompts are computed once for the samples that share them. Then each decode step draws a token for every
sample, whether it has ended or not: rows and addresses are static, so on a GPU one step (model, draw,
bookkeeping) is one CUDA graph, which is replayed until all samples have ended. Ended rows still cost their
share of a step, which is little for the short completions of studies.

Tokens are drawn as the rollout engines draw them (`lab.study.batched.draw`): with the same seed, a run in a
batch and a run by itself draw the same tokens.

Legend: S runs, P prompts of a run, U prompts computed for a run, n samples of each, R = U n samples of a run,
B = S R rows, C tokens of a completion, T tokens of the longest prompt, N norms, D hidden width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lab.study.batched.attention import attend_samples, bias_of, by_head
from lab.study.batched.draw import drawing
from lab.study.batched.model import BatchedModel
from lab.study.batched.norms import Norms
from lab.study.batched.prompts import Prompts, pad_prompts, shared_tokens
from qerl.rollout.engine import SamplingParams, check_request, uniform_streams

_LOOK_EVERY = 8
"""Decode steps between two checks whether all rows have ended; the host waits for each check."""


@dataclass(frozen=True)
class Samples:
    """Completions of a rollout.

    Attributes:
        prompts: Token ids by run and prompt.
        per_prompt: Samples of each prompt; the samples of a prompt are adjacent.
        tokens_SRC: int64, the pad token after the end.
        mask_SRC: True up to and including the stop token.
        logprobs_SRC, entropies_SRC: fp32, of the policy that sampled, at its temperature; 0 outside the mask.
        finite_S: False for a run in which a logit was not finite.
    """

    prompts: list[list[list[int]]]
    per_prompt: int
    tokens_SRC: torch.Tensor
    mask_SRC: torch.Tensor
    logprobs_SRC: torch.Tensor
    entropies_SRC: torch.Tensor
    finite_S: torch.Tensor

    def completions(self) -> list[list[list[int]]]:
        """Token ids by run and sample, without padding."""
        lengths_SR = self.mask_SRC.sum(dim=-1).tolist()
        return [
            [ids[:length] for ids, length in zip(rows, lengths, strict=True)]
            for rows, lengths in zip(self.tokens_SRC.tolist(), lengths_SR, strict=True)
        ]


class Shape(NamedTuple):
    """Sizes on which a decode step depends."""

    runs: int
    prompts: int
    samples: int
    width: int
    tokens: int
    norm_rows: int
    greedy: bool
    noisy_logits: bool


class Sampler:
    """Samples from a batched model.

    Args:
        model: The model; its trained weights are read at each call.
        pad: Token at masked positions.
        prompt_width: Minimum number of tokens to which prompts are padded. Calls with prompts of one width
            share buffers and graphs.
    """

    def __init__(self, model: BatchedModel, pad: int, prompt_width: int = 0) -> None:
        self.model, self._pad, self._width = model, pad, prompt_width
        self._decoders: dict[tuple[Shape, tuple[int, ...]], _Decoder] = {}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        samples_per_prompt: int,
        params: SamplingParams,
        uniforms_SRC: torch.Tensor | None = None,
        norms: Norms | None = None,
        temperature_S: torch.Tensor | None = None,
        logits_noise_SV: torch.Tensor | None = None,
    ) -> Samples:
        """Sample completions for the prompts of each run.

        Args:
            prompts: Token ids by run and prompt, equally many prompts in each run.
            samples_per_prompt: n times the number of ways in which a prompt is computed.
            params: Maximum length, stop tokens, and temperature, 0 for greedy decoding; its seed is not read.
            uniforms_SRC: Numbers in [0, 1), fp64, one per token; not needed for greedy decoding.
            norms: Weights of the norms; None for the clean ones.
            temperature_S: Temperature of each run, in place of that of ``params``.
            logits_noise_SV: Added to the logits of every token that a run draws.

        Raises:
            QeRLError: An empty prompt, or one that with its completion exceeds the model's positions.
        """
        model = self.model
        every = [prompt for run in prompts for prompt in run]
        check_request(every, samples_per_prompt, params, model.sizes.positions or None)
        rows = len(prompts[0]) * samples_per_prompt
        if norms is None:
            norms = clean_norms(model, rows)
        sharing = norms.sharing(samples_per_prompt)
        width = max(self._width, max(map(len, every)))
        ids_SPT, lengths_SP = pad_prompts(prompts, width, self._pad, model.device)
        padded = Prompts(ids_SPT, lengths_SP, shared_tokens(prompts, norms)).copies(
            samples_per_prompt // sharing
        )
        steady = len(set(norms.of_own_R)) == 1
        shape = Shape(
            len(prompts), padded.lengths_SU.shape[1], sharing, width, params.max_tokens,
            1 if steady else rows, params.temperature == 0, logits_noise_SV is not None,
        )  # fmt: skip
        key = shape, params.stop_token_ids
        if key not in self._decoders:
            self._decoders[key] = _Decoder(model, shape, params.stop_token_ids, self._pad, self._pool)
        if temperature_S is None:
            temperature_S = torch.full((shape.runs,), params.temperature or 1.0)
        decoder = self._decoders[key]
        if uniforms_SRC is None:
            uniforms_SRC = torch.zeros(shape.runs, rows, params.max_tokens)
        decoder.start(padded, norms, uniforms_SRC.flatten(0, 1), temperature_S, logits_noise_SV)
        return decoder.run([list(map(list, run)) for run in prompts], samples_per_prompt)


def keyed_uniforms(seeds: Sequence[int], prompts: int, samples: int, tokens: int) -> torch.Tensor:
    """The uniform numbers [S, R, C] with which a rollout engine draws from these seeds, one seed per run."""
    rows = [(prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    streams = {seed: uniform_streams([(seed, *row) for row in rows], tokens) for seed in set(seeds)}
    return torch.stack([streams[seed] for seed in seeds])


def clean_norms(model: BatchedModel, samples: int) -> Norms:
    """Norms with the clean weights for every token."""
    weights_NSD = model.norm_weights_ND[:, None].expand(-1, model.runs, -1)
    return Norms.same(weights_NSD, samples)


class _Decoder:
    """Buffers of rollouts of one shape, and the step that advances them."""

    def __init__(
        self,
        model: BatchedModel,
        shape: Shape,
        stops: tuple[int, ...],
        pad: int,
        pool: Any,
    ) -> None:
        self._model, self._shape, self._pad = model, shape, pad
        sizes, mixer = model.sizes, model.sizes.attention
        device, dtype = model.device, model.dtype
        s, u, n, width, tokens = shape[:5]
        rows = s * u * n
        own = max(tokens - 1, 1)
        cache = (sizes.layers, 2, s * u, mixer.kv_heads, width + n * own, mixer.head_size)
        self._cache = torch.zeros(cache, dtype=dtype, device=device)
        """Keys and values of a prompt, and after them those of its samples one after the other."""
        self._cosine, self._sine = model.angles(width + tokens)
        norms = len(model.norm_names)
        self._norms_NSRD = torch.zeros(norms, s, shape.norm_rows, sizes.hidden, device=device)
        self._weights = model.trained.views(model.trained.cast_SE)
        self._hidden_UP = torch.zeros(s * u, width, dtype=torch.bool, device=device)
        self._length_SR = torch.zeros(s, u * n, dtype=torch.long, device=device)
        self._temperature_B = torch.ones(rows, device=device)
        self._noise_SV = torch.zeros(s, sizes.vocabulary if shape.noisy_logits else 0, device=device)
        self._uniforms_BC = torch.zeros(rows, tokens, dtype=torch.float64, device=device)
        self._stops_K = torch.tensor(stops or (-1,), device=device)
        self._columns = torch.arange(own, device=device)
        self._begins_n = width + own * torch.arange(n, device=device)
        self._at = torch.zeros(1, dtype=torch.long, device=device)
        """Tokens drawn so far."""
        self._token_B = torch.zeros(rows, dtype=torch.long, device=device)
        self._ended_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self._tokens_BC = torch.zeros(rows, tokens, dtype=torch.long, device=device)
        self._mask_BC = torch.zeros(rows, tokens, dtype=torch.bool, device=device)
        self._logprobs_BC = torch.zeros(rows, tokens, device=device)
        self._entropies_BC = torch.zeros(rows, tokens, device=device)
        self._finite_B = torch.ones(rows, dtype=torch.bool, device=device)
        self._draw_tokens = drawing(rows, sizes.vocabulary, shape.greedy, device)
        self._graph = self._captured(pool) if device.type == "cuda" and tokens > 1 else None

    def _captured(self, pool: Any) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate in their first calls, which cannot be captured
            for _ in range(2):
                self._at.fill_(1)
                self._advance()
            self._at.fill_(1)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._advance()
        return graph

    def start(
        self,
        prompts: Prompts,
        norms: Norms,
        uniforms_BC: torch.Tensor,
        temperature_S: torch.Tensor,
        logits_noise_SV: torch.Tensor | None,
    ) -> None:
        """Compute the prompts and draw the first token of each row."""
        model, shape = self._model, self._shape
        model.trained.refresh()
        own = norms.of_own_R[:1] if shape.norm_rows == 1 else norms.of_own_R
        index = torch.tensor(own, device=model.device)
        self._norms_NSRD.copy_(norms.weights_NSVD.index_select(2, index))
        self._uniforms_BC.copy_(uniforms_BC)
        self._temperature_B.copy_(temperature_S.repeat_interleave(shape.prompts * shape.samples))
        if logits_noise_SV is not None:
            self._noise_SV.copy_(logits_noise_SV)
        columns = torch.arange(shape.width, device=model.device)
        self._hidden_UP.copy_(columns >= prompts.lengths_SU.flatten()[:, None])
        self._length_SR.copy_(prompts.lengths_SU.repeat_interleave(shape.samples, dim=1))
        for buffer in (self._at, self._ended_B, self._mask_BC, self._logprobs_BC, self._entropies_BC):
            buffer.zero_()
        self._tokens_BC.fill_(self._pad)
        self._finite_B.fill_(True)
        last_SUD = self._prefill(prompts, norms)
        logits_SUV = model.logits(last_SUD, self._weights)
        self._draw(logits_SUV.repeat_interleave(shape.samples, dim=1))

    def _prefill(self, prompts: Prompts, norms: Norms) -> torch.Tensor:
        """Cache keys and values of the prompts; returns the last layer's output at each prompt's end."""
        model = self._model
        bias = prompts.bias(model.sharing, model.dtype)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q_parts, k_parts, v_parts = (x.split(prompts.parts, dim=1) for x in (q, k, v))
            outs, *both = prompts.attend(q_parts, k_parts, v_parts, bias)
            for cache, whole in zip(self._cache[layer], both, strict=True):
                cache[:, :, : self._shape.width].copy_(whole.flatten(0, 1))
            return torch.cat(outs, dim=1)

        at_L = prompts.positions_L
        angles = self._cosine[at_L][None], self._sine[at_L][None]
        weight = norms.weight(*prompts.segments(norms.of_prompt_R[:: self._shape.samples]))
        x_SLD = model.embed(prompts.ids_SL, self._weights)
        return prompts.ends(model.layers(x_SLD, angles, attend, self._weights, weight))

    def run(self, prompts: list[list[list[int]]], per_prompt: int) -> Samples:
        """Draw until every row has ended; the samples are copies of the buffers."""
        tokens = self._shape.tokens
        look_every = _LOOK_EVERY if self._graph is not None else 1
        for done in range(1, tokens):
            if done % look_every == 0 and bool(self._ended_B.all()):
                break
            self._graph.replay() if self._graph is not None else self._advance()
        s = self._shape.runs

        def by_run(buffer_BC: torch.Tensor) -> torch.Tensor:
            return buffer_BC.clone().unflatten(0, (s, -1))

        return Samples(
            prompts=prompts,
            per_prompt=per_prompt,
            tokens_SRC=by_run(self._tokens_BC),
            mask_SRC=by_run(self._mask_BC),
            logprobs_SRC=by_run(self._logprobs_BC),
            entropies_SRC=by_run(self._entropies_BC),
            finite_S=self._finite_B.view(s, -1).all(dim=1),
        )

    def _advance(self) -> None:
        """One decode step: run the model on the last tokens and draw the next ones; one CUDA graph."""
        model, shape = self._model, self._shape
        s, u, n = shape[:3]
        slot = self._at - 1
        at_SR = self._length_SR + slot
        angles = self._cosine[at_SR], self._sine[at_SR]
        places_n = self._begins_n + slot
        bias = bias_of(self._hidden_UP, (self._columns > slot)[None], n, model.sharing, model.dtype)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.unflatten(1, (u, n, 1)) for x in (q, k, v))
            keys, values = self._cache[layer]
            keys.index_copy_(2, places_n, by_head(k).flatten(0, 1))
            values.index_copy_(2, places_n, by_head(v).flatten(0, 1))
            return attend_samples(q, keys, values, bias).flatten(1, 3)

        x_SRD = model.embed(self._token_B.view(s, -1), self._weights)
        x_SRD = model.layers(x_SRD, angles, attend, self._weights, lambda norm: self._norms_NSRD[norm])
        self._draw(model.logits(x_SRD, self._weights))

    def _draw(self, logits_SRV: torch.Tensor) -> None:
        """Draw the next token of each row, and record it for rows that had not ended."""
        if self._shape.noisy_logits:
            logits_SRV += self._noise_SV[:, None]
        uniforms_B = self._uniforms_BC.index_select(1, self._at)[:, 0]
        drawn = self._draw_tokens(logits_SRV.flatten(0, 1), uniforms_B, self._temperature_B)
        runs_B = ~self._ended_B & drawn.finite_B
        self._finite_B &= drawn.finite_B | self._ended_B
        # Not `torch.where` with a number, which would be copied to the GPU and so could not be captured.
        self._token_B.copy_(drawn.tokens_B.masked_fill(~runs_B, self._pad))
        self._tokens_BC.index_copy_(1, self._at, self._token_B[:, None])
        self._mask_BC.index_copy_(1, self._at, runs_B[:, None])
        for buffer, values in (
            (self._logprobs_BC, drawn.logprobs_B),
            (self._entropies_BC, drawn.entropies_B),
        ):
            buffer.index_copy_(1, self._at, values.masked_fill(~runs_B, 0.0)[:, None])
        self._ended_B.copy_(~runs_B | (self._token_B[:, None] == self._stops_K).any(dim=1))
        self._at += 1
