"""`qerl serve` as a process that is killed: the next one goes on from what was saved with the same bits."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="needs the extra serve")
pytest.importorskip("google.protobuf", reason="needs the extra serve")

from tests.fuzz._tiny import save_model
from tests.support.http import Client
from tests.support.wire import KEY

pytestmark = pytest.mark.slow

NAME = "some/Name-1.5B"
ADAM = {"learning_rate": 0.01, "weight_decay": 0.1}


@contextlib.contextmanager
def process(model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen, Client]]:
    """A server of a model in a process of its own, and a client of it; it is killed at the end."""
    command = [sys.executable, "-m", "qerl", "serve", str(model), "--port", "0", "--output_dir", str(folder)]
    command += ["--served_name", NAME]
    environment = os.environ | {"QERL_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            said = next(line for line in server.stdout or () if "TINKER_BASE_URL" in line)
            url = re.search(r"http://\S+", said)
            assert url is not None and KEY not in said
            with httpx.Client(base_url=url[0], headers={"X-API-Key": KEY}, timeout=60) as http:
                backend = SimpleNamespace(models=[SimpleNamespace(name=NAME)])
                yield server, Client(http, None, backend)
        finally:
            server.kill()


def train(client: Client, model: str, first: int, steps: int) -> list[Any]:
    """What passes and steps answer, byte for byte."""
    found = []
    for number in range(first, first + 2 * steps, 2):
        client.send_pass(model, number, [5, 9, 77, 31, number % 5])
        found.append(client.result(f"{model}:{number}"))
        found.append(client.ask("optim_step", model_id=model, seq_id=number + 1, adam_params=ADAM))
    assert not [answer for answer in found if isinstance(answer, dict) and "error" in answer]
    return found


def test_a_server_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path):
    model, folder = tmp_path / "model", tmp_path / "served"
    save_model(model)
    with process(model, folder) as (server, client):
        served = client.http.get("/api/v1/get_server_capabilities").json()["supported_models"]
        assert [each["model_name"] for each in served] == [NAME]  # and not where it lies
        trained = client.model(rank=4)
        train(client, trained, 1, 2)
        path = client.ask("save_weights", model_id=trained, seq_id=5, path="two")["path"]
        wanted = train(client, trained, 6, 2)
        for number in range(10, 30, 2):  # work that waits or runs when it is killed
            client.send_pass(trained, number, [5, 9, 77] * 100)
            client.post("save_weights", model_id=trained, seq_id=number + 1, path=f"late-{number}")
            if number == 10:
                client.result(f"{trained}:10")
        server.kill()
        assert server.wait(30) == -9
    with process(model, folder) as (_, client):
        load = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
        again = client.ask("load_weights", **load)["model_id"]
        found = train(client, again, 1, 2)
    assert not (folder / "api_key").exists()
    assert found == wanted
