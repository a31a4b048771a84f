"""Connections of a server as the command runs it: how fast it answers, and who holds one for nothing."""

import http.client
import resource
import socket
import statistics
import time
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl_serve import connections
from tests.support.wire import KEY, FakeBackend, RunningServer

HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n"
MOST = 8


def closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection of which nothing was asked."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def answered(connection: socket.socket) -> bool:
    """Whether a whole answer of healthz comes."""
    heard = b""
    while got := connection.recv(1000):
        heard += got
        if heard.endswith(b'{"status":"ok"}'):
            return True
    return False


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=20)


def test_no_answer_waits_for_an_acknowledgement(tmp_path: Path):
    """A client acknowledges after 40 ms what nothing follows; the median does not mind a busy machine."""
    with RunningServer(FakeBackend(tmp_path)) as server:
        client = http.client.HTTPConnection(*server.address, timeout=20)
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            client.request("GET", "/api/v1/healthz")
            assert client.getresponse().read() == b'{"status":"ok"}'
            seconds.append(time.monotonic() - began)
        client.close()
    assert statistics.median(seconds) < 0.03


@pytest.mark.slow
def test_connections_that_bring_nothing_lock_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "_PATIENCE_S", 1.0)
    with RunningServer(FakeBackend(tmp_path), connections=MOST) as server:
        before = connect(server)
        before.sendall(HEALTH)
        assert answered(before)
        idle = [connect(server) for _ in range(5 * MOST)]
        time.sleep(0.3)
        assert [closed(each) for each in idle] == [True] * (4 * MOST + 1) + [False] * (MOST - 1)
        for half in idle[-4:]:
            half.sendall(HEALTH[:20])
        assert server.ask("create_session", sdk_version="0")["session_id"]  # by a connection of its own
        for _ in range(3):  # one that was there goes on, and brings the rest of its request in time
            before.sendall(HEALTH[:9])
            time.sleep(0.4)
            before.sendall(HEALTH[9:])
            assert answered(before)
        assert all(map(closed, idle))
        for each in (before, *idle):
            each.close()


@pytest.mark.slow
@pytest.mark.parametrize(("key", "answer"), [("none", b"401"), (KEY, b"")])
def test_a_body_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, answer: bytes
):
    """Neither with the key, nor once the request was refused without it, however often a byte comes."""
    monkeypatch.setattr(connections, "_PATIENCE_S", 0.5)
    head = f"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Length: 9000\r\n\r\n"
    with RunningServer(FakeBackend(tmp_path)) as server, connect(server) as slow:
        slow.sendall(head.encode())
        began, heard = time.monotonic(), b""
        slow.settimeout(0.1)
        while time.monotonic() - began < 20:
            try:
                slow.sendall(b"x")
                if not (got := slow.recv(1000)):
                    break
                heard += got
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - began < 10
        assert answer in heard


@pytest.mark.parametrize(
    ("soft", "hard", "set_to", "room"),
    [
        (1024, 4096, [4096], 2048),
        (1024, 1 << 20, [1 << 16], 1 << 15),
        (1024, 1024, [], 512),
        (1024, resource.RLIM_INFINITY, [1 << 16], 1 << 15),
    ],
)
def test_descriptors_are_asked_for_and_kept_back(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, set_to: list[int], room: int
):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    assert connections.room_for_connections() == room
    assert found == [(new, hard) for new in set_to]
    assert 3 * connections.backlog_of(room) < room
