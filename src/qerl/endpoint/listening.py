"""An HTTP server for an endpoint, in a thread beside the main program."""

import socket
import threading
import time
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from qerl.errors import QeRLError

_BEGIN_S = 10.0

_IDLE_S = 24 * 3600
"""Seconds that a connection may be idle. Clients close idle connections themselves, many after some seconds.
A server that closes them as early breaks off requests that arrive just then, as at the start of a rollout,
and the client retries half a second later."""


class Listening:
    """A server of routes, which runs until it is closed.

    Args:
        routes: Routes from `qerl.endpoint.http.Routes`.
        host, port: Address to listen on; port 0 takes a free one.

    Attributes:
        url: Base URL for clients on this machine, including the version.

    Raises:
        QeRLError: The address cannot be used, or the server does not start within 10 s.
    """

    def __init__(self, routes: Sequence[BaseRoute], host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Named TCP: otherwise asyncio leaves Nagle's algorithm on, and answers wait for acknowledgements.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(1024)
        except OSError as error:
            listening.close()
            raise QeRLError(
                f"The endpoint cannot listen on {host}:{port} ({error.strerror or error}); choose another "
                "host or port in environment_options."
            ) from error
        at = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{at}:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(
            Starlette(routes=list(routes)),
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=_IDLE_S,
            lifespan="off",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listening]},
            name="qerl-endpoint",
            daemon=True,
        )
        self._thread.start()
        until = time.monotonic() + _BEGIN_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        if not self._server.started:
            raise QeRLError("The endpoint's server did not start; its error is above.")

    def close(self) -> None:
        """Stop the server; open connections are broken off after a second."""
        self._server.should_exit = True
        self._thread.join(5.0)
