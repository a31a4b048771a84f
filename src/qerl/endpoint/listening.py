"""A server of an endpoint in a thread of its own, beside a program that has something else to do."""

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
"""Seconds that a connection may be idle. Clients close theirs, many after some seconds. A server that does so
as early breaks off what is asked just then, as when a rollout begins, and the client retries half a second
later."""


class Listening:
    """Serves routes until it is closed.

    Args:
        routes: Of `qerl.endpoint.http.Routes`.
        host, port: Where; port 0 takes a free one.

    Attributes:
        url: For clients on this machine, up to the version.

    Raises:
        QeRLError: The address cannot be had.
    """

    def __init__(self, routes: Sequence[BaseRoute], host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Named TCP, since asyncio else leaves Nagle's algorithm on, and answers wait for acknowledgements.
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
            raise QeRLError("The endpoint's server did not begin; its error is above.")

    def close(self) -> None:
        """End it; connections are broken off after a second."""
        self._server.should_exit = True
        self._thread.join(5.0)
