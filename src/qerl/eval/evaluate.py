"""Accuracy on a task, with an interval.

One sample a problem, decoded greedily, is the usual accuracy; its 95 % interval is Wilson's. With K samples a
problem, avg@K is the mean over problems of the share that is right. Its interval treats the problem as the
unit, since the samples of one problem are not independent of each other: mean +- 1.96 standard errors over
problems. pass@k for k <= K is the unbiased estimator 1 - C(K - c, k) / C(K, k) with c right samples (arXiv
2107.03374).

The same function scores the base model and the trained one, from the prompts and with the accuracy reward
that training uses. A completion without a final answer counts as wrong; the share that has one is reported,
since a model can gain accuracy by answering better or merely by answering in the form asked for.

What was given up: where all problems have the same share, avg@K's interval has no width, which says more
about the estimate than about the model.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

import qerl
from qerl.errors import QeRLError
from qerl.rollout.engine import Completion, RolloutEngine, SamplingParams
from qerl.seeding import derive_seed
from qerl.tasks.base import Task
from qerl.tasks.guard import guarded

Z95 = 1.959964
PROBLEMS_AT_A_TIME = 64


@dataclass(frozen=True)
class EvalResult:
    """Score of a policy on a task.

    Attributes:
        task: Name of the task.
        problems: Problems scored.
        samples: Completions for each.
        accuracy: Share of right completions, averaged over problems (avg@K).
        interval: 95 % interval of the accuracy.
        pass_at: pass@k by k, for powers of two up to K.
        answered: Share of completions that state a final answer.
        failed: Completions whose answer could not be judged, by error or time limit; they count as wrong.
        truncated: Share of completions that reached max_tokens.
        mean_tokens: Mean length of a completion.
        settings: How completions were sampled.
        source: What was scored.
        versions: Of the libraries that matter.
        date: UTC, ISO 8601.
    """

    task: str
    problems: int
    samples: int
    accuracy: float
    interval: tuple[float, float]
    pass_at: dict[int, float]
    answered: float
    failed: int
    truncated: float
    mean_tokens: float
    settings: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    def summary(self) -> str:
        """One line for people."""
        low, high = (100 * bound for bound in self.interval)
        kind = "accuracy" if self.samples == 1 else f"avg@{self.samples}"
        line = f"{self.task}: {kind} {100 * self.accuracy:.1f} % (95 % interval {low:.1f} to {high:.1f}, "
        line += f"{self.problems} problems)"
        if self.samples > 1:
            line += ", " + ", ".join(f"pass@{k} {100 * value:.1f} %" for k, value in self.pass_at.items())
        line += f"; {100 * self.answered:.1f} % of the completions state an answer"
        if self.failed:
            line += f", {self.failed} of them could not be judged and count as wrong"
        return line


def evaluate(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    samples: int,
    params: SamplingParams,
    console: Console,
    limit: int | None = None,
    out: Path | None = None,
    source: dict[str, Any] | None = None,
) -> EvalResult:
    """Sample completions for the held-out problems and compare their answers.

    Args:
        engine: Samples from the policy.
        tokenizer: With a chat template.
        task: Gives problems and judges answers.
        samples: Completions for each problem (K).
        params: How they are sampled.
        console: Where progress is shown.
        limit: First problems only; None for all.
        out: Folder for result.json and completions.jsonl; None writes nothing.
        source: What is scored, kept in the result.

    Raises:
        QeRLError: There are no problems, or fewer than one sample is asked for.
    """
    if samples < 1:
        raise QeRLError(f"samples is {samples}; at least one completion a problem is needed.")
    problems = task.test()
    problems = problems.select(range(min(limit if limit is not None else len(problems), len(problems))))
    if len(problems) == 0:
        raise QeRLError(f"The task {task.name} gives no problems to score; raise --limit.")
    completions = _sample(engine, tokenizer, problems, samples, params, console)
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    answers = [task.extract(text) for text in texts]
    right, failed = _judge(task, _repeat(problems, samples), texts)
    counts = [sum(right[i : i + samples]) for i in range(0, len(right), samples)]
    result = EvalResult(
        task=task.name,
        problems=len(problems),
        samples=samples,
        accuracy=fmean(counts) / samples,
        interval=wilson(sum(counts), len(counts)) if samples == 1 else _clustered(counts, samples),
        pass_at={k: fmean(pass_at(samples, c, k) for c in counts) for k in _powers_of_two(samples)},
        answered=fmean(answer is not None for answer in answers),
        failed=failed,
        truncated=fmean(c.finish_reason == "length" for c in completions),
        mean_tokens=fmean(len(c.token_ids) for c in completions),
        settings=asdict(params),
        source=source or {},
        versions={p.__name__: str(p.__version__) for p in (qerl, torch, transformers, peft)},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if out is not None:
        rows = zip(_repeat(problems, samples), texts, answers, right, completions, strict=True)
        _write(out, result, rows)
    return result


def _sample(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Dataset,
    samples: int,
    params: SamplingParams,
    console: Console,
) -> list[Completion]:
    """Completions of all problems, a slice at a time so that progress can be shown."""
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for row in problems
    ]
    completions: list[Completion] = []
    columns = (TextColumn("scoring"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(prompts))
        for start in range(0, len(prompts), PROBLEMS_AT_A_TIME):
            part = prompts[start : start + PROBLEMS_AT_A_TIME]
            # The engine numbers prompts from 0 in each call; another seed keeps slices apart.
            seeded = replace(params, seed=derive_seed("eval", params.seed, start))
            completions += engine.generate(part, samples, seeded).completions
            progress.advance(bar, len(part))
    return completions


def _judge(task: Task, rows: list[dict[str, Any]], texts: list[str]) -> tuple[list[bool], int]:
    """Whether each completion is right, within a time limit for each, and how many could not be judged."""
    accuracy = guarded(task.rewards[0])
    failures: list[float] = []
    right = []
    for row, text in zip(rows, texts, strict=True):
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        scores = accuracy([row["prompt"]], [text], log_metric=lambda _, n: failures.append(n), **columns)
        right.append(scores == [1.0])
    return right, round(sum(failures))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = successes / trials
    spread = Z95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def _clustered(counts: Sequence[int], samples: int) -> tuple[float, float]:
    """Interval of avg@K from the spread between problems; the whole range where there is one problem."""
    if len(counts) < 2:
        return 0.0, 1.0
    shares = [count / samples for count in counts]
    half = Z95 * stdev(shares) / math.sqrt(len(shares))
    return max(0.0, fmean(shares) - half), min(1.0, fmean(shares) + half)


def pass_at(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k completions drawn from the K sampled ones is right."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def _repeat(problems: Dataset, samples: int) -> list[dict[str, Any]]:
    return [row for row in problems for _ in range(samples)]


def _write(out: Path, result: EvalResult, rows: Any) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        with (out / "completions.jsonl").open("w", encoding="utf-8") as file:
            for row, text, found, is_right, completion in rows:
                record = {
                    "prompt": row["prompt"],
                    "expected": row["answer"],
                    "completion": text,
                    "answer": found,
                    "right": is_right,
                    "finish_reason": completion.finish_reason,
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise QeRLError(f"The evaluation cannot be written to {out}: {error.strerror}.") from error
