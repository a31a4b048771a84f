"""Evaluation and single answers, from names to numbers: what `qerl eval` and `qerl generate` do.

A policy is scored as it was trained: what the user does not say is taken from config.yaml of the run
(`qerl.eval.trained`), and one line names every value and where it came from. All that can be refused without
the model is refused before it is loaded: settings, the task and its data, the output folder, an adapter that
is damaged or belongs to another model.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.eval.adapter_check import prove_adapter
from qerl.eval.base_check import check_base, check_rounding, packing
from qerl.eval.evaluate import evaluate, held_out, versions
from qerl.eval.record import Record
from qerl.eval.result import EvalResult
from qerl.eval.trained import Choices, read_trained
from qerl.lora.adapter import adapter_file, check_adapter, load_adapter
from qerl.models.chat import Chat
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.hub import local_checkpoint
from qerl.models.load import load_model, load_tokenizer
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.select import make_engine
from qerl.tasks import get_task
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding, WeightFormatName

ComputeDtype = Literal["auto", "float32", "bfloat16"]
EVAL_TOKENS, ANSWER_TOKENS = 4096, 256
"""Longest completion where neither the user nor a run says one: of a problem, of `qerl generate`."""


@dataclass(frozen=True)
class Source:
    """Where a policy comes from; None takes what the run that made it says, else the default.

    Attributes:
        model: Hub id, local folder or .gguf file.
        adapter: Folder of a PEFT adapter, or None.
        weights: Format of the linears; else that of a packed checkpoint, else nvfp4.
        rounding: For checkpoints that are not packed yet; else mse.
        dtype: Of everything that is not quantised; else auto: bfloat16 on a GPU, float32 on a CPU.
        chat_template_kwargs: Arguments of the chat template; else none.
    """

    model: str
    adapter: Path | None = None
    weights: WeightFormatName | None = None
    rounding: Rounding | None = None
    dtype: ComputeDtype | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Request:
    """What is asked of a policy; None takes what the run says, else the default.

    Attributes:
        task: As in a recipe; required where no run says one.
        task_options: As in a recipe; those of the run count for its own task alone.
        samples: Completions for each problem.
        temperature: Else 0 for one sample and 0.6 for several.
        top_p: Without effect at temperature 0.
        max_tokens: Longest completion.
        limit: First problems only; None for all.
        seed: Of the sampling.

    Raises:
        QeRLError: A number is out of its range.
    """

    task: str | None = None
    task_options: dict[str, Any] | None = None
    samples: int = 1
    temperature: float | None = None
    top_p: float = 0.95
    max_tokens: int | None = None
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("samples", self.samples),
            ("limit", self.limit),
            ("max_tokens", self.max_tokens),
        ):
            if value is not None and value < 1:
                raise QeRLError(f"{name} is {value}; it must be at least 1.")


@dataclass(frozen=True)
class Loading:
    """How a policy is loaded, with nothing left open; no rounding where none is done or known."""

    model: str
    adapter: Path | None
    weights: WeightFormatName
    rounding: Rounding | None
    dtype: torch.dtype
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What decides the policy and its prompts, the contents of the files included."""
        folder = local_checkpoint(self.model)
        return {
            "model": self.model,
            "fingerprint": checkpoint_fingerprint(folder),
            "adapter": str(self.adapter) if self.adapter else None,
            "adapter_digest": _digest(adapter_file(self.adapter).read_bytes()) if self.adapter else None,
            "weights": self.weights,
            "rounding": self.rounding,
            "dtype": str(self.dtype).removeprefix("torch."),
            "chat_template_kwargs": self.chat_template_kwargs,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }


@dataclass(frozen=True)
class Policy:
    """A model that is ready to answer."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]


def decide(source: Source, choices: Choices) -> Loading:
    """How the policy is loaded; a model and an adapter that do not belong together are refused here.

    Raises:
        QeRLError: The model is not found, the adapter is damaged, or it was trained on another rounding.
    """
    packed, packed_with = packing(source.model)
    trained_with = choices.trained.settings.get("rounding")
    if packed and source.adapter is None and source.weights is None:
        weights = choices.note("weights", packed, source.model)
    else:
        weights = choices.take("weights", source.weights, packed or DEFAULT_FORMAT)
    if source.adapter is not None:
        check_adapter(source.adapter)
        if packed and source.rounding is None and source.weights is None:
            check_rounding(source.model, packed_with, trained_with)
    rounding: Any = packed_with
    if FORMATS[weights].packed and not packed:
        rounding = choices.take("rounding", source.rounding, DEFAULT_ROUNDING)
    dtype = choices.take("dtype", source.dtype, "auto")
    if dtype == "auto":
        full = choices.trained.settings.get("tuning") == "full"
        dtype = "bfloat16" if torch.cuda.is_available() and not full else "float32"
        choices.note("dtype", dtype, "which is auto on this machine")
    kwargs = choices.take("chat_template_kwargs", source.chat_template_kwargs, {})
    return Loading(source.model, source.adapter, weights, rounding, getattr(torch, dtype), kwargs)


def load(loading: Loading, console: Console) -> Policy:
    """Model, adapter, tokenizer and engine.

    Raises:
        QeRLError: Something cannot be loaded, or the adapter changes nothing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(loading.model)
    model: Any = load_model(
        loading.model,
        loading.weights,
        dtype=loading.dtype,
        device=device,
        rounding=loading.rounding or DEFAULT_ROUNDING,
    )
    if loading.adapter is not None:
        model = load_adapter(model, loading.adapter)
        prompt = tokenizer("The adapter must change what follows this.")["input_ids"]
        difference = prove_adapter(model, prompt)
        console.print(f"The adapter is in use: it moves logits by up to {difference:.3g}.")
    stops = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *([stops] if isinstance(stops, int) else stops or [])}
    engine = make_engine(model, tokenizer.pad_token_id)
    return Policy(model, tokenizer, engine, tuple(sorted(stop_ids)))


def evaluate_model(source: Source, request: Request, out: Path | None, console: Console) -> EvalResult:
    """Score a policy on the held-out problems of a task and print the result.

    Args:
        source: The policy.
        request: The task, and how it is sampled.
        out: Folder for result and completions, None for none; an evaluation that was cut off there goes on.
        console: Where progress and result go.

    Raises:
        QeRLError: Anything the user can mend.
    """
    choices = _choices(source)
    params = _sampling(request, choices)
    name, options = _task(request, choices)
    task = get_task(name, **options)
    loading = decide(source, choices)
    _say(choices, params, loading, console)
    problems = held_out(task, request.limit)
    policy_json = loading.as_json()
    record = Record(
        out,
        {"task": name, "task_options": options, "samples": request.samples}
        | {"problems": _problems_digest(problems), **asdict(params), **policy_json, "versions": versions()},
    )
    policy = load(loading, console)
    try:
        result = evaluate(
            policy.engine,
            policy.tokenizer,
            task,
            problems,
            samples=request.samples,
            params=replace(params, stop_token_ids=policy.stop_token_ids),
            console=console,
            record=record,
            chat=Chat(policy.tokenizer, loading.chat_template_kwargs),
            source={**policy_json, "task_options": options},
        )
    except KeyboardInterrupt:
        if out is not None:
            console.print(
                f"{len(record.rows)} of {len(problems) * request.samples} completions are kept in {out}; the "
                "same command goes on from there.",
                markup=False,
                soft_wrap=True,
            )
        raise
    console.print(result.summary(), markup=False, soft_wrap=True)
    return result


def answer(source: Source, prompt: str, request: Request, console: Console, system: str | None = None) -> str:
    """The policy's reply to one user message.

    Args:
        source: The policy.
        prompt: The message.
        request: How it is sampled; its task gives the system message that asks for the answer's form.
        console: Where it is said what answers.
        system: The system message; None takes that of the task, if there is one, and "" has none.

    Raises:
        QeRLError: Anything the user can mend.
    """
    for text in (prompt, system or ""):
        if not _is_text(text):
            raise QeRLError("The prompt is not valid text: it has bytes that are not UTF-8; encode it anew.")
    choices = _choices(source)
    if request.max_tokens is None and "max_completion_length" not in choices.trained.settings:
        request = replace(request, max_tokens=ANSWER_TOKENS)
    params = _sampling(request, choices)
    messages = [{"role": "user", "content": prompt}]
    if system is None and (request.task or choices.trained.settings.get("task")):
        name, options = _task(request, choices)
        messages = get_task(name, **options).prompt(prompt)
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    loading = decide(source, choices)
    _say(choices, params, loading, console)
    policy = load(loading, console)
    ids = Chat(policy.tokenizer, loading.chat_template_kwargs).ids(messages)
    seeded = replace(params, stop_token_ids=policy.stop_token_ids)
    result = policy.engine.generate([ids], 1, seeded)
    return policy.tokenizer.decode(result.completions[0].token_ids, skip_special_tokens=True)


def _choices(source: Source) -> Choices:
    """What the run says that made the policy; a folder without an adapter is refused before what it lacks."""
    trained = read_trained(source.adapter, source.model)
    if source.adapter is not None:
        adapter_file(source.adapter)
    return Choices(trained)


def _sampling(request: Request, choices: Choices) -> SamplingParams:
    tokens = choices.take("max_tokens", request.max_tokens, EVAL_TOKENS, key="max_completion_length")
    default = 0.0 if request.samples == 1 else 0.6
    temperature = choices.take("temperature", request.temperature, default, key="")
    return SamplingParams(tokens, temperature, request.top_p, seed=request.seed)


def _task(request: Request, choices: Choices) -> tuple[str, dict[str, Any]]:
    """Name and options; the run's options belong to the run's task."""
    name = choices.take("task", request.task, None)
    if name is None:
        raise QeRLError("No task is given and no run says one; pass --task, for example --task gsm8k.")
    same = name == choices.trained.settings.get("task")
    options = choices.take("task_options", request.task_options, {}, key="task_options" if same else "")
    return name, options


def _say(choices: Choices, params: SamplingParams, loading: Loading, console: Console) -> None:
    """One line with the values and where they came from; a doubt about the adapter's base."""
    trained_at = choices.trained.settings.get("temperature", params.temperature)
    of_run = "" if trained_at == params.temperature else f" The run sampled at temperature {trained_at}."
    console.print(f"Settings: {choices}.{of_run}", markup=False, highlight=False, soft_wrap=True)
    doubt = check_base(loading.adapter, loading.model) if loading.adapter is not None else ""
    if doubt:
        console.print(doubt, markup=False, highlight=False, soft_wrap=True)


def _problems_digest(problems: Dataset) -> str:
    return _digest(json.dumps(list(problems), sort_keys=True, default=str).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
