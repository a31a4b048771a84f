"""A server: backend, worker and HTTP put together, and run until it is told to end."""

import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from qerl.errors import QeRLError
from qerl_serve.clients import Clients
from qerl_serve.connections import backlog_of, connection_type
from qerl_serve.futures import Failure
from qerl_serve.http import Api
from qerl_serve.limits import Limits
from qerl_serve.metrics import Metrics
from qerl_serve.owners import Keys
from qerl_serve.types import Backend
from qerl_serve.worker import Worker

_ENDING = Failure("The server is ending; what was saved is still there when it runs again.", "server")


class Server:
    """Serves a backend.

    Args:
        backend: The model; from now on only the worker touches it.
        limits: Of clients.
        keys: Of which clients have one; they begin with `tml-`, as clients demand.

    Attributes:
        keys: As given.
        app: The ASGI application.
        clients: Their records.
        worker: The thread in which the backend runs, once `start` was called.
    """

    def __init__(self, backend: Backend, limits: Limits, keys: Keys) -> None:
        self.keys = keys
        self.metrics = Metrics()
        self.clients = Clients(backend.models, limits)
        self.worker = Worker(self.clients.queue, backend, self.metrics)
        self.worker.on_break = lambda why: self._end(Failure(why, "server"))
        self.metrics.watch(lambda: {**self.clients.gauges(), **self.worker.gauges})
        self.app: Starlette = Api(
            self.clients, self.metrics, keys, self.worker.is_alive, backend.reader
        ).app()
        self._http: _Http | None = None

    def start(self) -> None:
        """Let the worker begin."""
        self.worker.start()

    def stop(self) -> None:
        """Let the worker end, and wait for it.

        Pending requests fail at once. Samples that are being decoded end with it, since their clients get no
        answer; a pass that runs is waited for.
        """
        self._end(_ENDING)
        self.worker.join()

    def end(self) -> None:
        """Let :meth:`run`, in another thread, return, as an interrupt does."""
        self._end(_ENDING)

    def run(self, listening: socket.socket) -> None:
        """Serve at a bound socket until interrupted.

        Raises:
            QeRLError: It ended because no further request could run, as after a fault of the GPU.
        """
        maximum = self.clients.limits.connections
        config = uvicorn.Config(
            self.app,
            http=connection_type(maximum),
            backlog=backlog_of(maximum),
            log_level="warning",
            timeout_graceful_shutdown=2,
        )
        self._http = _Http(config, lambda: self._end(_ENDING))
        self.start()
        try:
            self._http.run(sockets=[listening])
        finally:
            self.stop()
        if self.worker.broken is not None:
            raise QeRLError(self.worker.broken)

    def _end(self, why: Failure) -> None:
        self.clients.queue.close()
        self.clients.futures.fail(why)
        if self._http is not None:
            self._http.should_exit = True


class _Http(uvicorn.Server):
    """Tells clients that the server ends while their connections are still there."""

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything; called by uvicorn once it was told to exit."""
        self._end()
        await super().shutdown(sockets)
