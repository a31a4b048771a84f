"""The model behind a server: one frozen base, the adapters of its clients, and teachers.

It implements `qerl_serve.types.Backend` with its neighbouring modules: `bases` has the models with their
engines and loss drivers, `seats` and `adapters` train, `sampling` samples, `checkpoints` saves. The packed
weights of each model exist once; engine and update read the same bytes, so no weights are synced for
sampling.

**Noise.** A server with a noise schedule samples a model's snapshots with noise in their norms: Z from the
model's seed and its number of optimizer steps, as in the rollouts of `qerl train`. The client receives the
log-probabilities of the noisy policy and sends them back with its loss, where `importance_sampling` turns
them into the importance ratio of clean over noisy. The base, greedy samples, log-probabilities of prompts,
teachers and losses have no noise.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from qerl.errors import QeRLError
from qerl.noise.draw import AdaptiveNoise, NoiseScale
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.engine import NormOffsets
from qerl.seeding import derive_seed
from qerl_serve.adapters import Adapters, Snapshot, TrainedAdapter
from qerl_serve.bases import Base
from qerl_serve.checkpoints import EXTERNAL, SAMPLING, TRAINING, Store
from qerl_serve.names import SCHEME
from qerl_serve.sampling import Host, Policy, Sampling
from qerl_serve.seats import Shape
from qerl_serve.types import (
    AdamParams,
    Arrivals,
    Checkpoint,
    LoraParams,
    ModelInfo,
    Notes,
    Overdue,
    Reader,
    SampleRequest,
    SampleResult,
    WeightsInfo,
    nothing_overdue,
)

if TYPE_CHECKING:
    from qerl.update.losses import Datum, LossOutput

_NO_NOTES = Notes()


class ModelBackend:
    """See `qerl_serve.types.Backend`.

    Args:
        base: The model that clients train.
        adapters: The clients' adapters.
        store: The server's folder.
        teachers: Models that do not train, under other names.
        noise: Noise schedule over a model's optimizer steps; None samples without noise.
        noise_scale: Unit of the schedule's sigma.
        enable_prefix_caching: Whether keys and values are kept until the next update, for samples with the
            same prefix.
    """

    def __init__(
        self,
        base: Base,
        adapters: Adapters,
        store: Store,
        teachers: Sequence[Base] = (),
        noise: NoiseSchedule | None = None,
        noise_scale: NoiseScale = "absolute",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.models: Sequence[ModelInfo] = [name for each in (base, *teachers) for name in each.names]
        self.reader: Reader | None = Reader(copy.deepcopy(base.tokenizer), base.end_token_ids)
        self._base, self._seats, self._adapters, self._store = base, base.seats, adapters, store
        self._noise = None if noise is None else AdaptiveNoise(base.seats.model, noise, 0, noise_scale)
        offsets = None if self._noise is None else partial(self._offsets, self._noise)
        kept = enable_prefix_caching
        self._hosts = {base: base.host(offsets, kept)}
        self._hosts |= {teacher: teacher.host(keeps_prefixes=kept) for teacher in teachers}
        self._sampling = Sampling(self._policy)
        self._policies: dict[str, tuple[Base, Policy]] = {}
        self._given: dict[str, int] = {}  # how often each key was given
        self._saved: WeakValueDictionary[str, Snapshot] = WeakValueDictionary()
        self._snapshots = 0

    def create_model(self, model_id: str, lora: LoraParams) -> None:
        """See `Backend.create_model`; the output head is never adapted."""
        shape = Shape(lora.rank, lora.train_attn, lora.train_mlp)
        seed = derive_seed("model", model_id) if lora.seed is None else lora.seed
        self._sampling.release()
        self._adapters.create(model_id, shape, seed)

    def forward_backward(
        self,
        model_id: str,
        data: Sequence["Datum"],
        loss: str,
        config: Mapping[str, float],
        forward_only: bool,
    ) -> "LossOutput":
        """See `Backend.forward_backward`."""
        adapter = self._used(model_id)
        with self._seats.used(adapter.shape, adapter.matrices):
            driver = self._base.driver
            run = driver.forward if forward_only else driver.forward_backward
            return run(data, loss, config)

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """See `Backend.optim_step`."""
        return self._used(model_id).step(adam)

    def drop_gradients(self, model_id: str) -> bool:
        """See `Backend.drop_gradients`."""
        return model_id in self._adapters and self._adapters.get(model_id).drop_gradients()

    def save_state(self, model_id: str, name: str, overwrite: bool = False, notes: Notes = _NO_NOTES) -> str:
        """See `Backend.save_state`."""
        return self._save(model_id, TRAINING, name, notes, overwrite)

    def save_for_sampler(self, model_id: str, name: str | None, notes: Notes = _NO_NOTES) -> str:
        """See `Backend.save_for_sampler`."""
        if name is not None:
            return self._save(model_id, SAMPLING, name, notes)
        snapshot = self._adapters.get(model_id).snapshot()
        self._snapshots += 1
        key = f"snapshot:{self._snapshots}:{model_id}"
        self._give(key, self._base, snapshot)
        return key

    def save_external(self, model_id: str, name: str, notes: Notes = _NO_NOTES) -> str:
        """See `Backend.save_external`."""
        return self._save(model_id, EXTERNAL, name, notes)

    def load_state(self, model_id: str, path: str, with_optimizer: bool) -> None:
        """See `Backend.load_state`; without the optimizer the step count restarts at 0."""
        self._trained_on(path, [self._base])
        saved = self._store.read(path, with_optimizer)
        if model_id in self._adapters:
            adapter = self._used(model_id)
            if adapter.shape != saved.shape:
                raise QeRLError(
                    f"{path} has an adapter of {_said(saved.shape)}, but {model_id} was made with "
                    f"{_said(adapter.shape)}; make a new model from these weights."
                )
            made = False
        else:
            self._sampling.release()
            adapter, made = self._adapters.create(model_id, saved.shape, saved.seed), True
        try:
            adapter.load(saved.weights, saved.moments, saved.steps if with_optimizer else 0)
        except BaseException:
            if made:
                self._adapters.drop(model_id)
            raise
        adapter.seed = saved.seed

    def sampler(self, path_or_base: str, base: str | None = None) -> str:
        """See `Backend.sampler`."""
        if not path_or_base.startswith(SCHEME):
            self._give(path_or_base, self._named(path_or_base), None)
            return path_or_base
        on = self._trained_on(path_or_base, self._hosts if base is None else [self._named(base)])
        key = f"{path_or_base}@{self._store.saved_at(path_or_base)}@{on.name}"
        snapshot = self._saved.get(key)
        if snapshot is None:
            saved = self._store.read(path_or_base)
            matrices = {name: torch.nn.Parameter(t, False) for name, t in saved.weights.items()}
            on.seats.check(saved.shape)
            snapshot = self._saved[key] = Snapshot(saved.shape, matrices, saved.seed, saved.steps)
        self._give(key, on, snapshot)
        return key

    def sample(
        self, requests: Sequence[SampleRequest], arrived: Arrivals, overdue: Overdue = nothing_overdue
    ) -> Iterator[tuple[int, SampleResult | Exception]]:
        """See `Backend.sample`."""
        return self._sampling.answer(requests, arrived, overdue)

    def model_info(self, model_id: str) -> WeightsInfo:
        """See `Backend.model_info`."""
        return _info(self.models[0].name, self._adapters.get(model_id).shape)

    def weights_info(self, path: str) -> WeightsInfo:
        """See `Backend.weights_info`; the base has its present name, which clients send back."""
        saved = self._store.about(path)
        present = {base.fingerprint: base.name for base in reversed(self._hosts)}
        return _info(present.get(saved.fingerprint, saved.base), saved.shape)

    def checkpoints(self) -> Sequence[Checkpoint]:
        """See `Backend.checkpoints`."""
        return self._store.list()

    def checkpoint(self, path: str) -> Checkpoint:
        """See `Backend.checkpoint`."""
        return self._store.checkpoint(path)

    def delete_checkpoint(self, path: str) -> None:
        """See `Backend.delete_checkpoint`; open samplers of it remain usable."""
        self._store.delete(path)

    def expire_checkpoint(self, path: str, expires: float | None) -> None:
        """See `Backend.expire_checkpoint`."""
        self._store.expire(path, expires)

    def delete_expired(self) -> None:
        """See `Backend.delete_expired`."""
        self._store.delete_expired()

    def drop(self, model_id: str) -> None:
        """See `Backend.drop`."""
        self._adapters.drop(model_id)

    def drop_sampler(self, key: str) -> None:
        """See `Backend.drop_sampler`."""
        if key not in self._given:
            raise QeRLError(f"There is no sampler {key}; it was dropped already.")
        self._given[key] -= 1
        if not self._given[key]:
            del self._given[key]
            del self._policies[key]

    def gauges(self) -> Mapping[str, float]:
        """See `Backend.gauges`."""
        found = {
            "adapters": len(self._adapters),
            "adapters_on_device": self._adapters.resident,
            "adapter_bytes": self._adapters.bytes,
            "samplers": len(self._given),
            "prefilled_tokens": self._sampling.prefilled_tokens,
            "update_every_n_layers": self._seats.every_n_layers,
        }
        if self._base.driver.tokens_per_forward is not None:
            found["update_tokens_per_forward"] = self._base.driver.tokens_per_forward
        if self._seats.device.type == "cuda":
            found["gpu_memory_bytes"] = torch.cuda.memory_allocated(self._seats.device)
            found["gpu_peak_memory_bytes"] = torch.cuda.max_memory_allocated(self._seats.device)
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """See `Backend.close`."""
        try:
            for base in self._hosts:
                base.engine.release()
        finally:
            self._store.close()

    def _used(self, model_id: str) -> TrainedAdapter:
        """Release the KV cache, and return an adapter on the base's device."""
        self._sampling.release()
        return self._adapters.use(model_id)

    def _save(self, model_id: str, kind: str, name: str, notes: Notes, overwrite: bool = False) -> str:
        adapter = self._adapters.get(model_id)
        config = self._seats.config(adapter.shape)
        return self._store.save(model_id, kind, name, adapter, config, notes, overwrite)

    def _named(self, name: str) -> Base:
        """Return the base with this name."""
        for base in self._hosts:
            if any(name == model.name for model in base.names):
                return base
        raise QeRLError(
            f"This server has no model {name[:200]!r}, but "
            f"{' or '.join(model.name for model in self.models)}; name that one, or a tinker:// path."
        )

    def _trained_on(self, path: str, bases: Iterable[Base]) -> Base:
        """Return the first of `bases` on which saved weights were trained, by its fingerprint: its name may
        have changed, and several bases may be one model in different formats.

        Raises:
            QeRLError: The weights were trained on none of them.
        """
        saved, bases = self._store.about(path), [*bases]
        for base in bases:
            if base.fingerprint == saved.fingerprint:
                return base
        raise QeRLError(
            f"{path} was trained on {saved.base}, whose norms or embeddings are not those of "
            f"{' or '.join(base.name for base in bases)}; name that model, or start a server with it."
        )

    def _give(self, key: str, base: Base, policy: Policy) -> None:
        self._policies[key] = base, policy
        self._given[key] = self._given.get(key, 0) + 1

    def _policy(self, key: str) -> tuple[Host, Policy]:
        if key not in self._policies:
            raise QeRLError("There is no such sampler on this server; make one from saved weights.")
        base, policy = self._policies[key]
        return self._hosts[base], policy

    def _offsets(self, noise: AdaptiveNoise, policy: Snapshot) -> NormOffsets:
        noise.seed = policy.seed
        return noise.offsets(policy.steps)


def _info(base: str, shape: Shape) -> WeightsInfo:
    return WeightsInfo(base, shape.rank, shape.attn, shape.mlp, train_unembed=False)


def _said(shape: Shape) -> str:
    layers = [name for name, adapted in (("attention", shape.attn), ("MLPs", shape.mlp)) if adapted]
    return f"rank {shape.rank} on {' and '.join(layers)}"
