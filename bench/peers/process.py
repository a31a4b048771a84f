"""Runs a peer in a subprocess and reads its rows.

The subprocess is `python -m` of a peer's module, with the benchmark's interpreter and environment. If the
peer is installed elsewhere, QERL_PEER_PATH lists the folders with its packages and replaces PYTHONPATH for
it. Both sides share a temporary folder: `spec.json` describes what to measure, `rows.jsonl` gets one line per
row as soon as it is measured (a pipe would stay open, and the reader would wait, while any process of the
peer lives), and the peer writes its models beside them. The folder and all processes that the peer started
are removed at the end.

If a peer is not installed, fails, or yields no row for too long, one sentence is printed and the peer is left
out; rows that it has already yielded are kept.
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
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import qerl

PEER_PATH = "QERL_PEER_PATH"
# A peer's model is a local folder; it needs no network and sends no telemetry.
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1"}
# With its engine in a process of its own vLLM 0.24 hung on an H200, at "Using FlashInfer for top-p & top-k
# sampling", without using a CPU. One process also saves the communication between front end and engine.
_VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_POLL_SECONDS = 0.2

PATIENCE_MINUTES = 15.0
"""Minutes that a peer may take per row; vLLM compiles for five of them before its first."""


def peer_rows(
    name: str, module: str, spec: Mapping[str, Any], minutes: float = PATIENCE_MINUTES
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a peer, each as soon as it is measured.

    GPU memory that torch caches in this process is freed first. When the caller stops or is interrupted, the
    peer and all processes that it started are killed.

    Args:
        name: Name of the peer in messages and in the name of its log.
        module: Module that calls :func:`serve`.
        spec: Description of what to measure, serializable as JSON.
        minutes: Time limit per row, including start and loading; a peer that exceeds it is killed.
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
                hung = yield from _follow(process, reader, 60 * minutes)
            finally:
                # The process group may outlive its leader.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if hung:
            print(f"{name} is left out: {_patience_ended(minutes, log)}", flush=True)
        elif process.returncode != 0:
            print(f"{name} is left out: {_reason(process.returncode, log)}", flush=True)


def serve(run: Callable[[dict[str, Any], Path], Iterator[dict[str, Any]]]) -> None:
    """Measure, in the peer's process, the spec in the folder on the command line, and write the rows there.

    Args:
        run: Takes the spec and the folder, in which it may write files, and yields rows.
    """
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    with (folder / "rows.jsonl").open("a") as rows:
        for row in run(spec, folder):
            rows.write(json.dumps(row) + "\n")
            rows.flush()


def _environment() -> dict[str, str]:
    """Return the environment of the peer's process.

    Its PYTHONPATH has QERL_PEER_PATH, or else this process's PYTHONPATH, followed by the folders of `bench`
    and `qerl`.
    """
    packages = os.environ.get(PEER_PATH) or os.environ.get("PYTHONPATH")
    homes = (Path(__file__).parents[2], Path(qerl.__file__).parents[1])
    found = [packages, *map(str, homes)] if packages else [*map(str, homes)]
    return {**_VLLM, **os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join(found)}


def _follow(
    process: "subprocess.Popen[bytes]", reader: Any, seconds: float
) -> Generator[dict[str, Any], None, bool]:
    """Yield rows as they are written, until the process has ended and all are read.

    Returns:
        True if the process wrote no row for ``seconds`` seconds.
    """
    unfinished = ""
    last = time.monotonic()
    while True:
        ended = process.poll() is not None  # before reading, so that nothing written before the end is missed
        *lines, unfinished = (unfinished + reader.read()).split("\n")
        for line in lines:
            yield json.loads(line)
            last = time.monotonic()
        if ended:
            return False
        if time.monotonic() - last > seconds:
            return True
        time.sleep(_POLL_SECONDS)


def _patience_ended(minutes: float, log: Path) -> str:
    """Return the message for a peer that yielded no row in time, with the last line of its log."""
    return (
        f"it gave no row for {minutes:g} minutes (last line: {_last_line(log)}); its log is {log}. Raise "
        "--peer_minutes to give it more time."
    )


def _reason(status: int, log: Path) -> str:
    """Return the reason why a peer ended, from its status and the last line of its log."""
    last = _last_line(log)
    missing = last.removeprefix("ModuleNotFoundError: ")
    if missing != last:
        return f"{missing}; install it, or set {PEER_PATH} to its folder."
    return f"it ended with status {status} ({last}); its log is {log}."


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
