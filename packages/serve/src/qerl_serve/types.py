"""The interface between the front end of `qerl serve` and the model behind it.

The front end (HTTP, messages, order, futures) knows no model; a backend knows no HTTP, no client and no
sequence number. Between them are these plain values and one protocol, so each side is tested without the
other.

A backend runs in one thread: the worker calls its methods one after another, in the order of each client's
requests; during `Backend.sample` it calls other methods only as described there. A method that fails leaves
the backend as it was before the call, except that a failed `optim_step` may drop the gradients. A client's
mistake is a `QeRLError`, whose message the client receives; any other exception is a defect, which is
reported to the client without its traceback. Either way the server goes on, unless the GPU is lost
(`qerl_serve.worker`).
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
    """A base model under one of its names.

    Attributes:
        name: The name as clients write it: a Hub id or the path of a folder.
        max_context_length: Maximum tokens of a prompt plus its completion, or of a datum.
        tokenizer: Hub id or folder from which clients load it with `AutoTokenizer.from_pretrained`.
        trainable: False for a teacher, which samples and scores, and trains no adapters.
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
        seed: Seed of the initial weights of A; None leaves it to the server.
        train_attn, train_mlp: Which linears get an adapter; the unembedding gets none, though clients ask for
            it by default.
    """

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class AdamParams:
    """Hyperparameters of one AdamW step, sent with each step; the defaults are those of the protocol.

    Attributes:
        grad_clip_norm: Maximum norm of all gradients together; 0 clips nothing.
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
    """A request for completions of one prompt.

    Clients send the samples of a group as requests of one sample each, so different requests often have equal
    prompts; their seeds differ.

    Attributes:
        sampler: A key from `Backend.sampler` or `Backend.save_for_sampler`.
        prompt: Token ids, at least one.
        num_samples: Number of completions, at least 1, each with its own seed derived from `seed`.
        max_tokens: Maximum tokens of a completion; None for the rest of the context.
        temperature: Divides the logits; 0 takes the most probable token.
        top_p: 1 keeps all tokens.
        top_k: 0 keeps all tokens.
        seed: The same request and seed give the same samples, whatever else is in the batch. The server draws
            one if the client gave none.
        stop_token_ids: A completion ends with the first of these, which it includes; None stands for the
            model's own end tokens, an empty tuple for none.
        stop_strings: A completion ends with the token that completes the first of these.
        prompt_logprobs: Whether to return log-probabilities of the prompt's tokens, without noise.
        topk_prompt_logprobs: Number of most probable tokens to return per prompt position.
        wanted: Returns False once the client is gone; the samples need not be finished then. May be called at
            any time.
        min_p: 0 keeps all tokens.
        told: Called with the number of a sample and its new tokens as they are drawn; None without streaming.
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
        prompt_logprobs: One per prompt token, NaN for the first; None if not requested.
        topk_prompt_logprobs: Per prompt token the most probable token ids in its place and their
            log-probabilities, most probable first; empty for the first. None if not requested.
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
        run: Notes about their model, by key.
        own: Notes about the weights themselves, by key.
        expires: Time in seconds since the epoch after which the weights may be deleted; None keeps them.
        owner: Name of the owner, who may delete the weights, as may the server's own key; empty for the
            server's own.
    """

    run: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    expires: float | None = None
    owner: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights in the server's folder.

    Attributes:
        path: tinker://MODEL_ID/KIND/NAME with one of `qerl_serve.names.KINDS`; the kind `weights` has an
            optimizer.
        folder: A plain PEFT folder.
        bytes: Size of its files.
        time: Time of saving, in seconds since the epoch.
        notes: The client's notes.
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
"""Returns work that has waited too long for the model; None while there is none."""


def nothing_overdue() -> None:
    """An `Overdue` that never has work."""


@dataclass(frozen=True)
class Reader:
    """Tokenizer and end tokens of the trainable base.

    Attributes:
        tokenizer: Used in the HTTP thread alone, except for decoding.
        end_token_ids: Default end tokens of a completion.
    """

    tokenizer: "PreTrainedTokenizerBase"
    end_token_ids: tuple[int, ...]


class Backend(Protocol):
    """The trainable model with its adapters, and teachers, as the worker uses them; methods raise `QeRLError`
    for a client's mistakes.

    Model ids and checkpoint names come from clients. The front end passes on only those made of letters,
    digits, `_`, `-`, `.` and (in ids) `:`, which neither begin with a dot nor exceed 128 characters.
    """

    models: Sequence[ModelInfo]
    """The trainable base under each of its names, then each teacher under its own; answers use a model's
    first name."""

    reader: Reader | None
    """For the routes that take texts and messages; None for a backend without a model."""

    def create_model(self, model_id: str, lora: LoraParams) -> None:
        """Create an adapter under a new id, with an optimizer that has not stepped."""

    def forward_backward(
        self,
        model_id: str,
        data: Sequence["Datum"],
        loss: str,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> "LossOutput":
        """Return log-probabilities and metrics, `loss:sum` among them; gradients are added to the adapter's
        unless `forward_only`."""

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Step the optimizer with the gradients since its last step, which are then zero; return metrics."""

    def drop_gradients(self, model_id: str) -> bool:
        """Drop the gradients since the last optimizer step; return True if there were any, False for an
        unknown model."""

    def save_state(self, model_id: str, name: str, overwrite: bool, notes: Notes) -> str:
        """Save adapter and optimizer under a new name, or over an old one if `overwrite`; return the
        tinker:// path."""

    def save_for_sampler(self, model_id: str, name: str | None, notes: Notes) -> str:
        """Fix the present state of a model as a policy to sample from.

        Returns:
            With a new name, the tinker:// path of the saved policy, which outlives the server; without a
                name, the key of a snapshot for `SampleRequest.sampler`, which lives until `drop_sampler`.
        """

    def save_external(self, model_id: str, name: str, notes: Notes) -> str:
        """Save the adapter for other programs, under a name that no other external weights of the model have;
        return the tinker:// path."""

    def load_state(self, model_id: str, path: str, with_optimizer: bool) -> None:
        """Load the weights at a tinker:// path into a model, which is created with their rank if it is
        unknown."""

    def sampler(self, path_or_base: str, base: str | None = None) -> str:
        """Return the key of a policy to sample from, given the name of a base or a tinker:// path. Saved
        weights run on the base named `base`, or if None on the one that they were trained on."""

    def sample(
        self, requests: Sequence[SampleRequest], arrived: Arrivals, overdue: Overdue
    ) -> Iterator[tuple[int, SampleResult | Exception]]:
        """Yield answers to requests, each as soon as it is finished, with its number in the order given.

        Args:
            requests: Requests to any samplers, in order of arrival.
            arrived: Called between rounds of decoding; returns new requests, which are numbered on from the
                last one and are answered by this call too. It may call methods that neither train nor sample.
            overdue: Called between rounds as well. The work that it returns is run before the next round and
                may call any method but this one; meanwhile the model has no policy and no KV cache. Sampling
                then continues as if uninterrupted, each sample with the policy with which it began.

        Returns:
            Numbers and results; a `QeRLError` for a client's mistake, and any other exception for a defect,
            which ends the requests that share its session and no others.
        """

    def model_info(self, model_id: str) -> WeightsInfo:
        """Return the facts about the adapter that a model was created with."""

    def weights_info(self, path: str) -> WeightsInfo:
        """Return the facts about the weights at a tinker:// path."""

    def checkpoints(self) -> Sequence[Checkpoint]:
        """Return all saved weights, oldest first, damaged ones included."""

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the saved weights at a tinker:// path; raise `NotSavedError` if there are none."""

    def delete_checkpoint(self, path: str) -> None:
        """Delete the weights at a tinker:// path, damaged or not; raise `NotSavedError` if there are none."""

    def expire_checkpoint(self, path: str, expires: float | None) -> None:
        """Set when the weights at a tinker:// path may be deleted, as in `Notes`; raise `NotSavedError` if
        there are none."""

    def delete_expired(self) -> None:
        """Delete expired weights."""

    def drop(self, model_id: str) -> None:
        """Drop a model: adapter, gradients and optimizer, not its snapshots or saved weights."""

    def drop_sampler(self, key: str) -> None:
        """Release a key of `sampler` or `save_for_sampler`, once for each time it was returned."""

    def gauges(self) -> Mapping[str, float]:
        """Return numbers for the server's metrics by snake_case name with unit, such as
        `gpu_memory_bytes`."""

    def close(self) -> None:
        """Release everything; nothing is called afterwards."""
