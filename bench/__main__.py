"""Run a benchmark: `python -m bench NAME ...`; `python -m bench NAME --help` lists its options.

With `--arch 80` after any name this GPU is treated as one of compute capability 8.0 (`qerl.kernels.cards`),
with `--memory 24` as one sold with 24 GB (`qerl.gpu_memory`); with `--host 200` a run may take 200 GB of the
CPU's memory, whatever the system reports (`qerl.host_memory`).
"""

import argparse
import os
import signal
import sys
from importlib import import_module

import torch

from bench.result import EVERYWHERE
from qerl.errors import QeRLError
from qerl.gpu_memory import limit_gb
from qerl.host_memory import host_gb
from qerl.kernels.cards import asked

BENCHMARKS = (
    "rollout", "prefill", "ways", "step", "backward", "context", "kernels", "parity", "turns", "tail",
    "serve", "loop", "cookbook", "demo", "agents",
)  # fmt: skip
WITHOUT_GPU = ("turns", "tail", "serve", "loop", "cookbook", "demo", "agents")
"""Benchmarks that measure the CPU if there is no GPU."""


def main(arguments: list[str]) -> int:
    """Run the benchmark that the command line names.

    Returns:
        Exit status: 2 if there is no GPU to measure or the command line is wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS, help="benchmark to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark")
    args = parser.parse_args(arguments)
    asks_help = bool({"-h", "--help"} & set(args.arguments))
    if not (torch.cuda.is_available() or args.name in WITHOUT_GPU or asks_help):
        print(
            "This benchmark needs a CUDA GPU, and this machine shows none; see `qerl doctor`.",
            file=sys.stderr,
        )
        return 2
    everywhere = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option, variable in EVERYWHERE.items():
        everywhere.add_argument(option, dest=variable)
    chosen, options = everywhere.parse_known_args(args.arguments)
    # Before the import of the kernels, which read these variables.
    os.environ.update({variable: value for variable, value in vars(chosen).items() if value})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a peer's process must not outlive this one
    try:
        asked()
        limit_gb()
        host_gb()
        import_module(f"bench.{args.name}").main(options)
    except QeRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
