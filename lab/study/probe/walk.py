"""Sampling under a perturbation, with what the clean policy says of every token.

A *walk* decodes many rows in step. Each row has a problem, a sample number and a strength. Where the
perturbation acts on the forward pass every row has a clean twin in the same batch that is fed the same
tokens: the log-probability of a token under both policies, and KL(mu || pi) summed over the whole vocabulary,
then come from the same kernels in the same pass. A second pass over finished completions would be other
arithmetic (prefill instead of decoding), whose rounding in bf16 looks like a KL of its own; and a sum over
the vocabulary has far less variance than an estimate from the tokens that happened to be drawn. The price is
twice the rows.

With thousands of rows the products and the cache bound the time and not the launches, so the model is
transformers' own, in place, without graphs. Logits are FP32 (`_unrounded_head`).

A walk along given tokens (`forced`) draws nothing: it reads the policies along worked solutions, or along
what another policy wrote.

Shapes: R rows of a walk, T tokens of a completion at most, B rows of a batch, V vocabulary, C contexts
(prompts that are computed once for all rows that share them), U units of noise, W widths of all noisy norms.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.study.probe.perturb import CLEAN, NormNoise, Perturbation, normals
from qerl.families.parts import base_model, eval_mode
from qerl.families.sizes import Sizes
from qerl.fp4.linear import dense_weights_kept
from qerl.gpu_memory import total_bytes
from qerl.noise.norms import noisy_norms
from qerl.rollout.engine import SamplingParams, draw_tokens, uniform_streams
from qerl.rollout.portable.runner import Runner, grouped_decode

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ONE_DRAW = SamplingParams(max_tokens=1)
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_SHRINK = 0.85
"""Finished rows leave the batch when no more than this share still runs."""

_SHARE = 0.42
"""Of a GPU's memory, that the rows of a batch may take."""

_DRAW_ROWS = 2048
"""Rows whose distributions are computed at once: one pass over V takes 0.4 GB for 2048 rows of SmolLM2."""


@dataclass(frozen=True)
class Rows:
    """What a walk samples: problem, sample number and strength of each row, all [R]."""

    problem: Ints
    sample: Ints
    strength: Floats

    @classmethod
    def of(cls, problems: Sequence[int], samples: int, strengths: Sequence[float] = (0.0,)) -> "Rows":
        """Every sample of every problem at every strength, the samples of a problem next to each other."""
        s, p, g = np.meshgrid(strengths, problems, np.arange(samples), indexing="ij")
        return cls(p.ravel().astype(np.int64), g.ravel().astype(np.int64), s.ravel().astype(np.float32))

    def __len__(self) -> int:
        return len(self.problem)

    def part(self, start: int, stop: int) -> "Rows":
        """Some of the rows."""
        return Rows(self.problem[start:stop], self.sample[start:stop], self.strength[start:stop])


@dataclass(frozen=True)
class Walk:
    """What the rows wrote, and both policies on it; all [R, T].

    Attributes:
        tokens: Token ids; without meaning where `valid` is false.
        valid: Tokens of the completion, the stop token included; none from where logits are not finite.
        mu, pi: Log-probability of the token under the sampler and under the clean policy at temperature 1.
        kl: KL(mu || pi) in nats at this token's place, over the whole vocabulary.
        entropy, entropy_pi: Of both policies there, in nats.
    """

    tokens: Ints
    valid: Bools
    mu: Floats
    pi: Floats
    kl: Floats
    entropy: Floats
    entropy_pi: Floats

    @classmethod
    def joined(cls, walks: Sequence["Walk"]) -> "Walk":
        """The rows of several walks below each other."""
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(walk, name) for walk in walks]) for name in names})


class Walker:
    """Walks of one policy over one set of prompts.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not; it is left as it was.
        prompts: Token ids of each problem's prompt.
        stop_token_ids: A completion ends with the first of these.
        pad_token_id: Any id; it fills masked positions.
        max_tokens: T.
        seed: Of uniform numbers and noise, which depend on it, on the problem and on the sample alone.
        batch_rows: B at most, clean twins included.

    Attributes:
        prompts: As given.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        max_tokens: int,
        seed: int = 0,
        batch_rows: int = 8192,
    ) -> None:
        self._model, self.prompts = model, prompts
        self._device = base_model(model).device
        self._stops = torch.tensor(list(stop_token_ids), device=self._device)
        self._pad, self._tokens = pad_token_id, max_tokens
        self._seed = seed
        self._norms = NormNoise(model)
        self._batch_rows = min(batch_rows, self._rows_in_memory())

    def walk(self, rows: Rows, perturbation: Perturbation = CLEAN, forced: Ints | None = None) -> Walk:
        """Sample a completion for each row.

        Args:
            rows: What is sampled.
            perturbation: Of the sampler; its strength is the row's.
            forced: Token ids [R, T] that are taken instead of drawn ones, up to their stop token.
        """
        size = max(1, self._batch_rows // (2 if perturbation.on_norms else 1))
        parts = []
        with self._ready():
            for start in range(0, len(rows), size):
                given = (
                    None
                    if forced is None
                    else torch.from_numpy(forced[start : start + size]).to(self._device)
                )
                parts.append(_Batch(self, rows.part(start, start + size), perturbation, given).walk())
        return Walk.joined(parts)

    def _rows_in_memory(self) -> int:
        """Rows for which a GPU has memory, so that two processes fit on it.

        A row has keys, values and states, twice while prompts are handed to their samples, FP32 logits and as
        much again that is computed of them, and a weight of each noisy norm with its noise.
        """
        if self._device.type != "cuda":
            return sys.maxsize
        config = base_model(self._model).config.get_text_config(decoder=True)
        sizes = Sizes.from_config(config.to_dict())
        tokens = max(map(len, self.prompts)) + self._tokens
        cache = 2 * sizes.keys * tokens * base_model(self._model).dtype.itemsize + 4 * sizes.states
        row = 2 * cache + 4 * (2 * sizes.vocabulary + 3 * self._norms.width)
        return max(2, int(_SHARE * total_bytes(self._device) / row))

    @contextmanager
    def _ready(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self._model))
            if base_model(self._model)._supports_attention_backend:
                stack.enter_context(grouped_decode(base_model(self._model).config))
            if self._device.type == "cuda":  # cuDNN's would be planned anew for each length of the cache
                stack.enter_context(sdpa_kernel(_ATTENTION))
            stack.enter_context(dense_weights_kept(self._model))
            stack.enter_context(_unrounded_head(self._model))
            yield

    def _uniforms(self, rows: Rows) -> torch.Tensor:
        """fp64 [R, T]: the same for a problem's sample under every policy, perturbation and strength."""
        streams = _streams(self._seed, len(self.prompts), int(rows.sample.max()) + 1, self._tokens)
        return streams[rows.problem, rows.sample].to(self._device)


@lru_cache(maxsize=4)
def _streams(seed: int, problems: int, samples: int, tokens: int) -> torch.Tensor:
    """Uniform numbers fp64 [problems, samples, tokens], which all walks over as many problems share."""
    keys = [(seed, problem, sample) for problem in range(problems) for sample in range(samples)]
    return uniform_streams(keys, tokens).view(problems, samples, tokens)


class _Batch:
    """Rows of a walk that are decoded together; those that have ended leave it.

    Args:
        walker: Whose policy and prompts they have.
        rows: What is sampled.
        perturbation: Of the sampler.
        forced: Token ids [R, T] that are taken instead of drawn ones; None draws.
    """

    def __init__(
        self, walker: Walker, rows: Rows, perturbation: Perturbation, forced: torch.Tensor | None
    ) -> None:
        self._walker, self._rows, self._perturbation, self._forced = walker, rows, perturbation, forced
        self._model, self._device, self._tokens = walker._model, walker._device, walker._tokens
        self._twins = perturbation.on_norms
        numbers = zip(rows.problem.tolist(), rows.sample.tolist(), strict=True)
        self._units = [perturbation.unit(*pair) for pair in numbers]
        self._place = {unit: index for index, unit in enumerate(dict.fromkeys(self._units))}
        self._units_R = torch.tensor([self._place[unit] for unit in self._units], device=self._device)
        self._strengths_R = torch.from_numpy(rows.strength).to(self._device)
        self._noise = _Noise(walker, perturbation, list(self._place)) if self._twins else None
        self._bias_UV = None
        if perturbation.kind == "logits_noise":
            vocabulary = base_model(self._model).get_output_embeddings().weight.shape[0]
            self._bias_UV = normals(walker._seed, "logits", list(self._place), vocabulary, self._device)
        self._uniforms_RT = None if forced is not None else walker._uniforms(rows)
        self._runner = Runner(self._model, walker._pad)
        self._record = _Record(len(rows), self._tokens, self._device)
        self._at_B = torch.arange(len(rows), device=self._device)  # the row of each row of the batch
        self._alive_B = torch.ones_like(self._at_B, dtype=torch.bool)

    def walk(self) -> Walk:
        """Decode until all rows have ended or have T tokens."""
        logits_BV = self._prefill()
        with ExitStack() as noise:
            for step in range(self._tokens):
                tokens_B = self._draw(step, logits_BV)
                self._alive_B = self._record.valid[self._at_B, step]
                self._alive_B &= ~torch.isin(tokens_B, self._walker._stops)
                left = int(self._alive_B.sum())
                if step + 1 == self._tokens or not left:
                    break
                shrinks = left <= _SHRINK * len(self._at_B)
                if shrinks:
                    tokens_B = tokens_B[self._alive_B]
                    self._leave()
                if self._noise is not None and (shrinks or not step):
                    noise.close()
                    strengths_B = self._strengths_R[self._at_B]
                    strengths = torch.cat([strengths_B, torch.zeros_like(strengths_B)])
                    noise.enter_context(self._noise.on(self._units_R[self._at_B].repeat(2), strengths))
                logits_BV = self._runner.step(tokens_B.repeat(2) if self._twins else tokens_B)
        return self._record.walk()

    def _prefill(self) -> torch.Tensor:
        """The first logits of each row; those of the clean twins stand below."""
        contexts, of_row = _contexts(self._rows, self._units, self._perturbation)
        with ExitStack() as noise:
            if self._noise is not None:
                units = [self._place.get(unit, 0) for _, unit, _ in contexts]
                strengths = [strength for _, _, strength in contexts]
                given = (torch.tensor(column, device=self._device) for column in (units, strengths))
                noise.enter_context(self._noise.on(*given))
            prompts = [self._walker.prompts[problem] for problem, _, _ in contexts]
            return self._runner.prefill(prompts, of_row, self._tokens)

    def _draw(self, step: int, logits_BV: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int64 [B], which is noted with what both policies say of it."""
        count = len(self._at_B)
        tokens_B = torch.empty_like(self._at_B)
        for start in range(0, count, _DRAW_ROWS):
            part = slice(start, min(start + _DRAW_ROWS, count))
            at = self._at_B[part]
            bias_BV = None if self._bias_UV is None else self._bias_UV[self._units_R[at]]
            mu_BV = self._perturbation.logits(logits_BV[part], self._strengths_R[at], bias_BV)
            pi_BV = logits_BV[count + part.start : count + part.stop] if self._twins else logits_BV[part]
            given = None if self._forced is None else self._forced[at, step]
            uniforms = None if self._uniforms_RT is None else self._uniforms_RT[at, step]
            tokens_B[part] = self._record.write(step, at, mu_BV, pi_BV, self._alive_B[part], given, uniforms)
        return tokens_B

    def _leave(self) -> None:
        """Take the rows that have ended out of the batch, and their twins."""
        kept_B = self._alive_B.nonzero()[:, 0]
        sources = torch.cat([kept_B, kept_B + len(self._at_B)]) if self._twins else kept_B
        self._runner.keep(sources.tolist())
        self._at_B, self._alive_B = self._at_B[kept_B], self._alive_B[kept_B]


class _Noise:
    """The norms' noise of one batch, for its prompts and for its rows."""

    def __init__(self, walker: Walker, perturbation: Perturbation, units: list[tuple[int, int]]) -> None:
        self._model, self._norms, self._scale = walker._model, walker._norms, perturbation.noise_scale
        self._eps_UW = normals(walker._seed, "norms", units, walker._norms.width, walker._device)

    @contextmanager
    def on(self, units_B: torch.Tensor, strengths_B: torch.Tensor) -> Iterator[None]:
        """The block runs batches whose rows have these units and strengths."""
        offsets = self._norms.offsets(self._eps_UW, units_B, strengths_B, self._scale)
        with noisy_norms(self._model, offsets):
            yield


def _contexts(
    rows: Rows, units: Sequence[tuple[int, int]], perturbation: Perturbation
) -> tuple[list[tuple[int, tuple[int, int], float]], list[int]]:
    """The prompts to compute, as (problem, unit, strength), and which of them each row starts from."""
    clean = [(problem, (-1, -1), 0.0) for problem in rows.problem.tolist()]
    wanted = clean
    if perturbation.on_norms and perturbation.noise_where == "all":
        wanted = list(zip(rows.problem.tolist(), units, rows.strength.tolist(), strict=True))
    if perturbation.on_norms:
        wanted = [*wanted, *clean]
    index = {context: i for i, context in enumerate(dict.fromkeys(wanted))}
    return list(index), [index[context] for context in wanted]


class _Record:
    """The fields of a `Walk` while they are written, on the device."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, tokens, dtype=torch.long, device=device)
        self.valid = torch.zeros(rows, tokens, dtype=torch.bool, device=device)
        self.numbers = torch.zeros(5, rows, tokens, device=device)

    def write(
        self,
        step: int,
        at: torch.Tensor,
        mu_BV: torch.Tensor,
        pi_BV: torch.Tensor,
        alive_B: torch.Tensor,
        given_B: torch.Tensor | None,
        uniforms_B: torch.Tensor | None,
    ) -> torch.Tensor:
        """Choose a token for some rows, note what both policies say of it, and return it, int64 [B].

        Args:
            step: Column that is written.
            at: Rows that are written, int64 [B].
            mu_BV, pi_BV: Logits of both policies.
            alive_B: Rows that have not ended.
            given_B: The tokens where they are not drawn.
            uniforms_B: Uniform numbers where they are.
        """
        mu_BV = torch.log_softmax(mu_BV, dim=-1)
        pi_BV = torch.log_softmax(pi_BV, dim=-1)
        if given_B is None:
            assert uniforms_B is not None
            given_B = draw_tokens(mu_BV, uniforms_B, _ONE_DRAW).tokens_B
        p_BV = mu_BV.exp()
        entropy_B = -torch.linalg.vecdot(p_BV, mu_BV)
        kl_B = -entropy_B - torch.linalg.vecdot(p_BV, pi_BV)
        entropy_pi_B = -torch.linalg.vecdot(pi_BV.exp(), pi_BV)
        said = (mu_BV.gather(-1, given_B[:, None])[:, 0], pi_BV.gather(-1, given_B[:, None])[:, 0])
        self.tokens[at, step] = given_B
        self.valid[at, step] = alive_B & kl_B.isfinite()
        self.numbers[:, at, step] = torch.stack([*said, kl_B, entropy_B, entropy_pi_B])
        return given_B

    def walk(self) -> Walk:
        mu, pi, kl, entropy, entropy_pi = self.numbers.cpu().numpy()
        return Walk(self.tokens.cpu().numpy(), self.valid.cpu().numpy(), mu, pi, kl, entropy, entropy_pi)


@contextmanager
def _unrounded_head(model: nn.Module) -> Iterator[None]:
    """Inside the block the output head returns FP32 logits.

    In bf16 a logit of 20 is off by up to 0.06, which two policies that hardly differ do not share: a KL of
    0.002 nats that is not there.
    """
    head = base_model(model).get_output_embeddings()
    weight, bias = head.weight, head.bias

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cuda and hidden.dtype != torch.float32:
            logits = torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32)
            return (logits if bias is None else logits + bias).unflatten(0, hidden.shape[:-1])
        return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
