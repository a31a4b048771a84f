"""The Hub as its own library meets it, over sockets of this machine: one that answers, others that fail."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from qerl.models.hub import Unreachable, download, hub_answers


class _Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class _HangsUp(_Answers):
    def do_HEAD(self) -> None:
        self.close_connection = True

    do_GET = do_HEAD


class _IsBroken(_Answers):
    def do_HEAD(self) -> None:
        self.send_response(501)
        self.end_headers()

    do_GET = do_HEAD


@pytest.fixture
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server with the test's handler in the Hub's place."""
    server = HTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("hub", [_Answers], indirect=True)
def test_a_hub_that_answers(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_answers()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub_answers()


@pytest.mark.parametrize("hub", [_HangsUp, _IsBroken], indirect=True)
def test_a_hub_that_fails(hub: None, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert not hub_answers()
    with pytest.raises(Unreachable):
        download("owner/model", ["*.json"])


def test_no_hub_at_all(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not hub_answers()
    with pytest.raises(Unreachable, match="Connection refused"):
        download("owner/model", ["*.json"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match=r"^HF_HUB_OFFLINE is set$"):
        download("owner/model", ["*.json"])


@pytest.mark.parametrize("cause", [PermissionError(13, "Permission denied"), OSError(28, "No space left")])
def test_a_disk_that_fails_is_told_offline_too(cause: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("qerl.models.hub.snapshot_download", fails)
    with pytest.raises(Unreachable, match=cause.strerror):
        download("owner/model", ["*.json"])
