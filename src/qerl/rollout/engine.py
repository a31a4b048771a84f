"""The interface of rollout engines: prompts in, sampled tokens with their log-probabilities out.

A completion is sampled in one go (`RolloutEngine.generate`) or in turns (`Session`). Between turns the caller
appends tokens, such as a tool's result or a user's answer. Both are the same work, the second with pauses.

An engine runs on the modules that are trained. It never copies, syncs or merges weights: LoRA parameters are
read where the optimizer writes them, and parameter noise is handed to each call as offsets of RMSNorm
weights. The engine knows nothing of trainers, tasks or rewards.

**Drawing.** Tokens are drawn by inverting the cumulative distribution at one uniform number. Each sequence
has its own stream of uniforms, keyed by (seed, prompt, sample), and uses exactly one number per token, so
its tokens do not depend on which others share its batch, when they finish, or how the sequences were split
into waves. ``torch.multinomial`` could not guarantee that: it takes numbers from one stream for the whole
batch.

Order of the filters: temperature, then top-k, then top-p over the tokens that top-k kept, then min-p. Filters
decide which tokens can be drawn; log-probabilities are computed before top-k, top-p and min-p
(`qerl.rollout.engine.Completion` says why).

Shapes: B sequences, V vocabulary, C candidates (the most probable tokens, descending).
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from qerl.errors import QeRLError
from qerl.families.layer import Attention
from qerl.families.parts import base_model
from qerl.families.sizes import Sizes
from qerl.families.supported import why_not
from qerl.rollout.stops import FinishReason, Stop
from qerl.seeding import derive_seed

KvCacheDtype = Literal["auto", "fp8"]
KV_DTYPES: dict[str, torch.dtype] = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}
NormOffsets = Mapping[str, torch.Tensor]
"""Noise Z by the qualified name of its RMSNorm module, each a fp32 tensor of the norm's width."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a completion.

    Attributes:
        max_tokens: Maximum number of tokens in a completion, stop token included; at least 1.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Keeps the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keeps this many most probable tokens; 0 keeps all.
        min_p: Keeps tokens with at least this fraction of the highest token probability; 0 keeps all.
        stop_token_ids: A completion ends with the first of these, which it includes.
        seed: Same seed, same samples, whatever else is in the batch.
        stops: Other conditions that end a completion, such as stop strings (`qerl.rollout.stops`).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stops: tuple[Stop, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise QeRLError(
                f"max_tokens is {self.max_tokens}; a completion needs room for at least one token."
            )
        if not 0 <= self.temperature < math.inf:
            raise QeRLError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive.")
        if not 0 < self.top_p <= 1:
            raise QeRLError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise QeRLError(f"top_k is {self.top_k}; it must be 0 (all tokens) or positive.")
        if not 0 <= self.min_p <= 1:
            raise QeRLError(f"min_p is {self.min_p}; it must be between 0 and 1.")

    @property
    def plain(self) -> dict[str, Any]:
        """All fields except `stops`, as plain values."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "stops"}

    @property
    def filtered(self) -> bool:
        """True if top-p, top-k or min-p may exclude tokens; greedy decoding excludes none."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        token_ids: Sampled tokens, the stop token included when there is one; never empty.
        logprobs: Natural log-probability of each token under softmax(logits / temperature), noise included,
            before top-k, top-p and min-p; greedy: at temperature 1. Restricting the policy to the filtered
            tokens would multiply each of their probabilities by 1 / (their mass). The factor is nearly the
            same for the trainer's restricted policy, so both sides omit it: applied on one side only, it
            would make every importance ratio too small by that factor.
        entropies: Entropy in nats of the same distribution.
        finish_reason: ``stop`` (a stop token or another stop, such as a stop string; its tokens are kept),
            ``length`` (max_tokens reached), ``error`` (logits not finite; earlier tokens are kept, and if
            there are none, one pad token of log-probability 0 stands in) or ``pause`` (a stop after which the
            caller appends tokens and the turn goes on).
        choices: For mixture-of-experts models, if the engine records them: the experts of each computed
            token, including those of the prompt and of earlier turns, but not of the last token, which the
            model has not read; uint8 [tokens, mixtures, experts per token].
    """

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: FinishReason
    choices: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Begun:
    """The state of a sequence from an earlier session (`Session.leave`), from which a new session continues.

    Attributes:
        token_ids, logprobs, entropies: Of the tokens so far, as in `Completion`; they may be empty.
        finish_reason: Why the sequence has ended, as in `Completion`; None if it goes on.
        choices: Experts of an ended sequence, as in `Completion`.
    """

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: FinishReason | None = None
    choices: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RolloutResult:
    """All completions of one call: prompts in the order given, samples of a prompt next to each other.

    Attributes:
        completions: ``len(prompts) * samples_per_prompt`` of them.
        prompt_tokens: Prompt tokens computed; a prompt counts once for all its samples that run together. The
            portable engine also computes a prefix that is common to all prompts of a wave only once.
        generated_tokens: Tokens sampled.
        seconds: Wall-clock time of the call.
    """

    completions: list[Completion]
    prompt_tokens: int
    generated_tokens: int
    seconds: float


WhenEnded = Callable[[int, Completion], None]
"""Callback for a finished completion: its index in `RolloutResult.completions`, and the completion."""


@dataclass(frozen=True)
class Ended:
    """A turn that has ended.

    Attributes:
        index: The sequence, as `Session.start` numbered it.
        completion: Only the tokens that the policy drew in this turn, stop token included. It is empty, with
            the reason ``length``, only for a sequence that had no room from the start.
    """

    index: int
    completion: Completion


class Session(ABC):
    """Sequences sampled in turns: the policy draws tokens, the caller appends tokens, the policy draws again.

    All sequences of a session are drawn with one state of the policy and one noise, each with its own
    sampling parameters. A session that was left can be entered again with another policy state, which draws
    the tokens that follow, on top of keys and values that earlier states computed. Drawn and appended tokens
    count together towards a sequence's limit: ``SamplingParams.max_tokens``, or the positions that its prompt
    leaves if these are fewer.

    The uniform number of a token is keyed by the seed, the number of its prompt in the session, the sample,
    and the token's index in the completion, or by the sequence's own seed and that index. So a sequence draws
    the same tokens whatever else is in the batch, in whichever order turns end, and whether its keys and
    values were kept between turns or recomputed (up to rounding, which depends on the batch as it does in
    `RolloutEngine.generate`).

    Created by `RolloutEngine.session`. Used from one thread.

    Attributes:
        prefilled_tokens: Tokens that were prefilled: prompts (once for all their samples that run together),
            appended tokens, and recomputed tokens.
        over: Whether the session cannot be entered again: it was ended by `leave` or by an error, or the
            engine was reset or has opened another session since. Unless it was an error, `leave` returns the
            sequences whose turn has not ended.
    """

    prefilled_tokens: int
    over: bool = False

    @abstractmethod
    def start(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: Sequence[SamplingParams] | None = None,
        seeds: Sequence[int] | None = None,
        begun: Sequence[Begun] | None = None,
    ) -> list[int]:
        """Start new sequences, which `next` decodes.

        Args:
            prompts: Token ids of each prompt, without padding; every prompt has at least one token.
            samples_per_prompt: Sequences per prompt; they share its prefill.
            params: Sampling parameters of each sequence, in the order of the returned numbers. A sequence
                draws the same tokens as in a session with these parameters for all. None uses the session's.
            seeds: Seed of each sequence, in the same order, instead of the seed of its parameters. A sequence
                draws the same tokens as when it is alone in a session with this seed.
            begun: State of each sequence, in the same order; its keys and values are recomputed. A sequence
                that has already ended is returned by the following `next`.

        Returns:
            The numbers of the new sequences, prompts in the order given, samples of a prompt next to each
            other; the session counts from 0.

        Raises:
            QeRLError: The prompt list or a prompt is empty, the number of parameters, seeds or beginnings is
                not that of the sequences, or memory for one of them is missing; earlier sequences go on.
        """

    @abstractmethod
    def go_on(self, index: int, token_ids: Sequence[int]) -> None:
        """Append tokens to a sequence whose turn has ended, and begin its next turn.

        Args:
            index: The sequence.
            token_ids: The tokens to append, fewer than `room`; may be empty.

        Raises:
            QeRLError: The tokens leave no room for a drawn one, or the sequence's turn has not ended, or the
                sequence was finished.
        """

    @abstractmethod
    def room(self, index: int) -> int:
        """Return how many more tokens, drawn or appended, a sequence between turns may have.

        This is 0 after logits that were not finite.

        Raises:
            QeRLError: The sequence was finished.
        """

    @abstractmethod
    def finish(self, index: int) -> None:
        """Finish a sequence whose turn has ended, and free everything that is held for it.

        Raises:
            QeRLError: Its turn has not ended.
        """

    def length(self, index: int) -> int:
        """Return the current number of tokens of a sequence, drawn or appended.

        Raises:
            QeRLError: The sequence was finished, or sessions of this class cannot be entered again.
        """
        raise QeRLError(_not_going_on(self, "length"))

    def leave(self) -> dict[int, Begun]:
        """End the session, and return the state of each sequence whose turn has not ended, by its number.

        It may be called outside of the session's context, even after another session was opened.

        Raises:
            QeRLError: Sessions of this class cannot be entered again.
        """
        raise QeRLError(_not_going_on(self, "leave"))

    @abstractmethod
    def next(self, one_round: bool = False, meanwhile: Callable[[], None] | None = None) -> list[Ended]:
        """Decode until at least one turn has ended, and return the ended turns; empty if nothing is running.

        Args:
            one_round: Decode a single round of the engine, so that more sequences can be started before any
                has ended; the list may then be empty while the session is `busy`.
            meanwhile: Called in each round after its work was submitted to the device, before the host waits
                for it; must not call the session. Work that it does in parallel with the device is free.
        """

    def next_finished(self, one_round: bool = False) -> list[Ended]:
        """Decode as `next` does, and finish each sequence that is returned, for sequences of one turn."""
        ended = self.next(one_round)
        for turn in ended:
            self.finish(turn.index)
        return ended

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True if `next` has anything to decode or return."""


def _not_going_on(session: Session, method: str) -> str:
    return (
        f"{type(session).__name__} has no method {method}, which max_staleness needs; add it, as "
        f"qerl.rollout.engine.Session.{method} says, or set max_staleness: 0."
    )


def check_goes_on(session: Session) -> None:
    """Raise if a session cannot continue across an update of the policy.

    Raises:
        QeRLError: The session has no `length` or no `leave`, or its `start` does not take `begun`.
    """
    for method in ("length", "leave"):
        if getattr(type(session), method) is getattr(Session, method):
            raise QeRLError(_not_going_on(session, method))
    if not takes(session.start, "begun"):
        raise QeRLError(
            f"max_staleness needs the argument `begun` of start, which {type(session).__name__}.start "
            "lacks; add it, as in qerl.rollout.engine.Session.start, or set max_staleness: 0."
        )


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return True if a function accepts an argument by name; ``**kwargs`` counts as accepting it."""
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class RolloutEngine(ABC):
    """Samples completions from the current state of the policy.

    Attributes:
        model: The model to sample from, PEFT-wrapped or not, which the trainer compares with the one that it
            trains; None for an engine without a model, whose samples are scripted.
        rows_per_call: Recommended number of completions per call: with fewer, more of the call's time is
            spent waiting for the last ones.
        keeps_prefixes: Whether sessions that name their policy reuse keys and values of common prefixes.
    """

    model: nn.Module | None = None
    rows_per_call: int = 64
    keeps_prefixes: bool = False

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        seeds: Sequence[int] | None = None,
        ended: WhenEnded | None = None,
    ) -> RolloutResult:
        """Sample completions for each prompt.

        Args:
            prompts: Token ids of each prompt, without padding; every prompt has at least one token.
            samples_per_prompt: Completions per prompt; they share its prefill.
            params: Sampling parameters.
            norm_offsets: Noise added to RMSNorm weights for this call only; the weights themselves are never
                written.
            seeds: As in `Session.start`.
            ended: Called with each completion as soon as it is finished, in this thread, while others are
                still decoded; decoding waits for the call, so it should start work and not do it.

        Raises:
            QeRLError: The prompt list or a prompt is empty, a prompt with its completion exceeds the model's
                positions, or the number of seeds is not that of completions.
        """

    def session(
        self,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        growing: bool = False,
        longest_prompt: int | None = None,
        going_on: Session | None = None,
        policy: Hashable | None = None,
    ) -> AbstractContextManager[Session]:
        """Open a session for sampling in turns.

        Leaving the context drops all sequences, unless the session is entered again. Within the context the
        model must not change and no other method of the engine may be called.

        Args:
            params: Sampling parameters of sequences that are started without their own.
            norm_offsets: Noise, as in `generate`.
            growing: Whether more sequences, of other prompts and lengths, will be started while the first are
                decoded. An engine that sizes memory by the first sequences then reserves more at once.
            longest_prompt: Tokens of the longest prompt that will be started, if that is known and no more
                sequences will run concurrently than are started first; memory is then reserved for these.
            going_on: The last session of this engine, to enter again with the current policy and noise. Its
                sequences keep their tokens; their keys and values are not recomputed unless `release` was
                called, even if the weights have changed.
            policy: A name of the policy's current state, noise included; an engine that does not keep
                prefixes (`keeps_prefixes`) ignores it. Keys and values of a sequence whose turn has ended are
                then kept, and sequences that begin with the same tokens reuse them, in this session and in
                later ones of an equal name, until `release` or `reset` is called. None keeps and reuses
                nothing, nor does a session that is entered again with a name other than its first.

        Raises:
            QeRLError: The engine samples whole completions only, or ``going_on`` is over or another engine's.
        """
        raise QeRLError(
            f"{type(self).__name__} has no sessions and samples only whole completions; trajectories of "
            "several turns, max_staleness and dynamic sampling need an engine with sessions, such as those "
            "of make_engine."
        )

    def release(self) -> None:  # noqa: B027 - an engine may hold nothing
        """Free the memory that only `generate` and sessions need; the next call takes it back."""

    def pause(self) -> None:  # noqa: B027 - an engine may need all that it holds
        """Free the part of that memory that the last session does not need to go on; keys and values stay."""

    def reset(self) -> None:  # noqa: B027 - an engine may keep nothing of earlier calls
        """Free everything that earlier calls sized, so that the next call runs as the first of a process."""


def check_model(model: nn.Module) -> None:
    """Raise if no engine samples correctly from this model; to be called before anything is built around it.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not.

    Raises:
        QeRLError: The model is no decoder-only transformer with attention in every layer, or has a
            prompt-learning adapter.
    """
    base = base_model(model)
    if reason := why_not(base.config, type(base)):
        raise QeRLError(
            f"{reason}; use a decoder-only model with attention in every layer (docs/families.md)."
        )
    for config in model.peft_config.values() if isinstance(model, PeftModel) else ():
        if config.is_prompt_learning:
            raise QeRLError(
                f"The adapter has the type {config.peft_type.value}, whose virtual tokens the rollout "
                "engine does not support; use LoRA."
            )


def check_prompts(prompts: Sequence[Sequence[int]], samples_per_prompt: int) -> None:
    """Raise if no engine can sample from these prompts.

    Raises:
        QeRLError: The prompt list or a prompt is empty, or ``samples_per_prompt`` is below 1.
    """
    if not prompts:
        raise QeRLError("There is no prompt to sample from; pass at least one.")
    if samples_per_prompt < 1:
        raise QeRLError(f"samples_per_prompt is {samples_per_prompt}; it must be at least 1.")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise QeRLError(f"Prompt {index} is empty; a prompt needs at least one token.")


def check_one_each(what: str, given: Sequence[object], sequences: int) -> None:
    """Raise if the number of given values is not the number of sequences.

    Raises:
        QeRLError: There are more or fewer.
    """
    if len(given) != sequences:
        raise QeRLError(f"There are {len(given)} {what} for {sequences} sequences; pass one for each.")


def check_keys(kv_cache_dtype: KvCacheDtype, sizes: Sizes) -> None:
    """Raise for an FP8 KV cache of a model whose keys have a bias and no norm after it.

    On some channels such a bias is far larger than the part of the key that depends on the text. E4M3 keeps
    four significant bits of the sum, so little of that part is left, and samples become nonsense.

    Args:
        kv_cache_dtype: Dtype of the KV cache.
        sizes: Of the model.

    Raises:
        QeRLError: The dtype is ``fp8``, and an attention layer has such keys.
    """
    mixers = [run.spec.mixer for run in sizes.runs if isinstance(run.spec.mixer, Attention)]
    if kv_cache_dtype == "fp8" and any(each.qkv_bias and not each.qk_norm for each in mixers):
        raise QeRLError(
            "kv_cache_dtype: fp8 spoils the samples of models whose keys have a bias, such as Qwen2 and "
            "Qwen2.5, because biased keys are too large for E4M3; set kv_cache_dtype: auto."
        )


def check_request(
    prompts: Sequence[Sequence[int]], samples_per_prompt: int, params: SamplingParams, positions: int | None
) -> None:
    """Raise if no engine can serve this call.

    Args:
        prompts, samples_per_prompt, params: As in `RolloutEngine.generate`.
        positions: The model's maximum number of positions; None if it has no limit.

    Raises:
        QeRLError: The prompt list or a prompt is empty, ``samples_per_prompt`` is below 1, or a prompt with
            its completion exceeds the positions.
    """
    check_prompts(prompts, samples_per_prompt)
    longest = max(len(prompt) for prompt in prompts)
    if positions is not None and longest + params.max_tokens > positions:
        raise QeRLError(
            f"A prompt of {longest} tokens and a completion of up to {params.max_tokens} exceed the "
            f"{positions} positions of the model; shorten the prompt or lower max_tokens (in training "
            "max_completion_length)."
        )


# top-p needs the most probable tokens in order, but rarely many of them. For 64 x 49,152 logits on 2 cores,
# these candidates take 15 ms, a full sort 116 ms.
_CANDIDATES = 1024


class Drawn(NamedTuple):
    """One drawn token per sequence.

    Attributes:
        tokens_B: int64 token ids; undefined where ``finite_B`` is false.
        logprobs_B: fp32 log-probability in nats, under the distribution at temperature, before truncation.
        entropies_B: fp32 entropy in nats of the distribution at temperature, before truncation.
        finite_B: False where a logit was NaN or infinite.
    """

    tokens_B: torch.Tensor
    logprobs_B: torch.Tensor
    entropies_B: torch.Tensor
    finite_B: torch.Tensor


def uniform_streams(sequences: Iterable[tuple[int, int, int]], length: int) -> torch.Tensor:
    """Return a stream of uniform numbers for each sequence, one number per token that it may draw.

    Args:
        sequences: (seed of the rollout, prompt index, sample index) of each.
        length: Numbers per sequence; a longer stream begins with the shorter one.

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
    """Draw the next token of each sequence with its own parameters; see `draw_tokens`.

    Rows with the same temperature and filters are drawn together; usually all rows have the same.
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
    """Set the log-probabilities of tokens that top-k, top-p or min-p exclude to -inf.

    The most probable token is always kept. With top-p a token is kept if all more probable tokens together
    have less mass than ``top_p``, so the kept set is the smallest that reaches ``top_p``.

    Args:
        logprobs_BV: fp32 log-probabilities at temperature.
        params: The filters; when all of them are off the input itself is returned.

    Returns:
        fp32 [B, V]: unchanged for kept tokens, so they no longer sum to one; -inf for the others.
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
    """Return log-probabilities and ids [B, C] of all tokens that the filters can keep, descending."""
    vocabulary = logprobs_BV.shape[-1]
    if 0 < params.top_k < vocabulary:
        return logprobs_BV.topk(params.top_k, dim=-1)
    # On a GPU, checking whether the candidates suffice would synchronize the host, which a captured decode
    # step cannot do.
    if params.top_p < 1 and not logprobs_BV.is_cuda:
        values_BC, tokens_BC = logprobs_BV.topk(min(_CANDIDATES, vocabulary), dim=-1)
        if bool((values_BC.double().exp().sum(dim=-1) >= params.top_p).all()):
            return values_BC, tokens_BC
    return torch.sort(logprobs_BV, dim=-1, descending=True)


def _invert_cdf(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds the uniform, never one of probability 0."""
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    # fp32 probabilities sum to 1 only within 1e-6, so the uniform is scaled by the actual sum.
    target_B1 = uniforms_B[:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    # NaN rows land past the end; a valid id lets the rest of the batch go on.
    tokens_B1.clamp_(max=probs_BV.shape[-1] - 1)
    # On a GPU, checking whether a row needs the correction below would synchronize; it runs for every row.
    if not probs_BV.is_cuda and not bool((probs_BV.gather(-1, tokens_B1) == 0).any()):
        return tokens_B1[:, 0]
    # The cause is a product that rounds up to the whole sum, or a parallel cumsum that is not monotonic in
    # its last bit.
    possible_BV = probs_BV > 0
    after_BV = possible_BV & (cdf_BV > target_B1)
    last_B = probs_BV.shape[-1] - 1 - possible_BV.byte().flip(-1).argmax(dim=-1)
    mended_B = torch.where(after_BV.any(dim=-1), after_BV.byte().argmax(dim=-1), last_B)
    return torch.where(probs_BV.gather(-1, tokens_B1)[:, 0] == 0, mended_B, tokens_B1[:, 0])
