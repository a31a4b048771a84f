"""Routes about the server itself: its capabilities for clients, its state for people.

The server sends flags that switch on new behaviours of clients; all but two are off here.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from qerl_serve import owners
from qerl_serve.clients import Clients, Session
from qerl_serve.metrics import Metrics

FLAGS = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_enable_stuck_detection": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "create_model_via_load_weights": True,
}
"""Behaviours of clients that the server controls; those not listed are off unless asked for."""

_NO_PROJECTS = "This server has no projects"
_NO_ACCOUNTS = "This server has no accounts"
_ASKED_FOR = "Clients need this only if client/config enables it, which this server does not"
REFUSED = {
    "training_runs/{run}/checkpoints/{kind}/{name}/publish": "This server publishes nothing: save with "
    "save_weights_external, and give others the files behind its links.",
    "copy_weights": f"{_NO_PROJECTS} to copy weights into: load them by their path, which all clients can.",
    "sessions/search": "This server does not search sessions: list them, and ask for each by its id.",
    "sessions/{session_id}/project": f"{_NO_PROJECTS}: give the session a display_name or user_metadata.",
    "sessions/{session_id}/trace_export": "This server keeps no traces: /metrics counts requests.",
    "audit": f"{_NO_ACCOUNTS} and no log of who did what: `qerl serve --status` shows who is there.",
    "billing/{rest:path}": f"{_NO_ACCOUNTS} and no bills: the list of checkpoints has their sizes.",
    "auth/{rest:path}": f"{_NO_ACCOUNTS} to log in to: export TINKER_API_KEY as `qerl serve` printed it.",
    "create_custom_loss": "This server runs no client's code: forward_backward_custom computes a loss at the "
    "client.",
    "retrieve_futures": f"{_ASKED_FOR}: ask for each result with retrieve_future.",
    "join_sampling_session": f"{_ASKED_FOR}: create a sampling session of your own.",
}
"""Routes of the hosted service that this server lacks, each with the reason and the alternative."""

_SAMPLES = 2000
"""Sampling requests that a client has in flight at once by default, each on its own connection."""


METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _refuse(why: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(_: Request) -> Response:
        raise HTTPException(404, why)

    return route


class ServiceRoutes:
    """Routes for capabilities, health, status and metrics, and refusals of routes that are missing.

    Args:
        clients: Records of clients.
        metrics: For /metrics.
        works: Returns True while the worker runs, without which no request is ever answered.
    """

    def __init__(self, clients: Clients, metrics: Metrics, works: Callable[[], bool]) -> None:
        self._clients, self._metrics, self._works = clients, metrics, works
        self._began = time.time()

    def routes(self) -> list[BaseRoute]:
        """Return the routes for the application."""
        return [
            Route("/metrics", self._show_metrics),
            Route("/status", self._status),
            Route("/api/v1/client/config", self._config, methods=["POST"]),
            Route("/api/v1/client/dynamic_config", self._dynamic_config, methods=["POST"]),
            Route("/api/v1/telemetry", self._telemetry, methods=["POST"]),
            Route("/api/v1/healthz", self._health, methods=["GET"]),
            Route("/api/v1/get_server_capabilities", self._capabilities, methods=["GET"]),
            *(Route(f"/api/v1/{path}", _refuse(why), methods=METHODS) for path, why in REFUSED.items()),
        ]

    async def _config(self, _: Request) -> Response:
        samples = min(self._clients.limits.connections // 2, _SAMPLES)
        return JSONResponse(FLAGS | {"sample_max_concurrent_requests": samples})

    async def _dynamic_config(self, _: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, _: Request) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _health(self, _: Request) -> Response:
        if not self._works():
            raise HTTPException(503, "The thread that runs the model has ended; start the server again.")
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, _: Request) -> Response:
        return JSONResponse(
            {
                "supported_models": [
                    {
                        "model_name": base.name,
                        "max_context_length": base.max_context_length,
                        "trainable": base.trainable,
                        "sampleable": True,
                    }
                    for base in self._clients.bases.values()
                ]
            }
        )

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, _: Request) -> Response:
        clients = self._clients
        return JSONResponse(
            {
                "bases": list(clients.bases),
                "seconds": round(time.time() - self._began),
                "max_models": clients.limits.max_models,
                "sessions": [
                    self._described(session)
                    for session in list(clients.sessions.values())
                    if owners.now().may(session.owner)
                ],
                "waiting": clients.queue.depths(),
                "gauges": dict(self._metrics.watched()),
            }
        )

    def _described(self, session: Session) -> dict[str, Any]:
        models = [model for model in list(self._clients.models.values()) if model.session_id == session.id]
        samplers = list(self._clients.samplers.values())
        return {
            "id": session.id,
            "owner": session.owner,
            "sdk_version": session.sdk_version,
            "silent_seconds": round(time.monotonic() - session.seen),
            "models": [
                {"id": model.id, "rank": model.info and model.info.lora_rank, "steps": model.steps}
                for model in models
            ],
            "samplers": sum(sampler.session_id == session.id for sampler in samplers),
        }
