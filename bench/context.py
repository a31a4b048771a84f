"""Memory of a GRPO step with the longest completion that fits by the plan: measured against planned.

    python -m bench context --shape qwen3-8b --memory 80

A rollout of a hundred thousand tokens takes an hour, and its memory peaks at its end. So two shorter
measurements with the memory of a whole step are made, one after the other in one process.

The update is a step of the trainer itself, with the settings that the plan chose, on completions of random
tokens that were not sampled. One of them has the full length, the others are short. A whole group of long
completions would take no more memory, because no two of them fit into one forward pass; and the step begins
with gradients in place, as earlier passes would leave them.

The rollout is a session of the engine, beside the optimizer state that the update has left. It reserves a KV
cache for a group of that length and draws one token per sample; then as many samples as the plan runs
concurrently get all but the last tokens of their completion as prefill, and draw the rest.

Unused memory of torch's allocator is freed before the update and before the rollout, so that neither figure
includes leftovers of the first step, whose completions are short. If a GPU has more memory than the update
needs, torch keeps more of the freed memory; ``--hold`` prevents this and so tests the plan.

Not measured: the engine's way through all lengths between, and a step that does this for all its samples.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from bench.clock import Clock
from bench.lengths import random_ids
from bench.result import write_result
from bench.step import does_not_fit, make_trainer
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.gpu_memory import DRIVER_BYTES, LIMIT, USABLE, is_unified, keep_within_limit, total_bytes
from qerl.host_memory import host_bytes
from qerl.measure.gauge import gauge
from qerl.measure.random_model import random_policy
from qerl.plan.context import longest_completion
from qerl.plan.phases import MemoryPlan, make_plan
from qerl.plan.propose import fastest
from qerl.plan.work import Work
from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult, SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.stops import Stop
from qerl.trainer.step_log import used_bytes
from qerl.weight_formats import FORMATS, WeightFormatName

SHORT = 256
"""Tokens of the short completions."""

DRAWN = 64
"""Tokens drawn at the end of each long completion."""

_DEVICE = torch.device("cuda")


class GivenEngine(RolloutEngine):
    """An engine that returns random tokens without sampling; also the `Rollout` that `Clock` reads.

    Args:
        engine: The model's engine.
        lengths: Tokens of each completion of a call; the first call cuts them to `SHORT`.
    """

    seconds = rollout_gb = release_seconds = 0.0
    trace: torch.profiler.profile | None = None

    def __init__(self, engine: RolloutEngine, lengths: list[int]) -> None:
        self.engine, self._lengths = engine, lengths
        self.model = engine.model
        self.calls = self.tokens = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], samples_per_prompt: int, *_: Any, **__: Any
    ) -> RolloutResult:
        self.calls += 1
        lengths = [min(n, SHORT) for n in self._lengths] if self.calls == 1 else self._lengths
        assert len(lengths) == len(prompts) * samples_per_prompt
        given = [
            Completion(random_ids(place, 1, n)[0], [0.0] * n, [0.0] * n, "length")
            for place, n in enumerate(lengths)
        ]
        self.tokens = sum(lengths)
        return RolloutResult(given, 0, self.tokens, 0.0)

    def release(self) -> None:
        self.engine.release()
        # Cached segments of the short step are of no use to a long pass.
        torch.cuda.empty_cache()
        keep_within_limit(_DEVICE)  # as after freeing a KV cache; here there is none yet
        torch.cuda.reset_peak_memory_stats()


class OneToken(Stop):
    """Stop that ends a turn after one token while a sequence has fewer than ``before`` tokens.

    Args:
        before: Tokens of a sequence from which on turns are not ended.
    """

    reason = "pause"
    reads_tokens = False

    def __init__(self, before: int) -> None:
        self._before = before

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        return start + 1 if start == checked < self._before else None


def planned(
    sizes: Sizes, weights: WeightFormatName, rank: int, prompt: int, group: int, tokens: int | None
) -> MemoryPlan:
    """Return the plan of a step on this GPU, with a completion of ``tokens``; if None, the longest that fits.

    Raises:
        QeRLError: No such step fits.
    """
    capacity = total_bytes(_DEVICE)
    work = Work(
        weights=weights, rank=rank, targets=sizes.targets, prompt_tokens=prompt,
        completion_tokens=tokens or SHORT,
        group=group, sequences=group, microbatch=group, microbatches=2,
        may_offload=not is_unified(_DEVICE), host_bytes=host_bytes(1),
    )  # fmt: skip
    if tokens is None:
        plan = longest_completion(make_plan(sizes, work, capacity))
    else:
        found = fastest(sizes, work, capacity)
        plan = None if found is None else make_plan(sizes, found, capacity)
    if plan is None:
        raise does_not_fit(f"A completion of {tokens or SHORT} tokens", sizes, work, capacity)
    return plan


class Gradients(TrainerCallback):
    """Callback that starts a step with zero gradients allocated, as if earlier passes had left them."""

    def on_step_begin(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def measure_update(trainer: Any, clock: Clock) -> dict[str, float]:
    """Run both steps and return the figures of the second, which has the long completion.

    Raises:
        QeRLError: Memory ran out; torch's message is printed.
    """
    try:
        trainer.train()
    except QeRLError as error:
        print(error.__cause__, flush=True)
        raise
    names = ("update_s", "update_gb", "update_allocated_gb")
    return {name: clock.rows[-1][name] for name in names}


def measure_rollout(
    engine: RolloutEngine, prompt: int, group: int, tokens: int, rows: int
) -> dict[str, float]:
    """Prefill completions up to their last tokens, draw those, and measure memory and time.

    Args:
        engine: An engine with sessions.
        prompt: Tokens of the prompt.
        group: Samples of the prompt for which the session has room.
        tokens: Tokens of a completion.
        rows: Samples that get a long completion; the others end after one token.

    Returns:
        rollout_gb, in use on the device at the end, in 10^9 bytes; prefill_s; and step_ms, of a decode step
        at that length.
    """
    torch.cuda.empty_cache()
    with engine.session(SamplingParams(tokens, stops=(OneToken(tokens - DRAWN),))) as session:

        def turn() -> float:
            start = time.perf_counter()
            while session.busy:
                session.next()
            torch.cuda.synchronize()
            return time.perf_counter() - start

        indices = session.start(random_ids(0, 1, prompt), group)
        turn()
        for index in indices[rows:]:
            session.finish(index)
        for index, written in zip(indices, random_ids(1, rows, tokens - DRAWN - 2), strict=False):
            session.go_on(index, written)
        prefill = turn()
        for index in indices[:rows]:
            session.go_on(index, [])
        drawing = turn()
        assert not any(session.room(index) for index in indices[:rows])
        used = used_bytes(_DEVICE) / 1e9
    return {"rollout_gb": used, "prefill_s": prefill, "step_ms": drawing / DRAWN * 1e3}


@contextlib.contextmanager
def held_to(gigabytes: float) -> Iterator[None]:
    """Limit torch to ``gigabytes`` (10^9 bytes) of the GPU, less other processes' memory, in the context."""
    before = os.environ.get(LIMIT)
    os.environ[LIMIT] = str((gigabytes * 1e9 + DRIVER_BYTES) / (2**30 * USABLE))
    try:
        yield
    finally:
        os.environ.pop(LIMIT)
        if before is not None:
            os.environ[LIMIT] = before
        torch.cuda.empty_cache()
        keep_within_limit(_DEVICE)


def measure(plan: MemoryPlan, hold: bool = False) -> Iterator[dict[str, float]]:
    """Yield the figures of the update and then of the rollout, on a random policy of the plan's shape.

    Args:
        plan: The step's plan.
        hold: Whether to limit the update's memory to 5 % more than planned.
    """
    work, sizes = plan.work, plan.sizes
    positions = work.prompt_tokens + work.completion_tokens + DRAWN
    policy = random_policy(sizes, work.weights, work.rank, positions)
    engine = PagedEngine(policy, 0, work.group)
    lengths = [SHORT] * work.group + [work.completion_tokens] + [SHORT] * (work.group - 1)
    given = GivenEngine(engine, lengths)
    clock = Clock(given)
    with tempfile.TemporaryDirectory() as folder:
        # Tokens that were not drawn have no sampler probability to correct by.
        trainer = make_trainer(
            policy, given, clock, sizes, 2, work.prompt_tokens, num_generations=work.group,
            per_device_train_batch_size=work.group, gradient_accumulation_steps=2,
            tokens_per_forward=work.tokens, gradient_checkpointing_kwargs=work.checkpointing,
            max_completion_length=work.completion_tokens, max_steps=2, output_dir=folder,
            vllm_importance_sampling_correction=False,
        )  # fmt: skip
        trainer.add_callback(Gradients())
        if hold:
            held_gb = 1.05 * plan.update / 1e9
            with held_to(held_gb):
                found = measure_update(trainer, clock) | {"held_gb": held_gb}
        else:
            found = measure_update(trainer, clock)
        yield found
    # `trainer` is still alive, and with it the optimizer state.
    rows = min(plan.sequences, work.group)
    yield measure_rollout(engine, work.prompt_tokens, work.group, work.completion_tokens, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench context", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument(
        "--tokens", type=int, help="completion tokens; default: the most that fit by the plan"
    )
    parser.add_argument(
        "--hold", action="store_true", help="limit the update's memory to 5 %% above its plan"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Run `python -m bench context` with these arguments."""
    args = _parser().parse_args(arguments)
    sizes = replace(Sizes.by_name(args.shape), tied=False)
    plan = planned(sizes, args.weights, args.rank, args.prompt, args.samples, args.tokens)
    work = plan.work
    row: dict[str, Any] = {
        "shape": args.shape, "weights": args.weights, "lora_rank": args.rank, "samples": args.samples,
        "prompt_tokens": args.prompt, "completion_tokens": work.completion_tokens,
        "sequences": plan.sequences, "tokens_per_forward": work.tokens, **work.checkpointing,
        "capacity_gb": plan.capacity / 1e9, "planned_rollout_gb": plan.rollout / 1e9,
        "planned_update_gb": plan.update / 1e9, "planned_host_gb": plan.on_host / 1e9,
    }  # fmt: skip
    print(row, flush=True)
    with gauge() as state:
        for phase, found in zip(("update", "rollout"), measure(plan, args.hold), strict=True):
            row |= found | {f"gpu_state_{phase}": state.take()}
            seen, said = row[f"{phase}_gb"], row[f"planned_{phase}_gb"]
            print(f"{phase}: {seen:.1f} GB, planned {said:.1f} ({said / seen - 1:+.1%})", flush=True)
            if args.out:  # after each phase, so that a run cut short keeps what it measured
                write_result(args.out, " ".join(["context", *arguments]), [row])
