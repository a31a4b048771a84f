"""Runs a peer in a process of its own and reads its rows.

The process is `python -m` of a peer's module, by the interpreter that runs the benchmark and in its
environment. Where the peer is installed elsewhere, QERL_PEER_PATH, folders with its packages, takes the
place of PYTHONPATH for it. Both sides share a temporary folder: `spec.json` says what to measure,
`rows.jsonl` takes a line a row as soon as it is known (a pipe would stay open, and the reader wait, as long
as any process of the peer lives), and the rest of it is the peer's to write models into. It goes, with
everything that the peer started, at the end.

A peer that is not there, or fails, is said in one sentence and left out; the rows it gave stay.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import qerl

PEER_PATH = "QERL_PEER_PATH"
# A peer's model is a local folder, and nothing that it does is anybody else's business.
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1"}
_POLL_SECONDS = 0.2


def peer_rows(name: str, module: str, spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a peer, each as soon as it is measured.

    What this process holds on the GPU without using it is given back first. When the caller stops, or is
    interrupted, the peer is ended with all processes that it started.

    Args:
        name: What the peer is called, in what is printed and in the name of its log.
        module: Module that calls :func:`serve`.
        spec: What it is to measure; goes through JSON.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    log = Path(tempfile.gettempdir()) / f"qerl-{name}-{os.getpid()}.log"
    with tempfile.TemporaryDirectory(prefix="qerl-peer-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "spec.json").write_text(json.dumps(spec))
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        with log.open("a") as output, rows.open() as reader:
            process = subprocess.Popen(
                [sys.executable, "-m", module, folder], env=_environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                yield from _follow(process, reader)
            finally:
                # The session's leader may be gone while others of it live on.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            print(f"{name} is left out: {_reason(process.returncode, log)}", flush=True)


def serve(run: Callable[[dict[str, Any], Path], Iterator[dict[str, Any]]]) -> None:
    """The peer's side: runs what the folder on the command line asks for and writes the rows there.

    Args:
        run: Takes the spec and the folder, where it may write what it needs; gives rows.
    """
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    with (folder / "rows.jsonl").open("a") as rows:
        for row in run(spec, folder):
            rows.write(json.dumps(row) + "\n")
            rows.flush()


def _environment() -> dict[str, str]:
    """Environment of the peer's process.

    The peer finds the packages in QERL_PEER_PATH, or else those in PYTHONPATH, and behind them benchmarks and
    package.
    """
    packages = os.environ.get(PEER_PATH) or os.environ.get("PYTHONPATH")
    homes = (Path(__file__).parents[2], Path(qerl.__file__).parents[1])
    found = [packages, *map(str, homes)] if packages else [*map(str, homes)]
    return {**os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join(found)}


def _follow(process: "subprocess.Popen[bytes]", reader: Any) -> Iterator[dict[str, Any]]:
    """Rows as they are written, until the process has ended and all are read."""
    unfinished = ""
    while True:
        ended = process.poll() is not None  # before reading, so that nothing written before the end is missed
        *lines, unfinished = (unfinished + reader.read()).split("\n")
        yield from map(json.loads, lines)
        if ended:
            return
        time.sleep(_POLL_SECONDS)


def _reason(status: int, log: Path) -> str:
    """Why a peer ended, from its status and the last line that it wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    missing = last.removeprefix("ModuleNotFoundError: ")
    if missing != last:
        return f"{missing}; install it, or name the folder it is in by {PEER_PATH}."
    return f"it ended with status {status} ({last}); all that it wrote is in {log}."
