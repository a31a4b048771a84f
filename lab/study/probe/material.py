"""What a task gives to a probe: prompts to sample, prompts to calibrate on, and worked solutions to read."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lab.study.named import find_task
from lab.study.probe.measure import Judge
from lab.study.probe.spec import Probe
from lab.study.probe.walk import Ints
from qerl.errors import QeRLError
from qerl.eval.evaluate import held_out
from qerl.models.chat import Chat
from qerl.tasks.arithmetic import Arithmetic, draw_problems
from qerl.tasks.base import Task
from qerl.tasks.guard import stratum


@dataclass(frozen=True)
class Material:
    """Problems of one task as token ids.

    Attributes:
        prompts: Of the held-out problems that are sampled.
        calibration: Prompts of training problems.
        solutions: Token ids [problems, T] of the first held-out problems' worked solutions with the stop
            token, filled with stop tokens; no rows where the task has none.
        judge: Says what is right.
    """

    prompts: list[list[int]]
    calibration: list[list[int]]
    solutions: Ints
    judge: Judge


def make_material(probe: Probe, name: str, tokenizer: PreTrainedTokenizerBase) -> Material:
    """The material of the probe's task of this name.

    Raises:
        QeRLError: The task or its options are unknown, or it has too few problems.
    """
    choice = probe.tasks[name]
    task = find_task(choice.task, choice.task_options)
    chat = Chat(tokenizer)
    task.opening = chat.opening
    problems = held_out(task, probe.problems)
    if len(problems) < probe.problems:
        raise QeRLError(
            f"The task {name} has {len(problems)} held-out problems; lower problems, {probe.problems}."
        )
    training = task.train()
    training = training.select(range(min(probe.calibration_problems, len(training))))
    return Material(
        prompts=_ids(chat, problems),
        calibration=_ids(chat, training),
        solutions=_solutions(probe, task, tokenizer),
        judge=Judge(task, tokenizer, list(problems)),
    )


def strata_of(probe: Probe, name: str) -> list[str]:
    """Name of the part of a task that each sampled problem belongs to; empty if it has no parts."""
    choice = probe.tasks[name]
    task = find_task(choice.task, choice.task_options)
    if task.strata is None:
        return []
    return [stratum(task.strata, value) for value in held_out(task, probe.problems)[task.strata]]


def _ids(chat: Chat, problems: Dataset) -> list[list[int]]:
    return [chat.ids(prompt) for prompt in problems["prompt"]]


def _solutions(probe: Probe, task: Task, tokenizer: PreTrainedTokenizerBase) -> Ints:
    """Worked solutions; generated problems have them, others only an answer."""
    tokens = probe.max_completion_length
    count = min(probe.solution_problems, probe.problems)
    if not isinstance(task, Arithmetic):
        return np.zeros((0, tokens), dtype=np.int64)
    drawn = draw_problems("test", task.level, task.test_size, task.seed)[:count]
    stop = tokenizer.eos_token_id
    texts = [tokenizer(task.solution(problem), add_special_tokens=False)["input_ids"] for problem in drawn]
    return np.array([([*ids, *[stop] * tokens])[:tokens] for ids in texts], dtype=np.int64).reshape(
        -1, tokens
    )
