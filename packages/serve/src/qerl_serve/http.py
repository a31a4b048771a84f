"""The HTTP routes: the Tinker API below /api/v1, OpenAI's below /v1 (`qerl.endpoint.http`), /metrics and
/status.

A request that needs the model is answered at once with the id of a future. `retrieve_future` answers with the
result as soon as there is one, or after half a minute tells the client to ask again. Refusals are JSON with
one sentence under `detail`.

Every route but /metrics, healthz and signed downloads requires a key (`qerl_serve.owners`), in the header
X-API-Key or, on OpenAI's routes, as a bearer token, so neither another user of this machine nor a page in a
browser can use a server that listens locally.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from operator import methodcaller
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from qerl.endpoint import http as chat
from qerl.endpoint.bodies import ApiError
from qerl.errors import QeRLError
from qerl_serve import owners, requests
from qerl_serve.chat import ChatDesk
from qerl_serve.checkpoint_routes import CheckpointRoutes
from qerl_serve.clients import Clients
from qerl_serve.futures import Answer, Busy, Failure, Future
from qerl_serve.gate import Gate
from qerl_serve.messages import read_forward_backward
from qerl_serve.metrics import Metrics
from qerl_serve.names import split_path
from qerl_serve.owners import Keys
from qerl_serve.samples import Samples
from qerl_serve.service_routes import METHODS, ServiceRoutes
from qerl_serve.training import Training
from qerl_serve.types import Reader

logger = logging.getLogger(__name__)

SWEEP_S = 5.0

Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The application. It answers requests about clients' records; the neighbouring classes answer the
    others.

    Args:
        clients: Records, queue and futures.
        metrics: For /metrics.
        keys: The valid keys.
        works: Returns True while the worker runs, without which no request is ever answered.
        reader: For OpenAI's routes; None leaves them out.
    """

    def __init__(
        self,
        clients: Clients,
        metrics: Metrics,
        keys: Keys,
        works: Callable[[], bool],
        reader: Reader | None,
    ) -> None:
        self._clients, self._keys = clients, keys
        self._samples = Samples(clients)
        self._training = Training(clients, self._samples)
        self._service = ServiceRoutes(clients, metrics, works)
        self._checkpoints = CheckpointRoutes(clients, keys.own)
        self._chat: list[BaseRoute] = []
        if reader is not None:
            self._chat = chat.Routes(ChatDesk(clients, reader), rewarded=False).routes()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        limits, bases = self._clients.limits, self._clients.bases.values()
        gate = Middleware(
            Gate,
            keys=self._keys,
            max_tensors=limits.body,
            max_json=limits.json(max(base.max_context_length for base in bases)),
            max_coming=max(limits.held, limits.body),
        )
        return Starlette(
            routes=[
                *self._service.routes(), *self._routes(), *self._checkpoints.routes(), *self._chat, _ANY
            ],
            middleware=[gate],
            exception_handlers={
                QeRLError: _refusal, HTTPException: _http_error, Exception: _defect
            },
            lifespan=self._lifespan,
        )  # fmt: skip

    def _routes(self) -> list[BaseRoute]:
        training = self._training
        futures: dict[str, Callable[[bytes], str]] = {
            "create_model": lambda body: training.create_model(requests.read(requests.CreateModel, body)),
            "forward_backward": lambda body: training.forward_backward(read_forward_backward(body)),
            "load_weights": self._ordered("load_weights", requests.LoadWeights, training.load_weights),
            "unload_model": self._ordered("unload_model", requests.OfModel, training.unload_model),
            "optim_step": self._ordered("optim_step", requests.OptimStep, training.optim_step),
            "save_weights": self._ordered("save_weights", requests.SaveWeights, training.save_weights),
            "save_weights_for_sampler": self._ordered(
                "save_weights_for_sampler", requests.SaveWeights, training.save_for_sampler
            ),
            "save_weights_external": self._ordered(
                "save_weights_external", requests.SaveExternal, training.save_external
            ),
        }
        posts: dict[str, Handler] = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": self._get_info,
            "asample": self._sample,
            "create_sampling_session": self._create_sampler,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
            "sessions/{session_id}/finish": self._finish,
            **{name: _future_route(submit) for name, submit in futures.items()},
        }
        gets: dict[str, Handler] = {
            "samplers/{sampler_id}": self._sampler,
            "sessions": self._sessions,
            "sessions/{session_id}": self._session,
        }
        return [
            *(Route(f"/api/v1/{path}", handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(f"/api/v1/{path}", handler, methods=["GET"]) for path, handler in gets.items()),
        ]

    def _ordered(
        self, kind: str, of: type[requests.B], submit: Callable[[requests.B], str]
    ) -> Callable[[bytes], str]:
        """Return a function that takes bodies of sequenced requests; an unreadable body fails in its
        place."""

        def take(body: bytes) -> str:
            try:
                asked = requests.read(of, body)
            except QeRLError as error:
                if (place := requests.place_of(body)) is None:
                    raise
                return self._training.refuse(kind, place, error)
            return submit(asked)

        return take

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_S)
                self._clients.sweep()

        task = asyncio.create_task(sweep())
        yield
        task.cancel()

    # Sessions.

    async def _create_session(self, request: Request) -> Response:
        body = requests.read(requests.CreateSession, await request.body())
        session_id = self._clients.create_session(body.sdk_version, body.display_name, body.user_metadata)
        return JSONResponse({"session_id": session_id})

    async def _heartbeat(self, request: Request) -> Response:
        body = requests.read(requests.OfSession, await request.body())
        if not self._clients.heartbeat(body.session_id):
            raise HTTPException(410, f"The session {body.session_id} has ended.")
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        self._clients.finish(request.path_params["session_id"])
        return Response(status_code=204)

    async def _sessions(self, _: Request) -> Response:
        ids = [id_ for id_ in list(self._clients.sessions) if self._clients.session(id_) is not None]
        return JSONResponse({"sessions": ids})

    async def _session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        session = self._clients.session(session_id)
        if session is None:
            raise HTTPException(404, f"This server knows no session {session_id}.")
        models, samplers = list(self._clients.models.values()), list(self._clients.samplers.values())
        return JSONResponse(
            {
                "training_run_ids": [model.id for model in models if model.session_id == session_id],
                "sampler_ids": [sampler.id for sampler in samplers if sampler.session_id == session_id],
                "display_name": session.display_name,
                "user_metadata": dict(session.notes),
            }
        )

    # Models and samplers.

    async def _get_info(self, request: Request) -> Response:
        body = requests.read(requests.OfModel, await request.body())
        model, info, base = self._clients.model_info(body.model_id)
        return JSONResponse(
            {
                "type": "get_info",
                "model_data": {"model_name": base.name, "tokenizer_id": base.tokenizer},
                "model_id": model.id,
                "is_lora": True,
                "lora_rank": info.lora_rank,
                "model_name": base.name,
            }
        )

    async def _weights_info(self, request: Request) -> Response:
        path = requests.read(requests.WeightsPath, await request.body()).tinker_path
        split_path(path)
        info = await asyncio.wrap_future(self._clients.queue.call(methodcaller("weights_info", path)))
        return JSONResponse({"is_lora": True, **vars(info)})

    async def _create_sampler(self, request: Request) -> Response:
        body = requests.read(requests.CreateSampler, await request.body())
        sampler_id = await asyncio.wrap_future(self._samples.create_sampler(body))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _sampler(self, request: Request) -> Response:
        sampler = self._clients.sampler(request.path_params["sampler_id"])
        if sampler is None:
            raise HTTPException(404, f"This server knows no sampler {request.path_params['sampler_id']}.")
        return JSONResponse(
            {
                "sampler_id": sampler.id,
                "base_model": sampler.base_model,
                "model_path": sampler.model_path,
            }
        )

    async def _sample(self, request: Request) -> Response:
        body = requests.read(requests.Sample, await request.body())
        request_id, sequences = self._samples.sample(body)
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": sequences})

    # Results.

    async def _retrieve(self, request: Request) -> Response:
        request_id = requests.read(requests.Retrieve, await request.body()).request_id
        future = self._clients.futures.get(request_id)
        if future is None or not owners.now().may(future.owner):
            # After 410 a client sends a sampling request again; other requests must not be repeated.
            raise HTTPException(
                410 if ":sample:" in request_id else 404,
                f"This server has no result of the request {request_id}: it was fetched long ago, its "
                "session ended, or the server was restarted.",
            )
        self._clients.heartbeat(future.session_id)
        await _settled(future, self._clients.limits.poll_s)
        outcome = future.fetch()
        if outcome is None:
            return JSONResponse(self._pending(request_id), status_code=408)
        if isinstance(outcome, Failure):
            return JSONResponse({"error": outcome.error, "category": outcome.category})
        return _response(outcome)

    async def _cancel(self, request: Request) -> Response:
        """Cancel a sampling request; other kinds are not cancelled, because later requests wait for them."""
        request_id = requests.read(requests.Retrieve, await request.body()).request_id
        future = self._clients.futures.get(request_id)
        if future is not None and future.kind == "sample" and owners.now().may(future.owner):
            future.settle(Failure("Its client has cancelled this request.", "user"))
            future.fetch()  # its client will not
        return Response(status_code=204)

    def _pending(self, request_id: str) -> dict[str, Any]:
        model_id, _, number = request_id.rpartition(":")
        missing = self._clients.queue.missing(model_id)
        pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        if missing is None or not number.isdigit() or missing >= int(number):
            return pending
        reason = f"it waits for request {missing} of this model, which has not arrived"
        return pending | {"queue_state": "paused_capacity", "queue_state_reason": reason}


def _future_route(submit: Callable[[bytes], str]) -> Handler:
    async def route(request: Request) -> Response:
        return JSONResponse({"request_id": submit(await request.body())})

    return route


async def _nowhere(request: Request) -> Response:
    asked = f"{request.method} {request.url.path}"[:200]
    raise HTTPException(404, f"This server has no {asked}; docs/serve.md of QeRL says what it offers.")


_ANY = Route("/{path:path}", _nowhere, methods=METHODS)
"""Answers 404 for paths that no other route has; comes last."""


async def _settled(future: Future, seconds: float) -> None:
    """Wait until a future is settled, at most `seconds`."""
    loop, settled = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed when a server ends
            loop.call_soon_threadsafe(settled.set)

    future.when_settled(wake)
    try:
        await asyncio.wait_for(settled.wait(), seconds)
    except TimeoutError:
        future.forget(wake)


def _response(answer: Answer) -> Response:
    return Response(
        answer.body, media_type="application/x-protobuf" if answer.protobuf else "application/json"
    )


async def _refusal(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=429 if isinstance(error, Busy) else 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith(chat.PREFIX):
        return JSONResponse(ApiError(error.detail, error.status_code).body(), status_code=error.status_code)
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)


async def _defect(_: Request, error: Exception) -> Response:
    logger.error("A request failed.", exc_info=error)
    return JSONResponse({"detail": f"The server failed: {type(error).__name__}: {error}"}, status_code=500)
