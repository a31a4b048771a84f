"""A run on two GPUs that is stopped, fails and is resumed: ``python -m tests.gpu.two_gpus [--model FOLDER]``.

Where there are no two GPUs it takes two processes on the CPU. DAPO with dynamic sampling, updates in small
chunks, noise, evaluation, NVFP4 weights. One line for each check, then JSON; exit status 1 where one fails.
Samples are keyed by process, so a run of one process draws others: what a run is compared with is another run
on two. With ``--child`` this is one process of a run, told what is to happen to it.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

STEPS = 5
ROOT = Path(__file__).parents[2]


def child(recipe: str, what: str, mark: Path) -> int:
    """One process: `qerl train`, with a signal or an exception at a point."""
    from qerl.cli import main
    from tests.fuzz._kill import POINTS, Kill, arm

    rank = int(os.environ["RANK"])
    if what == "terminal":  # Ctrl-C: the launcher and all processes get it, and the launcher forwards it
        owner, name = POINTS["rollout"]
        original, passed = getattr(owner, name), []

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            passed.append(1)
            if len(passed) == 2:
                if rank == 0:
                    os.kill(os.getppid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **kwargs)

        setattr(owner, name, interrupted)
    elif what != "nothing":
        how, point, nth, ranks = what.split("/")
        arm(Kill(how, point, int(nth), ranks=tuple(map(int, ranks.split(",")))), rank, mark)
    status = main(["train", recipe])
    mark.with_name(f"{mark.name}-status-{rank}").write_text(str(status))
    return status


class Pair:
    """Runs on two processes in one folder.

    Attributes:
        results: Of each check, whether it holds and what was seen.
    """

    def __init__(self, folder: Path, recipe: dict[str, Any], limit: float) -> None:
        self.folder, self.settings, self.limit = folder, recipe, limit
        self.results: list[dict[str, Any]] = []

    def check(self, name: str, holds: bool, seen: Any = "") -> None:
        self.results.append(
            {"check": name, "holds": bool(holds), "seen": f"{str(seen)[:500]} ... {str(seen)[-1500:]}"}
        )
        print(f"{'ok    ' if holds else 'FAILED'} {name}: {str(seen)[:200]}", flush=True)

    def run(self, out: str, what: str = "nothing", launcher: bool = False) -> tuple[list[int], str, float]:
        """Exit codes of both processes, what they wrote, and seconds."""
        run = self.folder / out
        recipe, mark = self.folder / f"{out}.yaml", self.folder / f"mark-{time.monotonic_ns()}"
        resume = any(run.glob("checkpoint-*"))
        recipe.write_text(
            yaml.safe_dump(self.settings | {"output_dir": str(run), "resume_from_checkpoint": resume})
        )
        words = ["-m", "tests.gpu.two_gpus", "--child", str(recipe), what, str(mark)]
        start = time.monotonic()
        if launcher:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            text = self._wait([self._start([*torchrun, *words], {})])[1]
            marks = [mark.with_name(f"{mark.name}-status-{rank}") for rank in (0, 1)]
            codes = [int(path.read_text()) if path.exists() else -1 for path in marks]
        else:
            codes, text = self._wait([self._start(words, env) for env in _ranks()])
        return codes, text, time.monotonic() - start

    def _start(self, words: list[str], env: dict[str, str]) -> subprocess.Popen:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"} | env
        log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - read when the process has ended
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
        process.log = log  # type: ignore[attr-defined]
        return process

    def _wait(self, processes: list[subprocess.Popen]) -> tuple[list[int], str]:
        deadline, text = time.monotonic() + self.limit, ""
        for process in processes:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                text += "HANGS "
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for process in processes:
            process.log.seek(0)  # type: ignore[attr-defined]
            text += process.log.read()  # type: ignore[attr-defined]
        return [process.returncode for process in processes], text

    def checkpoints(self, out: str) -> list[str]:
        return sorted(path.name for path in (self.folder / out).glob("checkpoint-*"))


def _ranks() -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def recipe(folder: Path, model: str | None) -> dict[str, Any]:
    """Settings; a small random model where none is named."""
    if model is None:
        from tests.support.models import make_tiny_model, make_tiny_tokenizer

        sizes = {"hidden_size": 256, "intermediate_size": 448, "head_dim": 64, "initializer_range": 0.05}
        model = str(folder / "model")
        make_tiny_model("llama", **sizes).to(torch.bfloat16).save_pretrained(model)
        make_tiny_tokenizer().save_pretrained(model)
    reward = folder / "reward.py"
    reward.write_text(
        "def digits(completions, **kwargs):\n"
        "    return [sum(ch.isdigit() for ch in c[0]['content']) / 8 for c in completions]\n"
    )
    return {
        "model": model,
        "weights": "nvfp4",
        "task": "arithmetic",
        "task_options": {"level": "wp1", "examples": 0, "train_size": 10, "test_size": 8},
        "reward_files": [f"{reward}:digits"],
        "algorithm": "dapo",
        "signal": "reward",
        "dynamic_sampling_batches": 1,
        "lora_r": 8,
        "learning_rate": 1e-3,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "tokens_per_forward": 150,
        "max_completion_length": 24 if torch.cuda.device_count() >= 2 else 6,
        "max_steps": STEPS,
        "save_steps": 10 * STEPS,  # checkpoints are those of the signals, and the last one
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_samples": 4,
        "noise": True,
        "noise_stages": 3,
        "report_to": "none",
        "use_cpu": torch.cuda.device_count() < 2,
    }


def both(pair: Pair) -> None:
    """All checks, in the order in which one run goes through them."""
    codes, text, seconds = pair.run("whole")
    pair.check("two processes train to the end", codes == [0, 0], f"{codes}, {seconds:.0f} s\n{text}")
    for word in ("Traceback", "destroy_process_group", "find_unused_parameters", "Warning"):
        lines = [line for line in text.splitlines() if word in line]
        pair.check(f"nothing is said of {word}", not lines, lines[:3])
    rows = [json.loads(line) for line in (pair.folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    seen = [[row.get(name) for name in ("step", "loss", "reward", "grad_norm")] for row in steps]
    whole = len(steps) == STEPS and all(row[2] is not None for row in seen)
    pair.check("each step has rewards and a gradient", whole, seen)

    codes, text, seconds = pair.run("killed", "terminal", launcher=True)
    pair.check(
        "Ctrl-C in a rollout under torchrun: both exit with 130", codes == [130, 130], f"{codes}\n{text}"
    )
    pair.check("it is said once", text.count("Stopping after this step") == 1, text.count("Stopping"))
    first = pair.checkpoints("killed")
    pair.check("one checkpoint", len(first) == 1, first)

    codes, text, seconds = pair.run("killed", "INT/update/1/0,1")
    pair.check("SIGINT in an update: both exit with 130", codes == [130, 130], f"{codes}\n{text}")
    second = pair.checkpoints("killed")
    pair.check("one checkpoint more", len(second) == 2, second)

    codes, text, seconds = pair.run("killed", "memory/rollout/1/1")
    said = text.count("error: ")
    pair.check("a failure of one process ends both with 2, said once", codes == [2, 2] and said == 1,
               f"{codes}, {seconds:.0f} s, {said} times\n{text}")  # fmt: skip

    codes, text, seconds = pair.run("killed")
    pair.check("the resumed run ends", codes == [0, 0], f"{codes}, {seconds:.0f} s\n{text}")
    compare(pair)


def compare(pair: Pair) -> None:
    from safetensors.torch import load_file

    files = [pair.folder / out / "adapter_model.safetensors" for out in ("whole", "killed")]
    if not all(file.exists() for file in files):
        pair.check("both runs left an adapter", False, files)
        return
    whole, killed = (load_file(file) for file in files)
    difference = max((whole[name] - killed[name]).abs().max().item() for name in whole)
    pair.check(
        "the adapter is that of the run nobody stopped", difference == 0, f"largest difference {difference}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hub id; a small random model if left out")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds after which a run counts as hanging"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--child", nargs=3, metavar=("RECIPE", "WHAT", "MARK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child[0], args.child[1], Path(args.child[2]))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        pair = Pair(Path(temporary), recipe(Path(temporary), args.model), args.limit)
        try:
            both(pair)
        except Exception as error:
            pair.check("the script itself", False, repr(error))
    result = {
        "devices": torch.cuda.device_count(),
        "seconds": round(time.monotonic() - start),
        "checks": pair.results,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return int(not all(check["holds"] for check in pair.results))


if __name__ == "__main__":
    sys.exit(main())
