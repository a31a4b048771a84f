"""Agents that tests run in a process of their own: it runs this file, and no package of the tests."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any


def post(endpoint: Any, route: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}/{route}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def talk(endpoint: Any, row: dict[str, Any]) -> float | None:
    """Two turns; what else the row asks for, and the number of this process as the reward."""
    if row.get("hangs"):
        re.match(r"(a+)+$", "a" * 64 + "b")  # for years, and nothing else of this process runs
    print("what an agent prints is no reply")
    subprocess.run([sys.executable, "-c", "print('nor is what its programs print')"], check=True)
    if row.get("raises"):
        raise ValueError(row["raises"])
    if row.get("exits"):
        raise SystemExit(3)
    if row.get("dies"):
        os._exit(7)
    if row.get("sleeps"):
        while True:
            time.sleep(0.01)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        body = {"model": endpoint.model, "messages": messages, "max_tokens": 6}
        said = post(endpoint, "chat/completions", body)["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "b"}]
    if row.get("posts"):
        post(endpoint, "reward", {"reward": float(os.getpid())})
        return None
    return float(os.getpid())


def number(endpoint: Any, row: dict[str, Any]) -> float:
    """The number of this process."""
    return float(os.getpid())


def surroundings(endpoint: Any, row: dict[str, Any]) -> float:
    """Whether this process has the search path that the row says; prints, and stays as long as it says."""
    print("said at once")
    time.sleep(row.get("stays", 0.0))
    return float(os.environ.get("PYTHONPATH", "") == row["path"])


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


@_nothing()
def decorated(endpoint: Any, row: dict[str, Any]) -> float:
    """The function is that of another file, which wraps this one."""
    return 0.5


async def talk_later(endpoint: Any, row: dict[str, Any]) -> float | None:
    """The same from the event loop; a row may hold that up."""
    if row.get("holds"):
        while True:
            time.sleep(0.01)
    return await asyncio.to_thread(talk, endpoint, row)
