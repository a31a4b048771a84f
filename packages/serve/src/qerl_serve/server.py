"""The server: wires backend, worker thread and HTTP application together, and runs until it is stopped."""

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

_ENDING = Failure("The server is shutting down; saved weights are still there when it runs again.", "server")


class Server:
    """A Tinker API server over one backend.

    Args:
        backend: Called only in the worker thread from now on.
        limits: Limits of requests and of the server's records.
        keys: The API keys of clients; each begins with `tml-`, which clients require.

    Attributes:
        keys: As given.
        app: The ASGI application.
        clients: Records of sessions, models and samplers.
        worker: The thread that runs the backend, once `start` was called.
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
        """Start the worker thread."""
        self.worker.start()

    def stop(self) -> None:
        """Stop the worker and wait for it.

        Pending requests fail at once. Samples being decoded are given up, since their clients have the
        failure already; a running forward or backward pass is completed.
        """
        self._end(_ENDING)
        self.worker.join()

    def end(self) -> None:
        """Make :meth:`run`, in another thread, return, as an interrupt does."""
        self._end(_ENDING)

    def run(self, listening: socket.socket) -> None:
        """Serve on a bound socket until interrupted.

        Raises:
            QeRLError: The worker ended because no further request could run, as after a GPU fault.
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
    """A uvicorn server that fails pending requests while their clients' connections are still open."""

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fail pending requests, then close everything; called by uvicorn on exit."""
        self._end()
        await super().shutdown(sockets)
