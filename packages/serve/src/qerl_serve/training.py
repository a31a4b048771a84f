"""Training requests: each becomes a job in its model's line, and is answered with its request id.

A request that cannot be run still takes its place in the line, because later requests wait for it; it fails
when its turn comes. Only a body from which no place can be read is refused at once.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from qerl.errors import QeRLError
from qerl_serve.clients import Clients, Model, unknown
from qerl_serve.futures import Answer, Busy, Failure, Future, TooLarge
from qerl_serve.line import Job, Line
from qerl_serve.messages import ForwardBackward, loss_output_bytes
from qerl_serve.names import check_id, check_name, split_path
from qerl_serve.requests import (
    CreateModel,
    LoadWeights,
    OfModel,
    OptimStep,
    SaveExternal,
    SaveWeights,
    model_id_of,
)
from qerl_serve.samples import Samples
from qerl_serve.types import Backend, Notes

Run = Callable[[Backend], Answer]


class Training:
    """Enqueues the requests of models; each public method returns a request id.

    Args:
        clients: Records of clients.
        samples: Makes samplers of snapshots.
    """

    def __init__(self, clients: Clients, samples: Samples) -> None:
        self._clients, self._samples = clients, samples

    def create_model(self, body: CreateModel) -> str:
        """Enqueue the creation of a model."""

        def make(backend: Backend, model_id: str) -> None:
            self._clients.check_trainable(body.base_model)
            backend.create_model(model_id, body.lora(self._clients.limits))

        return self._new_model("create_model", body.session_id, body.model_seq_id, make, body)

    def load_weights(self, body: LoadWeights) -> str:
        """Enqueue loading saved weights into a model, which is created if the request names a new one.

        Raises:
            QeRLError: The request names no model.
        """

        def load(backend: Backend, model_id: str) -> None:
            if body.optimizer_config is not None:
                body.optimizer_config.check()
            if body.base_model is not None:
                self._clients.check_trainable(body.base_model)
            split_path(body.path)
            backend.load_state(model_id, body.path, body.optimizer)

        if body.session_id is not None and body.model_seq_id is not None:
            return self._new_model("load_weights", body.session_id, body.model_seq_id, load, body)
        if body.model_id is None:
            raise QeRLError("load_weights needs model_id and seq_id, or session_id and model_seq_id.")
        model_id = body.model_id

        def run(backend: Backend) -> Answer:
            load(backend, model_id)
            return Answer.of(path=body.path, model_id=model_id, type="load_weights")

        return self._submit(OfModel(model_id=model_id, seq_id=body.seq_id), "load_weights", run, body.size)

    def _new_model(
        self,
        kind: str,
        session_id: str,
        number: int,
        make: Callable[[Backend, str], None],
        body: CreateModel | LoadWeights,
    ) -> str:
        """Enqueue the creation of a model, as number 0 of its line; return the request id.

        Raises:
            Busy: There is no room for it at present.
        """
        clients = self._clients
        model_id = model_id_of(session_id, number)
        clients.check_session(session_id)

        def run(backend: Backend) -> Answer:
            try:
                make(backend, model_id)
            except BaseException:
                self._forget(model_id, "The model of this request could not be made.")
                raise
            if (model := clients.models.get(model_id)) is not None:
                model.info = backend.model_info(model_id)
            return Answer.of(model_id=model_id, type=kind)

        with clients.lock:
            if clients.futures.get(f"{model_id}:0") is not None or model_id in clients.models:
                return f"{model_id}:0"
            try:
                clients.make_room(session_id)
            except Busy:
                raise
            except QeRLError as error:
                return clients.refused(kind, session_id, str(error))
            clients.models[model_id] = Model(model_id, session_id, body.user_metadata)
            clients.queue.add_line(model_id)
            try:
                return self._submit(OfModel(model_id=model_id, seq_id=0), kind, run, body.size)
            except QeRLError:  # as if it had not been asked for
                self._forget(model_id, "The model of this request could not be made.")
                raise

    def unload_model(self, body: OfModel) -> str:
        """Enqueue the end of a model."""

        def run(backend: Backend) -> Answer:
            backend.drop(body.model_id)
            self._forget(body.model_id, "The model of this request was unloaded.")
            return Answer.of(model_id=body.model_id, type="unload_model")

        return self._submit(body, "unload_model", run, body.size)

    def forward_backward(self, message: ForwardBackward) -> str:
        """Enqueue a forward, or forward and backward, pass; seq_id 0 means none, as protobuf has it."""
        kind = "forward" if message.forward_only else "forward_backward"
        limits = self._clients.limits

        def run(backend: Backend) -> Answer:
            output = backend.forward_backward(
                message.model_id, message.data(limits), message.loss, message.config(), message.forward_only
            )
            return Answer(loss_output_bytes(output), protobuf=True)

        of = OfModel(model_id=message.model_id, seq_id=message.seq_id or None)
        return self._submit(of, kind, run, message.size)

    def optim_step(self, body: OptimStep) -> str:
        """Enqueue an optimizer step."""

        def run(backend: Backend) -> Answer:
            metrics = backend.optim_step(body.model_id, body.adam())
            if (model := self._clients.models.get(body.model_id)) is not None:
                model.steps += 1
            return Answer.of(metrics=metrics)

        return self._submit(body, "optim_step", run, body.size)

    def refuse(self, kind: str, place: OfModel, error: QeRLError) -> str:
        """Enqueue the failure of an unreadable body in its place of a model's line."""
        return self._submit(place, kind, partial(_fail, error), place.size)

    def save_weights(self, body: SaveWeights) -> str:
        """Enqueue saving a checkpoint with optimizer."""

        def run(backend: Backend) -> Answer:
            notes = self._notes(body, body.user_metadata)
            path = backend.save_state(body.model_id, check_name(body.path), body.overwrite, notes)
            return Answer.of(path=path, type="save_weights")

        return self._submit(body, "save_weights", run, body.size)

    def save_for_sampler(self, body: SaveWeights) -> str:
        """Enqueue saving a policy to sample from: a checkpoint if it has a name, else a new sampler."""

        def run(backend: Backend) -> Answer:
            body.check_kind()
            if body.path is not None:
                notes = self._notes(body, body.user_metadata)
                path = backend.save_for_sampler(body.model_id, check_name(body.path), notes)
                return Answer.of(path=path, type="save_weights_for_sampler")
            sampler_id = self._samples.snapshot(backend, body.model_id, body.sampling_session_seq_id)
            return Answer.of(sampling_session_id=sampler_id, type="save_weights_for_sampler")

        return self._submit(body, "save_weights_for_sampler", run, body.size)

    def save_external(self, body: SaveExternal) -> str:
        """Enqueue saving weights for other programs, as a plain PEFT folder."""

        def run(backend: Backend) -> Answer:
            body.check()
            path = backend.save_external(body.model_id, check_name(body.path), self._notes(body, {}))
            return Answer.of(path=path, type="save_weights_external")

        return self._submit(body, "save_weights_external", run, body.size)

    def _notes(self, body: SaveWeights | SaveExternal, own: Mapping[str, str]) -> Notes:
        model = self._clients.models.get(body.model_id)
        return Notes(
            {} if model is None else model.notes, own, body.expires(), self._clients.owner_of(body.model_id)
        )

    def _submit(self, body: OfModel, kind: str, run: Run, size: int) -> str:
        """Enqueue a request of a model, of ``size`` bytes; return the request id.

        Raises:
            QeRLError: The sequence number is out of range, or belongs to a request of another kind.
            Busy: The server holds too many requests and results.
        """
        clients = self._clients
        model_id = check_id(body.model_id, "model_id")
        model = clients.model(model_id)
        if model is None:
            return clients.refused(kind, "", unknown("model", model_id))
        model.used = time.time()
        clients.heartbeat(model.session_id)

        def make(request_id: str, line: Line) -> Job:
            told = partial(clients.queue.told, line, request_id)
            future = Future(request_id, kind, model.session_id, told, size)
            awaited = request_id == line.request_id(line.next)
            try:
                return Job(clients.futures.add(future, awaited), run)
            except TooLarge as error:
                if body.seq_id == 0:  # without its model, no request can wait for this one
                    raise
                without_body = Future(request_id, kind, model.session_id, told)
                return Job(clients.futures.add(without_body, awaited), partial(_fail, error))

        request_id = clients.queue.submit(model_id, body.seq_id, make)
        known = clients.futures.get(request_id)
        if known is not None and known.kind != kind:
            raise QeRLError(
                f"Request {body.seq_id} of model {model_id} was sent before as {known.kind}, now as {kind}; "
                "only one client may number the requests of a model."
            )
        return request_id

    def _forget(self, model_id: str, reason: str) -> None:
        with self._clients.lock:
            self._clients.models.pop(model_id, None)
        for job in self._clients.queue.drop(model_id):
            job.future.settle(Failure(reason, "user"))


def _fail(error: QeRLError, _: Backend) -> Answer:
    raise error
