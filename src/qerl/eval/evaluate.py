"""Accuracy on a task, with an interval.

One sample per problem, decoded greedily, gives the usual accuracy. With K samples per problem, avg@K is the
mean over problems of the share of right samples, and pass@k for k <= K is the unbiased estimator
1 - C(K - c, k) / C(K, k) with c right samples (arXiv 2107.03374); `qerl.eval.interval` gives 95 % intervals
of both.

Base model and trained model are scored by the same function, with the prompts and the accuracy reward of
training. A completion without a final answer counts as wrong; the share with an answer is reported, since a
model can gain accuracy by answering better or merely by using the requested format.

Problems are sampled in slices, and each slice is judged and saved (`qerl.eval.record`) before the next
begins. A slice has at least the number of completions that the engine recommends per call (the paged engine
4096), so little time is spent waiting for the last long completion: slices of 1024 in 512 rows took 14 to
20 % longer (lognormal lengths, simulated with `bench.tail`). Given up: up to one slice of work is lost at an
interruption.
"""

from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from qerl import __version__
from qerl.agents.conversations import Conversations
from qerl.agents.thinking import thinking_of
from qerl.agents.trajectory import Message
from qerl.errors import QeRLError
from qerl.eval.interval import accuracy_interval, pass_at, pass_interval
from qerl.eval.record import EvalResult, Record, Row, Stratum
from qerl.eval.sampling import MAX_CONVERSATIONS, Said, in_conversations, in_one_turn
from qerl.models.chat import Chat
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.seeding import ProblemSeeds, problem_key
from qerl.tasks.base import Task
from qerl.tasks.guard import GuardedReward, stratum
from qerl.tasks.together import guarded


def held_out(task: Task, limit: int | None = None) -> Dataset:
    """Return the held-out problems of a task: all of them, or the first ``limit``.

    Raises:
        QeRLError: There are none.
    """
    problems = task.test()
    problems = problems.select(range(min(limit if limit is not None else len(problems), len(problems))))
    if len(problems) == 0:
        raise QeRLError(f"No problems of the task {task.name} to score; it needs held-out problems.")
    return problems


def evaluate(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Dataset,
    *,
    samples: int,
    params: SamplingParams,
    console: Console,
    record: Record | None = None,
    chat: Chat | None = None,
    source: dict[str, Any] | None = None,
    conversations: Conversations | None = None,
) -> EvalResult:
    """Sample, judge and record completions of problems of a task, and return the policy's score.

    Args:
        engine: Samples from the policy.
        tokenizer: A tokenizer with a chat template.
        task: Judges answers.
        problems: From `held_out`.
        samples: Completions per problem (K).
        params: Sampling parameters.
        console: Shows progress.
        record: Stores the completions; may already hold those of an interrupted evaluation.
        chat: Renders prompts; None renders them without template arguments.
        source: Description of the policy, stored in the result.
        conversations: Conversations with tools or an environment; None samples one turn per completion.

    Raises:
        QeRLError: A prompt cannot be rendered, the engine rejects the call, or the record cannot be written.
    """
    if samples < 1:
        raise QeRLError(f"samples is {samples}; at least one completion per problem is needed.")
    record = record or Record(None, {})
    chat = chat or Chat(tokenizer)
    task.opening = chat.opening
    at_once = engine.rows_per_call
    if conversations is not None:
        at_once = min(at_once, MAX_CONVERSATIONS)
    size = record.problems_at_a_time(-(-at_once // samples), samples)
    columns = (TextColumn("scoring"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    done = len(record.rows) // samples
    every = list(problems)
    seeds = ProblemSeeds(params.seed).of([problem_key(row) for row in every], samples)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(problems) * samples, completed=done * samples)
        for start in range(done, len(problems), size):
            part = slice(start, start + size)
            rows = every[part]
            own = seeds[start * samples :][: len(rows) * samples]
            if conversations is not None:
                found = in_conversations(conversations, engine, rows, samples, params, own)
            else:
                prompts = [chat.ids(row["prompt"]) for row in rows]
                found = in_one_turn(
                    engine, tokenizer, prompts, samples, params, own, lambda *_: progress.advance(bar)
                )
            record.add(_scored(task, [row for row in rows for _ in range(samples)], found))
            progress.update(bar, completed=(start + len(rows)) * samples)
    strata = None if task.strata is None else [stratum(task.strata, v) for v in problems[task.strata]]
    result = _result(task.name, record.rows, strata, samples, params, source or {})
    record.finish(result)
    return result


def _scored(task: Task, rows: list[dict[str, Any]], found: list[Said]) -> list[Row]:
    """Judge completions, and return one row per completion."""
    accuracy = guarded(task.rewards[0])
    scored = []
    for row, said in zip(rows, found, strict=True):
        right, judged = _judge(accuracy, row, said.text)
        scored.append(
            {
                "prompt": row["prompt"],
                "expected": row["answer"],
                "completion": said.text,
                "answer": task.of(row).extract(said.text),
                "right": right,
                "judged": judged,
                "finish_reason": said.end,
                "tokens": said.tokens,
                "thoughts_closed_by": said.thoughts,
            }
        )
    return scored


def _judge(accuracy: GuardedReward, row: dict[str, Any], text: str | list[Message]) -> tuple[bool, bool]:
    """Return whether a completion is right, and whether it could be judged without error or timeout."""
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    scores = accuracy([row["prompt"]], [text], **columns)
    return scores == [1.0], accuracy.last.failed == 0


def _result(
    name: str,
    rows: list[Row],
    strata: list[str] | None,
    samples: int,
    params: SamplingParams,
    source: dict[str, Any],
) -> EvalResult:
    """Compute the score from the rows; ``strata`` has the stratum of each problem."""
    right = [row["right"] for row in rows]
    counts = [sum(right[i : i + samples]) for i in range(0, len(right), samples)]
    return EvalResult(
        task=name,
        problems=len(counts),
        samples=samples,
        accuracy=fmean(counts) / samples,
        interval=accuracy_interval(counts, samples),
        pass_intervals={k: pass_interval(counts, samples, k) for k in _powers_of_two(samples)},
        pass_at={k: fmean(pass_at(samples, c, k) for c in counts) for k in _powers_of_two(samples)},
        answered=fmean(row["answer"] is not None for row in rows),
        failed=sum(not row["judged"] for row in rows),
        errors=sum(row["finish_reason"] == "error" for row in rows),
        truncated=fmean(row["finish_reason"] == "length" for row in rows),
        mean_tokens=fmean(row["tokens"] for row in rows),
        thoughts_closed_by=_closed(rows) if thinking_of(params.stops) else {},
        settings=params.plain,
        source=source,
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        strata={} if strata is None else _by_stratum(strata, counts, samples),
    )


def _closed(rows: list[Row]) -> dict[str, float]:
    """Return the shares of completions whose thoughts the model closed and the budget closed."""
    closed = [row["thoughts_closed_by"] for row in rows]
    return {by: closed.count(by) / len(closed) for by in ("model", "budget")}


def _by_stratum(strata: list[str], counts: list[int], samples: int) -> dict[str, Stratum]:
    """Return scores by stratum, sorted by name."""
    parts: dict[str, list[int]] = {name: [] for name in sorted(set(strata))}
    for name, count in zip(strata, counts, strict=True):
        parts[name].append(count)
    return {
        name: Stratum(len(part), fmean(part) / samples, accuracy_interval(part, samples))
        for name, part in parts.items()
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect sampled tokens."""
    libraries = (torch, transformers, peft)
    return {"qerl": __version__} | {p.__name__: str(p.__version__) for p in libraries}


def _powers_of_two(maximum: int) -> list[int]:
    return [2**i for i in range(maximum.bit_length())]
