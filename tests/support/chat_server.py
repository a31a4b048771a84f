"""A server on this machine that speaks OpenAI's chat completions, as far as a judge needs them."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | str
"""A status and a body (bytes, or JSON), or the text of a chat completion."""


class Served:
    """What a server was asked.

    Attributes:
        url: Of the endpoint, with its version.
        requests: Bodies, in the order in which they came.
        headers: Of each request.
        most_at_once: Largest number of requests that were answered at the same time.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0


@contextlib.contextmanager
def chat_server(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[Served]:
    """Serve what a function answers to the body of each request, until the end of the block."""
    lock = threading.Lock()
    at_once = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal at_once
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                served.requests.append(body)
                served.headers.append(dict(self.headers))
                at_once += 1
                served.most_at_once = max(served.most_at_once, at_once)
            try:
                status, content = _response(self.path, answer(body))
            finally:
                with lock:
                    at_once -= 1
            with contextlib.suppress(OSError):  # the client has gone
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Served(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _response(path: str, answer: Answer) -> tuple[int, bytes]:
    if path != "/v1/chat/completions":
        return 404, b"no such path"
    if isinstance(answer, str):
        answer = (200, {"choices": [{"message": {"role": "assistant", "content": answer}}]})
    status, body = answer
    return status, body if isinstance(body, bytes) else json.dumps(body).encode()


def slow(seconds: float, text: str) -> Callable[[dict[str, Any]], str]:
    """Answers every request with a text, after some time."""

    def answer(_: dict[str, Any]) -> str:
        time.sleep(seconds)
        return text

    return answer
