"""Seconds and memory of a whole GRPO step, rollout to optimizer, on a model shape with random weights.

    python -m bench step --shape 7b --weights nvfp4 bf16 --samples 8 --tokens 2048

Runs the trainer itself. Weights are random and made on the GPU layer by layer, so a shape of 72B needs no
more memory than training it. No completion ends before its last token and rewards are random, so every
sample of every row does the same work. A row begins with an uncounted step: its rollout ends at once, because
a NaN is injected, but captures the CUDA graphs, and its update compiles. With `--peers`, TRL with vLLM does
the same work in the same run (`bench.peers`).

    python -m bench step --prompts 16 --tokens 1024 --lengths lognormal:400

With `--lengths` completions end at drawn lengths (`bench.lengths`), the same in every step and for every
trainer. The first step's rollout is then a whole one, because its tail captures one step size after another.

    python -m bench step --prompts 16 --tokens 1024 --lengths lognormal:400 --dead 0.5

With `--dead` this share of the groups has no signal, in the order in which they end, and the step is DAPO's:
further groups enter the open rollout until enough have one, at most three times as many as the step needs.

    python -m bench step --prompts 16 --tokens 1024 --backward_dtype auto fp8

With `--backward_dtype auto fp8 auto fp8` each entry is a row; the rows run in this order on one policy and
engine.

    python -m bench step --prompts 16 --tokens 1024 --lengths lognormal:400 --max_staleness 2

With `--max_staleness` rows are refilled across steps: samples continue across the update, and groups of
coming steps start beside a tail. `max_staleness` extra steps are trained before and after the counted ones,
so that each counted step begins and ends with unfinished samples.

    python -m bench step --prompts 16 --tokens 1024 --profile

With `--profile` a row also has the longest kernels of one update, of a step that is trained but not counted;
the GPU's state in that row includes it.

    torchrun --nproc_per_node 2 -m bench step --prompts 16 --tokens 1024 --lengths lognormal:400

Under torchrun every process has a GPU, its own prompts (`--prompts` counts those of one process) and its own
lengths, and all train one policy. A row then combines all processes (`bench.clock.of_all`).
"""

import argparse
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel

from bench.clock import Clock, medians, of_all
from bench.lengths import KINDS, draw_lengths
from bench.peers.process import PATIENCE_MINUTES, peer_rows
from bench.result import write_result
from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.families.sizes import Sizes
from qerl.gpu_memory import is_unified, total_bytes
from qerl.host_memory import host_bytes
from qerl.measure.gauge import gauge
from qerl.measure.model_config import declared, model_config, shape_of, sizes_of
from qerl.measure.random_model import adapted_linears, random_policy
from qerl.measure.random_task import random_prompts, random_rewards, word_tokenizer
from qerl.plan.parts import Weights
from qerl.plan.propose import beyond_host, fastest
from qerl.plan.render import would_fit
from qerl.plan.settings import published_bytes
from qerl.plan.work import Work
from qerl.ranks import is_first_process
from qerl.rollout.engine import (
    Ended,
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    Session,
    WhenEnded,
)
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.rollout.session import whole_completions
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.ready import ready_for_rows
from qerl.trainer.step_log import used_bytes
from qerl.trainer.teacher import Teacher
from qerl.weight_formats import FORMATS, WeightFormatName

_TRL_STEP = "bench.peers.trl_step"  # runs in the peer's process, which alone imports it

_DEVICE = torch.device("cuda")

_BATCHES = 3
"""Maximum number of further groups with `--dead`, in multiples of the groups of a step."""

_KERNELS = 20
"""Kernels of a profile that a row contains."""

_TOLD = ("lora_experts", "teacher", "dead", "max_staleness")
"""Options that a row contains if they are given."""


def _processes() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, from torchrun's environment."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class TimedEngine(RolloutEngine):
    """An engine that records time and memory at the end of each call.

    Args:
        engine: The engine to time, with sessions that take parameters per sequence.
        lengths: Tokens of each completion of a call. In a session, sequences get them in order of start, from
            the first again after the last, also across the steps of a session that continues.
        profile_call: Number of the call after which the kernels of the update are recorded.
    """

    def __init__(self, engine: PagedEngine, lengths: list[int], profile_call: int | None = None) -> None:
        self.engine, self._lengths, self._profile_call = engine, lengths, profile_call
        self.model = engine.model
        self.rollout_gb = self.seconds = self.release_seconds = 0.0
        self.calls = self.tokens = 0
        self._own: Iterator[SamplingParams] = iter(())  # parameters of the sequences to start
        self._under_way: dict[int, int] = {}  # tokens of unfinished sequences, by index
        self.trace: torch.profiler.profile | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        seeds: Sequence[int] | None = None,
        ended: WhenEnded | None = None,
    ) -> RolloutResult:
        start = time.perf_counter()
        if self.calls == 0 and len(set(self._lengths)) == 1:
            width = base_model(self.engine.model).config.hidden_size
            norm_offsets = {"model.norm": torch.full((width,), float("nan"))}
        self.calls += 1
        session = self.engine.session(params, norm_offsets)
        own = [replace(params, max_tokens=length) for length in self._lengths]
        result = whole_completions(session, prompts, samples_per_prompt, own, seeds, ended)
        if self.calls == 1:  # a rollout without any finite logits would end the run
            whole = [replace(completion, finish_reason="length") for completion in result.completions]
            result = replace(result, completions=whole)
        torch.cuda.synchronize()
        self.seconds, self.tokens = time.perf_counter() - start, result.generated_tokens
        self.rollout_gb = used_bytes(_DEVICE) / 1e9
        return result

    @contextmanager
    def session(
        self,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        growing: bool = False,
        longest_prompt: int | None = None,
        going_on: Session | None = None,
        policy: Hashable | None = None,
    ) -> Iterator[Session]:
        begin = time.perf_counter()
        if going_on is None:
            every = [replace(params, max_tokens=length) for length in self._lengths]
            self._own, self._under_way = itertools.cycle(every), {}
        own, under_way, tokens = self._own, self._under_way, -sum(self._under_way.values())
        with self.engine.session(params, norm_offsets, growing, longest_prompt, going_on, policy) as session:
            start, decode = session.start, session.next

            def started(prompts: Any, samples: int, seeds: Any = None, begun: Any = None) -> list[int]:
                assert begun is None, "nothing is saved or evaluated on the way"
                new = start(prompts, samples, list(itertools.islice(own, len(prompts) * samples)), seeds)
                under_way.update(dict.fromkeys(new, 0))
                return new

            def counted(one_round: bool = False) -> list[Ended]:
                nonlocal tokens
                ended = decode(one_round)
                for turn in ended:
                    tokens += len(turn.completion.token_ids)
                    del under_way[turn.index]
                return ended

            with mock.patch.multiple(session, start=started, next=counted):
                yield session
            under_way.update((index, session.length(index)) for index in under_way)
        self.calls += 1
        torch.cuda.synchronize()
        self.seconds, self.tokens = time.perf_counter() - begin, tokens + sum(under_way.values())
        self.rollout_gb = used_bytes(_DEVICE) / 1e9

    def pause(self) -> None:
        self._make_room(self.engine.pause)

    def release(self) -> None:
        self._make_room(self.engine.release)

    def _make_room(self, release: Callable[[], None]) -> None:
        start = time.perf_counter()
        release()
        torch.cuda.synchronize()
        self.release_seconds = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        if self.calls - 1 == self._profile_call and self.trace is None:  # the run's end also makes room
            self.trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.trace.start()


class Measured(NamedTuple):
    """What `measure` returns.

    Attributes:
        steps: `Clock` row of each counted step and of the one before them, combined over all processes.
        kernels: The longest kernels of one update of this process, with milliseconds and calls; empty without
            a profile.
        kernels_ms: Milliseconds of all its kernels.
    """

    steps: list[dict[str, float]]
    kernels: list[dict[str, Any]]
    kernels_ms: float


def measure(
    policy: PeftModel,
    engine: PagedEngine,
    sizes: Sizes,
    *,
    samples: int,
    prompts: int,
    microbatch: int,
    tokens_per_forward: int | None,
    checkpointing: dict[str, int | bool],
    prompt_tokens: int,
    tokens: int,
    lengths: list[int],
    steps: int,
    profile: bool = False,
    teacher: PreTrainedModel | None = None,
    dead: float = 0.0,
    max_staleness: int = 0,
    backward_dtype: str = "auto",
) -> Measured:
    """Run GRPO steps.

    Args:
        policy: Made by :func:`random_policy`; trained in place.
        engine: Engine of the policy, one for all rows, because making one changes the layout of the weights.
        sizes: The policy's shape.
        samples: Completions per prompt.
        prompts: Prompts per step and process.
        microbatch: Completions per loss of the update.
        tokens_per_forward: As in `QeRLConfig`; None for all of a microbatch.
        checkpointing: As `gradient_checkpointing_kwargs` in `QeRLConfig`.
        prompt_tokens: Tokens of each prompt.
        tokens: Tokens of the longest completion.
        lengths: Tokens of each completion of this process.
        steps: Optimizer steps after the first.
        profile: Whether to record the kernels of an update behind the counted steps.
        teacher: Model whose distributions alone the policy learns; None for GRPO.
        dead: Share of the groups without signal, which are replaced by further ones.
        max_staleness: Optimizer steps that groups may start early.
        backward_dtype: As in `QeRLConfig`.
    """
    more: dict[str, Any] = {"algorithm": "distill", "teacher": "random"} if teacher is not None else {}
    if dead:
        more |= {"dynamic_sampling_batches": _BATCHES, "signal": "reward"}
    if max_staleness:
        more |= {"max_staleness": max_staleness}
    first, last = max_staleness, max_staleness + steps + 1  # of the rows
    trained = last + max(max_staleness, profile)
    watch = TimedEngine(engine, lengths, trained - 1 if profile else None)
    clock = Clock(watch)
    with tempfile.TemporaryDirectory() as folder, taught_by(teacher):
        trainer = make_trainer(
            policy, watch, clock, sizes, prompts, prompt_tokens, dead, num_generations=samples,
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=samples * prompts // microbatch,
            tokens_per_forward=tokens_per_forward, gradient_checkpointing_kwargs=checkpointing,
            max_completion_length=tokens, max_steps=trained, output_dir=folder,
            backward_dtype=backward_dtype, **more,
        )  # fmt: skip
        trainer.train()
    rows, update_ms, found = clock.rows[first:last], 0.0, []
    if watch.trace is not None:
        found = [(e.self_device_time_total, e.count, e.key) for e in watch.trace.key_averages()]
        update_ms = sum(micros for micros, *_ in found) / 1e3
    kernels = [
        {"ms": round(micros / 1e3, 2), "calls": calls, "name": name}
        for micros, calls, name in sorted(found, reverse=True)[:_KERNELS]
    ]
    return Measured(
        rows if _processes()[1] == 1 else of_all(gather_object([rows])), kernels, round(update_ms, 1)
    )


@contextmanager
def taught_by(model: PreTrainedModel | None) -> Iterator[None]:
    """Make every `Teacher` in the context use ``model`` in place of loading one by name."""

    def take(self: Teacher, *_: Any) -> None:
        assert model is not None
        self._by_segment = ready_for_rows(model, self._args).by_segment
        self.model = model

    with mock.patch.object(Teacher, "_load", take):
        yield


def make_trainer(
    policy: PeftModel,
    engine: RolloutEngine,
    clock: Clock,
    sizes: Sizes,
    prompts: int,
    prompt_tokens: int,
    dead: float = 0.0,
    **settings: Any,
) -> QeRLTrainer:
    """Return a trainer that saves nothing, with random rewards and new prompts in each step.

    Args:
        policy: Made by :func:`random_policy`; trained in place.
        engine: Engine of the policy.
        clock: Callback that records the steps.
        sizes: The policy's shape.
        prompts: Prompts per step and process.
        prompt_tokens: Tokens of each prompt.
        dead: Share of the groups without signal.
        settings: Fields of `QeRLConfig`, including `output_dir` and `max_steps`.
    """
    args = QeRLConfig(
        learning_rate=1e-5, loss_type="grpo", noise=False, gradient_checkpointing=True, report_to="none",
        save_strategy="no", optim="adamw_torch_fused", **settings,
    )  # fmt: skip
    groups = _processes()[1] * prompts * (args.max_steps + (_BATCHES if dead else 0))
    texts = random_prompts(groups, prompt_tokens)
    reward = random_rewards(dead)
    return QeRLTrainer(
        policy, [reward], args, Dataset.from_dict({"prompt": texts}), engine=engine,
        processing_class=word_tokenizer(sizes.vocabulary), callbacks=[clock],
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench step", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument(
        "--weights",
        nargs="*",
        default=["nvfp4"],
        choices=tuple(FORMATS),
        help="weight formats; empty: only --peers",
    )
    parser.add_argument("--peers", nargs="+", default=[], choices=["trl-vllm"], help="also measure these")
    parser.add_argument("--rank", type=int, nargs="+", default=[32], help="LoRA rank")
    parser.add_argument("--teacher", help="distil from a random teacher of this shape, in the same format")
    parser.add_argument("--lora_experts", choices=["shared", "each"], help="also adapt experts")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1], help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--microbatch", type=int, help="samples per loss of the update; default: a group")
    parser.add_argument(
        "--tokens_per_forward", type=int, help="of the update; default: what `qerl plan` finds"
    )
    parser.add_argument(
        "--every_n_layers", type=int, help="recompute every n-th layer; default: from `qerl plan`"
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048], help="tokens of the longest completion"
    )
    parser.add_argument("--lengths", default="equal", help=f"completion lengths: {KINDS}")
    parser.add_argument(
        "--dead", type=float, default=0.0, help="share of groups without signal, which are replaced"
    )
    parser.add_argument(
        "--max_staleness", type=int, default=0, help="steps that groups may start early, with refilled rows"
    )
    parser.add_argument(
        "--backward_dtype",
        nargs="+",
        default=["auto"],
        choices=["auto", "fp8"],
        help="dtypes of the backward pass, a row each",
    )
    parser.add_argument(
        "--peer_minutes", type=float, default=PATIENCE_MINUTES, help="minutes that a peer may take per row"
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps; the median is reported")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of an update")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def _own_rows(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield a row of :func:`measure` per weight format, rank, prompt count, length and backward dtype."""
    number, processes = _processes()
    for weights, rank in itertools.product(args.weights, args.rank):
        before = _requested()  # workspaces of the previous row
        positions = args.prompt + max(args.tokens) + 64
        shape = shape_of(args.shape)
        policy = random_policy(shape, weights, rank, positions, lora_experts=args.lora_experts)
        engine = PagedEngine(policy, 0, min(args.samples * max(args.prompts), MAX_ROWS))
        resident, teacher = (_requested() - before) / 1e9, None
        if args.teacher:
            teacher = random_policy(shape_of(args.teacher), weights, 0, positions).requires_grad_(False)
        rows = itertools.product(args.prompts, args.tokens, args.backward_dtype)
        for prompts, tokens, backward_dtype in rows:
            fp8 = backward_dtype == "fp8"
            tokens_per_forward, checkpointing = _settings(args, sizes, weights, rank, prompts, tokens, fp8)
            own = prompts * args.samples * (1 + _BATCHES if args.dead else 1)
            lengths = draw_lengths(args.lengths, processes * own, tokens)[number * own : (number + 1) * own]
            seen = measure(
                policy, engine, sizes, samples=args.samples, prompts=prompts,
                microbatch=args.microbatch or args.samples, prompt_tokens=args.prompt, tokens=tokens,
                tokens_per_forward=tokens_per_forward, checkpointing=checkpointing, lengths=lengths,
                steps=args.steps, profile=args.profile, teacher=teacher, dead=args.dead,
                max_staleness=args.max_staleness, backward_dtype=backward_dtype,
            )  # fmt: skip
            yield {
                "engine": "qerl", "weights": weights, "lora_rank": rank, "prompts": prompts,
                "processes": processes, "completion_tokens": tokens, "resident_gb": resident,
                "tokens_per_forward": tokens_per_forward, **checkpointing, **medians(seen.steps),
                **{name: told for name in _TOLD if (told := getattr(args, name))},
                **({"backward_dtype": backward_dtype} if fp8 else {}),
                "peak_gb": max(step[phase] for step in seen.steps for phase in ("rollout_gb", "update_gb")),
                "steps": seen.steps,
                **({"kernels_ms": seen.kernels_ms, "kernels": seen.kernels} if args.profile else {}),
            }  # fmt: skip
        del policy, engine, teacher
        gc.collect()  # the trainer and its model refer to each other
        torch.cuda.empty_cache()


def _requested() -> int:
    """Return the bytes requested for all tensors; torch's allocated bytes add up to 1 MiB per tensor."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def _settings(
    args: argparse.Namespace,
    sizes: Sizes,
    weights: WeightFormatName,
    rank: int,
    prompts: int,
    tokens: int,
    fp8: bool,
) -> tuple[int | None, dict[str, int | bool]]:
    """Return `tokens_per_forward` and `gradient_checkpointing_kwargs`: as given, else as a run would choose
    them on this GPU."""
    tokens_per_forward, every = args.tokens_per_forward, args.every_n_layers
    if tokens_per_forward and every:
        return tokens_per_forward, {"every_n_layers": every}
    samples, microbatch = prompts * args.samples, args.microbatch or args.samples
    work = Work(
        weights=weights, published=published_bytes(sizes, declared(args.shape)), rank=rank,
        targets=adapted_linears(sizes, args.lora_experts), shared_lora=args.lora_experts != "each",
        prompt_tokens=args.prompt, completion_tokens=tokens, group=args.samples,
        sequences=min(samples, MAX_ROWS), microbatch=microbatch,
        microbatches=samples // microbatch, processes=_processes()[1],
        may_offload=not is_unified(_DEVICE), host_bytes=host_bytes(_processes()[1]),
        keeps_keys=args.max_staleness > 0, fp8_backward=fp8, **of_teacher(args.teacher, weights),
    )  # fmt: skip
    choices = [tokens_per_forward] if tokens_per_forward else None, [every] if every else None
    found = fastest(sizes, work, total_bytes(_DEVICE), *choices)
    if found is None:
        raise does_not_fit(f"A step of {args.shape}", sizes, work, total_bytes(_DEVICE), *choices)
    return found.tokens_per_forward, found.checkpointing


def of_teacher(name: str | None, weights: WeightFormatName) -> dict[str, Any]:
    """Return the fields of `Work` for a random teacher of this shape."""
    if name is None:
        return {}
    sizes = sizes_of(shape_of(name))
    return {"teacher": sizes, "teacher_bytes": Weights(sizes, FORMATS[weights]).bytes}


def does_not_fit(what: str, sizes: Sizes, work: Work, capacity: int, *choices: Any) -> QeRLError:
    """Return the error for work that does not fit; it says if more CPU memory would help.

    Args:
        what: The beginning of the sentence, naming the work.
        sizes, work, capacity, choices: As passed to `fastest`, which found nothing.
    """
    beyond = beyond_host(sizes, work, capacity, *choices)
    said = f"{what} does not fit this GPU by the plan"
    return QeRLError(f"{said}; `qerl plan` says why." if beyond is None else f"{said}. {would_fit(beyond)}")


def _peer_rows(args: argparse.Namespace, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the same rows of other trainers, each measured in a subprocess with a model of this config."""
    for peer, rank, prompts, tokens in itertools.product(args.peers, args.rank, args.prompts, args.tokens):
        spec = {
            "config": config,
            "rank": rank, "prompts": prompts, "samples": args.samples,
            "microbatch": args.microbatch or args.samples, "prompt_tokens": args.prompt, "tokens": tokens,
            "lengths": args.lengths, "steps": args.steps,
        }  # fmt: skip
        for row in peer_rows(peer, _TRL_STEP, spec, args.peer_minutes):
            yield {
                "weights": "bf16", "lora_rank": rank, "prompts": prompts, "completion_tokens": tokens, **row,
            }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run `python -m bench step` with these arguments."""
    args = _parser().parse_args(arguments)
    if args.peers and _processes()[1] > 1:
        raise QeRLError("--peers measures other trainers on one GPU; run it without torchrun.")
    if "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sizes = sizes_of(shape_of(args.shape))
    for_peers = model_config(sizes, "bf16", sizes.positions).to_dict() if args.peers else {}
    common = {
        "shape": args.shape, "samples": args.samples, "prompt_tokens": args.prompt,
        "microbatch": args.microbatch or args.samples, "lengths": args.lengths,
    }  # fmt: skip
    draw_lengths(args.lengths, 1, max(args.tokens))  # raises on a mistake before anything is made
    rows: list[dict[str, Any]] = []
    with gauge() as state:
        for row in itertools.chain(_own_rows(args, sizes), _peer_rows(args, for_peers)):
            rows.append(common | row | {"gpu_state": state.take()})
            if not is_first_process():
                continue
            print(_line(rows[-1]), flush=True)
            for kernel in row.get("kernels", []):
                print(f"    {kernel['ms']:9.2f} ms {kernel['calls']:6d} x {kernel['name'][:90]}")
            if args.out:  # after each row, so that a run cut short keeps what it measured
                write_result(args.out, " ".join(["step", *arguments]), rows)
    if dist.is_initialized():
        dist.destroy_process_group()


def _line(row: dict[str, Any]) -> str:
    nan = float("nan")
    gpus = f"{row['processes']} GPUs, each " if row.get("processes", 1) > 1 else ""
    return (
        f"{row['engine']} {row['shape']} {row['weights']} r{row['lora_rank']} "
        f"{'backward fp8 ' if 'backward_dtype' in row else ''}{gpus}{row['prompts']} x "
        f"{row['samples']} x {row['completion_tokens']} {row['lengths']}: rollout {row['rollout_s']:.2f} s, "
        "update "
        f"{row['update_s']:.2f} s, step {row['total_s']:.2f} s, {row['tokens_per_s']:.0f} tokens/s; GB: "
        f"rollout {row['rollout_gb']:.1f}, update {row['update_gb']:.1f}, peak "
        f"{row.get('peak_gb', nan):.1f}; loss {row.get('loss', nan):.4f}, "
        f"KL {row.get('sampling/kl', nan):.1e}"
    )
