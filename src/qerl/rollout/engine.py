"""What a rollout engine is: prompts in, sampled tokens with their log-probabilities out.

A completion is sampled in one go (`RolloutEngine.generate`) or in turns (`Session`), between which others
write: a tool's result, a user's answer. Both are the same work, the second with pauses.

An engine runs on the very modules that train. It never copies, syncs or merges weights: LoRA parameters are
read where the optimizer writes them, and parameter noise is handed to each call as offsets of RMSNorm
weights. The engine knows nothing of trainers, tasks or rewards.

**Drawing.** Tokens are drawn by inverting the cumulative distribution at one uniform number. Each sequence
has its own stream of uniforms, keyed by (seed, prompt, sample), and uses exactly one number per token, so
what a sequence draws does not depend on which others share its batch, when they finish, or how the work was
cut into waves. ``torch.multinomial`` could not promise that: it takes numbers from one stream for the whole
batch.

Order of the filters: temperature, then top-k, then top-p over what top-k left, then min-p. They decide which
tokens can be drawn; log-probabilities are those before them (`qerl.rollout.engine.Completion` says why).

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
    """How the next token is chosen.

    Attributes:
        max_tokens: Tokens that a completion may have at most, its stop token included; at least 1.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: Keeps the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keeps this many most probable tokens; 0 keeps all.
        min_p: Keeps tokens at least this share as probable as the most probable one; 0 keeps all.
        stop_token_ids: A completion ends with the first of these, which it includes.
        seed: Same seed, same samples, whatever else is in the batch.
        stops: What else ends a completion, such as texts (`qerl.rollout.stops`).
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
        """Its values as plain ones, without the stops, which whoever made them can name."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "stops"}

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out before one is drawn; greedy decoding leaves none out."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        token_ids: Sampled tokens, the stop token included when there is one; never empty.
        logprobs: Natural log-probability of each token under softmax(logits / temperature), noise included,
            before top-k, top-p and min-p; greedy: at temperature 1. A policy restricted to the tokens that a
            filter left has a probability larger by 1 / (their mass), a factor that is the same for all of
            them and that the trainer's restricted policy has as well, nearly. Both leave it out: with it on
            one side alone every importance weight would be too small by that factor.
        entropies: Entropy in nats of the same distribution.
        finish_reason: ``stop`` (a stop token, or a stop such as a text, whose tokens stay), ``length``
            (max_tokens reached), ``error`` (logits not finite; the tokens before stay, and where there are
            none one pad token of log-probability 0 stands in) or ``pause`` (a stop after which others write
            and the turn goes on).
        choices: Of a mixture, where the engine keeps them: experts of each token that was computed, those of
            the prompt and of earlier turns among them, but not of the last token, which nothing has read;
            uint8 [tokens, mixtures, experts per token].
    """

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: FinishReason
    choices: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Begun:
    """What a sequence has when it is started because an earlier session drew it (`Session.leave`).

    Attributes:
        token_ids, logprobs, entropies: Of its first tokens, as in `Completion`; they may be empty.
        finish_reason: Why it has ended, as in `Completion`; None for a sequence that goes on.
        choices: Of one that has ended, as in `Completion`.
    """

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: FinishReason | None = None
    choices: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RolloutResult:
    """All completions of one call, prompts in the order given, the samples of a prompt next to each other.

    Attributes:
        completions: ``len(prompts) * samples_per_prompt`` of them.
        prompt_tokens: Prompt tokens computed; a prompt counts once for all its samples that run together, and
            the portable engine computes once what all prompts that run together begin with.
        generated_tokens: Tokens sampled.
        seconds: Wall-clock time of the call.
    """

    completions: list[Completion]
    prompt_tokens: int
    generated_tokens: int
    seconds: float


WhenEnded = Callable[[int, Completion], None]
"""Is told of a finished completion: its place in `RolloutResult.completions`, and it."""


@dataclass(frozen=True)
class Ended:
    """A turn that has ended.

    Attributes:
        index: The sequence, as `Session.start` numbered it.
        completion: What the policy drew in this turn and nothing else, the stop token included. It is empty,
            with the reason ``length``, only for a sequence that had no room from its start.
    """

    index: int
    completion: Completion


class Session(ABC):
    """Sequences that go on: tokens that the policy draws, tokens that others write, drawn ones again.

    All of a session's sequences are drawn with one state of the policy and one noise, each with sampling
    parameters of its own. A session that was left can be entered again with another state: that draws what
    follows, behind keys and values that earlier states have computed. What the policy draws and what others
    write count together towards a sequence's limit, its ``SamplingParams.max_tokens`` or the positions that
    its prompt leaves if these are fewer.

    The uniform number of a token is keyed by the seed, the number of its prompt in the session, the sample,
    and the token's place in the completion, or by a seed of the sequence's own and that place. So a sequence
    draws the same whatever else is in the batch, in whichever order turns end, and whether its keys and
    values were kept between turns or computed again (up to rounding, which depends on the batch as it does in
    `RolloutEngine.generate`).

    Made by `RolloutEngine.session`. Used from one thread.

    Attributes:
        prefilled_tokens: Tokens that were computed otherwise than as they were drawn: prompts, once for all
            their samples that run together, what others wrote, and what had to be computed again.
        over: Whether it cannot be entered again: it was left by `leave` or by an error, or the engine was
            reset or has opened another session since. Unless it was an error, `leave` says what it has.
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
        """Begin sequences; they are decoded by `next`.

        Args:
            prompts: Token ids of each prompt, without padding; every prompt has at least one token.
            samples_per_prompt: Sequences for each prompt; they share its prefill.
            params: For each sequence, in the order of what is returned, parameters of its own: it draws what
                it would draw in a session with these alone. None gives all of them the session's.
            seeds: For each sequence, in the same order, a seed of its own in the place of its parameters': it
                draws what it would draw alone in a session with this seed.
            begun: For each sequence, in the same order, what it has already; the keys and values of that are
                computed anew. One that has ended is among those that the following `next` returns.

        Returns:
            The numbers of the new sequences, prompts in the order given, the samples of a prompt next to each
            other; the session counts from 0.

        Raises:
            QeRLError: An empty prompt list, an empty prompt, another number of parameters, seeds or
                beginnings than of sequences, or no memory for one of them; what was started before goes on.
        """

    @abstractmethod
    def go_on(self, index: int, token_ids: Sequence[int]) -> None:
        """Append what others wrote to a sequence whose turn has ended, and begin its next turn.

        Args:
            index: The sequence.
            token_ids: What they wrote, fewer tokens than `room`; it may be empty.

        Raises:
            QeRLError: The tokens leave no room for a drawn one, the sequence's turn has not ended, or it was
                finished.
        """

    @abstractmethod
    def room(self, index: int) -> int:
        """Tokens that a sequence whose turn has ended may still have, drawn or written; 0 after logits that
        were not finite.

        Raises:
            QeRLError: It was finished.
        """

    @abstractmethod
    def finish(self, index: int) -> None:
        """Say that a sequence whose turn has ended will not go on: all that is held of it is given up.

        Raises:
            QeRLError: Its turn has not ended.
        """

    def length(self, index: int) -> int:
        """Tokens that a sequence has at present, drawn or written.

        Raises:
            QeRLError: It was finished, or these sessions do not go on.
        """
        raise QeRLError(_not_going_on(self, "length"))

    def leave(self) -> dict[int, Begun]:
        """What each sequence has whose turn has not ended, by its number; the session is over then.

        It may be called outside of the session's context, also once another session was opened.

        Raises:
            QeRLError: These sessions do not go on.
        """
        raise QeRLError(_not_going_on(self, "leave"))

    @abstractmethod
    def next(self, one_round: bool = False, meanwhile: Callable[[], None] | None = None) -> list[Ended]:
        """Decode until at least one sequence has ended its turn; with nothing to decode the list is empty.

        Args:
            one_round: Decode the few steps of a round of the engine and no more, so that others can start
                sequences before any has ended; the list may then be empty while the session is `busy`.
            meanwhile: Called in each round once its work was given to the device, before that is waited for;
                it must ask nothing of the session. Whatever it lets run beside the device holds nothing up.
        """

    def next_finished(self, one_round: bool = False) -> list[Ended]:
        """As `next`, for sequences of one turn, each of which is finished."""
        ended = self.next(one_round)
        for turn in ended:
            self.finish(turn.index)
        return ended

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether `next` has something to decode."""


def _not_going_on(session: Session, method: str) -> str:
    return (
        f"{type(session).__name__} has no method {method}, which max_staleness needs; add it, as "
        f"qerl.rollout.engine.Session.{method} says, or set max_staleness: 0."
    )


def check_goes_on(session: Session) -> None:
    """Refuse a session that cannot be kept over an update.

    Raises:
        QeRLError: It has no `length` or no `leave`, or its `start` does not take `begun`.
    """
    for method in ("length", "leave"):
        if getattr(type(session), method) is getattr(Session, method):
            raise QeRLError(_not_going_on(session, method))
    if not takes(session.start, "begun"):
        raise QeRLError(
            f"max_staleness needs sessions whose start has the argument `begun`, and that of "
            f"{type(session).__name__} has not; add it, as qerl.rollout.engine.Session.start has it, or set "
            "max_staleness: 0."
        )


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function can be given an argument by name; one that hands all on is taken to."""
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class RolloutEngine(ABC):
    """Samples completions from the policy in its present state.

    Attributes:
        model: The model that it samples from, PEFT-wrapped or not, which a trainer compares with the one that
            it trains; None for an engine without a model, whose samples are scripted.
        rows_per_call: Completions that a call should have where there are many to make: with fewer, part of
            its time goes into waiting for the last ones.
        keeps_prefixes: Whether sessions that name their policy find what sequences have computed.
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
            samples_per_prompt: Completions for each prompt; they share its prefill.
            params: Sampling parameters.
            norm_offsets: Noise added to RMSNorm weights for this call alone; the weights themselves are never
                written.
            seeds: As in `Session.start`.
            ended: Called with each completion as soon as it is finished, in this thread, and while others are
                still decoded; decoding waits for it, so it should begin work and not do it.

        Raises:
            QeRLError: An empty prompt list, an empty prompt, a prompt that with its completion exceeds the
                positions the model has, or another number of seeds than of completions.
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
        """Sample in turns; leaving the context gives up all sequences, unless it is entered again.

        Within it neither the model may change nor another method of the engine be called.

        Args:
            params: Sampling parameters of the sequences that are started without their own.
            norm_offsets: Noise, as in `generate`.
            growing: Whether more sequences, of other prompts and lengths, are to be expected while these are
                decoded. An engine that takes memory by what was started then takes some more at once.
            longest_prompt: Tokens of the longest prompt that will be started, where that is known and no more
                sequences will go on side by side than are started first: then memory is taken for these.
            going_on: The last session of this engine, which is entered again with the policy and the noise as
                they are now. Its sequences keep what they have; their keys and values, unless `release` was
                called, are not computed again, whatever became of the weights.
            policy: A name of the policy as it is now, noise included, for an engine that `keeps_prefixes`.
                Then what sequences have computed is kept when their turn has ended, and others that begin
                with the same tokens take it, in this session and in those of an equal name that follow, until
                `release` or `reset` is called. None keeps and takes nothing, as does a session that is
                entered again with another name than it had.

        Raises:
            QeRLError: The engine samples whole completions alone, or another session was opened since.
        """
        raise QeRLError(
            f"{type(self).__name__} samples whole completions alone; trajectories of several turns, "
            "max_staleness and dynamic sampling need an engine with sessions, as those that qerl chooses by "
            "itself."
        )

    def release(self) -> None:  # noqa: B027 - an engine may hold nothing
        """Free the memory that only `generate` and sessions need; the next call takes it back."""

    def pause(self) -> None:  # noqa: B027 - an engine may need all that it holds
        """Free of that memory what the last session can go on without; keys and values stay."""

    def reset(self) -> None:  # noqa: B027 - an engine may keep nothing of earlier calls
        """Free all that was sized by earlier calls, so that the next is computed as the first one of a new
        process would be."""


def check_model(model: nn.Module) -> None:
    """Refuse a model that no engine samples from rightly, before anything is built around it.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not.

    Raises:
        QeRLError: It is no decoder-only transformer with attention in every layer, or has a prompt-learning
            adapter.
    """
    base = base_model(model)
    if reason := why_not(base.config, type(base)):
        raise QeRLError(
            f"{reason}; use a decoder-only model with attention in every layer (docs/families.md)."
        )
    for config in model.peft_config.values() if isinstance(model, PeftModel) else ():
        if config.is_prompt_learning:
            raise QeRLError(
                f"The adapter is of the type {config.peft_type.value}, whose virtual tokens the rollout "
                "engine does not sample behind; use LoRA."
            )


def check_prompts(prompts: Sequence[Sequence[int]], samples_per_prompt: int) -> None:
    """Refuse prompts that no engine can sample from.

    Raises:
        QeRLError: An empty prompt list, an empty prompt, or no sample.
    """
    if not prompts:
        raise QeRLError("There is no prompt to sample from; pass at least one.")
    if samples_per_prompt < 1:
        raise QeRLError(f"samples_per_prompt is {samples_per_prompt}; it must be at least 1.")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise QeRLError(f"Prompt {index} is empty; a prompt needs at least one token.")


def check_one_each(what: str, given: Sequence[object], sequences: int) -> None:
    """Refuse values of which there is not one for each sequence.

    Raises:
        QeRLError: There are more or fewer.
    """
    if len(given) != sequences:
        raise QeRLError(f"There are {len(given)} {what} for {sequences} sequences; pass one for each.")


def check_keys(kv_cache_dtype: KvCacheDtype, sizes: Sizes) -> None:
    """Refuse FP8 keys of a model whose keys have a bias and are not normalised behind it.

    On some channels such a bias is far larger than what the text adds to it. E4M3 keeps four bits of the sum,
    so little of the text is left, and what is sampled becomes nonsense.

    Args:
        kv_cache_dtype: Dtype of keys and values.
        sizes: Of the model.

    Raises:
        QeRLError: It is ``fp8``, and the model is such a one.
    """
    mixers = [run.spec.mixer for run in sizes.runs if isinstance(run.spec.mixer, Attention)]
    if kv_cache_dtype == "fp8" and any(each.qkv_bias and not each.qk_norm for each in mixers):
        raise QeRLError(
            "kv_cache_dtype: fp8 spoils what a model samples whose keys have a bias, as those of Qwen2 and "
            "Qwen2.5 do, because biased keys are too large for E4M3; set kv_cache_dtype: auto."
        )


def check_request(
    prompts: Sequence[Sequence[int]], samples_per_prompt: int, params: SamplingParams, positions: int | None
) -> None:
    """Refuse a call that no engine can serve.

    Args:
        prompts, samples_per_prompt, params: As in `RolloutEngine.generate`.
        positions: Positions the model has, None where it sets no limit.

    Raises:
        QeRLError: An empty prompt list, an empty prompt, or a prompt that with its completion exceeds them.
    """
    check_prompts(prompts, samples_per_prompt)
    longest = max(len(prompt) for prompt in prompts)
    if positions is not None and longest + params.max_tokens > positions:
        raise QeRLError(
            f"A prompt of {longest} tokens and a completion of up to {params.max_tokens} exceed the "
            f"{positions} positions of the model; shorten the prompt or lower max_tokens (in training "
            "max_completion_length)."
        )


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
