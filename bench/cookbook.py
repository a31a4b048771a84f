"""Learning through `qerl serve`: the Tinker cookbook's arithmetic recipe, unmodified, beside controls.

    python -m bench cookbook --steps 15 --out bench/results/cookbook-smollm2-CARD.json

Needs the packages tinker and tinker-cookbook in addition to this one. Servers are started with `qerl serve`,
with and without noise; the recipe runs against them, each run in a subprocess as a user would start it, all
at once. The problems of a step are the same in every run (the recipe draws them by the step's number), so
runs differ in their adapters' initial weights and in their samples. A control is a run with learning rate 0:
changes of its reward are due to the problems.

Each row has a status: "finished", "ended after its time" with the steps logged until then, or "failed". If a
run failed, the result is still written, and the exit status is 1.

On a machine with a GPU the servers use it. With an empty CUDA_VISIBLE_DEVICES they use the CPU; then set
`--threads`, and several `--servers` per noise setting, because a server runs one model at a time.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.result import Row, write_result
from qerl.errors import QeRLError
from qerl.models.smollm2 import HUB_ID

SERVER, RECIPE = "qerl", "tinker_cookbook.recipes.math_rl.train"
PACKAGES = ("torch", "transformers", "peft", "tinker", "tinker-cookbook")
KEY = "tml-of-the-benchmarks"
COLUMNS = {
    "reward": "env/all/reward/total",
    "correct": "env/all/correct",
    "format": "env/all/format",
    "tokens": "env/all/ac_tokens_per_turn",
    "kl_sample_train": "optim/kl_sample_train_v1",
    "grad_norm": "grad_norm",
    "step_seconds": "time/total",
}
"""Fields of a row, and the recipe's names of these metrics."""

FINISHED, CUT, FAILED = "finished", "ended after its time", "failed"
"""Statuses of a run."""

STAGES = 10
"""Maximum number of noise stages; at most one per step of a run."""

_URL = re.compile(r"TINKER_BASE_URL=(\S+)")
_TAIL = 60
"""Lines of a log that are printed when its process fails."""
_REPORT_S = 20.0


@dataclass
class Process:
    """A subprocess in a session of its own, and its log."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path
    began: float
    seconds: float | None = None
    """Seconds from start to end; None while it runs."""

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL:])


@dataclass
class Run:
    """A run of the recipe."""

    noise: bool
    learning_rate: float
    number: int
    folder: Path
    process: Process | None = None
    status: str | None = None
    """One of the statuses above; None while it runs."""

    @property
    def name(self) -> str:
        """Name of the run's folder and log."""
        return self.folder.name

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics that the recipe has logged so far, per step."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for line in lines if COLUMNS["reward"] in (row := json.loads(line))]

    def row(self) -> Row:
        """Return the result row of the run."""
        steps = self.steps()
        found: Row = {
            "noise": self.noise, "learning_rate": self.learning_rate, "run": self.number,
            "status": self.status,
        }  # fmt: skip
        if self.process is not None and self.process.seconds is not None:
            found["recipe_seconds"] = round(self.process.seconds, 1)
        for name, key in COLUMNS.items():
            found[name] = [round(step[key], 6) for step in steps if key in step]
        return found


def start(name: str, module: str, arguments: Sequence[str], logs: Path, threads: int | None) -> Process:
    """Start `python -m module` without telemetry and Hub access, with ``threads`` threads."""
    quiet = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "TINKER_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    # Without a network the recipe's request for a price list would wait long for its DNS lookup.
    quiet["RES_OPTIONS"] = "timeout:1 attempts:1"
    if threads is not None:
        quiet |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    log = logs / f"{name}.log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Process(name, popen, log, time.monotonic())


def await_url(server: Process, seconds: float) -> str:
    """Wait until a server has loaded its model, and return its URL.

    Raises:
        QeRLError: The server ended, or printed no URL within ``seconds`` of its start.
    """
    while time.monotonic() - server.began < seconds:
        if (found := _URL.search(server.log.read_text(errors="replace"))) is not None:
            return found[1]
        if server.popen.poll() is not None:
            raise QeRLError(f"{server.name} ended with {server.popen.returncode}:\n{server.tail()}")
        time.sleep(0.2)
    raise QeRLError(f"{server.name} printed no URL within {seconds:.0f} s:\n{server.tail()}")


def folder_of(url: str) -> str:
    """Return the folder of the server's model, in which a client finds the tokenizer without the Hub."""
    request = urllib.request.Request(f"{url}/api/v1/get_server_capabilities", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["supported_models"][-1]["model_name"])


def recipe_arguments(args: argparse.Namespace, run: Run, url: str, model: str) -> list[str]:
    """Return the recipe's command line."""
    return [
        "env=arithmetic", f"base_url={url}", f"model_name={model}", f"renderer_name={args.renderer}",
        "loss_fn=importance_sampling", f"learning_rate={run.learning_rate}", f"max_steps={args.steps}",
        f"groups_per_batch={args.groups}", f"group_size={args.group_size}", f"max_tokens={args.max_tokens}",
        f"lora_rank={args.rank}", f"log_path={run.folder}", "behavior_if_log_dir_exists=delete",
        "save_every=0", "eval_every=0",
    ]  # fmt: skip


def servers(args: argparse.Namespace, ended: contextlib.ExitStack) -> Iterator[tuple[bool, list[str]]]:
    """Start all servers; yield whether they have noise, and their URLs, per noise setting."""
    started: dict[bool, list[Process]] = {}
    schedule = ["--noise_steps", str(args.steps), "--noise_stages", str(min(args.steps, STAGES))]
    for noise in (setting == "aqn" for setting in args.noise):
        for number in range(args.servers):
            name = f"server-{'aqn' if noise else 'plain'}-{number}"
            arguments = [
                "serve", args.model, "--port", "0", "--api_key", KEY, "--max_rank", str(args.rank),
                "--max_models", str(len(_planned(args))), "--output_dir", str(args.logs / name),
                "--dtype", args.dtype,
                *(schedule if noise else []),
            ]  # fmt: skip
            process = start(name, SERVER, arguments, args.logs, args.threads)
            ended.callback(process.end)
            started.setdefault(noise, []).append(process)
    for noise, processes in started.items():
        yield noise, [await_url(process, 60 * args.minutes) for process in processes]


def follow(runs: Sequence[Run], deadline: float) -> None:
    """Wait until all runs have ended or time is up; print their progress, and the log's tail if one fails."""
    reported = time.monotonic()
    left = list(runs)
    while left and time.monotonic() < deadline:
        for run in [run for run in left if run.process and run.process.popen.poll() is not None]:
            left.remove(run)
            assert run.process is not None
            run.process.seconds = time.monotonic() - run.process.began
            code = run.process.popen.returncode
            run.status = FAILED if code else FINISHED
            print(f"{run.name} ended with {code} after {run.process.seconds:.0f} s", flush=True)
            if code:
                print(run.process.tail(), flush=True)
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            rewards = ((run.name, [step[COLUMNS["reward"]] for step in run.steps()]) for run in runs)
            print("; ".join(f"{name} {len(r)}: {r[-1]:.3f}" for name, r in rewards if r), flush=True)
        time.sleep(0.2)
    for run in left:
        assert run.process is not None
        run.process.seconds = time.monotonic() - run.process.began
        run.status = CUT
        print(f"{run.name} is stopped after {len(run.steps())} steps, because time is up", flush=True)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all runs, once they have ended or time is up."""
    deadline = time.monotonic() + 60 * args.minutes
    args.logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ended:
        runs = []
        for noise, urls in servers(args, ended):
            for index, (number, rate) in enumerate(_planned(args)):
                arm = ("aqn" if noise else "plain") + ("-learn" if rate else "-control")
                run = Run(noise, rate, number, args.logs / f"{arm}-{number}")
                url = urls[index % len(urls)]
                command = recipe_arguments(args, run, url, folder_of(url))
                run.process = start(run.name, RECIPE, command, args.logs, 1)
                ended.callback(run.process.end)
                runs.append(run)
        follow(runs, deadline)
    engine = "paged" if torch.cuda.is_available() else "portable"
    for run in runs:
        yield {"engine": engine, **run.row()}


def _planned(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Return the number and learning rate of each run of a noise setting."""
    counts = {args.learning_rate: args.runs, 0.0: args.runs if args.controls is None else args.controls}
    return [(n, rate) for n in range(max(counts.values())) for rate, count in counts.items() if n < count]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench cookbook", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=HUB_ID, help="as for `qerl serve`")
    parser.add_argument(
        "--renderer", default="qwen3_instruct", help="renderer of the cookbook; default: ChatML"
    )
    parser.add_argument("--noise", nargs="+", default=["none", "aqn"], choices=("none", "aqn"))
    parser.add_argument("--dtype", default="auto", help="as for `qerl serve`")
    parser.add_argument("--runs", type=int, default=3, help="runs that learn, per noise setting")
    parser.add_argument("--controls", type=int, help="runs with learning rate 0; default: --runs")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--groups", type=int, default=32, help="problems per step")
    parser.add_argument("--group_size", type=int, default=16, help="samples per problem")
    parser.add_argument("--max_tokens", type=int, default=12, help="maximum tokens per sample")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--servers", type=int, default=1, help="servers per noise setting")
    parser.add_argument("--threads", type=int, help="CPU threads per server; default: torch's")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which runs are stopped")
    parser.add_argument("--logs", type=Path, default=Path("runs/cookbook"), help="folder of logs and metrics")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Run `python -m bench cookbook` with these arguments.

    Raises:
        SystemExit: A run failed.
    """
    args = _parser().parse_args(arguments)
    found = list(measure(args))
    for row in found:
        rewards = " ".join(f"{reward:.3f}" for reward in row["reward"])
        print(
            f"{row['engine']}, noise {row['noise']}, learning rate {row['learning_rate']:g}, "
            f"run {row['run']}, {row['status']}, reward {rewards}"
        )
    if args.out:
        shared: dict[str, Any] = {
            "versions": {name: version(name) for name in PACKAGES}, "steps": args.steps,
            "groups": args.groups, "group_size": args.group_size, "max_tokens": args.max_tokens,
            "rank": args.rank, "servers": args.servers, "threads": args.threads, "dtype": args.dtype,
        }  # fmt: skip
        if not torch.cuda.is_available():
            count = args.servers * len(args.noise)
            shared["machine"] = (
                f"{os.cpu_count()} CPU cores, {count} servers, threads of each: {args.threads}"
            )
        write_result(args.out, " ".join(["cookbook", *arguments]), found, **shared)
    failed = sum(row["status"] == FAILED for row in found)
    if failed:
        sys.exit(f"error: {failed} of {len(found)} runs failed; see above, and their logs in {args.logs}.")
