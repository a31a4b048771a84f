"""Alternative ways to decode, compared in one process: the effect of a choice on whole decode steps.

    python -m bench ways --shape 7b --batch 256 512 \
        --way quack "qerl.kernels.weights.packed_gemm:MAX_TOKENS['wgmma']=128" --way packed

A way is a name and settings: module variables, or entries of module-level tables, that are changed while the
steps are captured and timed. Clocks and temperature drift by more than the effect of a choice, so each round
times all ways, every second round in reverse order, and the result of a way is its speed over that of the
first way in the same round.
"""

import argparse
import ast
import re
import shlex
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.result import write_result
from bench.rollout import profile, read_bandwidth
from qerl.errors import QeRLError
from qerl.kernels.limits import PAGE
from qerl.kernels.weights.packed_gemm import Tiling
from qerl.measure.decode import decode_speed
from qerl.measure.gauge import gauge
from qerl.measure.model_config import shape_of
from qerl.measure.random_model import random_decoder
from qerl.weight_formats import FORMATS

_SETTING = re.compile(r"([\w.]+):(\w+)(?:\[(.+?)\])?=(.+)")


def value_of(text: str) -> Any:
    """Parse a value from the command line: a Python literal, or ``Tiling(...)`` of literals.

    Raises:
        QeRLError: The text is neither.
    """
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Tiling":
            named = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
            return Tiling(*map(ast.literal_eval, node.args), **named)
        return ast.literal_eval(node)
    except (SyntaxError, ValueError, TypeError) as error:
        raise QeRLError(f"{text!r} in --way is not a value; write a literal, or Tiling(...).") from error


@contextmanager
def setting(text: str) -> Iterator[None]:
    """Apply ``MODULE:NAME=VALUE`` or ``MODULE:NAME[KEY]=VALUE`` until the context ends.

    Raises:
        QeRLError: The text has another form, or there is no such name or entry.
    """
    found = _SETTING.fullmatch(text)
    if found is None:
        raise QeRLError(
            f"{text!r} in --way is not a setting; write MODULE:NAME=VALUE or MODULE:NAME[KEY]=VALUE."
        )
    module, name, key, value = found.groups()
    try:
        holder = import_module(module).__dict__
        place: Any = name
        if key is not None:
            holder, place = holder[name], value_of(key)
        before = holder[place]
    except (ImportError, LookupError, TypeError) as error:
        raise QeRLError(f"{text!r} in --way names something that does not exist: {error}.") from error
    holder[place] = value_of(value)
    try:
        yield
    finally:
        holder[place] = before


def turns(names: list[str], rounds: int) -> list[tuple[int, str]]:
    """Return (round, way) pairs in the order in which they are timed."""
    return [(r, name) for r in range(rounds) for name in (names if r % 2 == 0 else names[::-1])]


def main(arguments: list[str]) -> None:
    """Run `python -m bench ways` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench ways", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--way", nargs="+", action="append", required=True, metavar=("NAME", "SETTING"))
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for none")
    parser.add_argument("--batch", type=int, nargs="+", default=[256])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--decode", type=int, default=128, help="tokens")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, each of which times every way once")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs per way and round")
    parser.add_argument(
        "--profile", action="store_true", help="also list the kernels of one step, in the first round"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    ways = {name: settings for name, *settings in args.way}
    if len(ways) < len(args.way):
        raise QeRLError("Two --way options have the same name; give each its own.")
    for settings in ways.values():
        for text in settings:
            with setting(text):  # raises on a mistake before anything is made
                pass
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, reads {limit:.0f} GB/s")
    decoder = random_decoder(
        shape_of(args.shape, args.layers or 0), args.weights, args.rank, args.prompt + args.decode + PAGE
    )
    common = {
        "engine": "qerl", "shape": args.shape, "weights": args.weights, "lora_rank": args.rank,
        "prompt_tokens": args.prompt, "decode_tokens": args.decode, "group": args.group,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with gauge() as state:
        for batch in args.batch:
            for turn, name in turns(list(ways), args.rounds):
                with ExitStack() as held:
                    for text in ways[name]:
                        held.enter_context(setting(text))
                    fixed = (decoder, batch, args.prompt)
                    row: dict[str, Any] = {"way": name, "settings": ways[name], "round": turn, "batch": batch}
                    row |= decode_speed(*fixed, args.decode, args.group, args.repeats)
                    row["gpu_state"] = state.take()
                    if args.profile and turn == 0:
                        row["kernels"] = [
                            {"us": round(micros, 1), "calls": calls, "name": kernel}
                            for kernel, calls, micros in profile(*fixed, args.group, torch.bfloat16)[:12]
                        ]
                        state.take()
                rows.append(common | row)
                _print(rows[-1])
                if args.out:
                    write_result(args.out, shlex.join(["ways", *arguments]), rows, read_gb_s=limit)
            for name in ways:
                over = over_first(rows, batch, name, next(iter(ways)))
                each = ", ".join(f"{share - 1:+.1%}" for share in over)
                print(f"{batch} rows, {name}: {statistics.mean(over) - 1:+.1%} ({each})", flush=True)


def over_first(rows: list[dict[str, Any]], batch: int, name: str, first: str) -> list[float]:
    """Return the speed of a way over that of the first way, per round."""
    speed = {(r["round"], r["way"]): r["decode_tok_s"] for r in rows if r["batch"] == batch}
    return [speed[turn, name] / speed[turn, first] for turn in sorted({turn for turn, _ in speed})]


def _print(row: dict[str, Any]) -> None:
    clocks = row["gpu_state"]
    mhz = f", {clocks['sm_mhz']['median']:.0f} MHz" if clocks else ""
    print(
        f"{row['batch']} rows, round {row['round']}, {row['way']}: {row['decode_tok_s']:.0f} tok/s, "
        f"{row['step_ms']:.3f} ms a step, spread {row['spread']:.1%}{mhz}",
        flush=True,
    )
    for kernel in row.get("kernels", []):
        print(f"    {kernel['us']:9.1f} us {kernel['calls']:5d} x {kernel['name'][:90]}")
