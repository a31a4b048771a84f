"""Samplers, and requests to them. A sampler is a fixed policy: the base, saved weights or a snapshot."""

import hashlib
import logging
import time
import uuid
from concurrent.futures import Future as CallFuture
from dataclasses import replace
from functools import partial

from qerl.errors import QeRLError
from qerl_serve.clients import Clients, Sampler
from qerl_serve.futures import Answer, Failure, Future
from qerl_serve.messages import sample_bytes
from qerl_serve.names import check_id, split_path
from qerl_serve.requests import CreateSampler, Sample
from qerl_serve.types import Backend, Notes, SampleRequest

logger = logging.getLogger(__name__)


class Samples:
    """Creates samplers and enqueues sampling requests.

    Args:
        clients: Records of clients.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._opening: dict[str, CallFuture[str]] = {}
        self._told_of_tempering = False

    def create_sampler(self, body: CreateSampler) -> "CallFuture[str]":
        """Create a sampler of the base or of saved weights; return the future of its id, set once the backend
        has checked it.

        Raises:
            QeRLError: The session or the base is unknown, the path is invalid, or neither base nor path is
                given.
        """
        clients = self._clients
        clients.check_session(body.session_id)
        source = body.model_path or body.base_model
        if source is None:
            raise QeRLError("create_sampling_session needs model_path or base_model.")
        if body.model_path is not None:
            split_path(body.model_path)
        if body.base_model is not None:
            clients.check_base(body.base_model)
        sampler_id = _sampler_id(body.session_id, body.sampling_session_seq_id)

        def open_sampler(backend: Backend) -> str:
            if body.model_path is not None:
                self._make_room(backend, body.session_id, ephemeral=False)
            key = backend.sampler(source, body.base_model)
            base = body.base_model or backend.weights_info(source).base_model
            self._add(backend, sampler_id, key, base, body.model_path)
            return sampler_id

        with clients.lock:
            opening = self._opening.pop(sampler_id, None)
            if opening is None or (opening.done() and sampler_id not in clients.samplers):
                opening = clients.queue.call(open_sampler)
            self._opening = {key: call for key, call in self._opening.items() if not call.done()}
            self._opening[sampler_id] = opening
            return opening

    def snapshot(self, backend: Backend, model_id: str, number: int | None) -> str:
        """Create a sampler of a model's present state and return its id; called by the worker.

        Raises:
            QeRLError: The model or its session is gone.
        """
        model, info, _ = self._clients.model_info(model_id)
        self._make_room(backend, model.session_id, ephemeral=True)
        sampler_id = _sampler_id(model.session_id, number)
        self._add(
            backend,
            sampler_id,
            backend.save_for_sampler(model_id, None, Notes()),
            info.base_model,
            None,
            True,
        )
        return sampler_id

    def sample(self, body: Sample) -> tuple[str, list[str]]:
        """Enqueue a sampling request; return its id, and an id per sample.

        Raises:
            QeRLError: The request names no sampler.
        """
        clients = self._clients
        if body.sampling_session_id is None:
            raise QeRLError("sampling_session_id is missing; create a sampling session first.")
        sampler_id = check_id(body.sampling_session_id, "sampling_session_id")
        request_id = f"{sampler_id}:{uuid.uuid4().hex if body.seq_id is None else body.seq_id}"
        count = min(max(body.num_samples, 0), clients.limits.num_samples)
        sequences = [f"{request_id}:{number}" for number in range(count)]
        with clients.lock:
            sampler = clients.sampler(sampler_id)
            if sampler is None:
                return clients.refused("sample", "", self._unknown(sampler_id)), sequences
            clients.heartbeat(sampler.session_id)
            if clients.futures.get(request_id) is not None:
                return request_id, sequences
            future = clients.futures.add(Future(request_id, "sample", sampler.session_id, bytes=body.size))
            sampler.used, sampler.waiting = time.monotonic(), sampler.waiting + 1
            opening = None if sampler.open else clients.queue.call(partial(self._reopen, sampler))
        future.when_settled(lambda: self._settled(sampler))
        try:
            context = clients.bases[sampler.base_model].max_context_length
            request = replace(
                body.request(sampler.key, _seed_of(request_id), replace(clients.limits, context=context)),
                wanted=lambda: future.outcome is None,  # it fails as soon as its session ends
            )
        except QeRLError as error:
            future.settle(Failure(str(error), "user"))
            return request_id, sequences
        self._tell_of_tempering(request)

        def opened(call: "CallFuture[None] | None") -> None:
            if call is not None and (error := call.exception()) is not None:
                future.settle(Failure(str(error), "user" if isinstance(error, QeRLError) else "server"))
            else:
                clients.queue.sample(
                    future,
                    request,
                    lambda result: Answer(sample_bytes(result, body.prompt_logprobs_last_n), protobuf=True),
                )

        if opening is None:
            opened(None)
        else:
            opening.add_done_callback(opened)
        return request_id, sequences

    def _tell_of_tempering(self, request: SampleRequest) -> None:
        """Warn once how the losses treat log-probabilities at temperatures other than 0 and 1."""
        if not self._told_of_tempering and request.temperature not in (0, 1):
            self._told_of_tempering = True
            logger.warning(
                "Samples and their log-probabilities have temperature %g, but forward and compute_logprobs "
                "use temperature 1: importance_sampling corrects for the difference, ppo and cispo clip it "
                "(docs/serve.md).",
                request.temperature,
            )

    def _reopen(self, sampler: Sampler, backend: Backend) -> None:
        """Reopen a closed sampler of saved weights; called by the worker.

        Raises:
            QeRLError: The session ended, or the weights have changed or are gone.
        """
        path = sampler.model_path
        if sampler.open or path is None:
            return
        self._make_room(backend, sampler.session_id, ephemeral=False)
        key = backend.sampler(path, sampler.base_model)
        with self._clients.lock:
            there = sampler.id in self._clients.samplers
            sampler.open = there and key == sampler.key
        if not sampler.open:
            backend.drop_sampler(key)
            raise QeRLError(
                f"{path} was saved anew since this sampler was made; make a new one."
                if there
                else "The session of this sampler has ended."
            )

    def _settled(self, sampler: Sampler) -> None:
        with self._clients.lock:
            sampler.waiting -= 1

    def _add(
        self,
        backend: Backend,
        sampler_id: str,
        key: str,
        base: str,
        path: str | None,
        ephemeral: bool = False,
    ) -> None:
        session_id = sampler_id.split(":")[0]
        with self._clients.lock:
            if session_id in self._clients.sessions:
                self._clients.samplers[sampler_id] = Sampler(
                    sampler_id, session_id, key, base, path, ephemeral, time.monotonic()
                )
                return
        backend.drop_sampler(key)
        raise QeRLError("The session of this sampler has ended.")

    def _make_room(self, backend: Backend, session_id: str, ephemeral: bool) -> None:
        """Close the least recently used idle samplers of a session, if it has too many open.

        Snapshots are dropped; samplers of saved weights are kept closed, since the weights can be read again.
        """
        clients = self._clients
        with clients.lock:
            mine = [
                sampler
                for sampler in clients.samplers.values()
                if sampler.session_id == session_id
                and sampler.open
                and (sampler.ephemeral if ephemeral else sampler.model_path is not None)
            ]
            idle = sorted((s for s in mine if not s.waiting), key=lambda sampler: sampler.used)
            surplus = idle[: max(len(mine) + 1 - clients.limits.snapshots, 0)]
            for sampler in surplus:
                sampler.open = False
                if ephemeral:
                    del clients.samplers[sampler.id]
        for sampler in surplus:
            backend.drop_sampler(sampler.key)

    def _unknown(self, sampler_id: str) -> str:
        return (
            f"This server knows no sampler {sampler_id}: its session ended, the server was restarted, or "
            f"the session has taken {self._clients.limits.snapshots} snapshots since it was last used. "
            "Weights saved under a name are still there."
        )


def _sampler_id(session_id: str, number: int | None) -> str:
    return f"{session_id}:sample:{uuid.uuid4().hex[:8] if number is None else number}"


def _seed_of(request_id: str) -> int:
    """Return a seed for a request without one, the same if the request is sent again."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1
