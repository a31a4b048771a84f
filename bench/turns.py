"""Speed of trajectories of several turns, with and without keeping the KV cache between turns.

    python -m bench turns --shape smollm2 --turns 1 2 4 8 --out bench/results/turns-smollm2-CARD.json

Weights are random, and the temperature is so high that all tokens are equally likely. With a share of the
vocabulary as stop tokens, the lengths of turns are then geometric with a given mean, like real ones, and the
same for any weights. The other side of the conversation answers at once with random tokens, so no time is
spent waiting. Without a kept KV cache a sequence drops its blocks when its turn has ended, and is prefilled
from its first token for its next turn. On a GPU the paged engine runs, elsewhere the portable one in FP32,
with CPU time given as well, for machines that do other work.

With `--requests` each turn is a request with the whole conversation, as a server's client sends it, and draws
`--drawn` tokens. Three ways are compared: full prefill, reuse of the prefixes that the engine keeps
(`RolloutEngine.session`, policy), and sequences that continue.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.result import write_result
from qerl.endpoint.stops import TurnLimits
from qerl.families.sizes import SIZES, Sizes
from qerl.measure.random_model import as_if_trained, random_policy
from qerl.rollout.engine import RolloutEngine, SamplingParams, Session
from qerl.rollout.paged.session import PagedSession
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.select import make_engine
from qerl.weight_formats import FORMATS

SMOLLM2 = Sizes.uniform(576, 1536, 30, 9, 3, 64, 49152, tied=True)
"""SmolLM2-135M, which `qerl.families.sizes` does not list."""

EVERY_TOKEN_ALIKE = 1e4
"""A temperature at which random logits, of about ten in size, make no difference."""

WAYS = ("anew", "prefixes", "going on")
"""Sources of a conversation's keys and values: full prefill, kept prefixes, a sequence that continues."""

LONGEST = 8
"""Room per turn, in multiples of the mean length; one turn in 3,000 is longer."""


def play(session: Session, args: argparse.Namespace, turns: int, kept: bool) -> int:
    """Play trajectories to their ends and return the number of drawn tokens."""
    texts = random.Random(0)
    prompts = [[texts.randrange(args.vocabulary) for _ in range(args.prompt)] for _ in range(args.prompts)]
    left = dict.fromkeys(session.start(prompts, args.samples), turns)
    drawn = 0
    while session.busy:
        ended = session.next()
        if not kept and isinstance(session, PagedSession):
            session.give_up_idle()
        for each in ended:
            drawn += len(each.completion.token_ids)
            left[each.index] -= 1
            if left[each.index] and session.room(each.index) > args.written:
                heard = random.Random(each.index * turns + left[each.index])
                session.go_on(each.index, [heard.randrange(args.vocabulary) for _ in range(args.written)])
            else:
                session.finish(each.index)
    return drawn


def play_once(engine: RolloutEngine, args: argparse.Namespace, turns: int, kept: bool) -> tuple[int, int]:
    """Run one step's rollout and return the numbers of drawn and of prefilled tokens."""
    params = SamplingParams(
        max_tokens=max_tokens(args, turns),
        temperature=EVERY_TOKEN_ALIKE,
        stop_token_ids=tuple(range(args.vocabulary // args.drawn)),
    )
    with engine.session(params) as session:
        drawn = play(session, args, turns, kept)
    return drawn, session.prefilled_tokens


def ask(engine: RolloutEngine, args: argparse.Namespace, turns: int, way: str) -> tuple[int, int]:
    """As `play_once`, for conversations whose turns are requests; requests of the same turn form a batch."""
    chance = random.Random(0)

    def said(tokens: int) -> list[int]:
        return [chance.randrange(args.vocabulary) for _ in range(tokens)]

    texts = [said(args.prompt) for _ in range(args.prompts)]
    whole = SamplingParams(max_tokens=turns * (args.drawn + args.written), temperature=EVERY_TOKEN_ALIKE)
    drawn = prefilled = 0
    if way == "going on":
        own = [replace(whole, stops=TurnLimits(args.drawn).stops()) for _ in texts]
        with engine.session(whole, growing=True) as session:
            session.start(texts, 1, own)
            for turn in range(turns):
                while session.busy:
                    for ended in session.next(one_round=True):
                        drawn += len(ended.completion.token_ids)
                if turn + 1 < turns:
                    for index in range(len(texts)):
                        session.go_on(index, said(args.written))
        return drawn, session.prefilled_tokens
    for _ in range(turns):
        one_turn = replace(whole, max_tokens=args.drawn)
        policy = way if way == "prefixes" else None
        with engine.session(one_turn, growing=True, policy=policy) as session:
            session.start(texts, 1)
            while session.busy:
                for ended in session.next(one_round=True):
                    drawn += len(ended.completion.token_ids)
                    session.finish(ended.index)
                    texts[ended.index] += ended.completion.token_ids
        texts = [text + said(args.written) for text in texts]
        prefilled += session.prefilled_tokens
    engine.release()
    return drawn, prefilled


def measure(run: Callable[[], tuple[int, int]], args: argparse.Namespace, **row: Any) -> dict[str, Any]:
    """Return a row of the median times of `--repeats` runs, after one that captures and compiles on a GPU."""
    seconds: list[float] = []
    busy: list[float] = []
    for _ in range(args.repeats + args.on_gpu):
        start, start_busy = time.perf_counter(), time.process_time()
        drawn, prefilled = run()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - start_busy)
    timed = seconds[args.on_gpu :]
    middle = statistics.median(timed)
    return row | {
        "seconds": round(middle, 3),
        "cpu_seconds": round(statistics.median(busy[args.on_gpu :]), 3),
        "spread": round((max(timed) - min(timed)) / middle, 3), "tok_s": round(drawn / middle, 1),
        "drawn_tokens": drawn, "prefilled_tokens": prefilled,
    }  # fmt: skip


def max_tokens(args: argparse.Namespace, turns: int) -> int:
    """Return the maximum number of tokens of a sequence after its prompt."""
    return turns * (LONGEST * args.drawn + args.written)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row of `measure` per number of turns, with and without kept keys, or per way of `WAYS`."""
    sizes = SMOLLM2 if args.shape == "smollm2" else Sizes.by_name(args.shape)
    args.vocabulary, args.on_gpu = sizes.vocabulary, torch.cuda.is_available()
    positions = args.prompt + max_tokens(args, max(args.turns))
    device = "cuda" if args.on_gpu else "cpu"
    torch.manual_seed(0)
    sizes = sizes.with_layers(args.layers or sizes.layers)
    model = as_if_trained(random_policy(sizes, args.weights, args.rank, positions, device)).eval()
    if not args.on_gpu:
        model = model.float()
    engine = make_engine(model, 0)
    forgetful = engine if args.on_gpu else PortableEngine(model, 0, kept_bytes=0)
    shared = {
        "engine": "paged" if args.on_gpu else "portable", "shape": args.shape, "layers": sizes.layers,
        "weights": args.weights,
        "lora_rank": args.rank, "prompts": args.prompts, "samples": args.samples,
        "prompt_tokens": args.prompt, "drawn_a_turn": args.drawn, "written_a_turn": args.written,
    }  # fmt: skip
    for turns in args.turns:
        if args.requests:
            for way in WAYS:
                yield shared | measure(partial(ask, engine, args, turns, way), args, turns=turns, way=way)
            continue
        for kept in (True, False) if turns > 1 else (True,):
            run = partial(play_once, engine if kept else forgetful, args, turns, kept)
            yield shared | measure(run, args, turns=turns, kept=kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench turns", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smollm2", choices=("smollm2", *SIZES))
    parser.add_argument("--weights", default="bf16", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for none")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--drawn", type=int, default=64, help="mean tokens that the policy draws in a turn")
    parser.add_argument("--written", type=int, default=32, help="tokens that the environment adds after it")
    parser.add_argument(
        "--requests", action="store_true", help="send each turn as a request; `--samples` is 1"
    )
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has, for a trial")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median is reported")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Run `python -m bench turns` with these arguments."""
    args = _parser().parse_args(arguments)
    if args.requests:
        args.samples = 1
    found: list[dict[str, Any]] = []
    for row in rows(args):
        found.append(row)
        print(
            f"{row['shape']} {row['weights']} r{row['lora_rank']}, {row['turns']} turns, "
            f"{row.get('way') or ('keys kept' if row['kept'] else 'keys computed again')}: "
            f"{row['tok_s']:.0f} tok/s, "
            f"{row['seconds']:.2f} s a step ({row['cpu_seconds']:.2f} of the CPU), "
            f"{row['drawn_tokens']} drawn, {row['prefilled_tokens']} prefilled",
            flush=True,
        )
        if args.out:
            write_result(args.out, " ".join(["turns", *arguments]), found)
