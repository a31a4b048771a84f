"""The longest completion of a GRPO step: what the plan says fits, and what its two phases then take.

    python -m bench context --shape qwen3-8b --memory 80

A rollout of a hundred thousand tokens takes an hour, and says of memory what its end says. So two things are
measured that have the memory of a whole step and not its time, in one process and one after the other.

The update is a step of the trainer itself, with the settings that the plan chose, of completions that nobody
drew: random tokens. One of them has all the tokens, the others a few. A forward pass of a group of long ones
holds no more, because no two of them fit into one; and the step begins with the gradients that the others
would leave.

The rollout is a session of the engine, beside the optimizer's state that the update has left. It reserves
keys and values for a group of that length and draws a token of each; as many as the plan says run side by
side are then given all but the last tokens of their completion, which are prefilled, and draw those.

What torch's allocator holds without a use is given back before the update and before the rollout, so what the
first step left there, whose completions are short, is in neither figure. Where a GPU has more memory than the
update needs, torch keeps more of what it has freed; ``--hold`` does not let it, and so tests the plan.

Not measured: that the engine goes through all lengths between, and that a step does this for all its samples.
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
"""Tokens of the other completions."""

DRAWN = 64
"""Tokens that are drawn at the end of the long ones."""

_DEVICE = torch.device("cuda")


class GivenEngine(RolloutEngine):
    """An engine whose completions are random tokens that nobody drew; what `Clock` reads of a rollout.

    Args:
        engine: Of the model.
        lengths: Tokens of each completion of a call; those of the first call are short.
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
        # Segments that the short step left fit no long pass; whoever needs them gets them.
        torch.cuda.empty_cache()
        keep_within_limit(_DEVICE)  # as where keys and values are given up; here there are none yet
        torch.cuda.reset_peak_memory_stats()


class OneToken(Stop):
    """Ends turns after one token, as long as a sequence has fewer than so many.

    Args:
        before: Tokens from which on turns go on.
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
    """The plan of a step on this GPU with the longest completion that fits, or with one of so many tokens.

    Raises:
        QeRLError: It does not fit.
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
    """Lets a step begin with gradients, zero ones, as if passes had been made before its first."""

    def on_step_begin(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


def measure_update(trainer: Any, clock: Clock) -> dict[str, float]:
    """Runs both steps, of which the second has the long completion.

    Raises:
        QeRLError: Memory ran out; what torch says of it is printed.
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
    """Prefills and draws at the end of completions of so many tokens.

    Args:
        engine: Has sessions.
        prompt: Tokens of the prompt.
        group: Its samples, of which each may have so many tokens.
        tokens: Tokens of a completion.
        rows: Samples that get them.

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
    """Within it torch gets so many 10^9 bytes of the GPU, less what others hold."""
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
    """What the update takes, and then what the rollout takes, on a random policy of the plan's shape.

    Args:
        plan: Of the step.
        hold: The update gets 5 % more memory than the plan says, and no more.
    """
    work, sizes = plan.work, plan.sizes
    positions = work.prompt_tokens + work.completion_tokens + DRAWN
    policy = random_policy(sizes, work.weights, work.rank, positions)
    engine = PagedEngine(policy, 0, work.group)
    lengths = [SHORT] * work.group + [work.completion_tokens] + [SHORT] * (work.group - 1)
    given = GivenEngine(engine, lengths)
    clock = Clock(given)
    with tempfile.TemporaryDirectory() as folder:
        # What was not drawn has no probability to be corrected by.
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
    # `trainer` is still there, and with it the optimizer's state.
    rows = min(plan.sequences, work.group)
    yield measure_rollout(engine, work.prompt_tokens, work.group, work.completion_tokens, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench context", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--weights", default="nvfp4", choices=tuple(FORMATS))
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--tokens", type=int, help="of the completion; the most that fit by the plan")
    parser.add_argument("--hold", action="store_true", help="give the update 5 %% more than its plan at most")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def main(arguments: list[str]) -> None:
    """Runs `python -m bench context` with these arguments."""
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
