"""The interface between the wire of `qerl serve` and the model behind it.

The wire (HTTP, messages, order, futures) knows no model; a backend knows no HTTP, no client and no sequence
number. Between them stand these plain values and one protocol, so each side is tested without the other.

All of a backend runs in one thread: the worker calls its methods one after another, in the order of each
client's requests; while `Backend.sample` draws it calls others where that method says so. A method that
fails leaves the backend as it was before the call. A mistake of a client is a `QeRLError`, whose sentence the
client reads; any other exception is a defect, which the client is told without its traceback. Either way the
server lives on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from qerl.errors import QeRLError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.update.losses import Datum, LossOutput

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ModelInfo:
    """A base model under one of the names by which clients may ask for it.

    Attributes:
        name: As clients write it: a Hub id or the path of a folder.
        max_context_length: Largest number of tokens of a prompt with its completion, or of a datum.
        tokenizer: Hub id or folder that `AutoTokenizer.from_pretrained` takes at the client.
        trainable: False for a teacher, which is sampled from and scores and takes no adapters that train.
    """

    name: str
    max_context_length: int
    tokenizer: str
    trainable: bool = True


@dataclass(frozen=True)
class LoraParams:
    """The adapter that a client asks for.

    Attributes:
        rank: At least 1.
        seed: Of the first weights of A; None leaves it to the server.
        train_attn, train_mlp, train_unembed: Which linears get an adapter. Clients ask for the unembedding
            unless told otherwise, so a backend without one there leaves it out instead of refusing.
    """

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class AdamParams:
    """One step of AdamW, all of whose numbers come with the step; the defaults are those of the protocol.

    Attributes:
        grad_clip_norm: Largest norm of all gradients together; 0 clips nothing.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def _always() -> bool:
    return True


@dataclass(frozen=True)
class SampleRequest:
    """Completions of one prompt, for one client.

    Clients send the samples of a group as requests of one sample each, so equal prompts of different requests
    are the rule; seeds tell them apart.

    Attributes:
        sampler: A key from `Backend.sampler` or `Backend.save_for_sampler`.
        prompt: Token ids, at least one.
        num_samples: Completions, at least 1, each with a seed of its own that follows from `seed`.
        max_tokens: Largest number of tokens of a completion; None stands for the rest of the context.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: 1 keeps all tokens.
        top_k: 0 keeps all tokens.
        seed: Same request and seed, same samples, whatever else is in the batch. The server draws one where
            the client gave none.
        stop_token_ids: A completion ends with the first of these, which it includes; None stands for the
            model's own end tokens, an empty tuple for none.
        stop_strings: A completion ends with the token that completes the first of these.
        prompt_logprobs: True if the log-probabilities of the prompt's tokens are wanted, without noise.
        topk_prompt_logprobs: Number of the most probable tokens that are wanted at each position of the
            prompt.
        wanted: False once the client is gone. It may be asked at any time, and once it is False the samples
            need not be finished.
        min_p: 0 keeps all tokens.
        told: Is told of the tokens of each sample, by its number, as they are drawn; None where nobody
            listens.
    """

    sampler: str
    prompt: tuple[int, ...]
    seed: int
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    wanted: Callable[[], bool] = field(default=_always, compare=False)
    min_p: float = 0.0
    told: Callable[[int, list[int]], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SampledSequence:
    """One completion: its tokens, the end token included, and the natural log-probability of each."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: StopReason


@dataclass(frozen=True)
class SampleResult:
    """The answer to a `SampleRequest`.

    Attributes:
        sequences: `num_samples` of them.
        prompt_logprobs: One for each token of the prompt, NaN for the first; None if not asked for.
        topk_prompt_logprobs: For each token of the prompt the most probable token ids in its place and their
            log-probabilities, most probable first; empty for the first. None if not asked for.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float] | None = None
    topk_prompt_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class WeightsInfo:
    """Facts about saved weights that a client needs before it loads them."""

    base_model: str
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True)
class Notes:
    """A client's notes about saved weights.

    Attributes:
        run: Texts about its model, by key.
        own: Texts about these weights, by key.
        expires: Seconds since the epoch from which on they may be deleted; None keeps them.
        owner: Who may delete them beside the server's own key; empty for no other.
    """

    run: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    expires: float | None = None
    owner: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights in the server's folder.

    Attributes:
        path: tinker://MODEL_ID/KIND/NAME with one of `qerl_serve.names.KINDS`; weights have an optimizer.
        folder: A plain PEFT folder.
        bytes: Size of its files.
        time: Seconds since the epoch when they were saved.
        notes: Of their client.
    """

    path: str
    folder: Path
    bytes: int
    time: float
    notes: Notes = Notes()


class NotSavedError(QeRLError):
    """Nothing is saved at a tinker:// path, or not any more."""


Arrivals = Callable[[], Sequence[SampleRequest]]

Overdue = Callable[[], Callable[[], None] | None]
"""Gives work that has waited too long for the model; None while there is none."""


def nothing_overdue() -> None:
    """`Overdue` where nobody else wants the model."""


@dataclass(frozen=True)
class Reader:
    """What makes texts of the tokens of the base that trains.

    Attributes:
        tokenizer: Used in the thread of HTTP alone, but to decode.
        end_token_ids: With which a completion ends by itself.
    """

    tokenizer: "PreTrainedTokenizerBase"
    end_token_ids: tuple[int, ...]


class Backend(Protocol):
    """A model with adapters, and teachers, as the worker uses them; methods raise `QeRLError` for a client's
    mistakes.

    Ids of models and names of checkpoints come from clients. The wire hands on only those made of letters,
    digits, `_`, `-`, `.` and (in ids) `:`, which neither begin with a dot nor exceed 128 characters.
    """

    models: Sequence[ModelInfo]
    """The base that trains under each of its names, the first of which is the one that answers name; then
    each teacher under its own."""

    reader: Reader | None
    """For the routes that take texts and messages; None for a backend without a model."""

    def create_model(self, model_id: str, lora: LoraParams) -> None:
        """Add an adapter under a new name, with an optimizer that has not stepped."""

    def forward_backward(
        self,
        model_id: str,
        data: Sequence["Datum"],
        loss: str,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> "LossOutput":
        """Log-probabilities and metrics, `loss:sum` among them; gradients are added to the adapter's unless
        `forward_only`."""

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """One step with the gradients since the last one, which are then zero; returns metrics."""

    def drop_gradients(self, model_id: str) -> bool:
        """Drop the gradients since the last optimizer step; True if there were any. An unknown model has
        none."""

    def save_state(self, model_id: str, name: str, overwrite: bool, notes: Notes) -> str:
        """The tinker:// path of adapter and optimizer, written under a new name, or over an old one if
        `overwrite`."""

    def save_for_sampler(self, model_id: str, name: str | None, notes: Notes) -> str:
        """A policy to sample from that stays as it is now while the model goes on.

        Returns:
            With a new name, the tinker:// path it was saved under, which outlives the server; without one the
                key of a snapshot for `SampleRequest.sampler`, which lives until `drop_sampler`.
        """

    def save_external(self, model_id: str, name: str, notes: Notes) -> str:
        """The tinker:// path of the adapter for other programs, written under a name that no other such
        one has."""

    def load_state(self, model_id: str, path: str, with_optimizer: bool) -> None:
        """Give a model the weights at a tinker:// path; it is made, with their rank, if there is none."""

    def sampler(self, path_or_base: str, base: str | None = None) -> str:
        """The key of a policy to sample from, by name of a base or by tinker:// path. Saved weights run on
        the base of the name `base`, or with None on the one that they were trained on."""

    def sample(
        self, requests: Sequence[SampleRequest], arrived: Arrivals, overdue: Overdue
    ) -> Iterator[tuple[int, SampleResult | Exception]]:
        """Answers to requests, each as soon as it is finished, with its number in the order given.

        Args:
            requests: Of any samplers, in order of arrival.
            arrived: Gives new requests, and is asked between rounds of decoding; they are numbered on from
                the last one given, and are then the call's to answer. Methods that neither train nor sample
                may be called in it.
            overdue: Is asked between rounds as well. What it gives is run before the next round, and may call
                any method but this one: no policy is lent to the model then, and no keys and values are held.
                Samples go on behind it as if it had not been, each of the policy with which it began.

        Returns:
            Numbers and results; a `QeRLError` for a client's mistake, and any other exception for a defect,
            which ends the requests that share its session and no others.
        """

    def model_info(self, model_id: str) -> WeightsInfo:
        """The adapter that a model was created with."""

    def weights_info(self, path: str) -> WeightsInfo:
        """Facts about the weights at a tinker:// path."""

    def checkpoints(self) -> Sequence[Checkpoint]:
        """All saved weights, oldest first, damaged ones among them."""

    def checkpoint(self, path: str) -> Checkpoint:
        """The saved weights at a tinker:// path; `NotSavedError` if there are none."""

    def delete_checkpoint(self, path: str) -> None:
        """Delete the weights at a tinker:// path, damaged or not; `NotSavedError` if there are none."""

    def expire_checkpoint(self, path: str, expires: float | None) -> None:
        """Set when the weights at a tinker:// path may be deleted, as in `Notes`; `NotSavedError` if there
        are none."""

    def delete_expired(self) -> None:
        """Delete expired weights."""

    def drop(self, model_id: str) -> None:
        """Drop a model: adapter, gradients and optimizer, not its snapshots or saved weights."""

    def drop_sampler(self, key: str) -> None:
        """Give up a key of `sampler` or `save_for_sampler`, each as often as it was given."""

    def gauges(self) -> Mapping[str, float]:
        """Numbers for the server's metrics by snake_case name with unit, as `gpu_memory_bytes`."""

    def close(self) -> None:
        """Release everything; nothing is called afterwards."""
