"""A server: backend, worker and HTTP put together, and run until it is told to end."""

import socket

import uvicorn
from starlette.applications import Starlette

from qerl.serve.clients import Clients
from qerl.serve.http import Api
from qerl.serve.limits import Limits
from qerl.serve.metrics import Metrics
from qerl.serve.types import Backend
from qerl.serve.worker import Worker


class Server:
    """Serves a backend.

    Args:
        backend: The model; from now on only the worker touches it.
        limits: What is taken of clients.
        api_key: What clients must send; it begins with `tml-`, as clients demand.

    Attributes:
        app: The ASGI application.
        clients: Who is there.
        worker: The thread in which the backend runs, once `start` was called.
    """

    def __init__(self, backend: Backend, limits: Limits, api_key: str) -> None:
        self.metrics = Metrics()
        self.clients = Clients(backend.models, limits)
        self.worker = Worker(self.clients.queue, backend, self.metrics)
        self.metrics.watch(lambda: {**self.clients.gauges(), **self.worker.gauges})
        self.app: Starlette = Api(self.clients, self.metrics, api_key).app()

    def start(self) -> None:
        """Let the worker begin."""
        self.worker.start()

    def stop(self) -> None:
        """Let the worker end after what it runs, and wait for it."""
        self.clients.queue.close()
        self.worker.join()

    def run(self, listening: socket.socket) -> None:
        """Serve at a bound socket until interrupted."""
        config = uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=2)
        self.start()
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            self.stop()
