"""Implementation of `qerl eval` and `qerl generate`: evaluations and single answers.

A policy is scored as it was trained: settings that the user does not give come from config.yaml of the run
(`qerl.eval.policy`), and one line lists every value and its origin. All checks that do not need the model run
before it is loaded: settings, task and data, output folder, an adapter that is damaged or belongs to another
model.
"""

import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from qerl.agents.thinking import CLOSING
from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate, held_out, versions
from qerl.eval.policy import Policy, choices_of, load
from qerl.eval.record import EvalResult, Record
from qerl.eval.request import Request
from qerl.eval.sampling import conversations_of, in_one_turn
from qerl.models.chat import Chat
from qerl.models.decide import Choices, Loading, Source, decide, digest
from qerl.models.fingerprint import check_base
from qerl.models.hub import check_if_local, local_config
from qerl.rollout.engine import SamplingParams
from qerl.settings.recipe import FIELDS
from qerl.tasks import Task, get_task

_OF_TURNS = ("tool_timeout", "tool_errors", "tool_output_limit")
"""Settings of tools and environment that only the run can give."""

EVAL_TOKENS, ANSWER_TOKENS = 4096, 256
"""Maximum tokens of a completion if neither user nor run gives a value: for `qerl eval`, `qerl generate`."""


@dataclass(frozen=True)
class Job:
    """An evaluation with all settings decided; no model is loaded yet.

    Attributes:
        asked: The task and its sampling settings.
        params: Sampling parameters without stop tokens and stops, which need the loaded policy.
        problems: The problems to score.
        turns: Tools and environment, as `conversations_of` takes them; empty for completions of one turn.
        source: Everything that determines the policy and the problems, as stored in the result.
    """

    asked: Request
    params: SamplingParams
    task: Task
    problems: Dataset
    turns: dict[str, Any]
    loading: Loading
    source: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that determines the completions, as plain JSON values."""
        return {
            "task": self.asked.task,
            "samples": self.asked.samples,
            **self.params.plain,
            **self.source,
            "versions": versions(),
        }


class Problems:
    """Cache of tasks and their problems to score, each loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Task, Dataset]] = {}

    def of(self, spec: str, options: dict[str, Any], limit: int | None) -> tuple[Task, Dataset]:
        """Return a task and its problems.

        Raises:
            QeRLError: The task is unknown, or its problems cannot be loaded.
        """
        key = json.dumps([spec, options, limit], sort_keys=True, default=str)
        if key not in self._loaded:
            task = get_task(spec, **options)
            self._loaded[key] = task, held_out(task, limit)
        return self._loaded[key]


def evaluate_model(source: Source, request: Request, out: Path | None, console: Console) -> EvalResult:
    """Score a policy on the held-out problems of a task; print and return the score.

    Args:
        source: The policy.
        request: The task and its sampling settings.
        out: Folder for result and completions; an interrupted evaluation there is continued. None stores
            nothing.
        console: Shows progress and result.

    Raises:
        QeRLError: Anything the user can fix.
    """
    job = prepare(source, request, Problems(), console)
    record = Record(out, job.settings)
    return score(job, load(job.loading, console), record, console)


def prepare(source: Source, request: Request, problems: Problems, console: Console) -> Job:
    """Decide all settings of an evaluation, and print their values and origins.

    Raises:
        QeRLError: Any error that can be found without loading the model.
    """
    choices = choices_of(source)
    asked, params = _sampled(request, choices)
    if request.task is None and not choices.of_run.get("task") and not check_if_local(source.model):
        local_config(source.model)  # a wrong model is the likelier mistake: a run is given in its place
    spec, options = _task(request, choices)
    if not get_task(spec, **options).on_hub:  # a wrong name or file is an error before a model is looked for
        problems.of(spec, options, request.limit)
    loading = decide(source, choices)
    turns = _turns(request, choices, spec)
    _say(choices, params, loading, console)
    task, chosen = problems.of(spec, options, request.limit)
    contents = digest(json.dumps(list(chosen), sort_keys=True, default=str).encode())
    source_json = loading.as_json() | {"task_options": options, "problems": contents}
    if turns:
        source_json["turns"] = turns
    asked = replace(asked, task=spec, task_options=options)
    return Job(asked, params, task, chosen, turns, loading, source_json | asked.ends)


def score(job: Job, policy: Policy, record: Record, console: Console) -> EvalResult:
    """Run a job with its loaded policy; print and return the result.

    Raises:
        QeRLError: As :func:`qerl.eval.evaluate.evaluate`.
    """
    engine, tokenizer, kwargs = policy.engine, policy.tokenizer, job.loading.chat_template_kwargs
    talk: Any = contextlib.nullcontext()
    if job.turns:
        talk = conversations_of(tokenizer, kwargs, **job.turns)
    try:
        with talk as conversations:
            result = evaluate(
                engine,
                tokenizer,
                job.task,
                job.problems,
                samples=job.asked.samples,
                params=policy.stopping(job.params, job.asked),
                console=console,
                record=record,
                chat=Chat(tokenizer, kwargs),
                source=job.source,
                conversations=conversations,
            )
    except KeyboardInterrupt:
        if record.folder is not None:
            console.print(
                f"{len(record.rows)} of {len(job.problems) * job.asked.samples} completions are kept in "
                f"{record.folder}; the same command goes on from there.",
                markup=False,
                soft_wrap=True,
            )
        raise
    console.print(result.summary(), markup=False, soft_wrap=True)
    return result


def answer(source: Source, prompt: str, request: Request, console: Console, system: str | None = None) -> str:
    """Return the policy's reply to one user message.

    Args:
        source: The policy.
        prompt: The message.
        request: Sampling settings; its task provides the system message that describes the answer format.
        console: Shows the settings of the policy.
        system: The system message; None takes that of the task, if there is one, and "" uses none.

    Raises:
        QeRLError: Anything the user can fix.
    """
    if re.search("[\ud800-\udfff]", prompt + (system or "")):
        raise QeRLError("The prompt has bytes that are not UTF-8; encode it as UTF-8.")
    choices = choices_of(source)
    of_run = choices.of_run
    if request.max_tokens is None and "max_completion_length" not in of_run:
        request = replace(request, max_tokens=ANSWER_TOKENS)
    asked, params = _sampled(request, choices)
    messages = [{"role": "user", "content": prompt}]
    if system is None and (request.task or of_run.get("task")):
        if request.task is None:
            named = [of_run["task"], of_run.get("task_options")]
            choices.refuse_foreign(named, 'give the system message with --system, "" for none')
        name, options = _task(request, choices)
        messages = get_task(name, **options).prompt(prompt)
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    loading = decide(source, choices)
    _say(choices, params, loading, console)
    policy = load(loading, console)
    ids = Chat(policy.tokenizer, loading.chat_template_kwargs).ids(messages)
    (said,) = in_one_turn(policy.engine, policy.tokenizer, [ids], 1, policy.stopping(params, asked))
    return str(said.text)


def _sampled(request: Request, choices: Choices) -> tuple[Request, SamplingParams]:
    """Return the request with all settings decided, and its sampling parameters.

    Raises:
        QeRLError: The thinking budget is not below the length limit, or several samples are asked for that
            would be the same.
    """
    tokens = choices.take("max_tokens", request.max_tokens, EVAL_TOKENS, key="max_completion_length")
    default = 0.0 if request.samples == 1 else 0.6
    temperature = choices.take("temperature", request.temperature, default, key="")
    if request.samples > 1 and temperature == 0:
        raise QeRLError(
            f"samples is {request.samples} with temperature 0, at which all samples of a problem are the "
            "same; leave out --samples, or set --temperature above 0."
        )
    strings = choices.take("stop_strings", request.stop_strings, [])
    budget, end = choices.take("thinking_budget", request.thinking_budget, None), request.thinking_end
    if budget is not None:
        if budget >= tokens:
            raise QeRLError(
                f"thinking_budget is {budget}; it must be below --max_tokens, which is {tokens}. Lower it "
                "or raise --max_tokens."
            )
        end = choices.take("thinking_end", end, CLOSING)
    asked = replace(request, max_tokens=tokens, temperature=temperature, stop_strings=strings)
    asked = replace(asked, thinking_budget=budget, thinking_end=end)
    return asked, SamplingParams(tokens, temperature, request.top_p, seed=request.seed)


def _task(request: Request, choices: Choices) -> tuple[str, dict[str, Any]]:
    """Return the task's name and options; the run's options apply only to the run's task."""
    name = choices.take("task", request.task, None)
    if name is None:
        raise QeRLError(
            "No task is given, and none is known from a run; pass --task, for example --task gsm8k."
        )
    same = name == choices.of_run.get("task")
    options = choices.take("task_options", request.task_options, {}, key="task_options" if same else "")
    return name, options


def _turns(request: Request, choices: Choices, spec: str) -> dict[str, Any]:
    """Return tools and environment as `conversations_of` takes them; the run's apply to its own task only."""
    same = spec == choices.of_run.get("task")

    def take(name: str, given: Any, default: Any) -> Any:
        return choices.take(name, given, default, key=name if same else "")

    tools = take("tools", request.tools, [])
    environment = take("environment", request.environment, None)
    if not tools and environment is None:
        return {}
    iterations = "max_tool_calling_iterations"
    return {
        "tools": list(tools),
        "environment": environment,
        "environment_options": take("environment_options", request.environment_options, {}),
        **{name: take(name, None, FIELDS[name].default) for name in _OF_TURNS},
        iterations: take(iterations, request.max_tool_calling_iterations, None),
    }


def _say(choices: Choices, params: SamplingParams, loading: Loading, console: Console) -> None:
    """Print one line with the values and their origins, and a warning if the adapter's base is in doubt."""
    trained_at = choices.of_run.get("temperature", params.temperature)
    of_run = "" if trained_at == params.temperature else f" The run sampled at temperature {trained_at}."
    console.print(f"Settings: {choices}.{of_run}", markup=False, highlight=False, soft_wrap=True)
    doubt = check_base(loading.adapter, loading.model) if loading.adapter is not None else ""
    if doubt:
        console.print(doubt, markup=False, highlight=False, soft_wrap=True)
