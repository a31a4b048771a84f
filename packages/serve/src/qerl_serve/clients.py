"""Records of clients: sessions, models and samplers.

A session ends at its client's request, or after a long silence; its models, snapshots and results go with it,
saved weights stay. Records are read and written by the HTTP thread and, in jobs that report their results, by
the worker thread.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as CallFuture
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

from qerl.errors import QeRLError
from qerl_serve import owners
from qerl_serve.futures import Busy, Failure, Future, Futures
from qerl_serve.limits import Limits
from qerl_serve.names import check_id
from qerl_serve.queue import WorkQueue
from qerl_serve.types import Backend, ModelInfo, WeightsInfo

logger = logging.getLogger(__name__)

EXPIRY_S = 60.0
"""Seconds between searches for expired weights."""


@dataclass(eq=False)
class Session:
    """A session of one client, with the client's description of itself."""

    id: str
    owner: str
    sdk_version: str
    seen: float
    display_name: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Model:
    """An adapter that a session trains, with the client's notes; `info` is None until the backend has created
    it."""

    id: str
    session_id: str
    notes: Mapping[str, str] = field(default_factory=dict)
    info: WeightsInfo | None = None
    steps: int = 0
    used: float = field(default_factory=time.time)


@dataclass(eq=False)
class Sampler:
    """A policy that a session samples from.

    Attributes:
        key: The backend's key of the policy.
        ephemeral: True if it is a snapshot that was not saved under a name.
        used: Time of its last request, in seconds of `time.monotonic`.
        waiting: Number of its unanswered requests.
        open: True if the backend holds the policy; a sampler of saved weights may be closed, and is opened
            again on use.
    """

    id: str
    session_id: str
    key: str
    base_model: str
    model_path: str | None
    ephemeral: bool
    used: float
    waiting: int = 0
    open: bool = True


class Clients:
    """Sessions with their models and samplers.

    Args:
        bases: The trainable base under each of its names, and teachers under theirs.
        limits: Of requests and records.

    Attributes:
        queue: Work for the worker.
        futures: Results.
        sessions, models, samplers: By id.
        lock: Held where several records change together.
    """

    def __init__(self, bases: Sequence[ModelInfo], limits: Limits) -> None:
        self.bases = {base.name: base for base in bases}
        self.limits = limits
        self.queue = WorkQueue(limits.gather_s, limits.gather_most_s, limits.pause_s)
        self.futures = Futures(limits.waiting, limits.held, limits.keep_s, limits.unfetched_s)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.lock = threading.RLock()
        self._looked_for_expired = time.monotonic()

    def create_session(
        self, sdk_version: str, display_name: str | None = None, notes: Mapping[str, str] | None = None
    ) -> str:
        """Create a session of the current owner; return its id."""
        session = Session(
            uuid.uuid4().hex,
            owners.now().name,
            sdk_version[:40],
            time.monotonic(),
            display_name,
            notes or {},
        )
        with self.lock:
            self.sessions[session.id] = session
        logger.info("Session %s began (client version %r).", session.id, session.sdk_version)
        return session.id

    def session(self, session_id: str) -> Session | None:
        """Return a session, None if it is unknown or belongs to another owner."""
        found = self.sessions.get(session_id)
        return found if found is not None and owners.now().may(found.owner) else None

    def model(self, model_id: str) -> Model | None:
        """Return a model, None if it is unknown or belongs to another owner."""
        found = self.models.get(model_id)
        return found if found is not None and self.session(found.session_id) is not None else None

    def sampler(self, sampler_id: str) -> Sampler | None:
        """Return a sampler, None if it is unknown or belongs to another owner."""
        found = self.samplers.get(sampler_id)
        return found if found is not None and self.session(found.session_id) is not None else None

    def owner_of(self, model_id: str) -> str:
        """Return the name of a model's owner; empty once the model is gone."""
        model = self.models.get(model_id)
        session = None if model is None else self.sessions.get(model.session_id)
        return "" if session is None else session.owner

    def heartbeat(self, session_id: str) -> bool:
        """Record that a client is alive; return False if the session is unknown, or another owner's."""
        session = self.session(session_id)
        if session is not None:
            session.seen = time.monotonic()
        return session is not None

    def finish(self, session_id: str) -> None:
        """End a session on its client's request, if it is known."""
        if self.session(session_id) is not None:
            self._finish(session_id, "its client ended it")

    def _finish(self, session_id: str, reason: str) -> None:
        """End a session, if it exists, and drop its models, samplers and requests."""
        with self.lock:
            if self.sessions.pop(session_id, None) is None:
                return
            models = [model.id for model in self.models.values() if model.session_id == session_id]
            samplers = [sampler for sampler in self.samplers.values() if sampler.session_id == session_id]
            for model_id in models:
                del self.models[model_id]
            for sampler in samplers:
                del self.samplers[sampler.id]
            keys = [sampler.key for sampler in samplers if sampler.open]
        logger.info("Session %s ended: %s. It had %d models.", session_id, reason, len(models))
        self.queue.drop_samples(session_id)
        for model_id in models:
            self.queue.drop(model_id)
            self.later(methodcaller("drop", model_id))
        for key in keys:
            self.later(methodcaller("drop_sampler", key))
        self.futures.end(session_id, Failure(f"The session of this request ended: {reason}.", "user"))

    def make_room(self, session_id: str) -> None:
        """Make room for one more model of a session: if its owner's share or the server is full, end the
        session with the longest silence, if that has lasted `Limits.gone_s`.

        Raises:
            Busy: The clients of all other sessions with models are alive; some will end.
            QeRLError: The session itself has all models.
        """
        owner, most = owners.now(), self.limits.max_models
        share = max(1, int(owner.share * most))
        if owner.share < 1:
            full = f"{owner.name} has {share} models, their share of the {most} of this server"
            self._make_room(session_id, share, full, owner.name)
        self._make_room(
            session_id, most, f"The server holds {most} models, its limit (`qerl serve --max_models`)"
        )

    def _make_room(self, session_id: str, most: int, full: str, owner: str | None = None) -> None:
        """Make room among the models of an owner, or of all owners if `owner` is None."""
        with self.lock:
            counted = {
                model.session_id: session.owner
                for model in self.models.values()
                if (session := self.sessions.get(model.session_id)) is not None
            }
            among = {id_ for id_, whose in counted.items() if owner in (None, whose)}
            if sum(model.session_id in among for model in self.models.values()) < most:
                return
            others = among - {session_id}
            if not others:
                raise QeRLError(
                    f"{full}, all of them yours; unload one, or start the server with a larger limit."
                )
            now = time.monotonic()
            silent, longest = max((now - self.sessions[other].seen, other) for other in others)
            if silent < self.limits.gone_s:
                raise Busy(f"{full}, and all their clients are active; try again once one has ended.")
            self._finish(
                longest, f"its client was silent for {silent:.0f} seconds, and another needed the room"
            )

    def sweep(self) -> None:
        """End sessions after too long a silence, forget old results and delete expired weights."""
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if now - session.seen > self.limits.silence_s:
                self._finish(session.id, f"its client was silent for {self.limits.silence_s:.0f} seconds")
        self.futures.sweep(now)
        if now - self._looked_for_expired > EXPIRY_S:
            self._looked_for_expired = now
            self.later(methodcaller("delete_expired"))

    def check_session(self, session_id: str) -> None:
        """Raise if a session is unknown; else record that its client is alive.

        Raises:
            QeRLError: The session is unknown, or another owner's.
        """
        if not self.heartbeat(check_id(session_id, "session_id")):
            raise QeRLError(unknown("session", session_id))

    def check_base(self, name: str) -> None:
        """Raise if this server does not have a base model.

        Raises:
            QeRLError: The name is unknown.
        """
        if name not in self.bases:
            raise QeRLError(
                f"The base model {name!r} is not on this server; it serves {', '.join(self.bases)}."
            )

    def check_trainable(self, name: str) -> None:
        """Raise if this server does not have a base model, or has it only as a teacher.

        Raises:
            QeRLError: The name is unknown, or a teacher's.
        """
        self.check_base(name)
        if not self.bases[name].trainable:
            trained = next(base.name for base in self.bases.values() if base.trainable)
            raise QeRLError(
                f"The model {name!r} is a teacher on this server, which samples and scores but is not "
                f"trained; train {trained}, or start a server with the teacher as its MODEL."
            )

    def model_info(self, model_id: str) -> tuple[Model, WeightsInfo, ModelInfo]:
        """Return a model, the adapter it was created with, and its base.

        Raises:
            QeRLError: There is no such model, or it is still being made.
        """
        model = self.model(check_id(model_id, "model_id"))
        if model is None:
            raise QeRLError(unknown("model", model_id))
        if model.info is None:
            raise QeRLError(f"The model {model_id} is still being made; ask again.")
        return model, model.info, self.bases.get(model.info.base_model, next(iter(self.bases.values())))

    def refused(self, kind: str, session_id: str, error: str) -> str:
        """Create a failed future for a request that was refused before it was enqueued; return its request
        id."""
        future = self.futures.add(Future(f"refused:{uuid.uuid4().hex}", kind, session_id))
        future.settle(Failure(error, "user"))
        return future.request_id

    def later(self, run: Callable[[Backend], Any]) -> None:
        """Enqueue a function for the backend without waiting for its result; a failure is logged."""

        def log(call: "CallFuture[Any]") -> None:
            if (error := call.exception()) is not None:
                logger.error("A clean-up failed.", exc_info=error)

        self.queue.call(run).add_done_callback(log)

    def gauges(self) -> dict[str, float]:
        """Numbers of records, by name."""
        return {
            "sessions": len(self.sessions),
            "models": len(self.models),
            "samplers": len(self.samplers),
            "results": len(self.futures),
            "held_bytes": self.futures.bytes,
            **{f"waiting_{kind}": number for kind, number in self.queue.depths().items()},
        }


def unknown(what: str, name: str) -> str:
    """Return the error message for an unknown session or model, with advice for the client."""
    return (
        f"This server knows no {what} {name}: its session ended, or the server was restarted. Make a new "
        "client, from saved weights with create_training_client_from_state_with_optimizer."
    )
