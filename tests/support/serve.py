"""A backend of a server around a tiny model, without HTTP."""

from pathlib import Path

import torch

from qerl.families.parts import base_model
from qerl.rollout.portable.engine import PortableEngine
from qerl.update.driver import LossDriver
from qerl.update.losses import Datum
from qerl_serve.adapters import Adapters
from qerl_serve.backend import ModelBackend
from qerl_serve.bases import Base
from qerl_serve.checkpoints import Store
from qerl_serve.seats import Seats
from qerl_serve.types import LoraParams, ModelInfo, SampleRequest, nothing_overdue
from tests.support.models import EOS, make_tiny_model, make_tiny_tokenizer

POSITIONS = 512


def small_model():
    return make_tiny_model(num_hidden_layers=1)


def portable(model) -> PortableEngine:
    return PortableEngine(model, pad_token_id=0)


def tiny_base(name="tiny", model=None, make_engine=portable, fingerprint="f", **info) -> Base:
    """A dense fp32 Llama of one layer and the portable engine, unless others are given."""
    seats = Seats(small_model() if model is None else model, max_rank=16)
    tokenizer = make_tiny_tokenizer()
    return Base(
        names=[ModelInfo(name, **{"max_context_length": POSITIONS, "tokenizer": name, **info})],
        seats=seats,
        engine=make_engine(seats.model),
        driver=LossDriver(seats.model, recompute_every_layer=seats.recompute_every_layer),
        tokenizer=tokenizer,
        end_token_ids=(tokenizer.convert_tokens_to_ids(EOS),),
        fingerprint=fingerprint,
    )


def tiny_backend(
    folder: Path, model=None, most=4, resident=2, make_engine=portable, **options
) -> ModelBackend:
    """On a base of :func:`tiny_base`."""
    base = tiny_base(model=model, make_engine=make_engine)
    facts = {"base": base.name, "fingerprint": base.fingerprint, "dtype": "float32"}
    store = Store(folder, facts, {"model": base.name})
    return ModelBackend(base, Adapters(base.seats, most, resident), store, **options)


def lora(rank=8, seed=3, **options) -> LoraParams:
    return LoraParams(rank, seed, **options)


def datum(tokens, weights=None) -> Datum:
    """A sequence whose every token is predicted, as cross entropy takes it."""
    tokens_T = torch.tensor(tokens, dtype=torch.int64)
    weights_T = torch.ones(len(tokens) - 1) if weights is None else torch.tensor(weights)
    return Datum(tokens_T[:-1], {"target_tokens": tokens_T[1:], "weights": weights_T})


DATA = [datum([5, 9, 77, 31, 6, 80]), datum([5, 9, 77, 100, 3]), datum([64, 7, 8])]


def request(sampler, prompt=(5, 9, 77), seed=1, max_tokens=6, **options) -> SampleRequest:
    return SampleRequest(sampler, tuple(prompt), seed, max_tokens=max_tokens, **options)


def sampled(backend, requests, arrivals=(), overdue=nothing_overdue):
    """Answers by the number of the request; each element of `arrivals` is what one question finds."""
    waiting = iter(arrivals)
    return dict(backend.sample(requests, lambda: next(waiting, ()), overdue))


def weights(backend, model_id):
    """Copies of an adapter's matrices by name."""
    return {name: m.detach().clone() for name, m in backend._adapters.get(model_id).matrices.items()}


def base_of(backend):
    return base_model(backend._seats.model)
