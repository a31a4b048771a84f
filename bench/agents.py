"""Time of a rollout led by external agents over the endpoint, beside the same rollout by the built-in loop.

    python -m bench agents --shape 7b --out bench/results/agents-7b-CARD.json
    python -m bench agents docs/examples/verifiers-calculator.yaml --beside demo-tools \\
        --out bench/results/agents-verifiers-CARD.json

With two recipes, both are run alternately on the same held-out problems with the untrained model, with the
group sizes and lengths of the recipes, after one untimed rollout of each that imports and connects. The drawn
tokens differ, because an agent's seeds follow from its requests, so rows have the token counts, and ratios
are of the times per token.

With a shape, weights are random and turns end at lengths drawn in advance, the same in every rollout, so that
all ways do the same work. The agent is the asynchronous client of the package openai, in this process and
then in a subprocess. Conversations have several turns, each answered at once with one sentence.

Rows also have the CPU time of all threads of this process, without subprocesses of agents, for machines that
do other work as well, and that of each thread that shares the interpreter: the one that draws, the endpoint's
server, and the calls with the agents and their clients.
"""

import argparse
import functools
import random
import shlex
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from bench.chat_agent import ANSWER, again
from bench.result import Row, write_result
from bench.turns import EVERY_TOKEN_ALIKE, SMOLLM2
from qerl.agents.conversations import Conversations, check_others
from qerl.agents.loop import Limits
from qerl.agents.outside import Endpoint
from qerl.agents.pool import ToolPool
from qerl.demo import packed, prepared
from qerl.errors import QeRLError
from qerl.eval.policy import load
from qerl.eval.sampling import conversations_of, in_conversations
from qerl.families.sizes import SIZES, Sizes
from qerl.measure.random_model import as_if_trained, random_policy
from qerl.models.hub import local_checkpoint
from qerl.models.load import load_tokenizer
from qerl.models.smollm2 import HUB_ID
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.select import make_engine
from qerl.rollout.stops import Stop
from qerl.settings.recipe import changed, load_config
from qerl.weight_formats import FORMATS

ALIKE = (
    "model", "weights", "rounding", "task", "task_options", "num_generations", "max_completion_length",
    "temperature",
)  # fmt: skip
"""Settings that both recipes must share, so that their rollouts are the same work."""

THREADS = {"MainThread": "drawing", "qerl-endpoint": "endpoint", "qerl-calls": "calls"}
"""Field of a row by name of the thread."""


@dataclass(frozen=True)
class Way:
    """A way to lead the conversations of a recipe or a shape.

    Attributes:
        about: Fields of the result row that describe the way.
        engine: Engine of the policy.
        conversations: Leads the conversations.
        rows: Problems.
        samples: Conversations per problem.
        params: Sampling parameters.
    """

    about: dict[str, Any]
    engine: RolloutEngine
    conversations: Conversations
    rows: Sequence[Mapping[str, Any]]
    samples: int
    params: SamplingParams

    def play(self, repeat: int) -> dict[str, Any]:
        """Run one rollout; return wall and CPU seconds, drawn tokens and number of failed conversations."""
        seeds = [repeat * 10_000 + place for place in range(len(self.rows) * self.samples)]
        for stop in self.params.stops:
            if isinstance(stop, Lengths):
                stop.begin()
        before, start, busy = _busy_threads(), time.perf_counter(), time.process_time()
        said = in_conversations(self.conversations, self.engine, self.rows, self.samples, self.params, seeds)
        found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        found |= {name: each - before.get(name, 0.0) for name, each in _busy_threads().items()}
        others = self.conversations.environments or []
        failed = sum(getattr(each, "error", None) is not None for each in others)
        return found | {"drawn_tokens": sum(each.tokens for each in said), "failed": failed}


class Lengths(Stop):
    """Stop that ends turns at lengths drawn in advance, uniform between 0.5 and 1.5 times a mean.

    A sequence is identified by its prompt and first token, and gets its lengths by the order in which
    sequences are first seen. So all rollouts have the same lengths, though not on the same sequences.

    Args:
        turns: Turns per conversation.
        mean: Mean tokens per turn.
    """

    def __init__(self, turns: int, mean: int) -> None:
        self._turns, self._mean = turns, mean
        self._seen: dict[tuple[int, int], tuple[list[int], dict[int, int]]] = {}

    def begin(self) -> None:
        """Forget the sequences of the previous rollout."""
        self._seen.clear()

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        key = hash(tuple(prompt_ids)), token_ids[0]
        if key not in self._seen:
            drawn, half = random.Random(len(self._seen)), self._mean // 2
            self._seen[key] = [drawn.randint(half, self._mean + half) for _ in range(self._turns)], {}
        lengths, places = self._seen[key]
        place = start + lengths[places.setdefault(start, len(places)) % self._turns]
        return place if checked < place <= len(token_ids) else None


class Again:
    """Environment that answers every turn but the last.

    Args:
        turns: Turns per conversation.
    """

    def __init__(self, turns: int) -> None:
        self._turns = self._left = turns

    def reset(self, **row: Any) -> None:
        """Begin a conversation."""
        self._left = self._turns

    def respond(self, text: str) -> str | None:
        """Return the answer to a turn; None after the last."""
        self._left -= 1
        return ANSWER if self._left else None


def of_recipes(args: argparse.Namespace, console: Console) -> list[Way]:
    """Return two ways: the built-in loop of one recipe, and the agents of another."""
    names = (args.beside, args.recipe)
    configs = [load_config([name], {"eval_samples": args.prompts}) for name in names]
    for name in ALIKE:
        one, other = (getattr(config, name) for config in configs)
        if one != other:
            raise QeRLError(
                f"{name} is {other!r} in {args.recipe} and {one!r} in {args.beside}; give both the same."
            )
    configs = [changed(config, {"model": packed(config, console)}) for config in configs]
    jobs = [prepared(config, None, console) for config in configs]
    policy = load(jobs[0].loading, console)
    ways = []
    for name, config, job in zip(names, configs, jobs, strict=True):
        params = SamplingParams(max_tokens=config.max_completion_length, temperature=config.temperature)
        about = {"recipe": name, "environment": config.environment}
        conversations = conversations_of(policy.tokenizer, job.loading.chat_template_kwargs, **job.turns)
        samples = config.num_generations
        params = policy.stopping(params, job.asked)
        ways.append(Way(about, policy.engine, conversations, list(job.problems), samples, params))
    return ways


def of_shape(args: argparse.Namespace) -> list[Way]:
    """Return three ways with random weights: the built-in loop, and clients here and in a subprocess."""
    tokenizer = load_tokenizer(local_checkpoint(args.tokenizer))
    sizes = SMOLLM2 if args.shape == "smollm2" else Sizes.by_name(args.shape)
    sizes = replace(sizes.with_layers(args.layers or sizes.layers), vocabulary=len(tokenizer))
    rows = _problems(tokenizer, args)
    heard = len(tokenizer.encode(ANSWER)) + 32  # with what the template writes around it
    params = SamplingParams(
        max_tokens=args.turns * (args.drawn + args.drawn // 2 + heard),
        temperature=EVERY_TOKEN_ALIKE,
        stops=(Lengths(args.turns, args.drawn),),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    positions = 2 * args.prompt + params.max_tokens
    model: Any = as_if_trained(random_policy(sizes, args.weights, args.rank, positions, device)).eval()
    engine = make_engine(model if device == "cuda" else model.float(), tokenizer.pad_token_id)
    shared = {
        "shape": args.shape, "layers": sizes.layers, "weights": args.weights, "lora_rank": args.rank,
        "prompt_tokens": args.prompt, "turns": args.turns, "drawn_a_turn": args.drawn,
    }  # fmt: skip
    makers = {
        "calls": functools.partial(Again, args.turns),
        "openai": functools.partial(Endpoint, again),
        "openai in a process": functools.partial(Endpoint, again, process=True),
    }
    return [
        Way(
            {"environment": name} | shared,
            engine,
            Conversations(tokenizer, None, check_others([], make), ToolPool(600.0, 1000), Limits()),
            rows,
            args.samples,
            params,
        )
        for name, make in makers.items()
    ]


def _problems(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return problems of random tokens."""
    texts = random.Random(0)
    drawn = [[texts.randrange(len(tokenizer)) for _ in range(args.prompt)] for _ in range(args.prompts)]
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
    return [{"prompt": [{"role": "user", "content": text}], "turns": args.turns} for text in said]


def _busy_threads() -> dict[str, float]:
    """Return the CPU seconds used so far by each thread of `THREADS`."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.name in THREADS and thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            found[THREADS[thread.name]] = found.get(THREADS[thread.name], 0.0) + time.clock_gettime(clock)
    return found


def played(ways: Sequence[Way], repeats: int) -> Iterator[list[Row]]:
    """Yield the rows of all timed rollouts so far, after each round over all ways."""
    for way in ways:
        way.play(0)
    taken = []
    for repeat in range(1, repeats + 1):
        taken.append([way.play(repeat) for way in ways])
        yield list(rows(ways, taken))


def rows(ways: Sequence[Way], taken: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Row]:
    """Yield a row per way, with the ratios of its times per token to those of the first, built-in way."""
    loop: dict[str, float] = {}
    for way, runs in zip(ways, zip(*taken, strict=True), strict=True):
        seconds, cpu = (statistics.median(run[key] for run in runs) for key in ("seconds", "cpu_seconds"))
        of_token = {
            key: statistics.median(run[key] / run["drawn_tokens"] for run in runs)
            for key in ("seconds", "cpu_seconds")
        }
        loop = loop or of_token
        yield way.about | {
            "prompts": len(way.rows), "samples": way.samples,
            "max_completion_length": way.params.max_tokens,
            "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
            "ratio": round(of_token["seconds"] / loop["seconds"], 3),
            "cpu_ratio": round(of_token["cpu_seconds"] / loop["cpu_seconds"], 3),
            "drawn_tokens": [run["drawn_tokens"] for run in runs],
            "failed": sum(run["failed"] for run in runs),
            "cpu_seconds_of": {
                name: round(statistics.median(run.get(name, 0.0) for run in runs), 3)
                for name in THREADS.values()
            },
            "runs": [{key: round(run[key], 2) for key in ("seconds", "cpu_seconds")} for run in runs],
        }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench agents", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="name or file of a recipe whose environment is an endpoint")
    parser.add_argument("--beside", help="recipe of the built-in loop with the same model and task")
    parser.add_argument(
        "--shape", choices=("smollm2", *SIZES), help="measure random weights of this shape instead of recipes"
    )
    parser.add_argument("--tokenizer", default=HUB_ID, help="with --shape: model whose tokenizer is used")
    parser.add_argument(
        "--weights", default="nvfp4", choices=tuple(FORMATS), help="with --shape: weight format"
    )
    parser.add_argument("--rank", type=int, default=32, help="with --shape: LoRA rank; 0 for none")
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has, for a trial")
    parser.add_argument("--samples", type=int, default=8, help="with --shape: samples per prompt")
    parser.add_argument("--prompt", type=int, default=256, help="with --shape: tokens per prompt, about")
    parser.add_argument("--turns", type=int, default=3, help="with --shape: turns per conversation")
    parser.add_argument("--drawn", type=int, default=256, help="with --shape: mean tokens per turn")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="timed rollouts; the median is reported")
    parser.add_argument("--note", default="", help="note for the result: what else the machine did")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Run `python -m bench agents` with these arguments."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if (args.shape is None) == (args.recipe is None) or (args.recipe is None) != (args.beside is None):
        parser.error("give either a recipe and --beside RECIPE, or --shape")
    ways = of_shape(args) if args.shape else of_recipes(args, Console())
    found: list[Row] = []
    for found in played(ways, args.repeats):
        if args.out:
            write_result(args.out, shlex.join(["agents", *arguments]), found, note=args.note)
    for row in found:
        print(
            f"{row.get('recipe', row['environment'])}: {row['seconds']} s a rollout ({row['cpu_seconds']} of "
            f"the CPU), {row['ratio']} of the loop's for each token ({row['cpu_ratio']}), "
            f"{row['drawn_tokens']} drawn, {row['failed']} failed, threads {row['cpu_seconds_of']}",
            flush=True,
        )
    for way in ways:
        way.conversations.__exit__()
