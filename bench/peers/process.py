"""Runs a peer in a process of its own and reads its rows.

The process is `python -m` of a peer's module, by the interpreter that runs the benchmark and in its
environment. Where the peer is installed elsewhere, QERL_PEER_PATH, folders with its packages, takes the
place of PYTHONPATH for it. Both sides share a temporary folder: `spec.json` says what to measure,
`rows.jsonl` takes a line a row as soon as it is known (a pipe would stay open, and the reader wait, as long
as any process of the peer lives), and the rest of it is the peer's to write models into. It goes, with
everything that the peer started, at the end.

A peer that is not there, fails, or gives no row for too long, is said in one sentence and left out; the rows
it gave stay.
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
# A peer's model is a local folder, and nothing that it does is anybody else's business.
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1"}
# With its engine in a process of its own vLLM 0.24 hung on an H200, at "Using FlashInfer for top-p & top-k
# sampling", without using a CPU. In one process the engine also pays nothing for talking to itself.
_VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_POLL_SECONDS = 0.2

PATIENCE_MINUTES = 15.0
"""Minutes that a peer may take for a row; vLLM compiles for five of them before the first."""


def peer_rows(
    name: str, module: str, spec: Mapping[str, Any], minutes: float = PATIENCE_MINUTES
) -> Iterator[dict[str, Any]]:
    """Rows of a peer, each as soon as it is measured.

    What this process holds on the GPU without using it is given back first. When the caller stops, or is
    interrupted, the peer is ended with all processes that it started.

    Args:
        name: What the peer is called, in what is printed and in the name of its log.
        module: Module that calls :func:`serve`.
        spec: What it is to measure; goes through JSON.
        minutes: Time for a row, starting and loading included; a peer that takes longer is ended.
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
                # The session's leader may be gone while others of it live on.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if hung:
            print(f"{name} is left out: {_patience_ended(minutes, log)}", flush=True)
        elif process.returncode != 0:
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
    return {**_VLLM, **os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join(found)}


def _follow(
    process: "subprocess.Popen[bytes]", reader: Any, seconds: float
) -> Generator[dict[str, Any], None, bool]:
    """Rows as they are written, until the process has ended and all are read.

    Returns:
        True if it gave none for so many seconds.
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
    """What a peer that gave no row in time wrote last."""
    return (
        f"it gave no row for {minutes:g} minutes (its last words: {_last_line(log)}); all that it wrote is "
        f"in {log}. --peer_minutes gives it more time."
    )


def _reason(status: int, log: Path) -> str:
    """Why a peer ended, from its status and the last line that it wrote."""
    last = _last_line(log)
    missing = last.removeprefix("ModuleNotFoundError: ")
    if missing != last:
        return f"{missing}; install it, or name the folder it is in by {PEER_PATH}."
    return f"it ended with status {status} ({last}); all that it wrote is in {log}."


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
