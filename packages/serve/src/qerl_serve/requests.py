"""The JSON bodies of requests.

Clients gain fields faster than servers do, so unknown fields are skipped, and a known field that asks for
something this server cannot do is refused with an error message instead of being ignored.

A request with a sequence number is refused only when its turn comes, because the requests after it wait for
it. So its values are checked in a method that the worker calls, not by constraints on the fields.
"""

import json
import math
import time
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from qerl.errors import QeRLError
from qerl_serve.limits import Limits
from qerl_serve.messages import check_tokens
from qerl_serve.names import check_id
from qerl_serve.types import AdamParams, LoraParams, SampleRequest


class Body(BaseModel):
    """A JSON body, without fields that this server does not know."""

    model_config = ConfigDict(protected_namespaces=(), extra="ignore")
    _sent: int = PrivateAttr(default=0)

    @property
    def size(self) -> int:
        """Bytes held while the request waits: the length of the body as sent."""
        return self._sent


B = TypeVar("B", bound=Body)


def read(kind: type[B], body: bytes) -> B:
    """Parse a body.

    Raises:
        QeRLError: The body is not JSON, or a field is missing or of the wrong type.
    """
    try:
        read = kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise QeRLError(
                f"The body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}."
            ) from error
        where = ".".join(map(str, first["loc"])) or "The body"
        raise QeRLError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}.") from error
    read._sent = len(body)
    return read


def _texts(found: dict[str, Any]) -> dict[str, str]:
    """Return a client's notes by key, with values as texts."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}
    if (size := sum(len(key) + len(text) for key, text in texts.items())) > _NOTED:
        raise PydanticCustomError("too_long", f"it has {size} characters, and this server keeps {_NOTED}")
    return texts


_NOTED = 1 << 14
Texts = Annotated[
    dict[str, Any], AfterValidator(_texts), BeforeValidator(lambda found: {} if found is None else found)
]


class CreateSession(Body):
    sdk_version: str = "unknown"
    display_name: str | None = Field(default=None, max_length=1000)
    user_metadata: Texts = {}


def place_of(body: bytes) -> "OfModel | None":
    """Return the model id and sequence number of a body, whatever else is wrong with it; None if it has
    none."""
    try:
        place = read(OfModel, body)
    except QeRLError:
        return None
    return None if place.seq_id is None else place


class OfSession(Body):
    session_id: str


class OfModel(Body):
    model_id: str
    seq_id: int | None = None


class Ttl(Body):
    """Time until saved weights may be deleted; with `ttl_seconds` None they are kept for ever."""

    ttl_seconds: int | None = None

    def expires(self) -> float | None:
        """Return the time, in seconds since the epoch, after which the weights may be deleted; None for
        never.

        Raises:
            QeRLError: `ttl_seconds` is less than an hour or more than ten years.
        """
        if self.ttl_seconds is None:
            return None
        if not HOUR_S <= self.ttl_seconds <= TEN_YEARS_S:
            raise QeRLError(
                f"ttl_seconds is {self.ttl_seconds}; it must be {HOUR_S} to {TEN_YEARS_S}, which is an hour "
                "to ten years."
            )
        return time.time() + self.ttl_seconds


HOUR_S = 3600
TEN_YEARS_S = 10 * 365 * 24 * HOUR_S


class Optimizer(Body):
    type: str = "adamw"

    def check(self) -> None:
        """Raise if this server does not have the optimizer."""
        if self.type != "adamw":
            raise QeRLError(f"The optimizer {self.type!r} is unknown to this server; it has adamw.")


class Lora(Body):
    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: Texts = {}
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()

    def lora(self, limits: Limits) -> LoraParams:
        """Return the requested adapter.

        Raises:
            QeRLError: `lora_config` is missing, its rank is out of range, or the optimizer is unknown.
        """
        self.optimizer_config.check()
        if self.lora_config is None:
            raise QeRLError("lora_config is missing; this server trains only adapters.")
        if not 1 <= self.lora_config.rank <= limits.max_rank:
            raise QeRLError(
                f"The rank is {self.lora_config.rank}; this server takes 1 to {limits.max_rank}. Ask for "
                "one of those (recipes call it lora_rank), or start the server with a larger --max_rank."
            )
        return LoraParams(**self.lora_config.model_dump())


class Adam(Body):
    type: str = "adamw"
    learning_rate: float = AdamParams.learning_rate
    beta1: float = AdamParams.beta1
    beta2: float = AdamParams.beta2
    eps: float = AdamParams.eps
    weight_decay: float = AdamParams.weight_decay
    grad_clip_norm: float = AdamParams.grad_clip_norm

    def numbers(self) -> AdamParams:
        """Return the hyperparameters of the step.

        Raises:
            QeRLError: A hyperparameter is out of range.
        """
        found = self.model_dump(exclude={"type"})
        for name, value in found.items():
            lowest, highest, range_ = _RANGES.get(name, (0, _LARGEST, f"from 0 to {_LARGEST:g}"))
            if not lowest <= value <= highest:  # NaN is refused as well
                raise QeRLError(f"adam_params.{name} is {value}; it must be {range_}.")
        return AdamParams(**found)


_LARGEST = 1e18
"""Maximum of AdamW's hyperparameters: products and quotients of two of them are within float32."""
_LEAST_EPS = 1e-30
"""Minimum of eps, which is there against 0 / 0; devices without subnormal numbers treat much smaller values
as 0."""
_BELOW_1 = (0, math.nextafter(1, 0), "at least 0 and below 1")
_RANGES = {
    "beta1": _BELOW_1,
    "beta2": _BELOW_1,
    "eps": (_LEAST_EPS, _LARGEST, f"from {_LEAST_EPS:g} to {_LARGEST:g}"),
}


class OptimStep(OfModel):
    adam_params: Adam = Field(
        validation_alias=AliasChoices("adam_params", "optim_params", "optimizer_params")
    )

    def adam(self) -> AdamParams:
        """Return the hyperparameters of the step.

        Raises:
            QeRLError: The optimizer is unknown, or a hyperparameter is out of range.
        """
        Optimizer(type=self.adam_params.type).check()
        return self.adam_params.numbers()


class SaveWeights(OfModel, Ttl):
    path: str | None = None
    user_metadata: Texts = {}
    sampling_session_seq_id: int | None = None
    overwrite: bool = False
    kind: str = "snapshot"

    def check_kind(self) -> None:
        """Raise if the request asks for a sampler that follows its model."""
        if self.kind != "snapshot":
            raise QeRLError(
                f"kind is {self.kind!r}, but samplers of this server are snapshots that do not follow their "
                "model; leave kind out, and create a new sampler after each optimizer step."
            )


class SaveExternal(OfModel, Ttl):
    path: str
    age_encryption_recipients: list[str] | None = None

    def check(self) -> None:
        """Raise if the request asks for encryption."""
        if self.age_encryption_recipients:
            raise QeRLError("age_encryption_recipients: this server does not encrypt; leave it out.")


class LoadWeights(Body):
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: Texts = {}
    path: str
    optimizer: bool = False
    optimizer_config: Optimizer | None = None


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Retrieve(Body):
    request_id: str


class WeightsPath(Body):
    tinker_path: str


TOKEN_BYTES = 40
"""Bytes per token of a waiting prompt: 8 for its place in the tuple and 32 for the int object, whose 28 by
`sys.getsizeof` Python's allocator rounds up to a multiple of 16. Ints up to 256 are shared and take none."""

_LEAST_TEMPERATURE = 1e-6
"""Logits divided by it are still well within float32."""


class _Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class _Prompt(Body):
    chunks: list[_Chunk]


class _Sampling(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class Sample(Body):
    """A request for samples of a sampling session."""

    prompt: _Prompt
    sampling_params: _Sampling = _Sampling()
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None
    record_stability_info: bool | None = None

    @property
    def size(self) -> int:
        """Bytes held while the request waits; a token takes more as a Python int than as digits."""
        return super().size + TOKEN_BYTES * sum(len(chunk.tokens or ()) for chunk in self.prompt.chunks)

    def request(self, sampler: str, seed: int, limits: Limits) -> SampleRequest:
        """Return the request in the backend's form.

        Args:
            sampler: Key of the policy.
            seed: Used if the client gives none.
            limits: Limits of prompt, completion and number of samples.

        Raises:
            QeRLError: The request asks for something that this server cannot do.
        """
        self._refuse()
        tokens = [token for chunk in self.prompt.chunks for token in chunk.tokens or ()]
        if max(tokens, default=0) >= 2**31 or min(tokens, default=0) < 0:
            raise QeRLError("The prompt holds a token id outside 0 to 2^31 - 1.")
        check_tokens(np.asarray(tokens, np.int64), limits, "The prompt")
        asked, room = self.sampling_params, limits.context - len(tokens)
        if room < (asked.max_tokens or 1):
            raise QeRLError(
                f"The prompt has {len(tokens)} tokens and max_tokens is {asked.max_tokens}; together they "
                f"exceed the {limits.context} tokens of the context."
            )
        if not 1 <= self.num_samples <= limits.num_samples:
            raise QeRLError(f"num_samples is {self.num_samples}; it must be 1 to {limits.num_samples}.")
        if not 0 <= self.topk_prompt_logprobs <= limits.topk:
            raise QeRLError(
                f"topk_prompt_logprobs is {self.topk_prompt_logprobs}; it must be 0 to {limits.topk}."
            )
        if 0 < asked.temperature < _LEAST_TEMPERATURE:
            raise QeRLError(
                f"temperature is {asked.temperature}; it must be at least {_LEAST_TEMPERATURE:g}, or 0, "
                "which takes the most probable token."
            )
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        if stop and all(word == "" for word in stop):
            stop = None  # an empty text stops nothing, and the model's own end tokens stay
        ids = tuple(word for word in stop or () if isinstance(word, int))
        strings = tuple(word for word in stop or () if isinstance(word, str) and word)
        return SampleRequest(
            sampler=sampler,
            prompt=tuple(tokens),
            num_samples=self.num_samples,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            seed=seed if asked.seed is None else asked.seed,
            stop_token_ids=None if stop is None or strings else ids,
            stop_strings=strings,
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
        )

    def _refuse(self) -> None:
        if any(chunk.tokens is None for chunk in self.prompt.chunks):
            raise QeRLError("The prompt holds an image or sound; this server takes only text.")
        if self.record_stability_info:
            raise QeRLError(
                "record_stability_info belongs to the loss stable_reinforce, whose formula is not public; "
                "choose loss_fn=importance_sampling."
            )
        for name in ("topk_sample_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs"):
            if getattr(self, name):
                raise QeRLError(f"{name} is not known to this server; leave it out.")
        last_n = self.prompt_logprobs_last_n
        if last_n is not None and last_n < 1:
            raise QeRLError(f"prompt_logprobs_last_n is {last_n}; it must be at least 1.")


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return the id of a session's model; clients compose the same id."""
    return f"{check_id(session_id, 'session_id')}:train:{model_seq_id}"
