"""From names to a policy that is ready to answer, as it was trained.

Whoever saves a policy writes config.yaml and policy.json beside it (`qerl.trainer.resume.provenance`). From
there evaluation takes what it is not told: the format and rounding of the weights, the dtype, the task with
its options, the length of a completion, and the arguments of the chat template. What is told always wins,
and where each value came from is kept (`Choices`), to be said once before anything is scored. Names of code
that is not QeRL's have to be told, because whoever made the folder wrote them.

How the policy is loaded is settled first (`decide`); the model is loaded after that (`load`), and an adapter
has to prove that it is in use. Policies that differ in the adapter alone, as the checkpoints of a run do,
share one loaded base (`OneAtATime`).
"""

import gc
import hashlib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.agents.thinking import ThinkingBudget
from qerl.errors import QeRLError
from qerl.eval.request import Request
from qerl.families.parts import eval_mode
from qerl.fp4.checkpoint import read_config
from qerl.lora.adapter import adapter_file, check_adapter, exchange_adapter, load_adapter
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.hub import LocalModel, find_model
from qerl.models.load import check_model, end_token_ids, load_model, load_tokenizer
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.select import make_engine
from qerl.rollout.stops import Stop, StopStrings
from qerl.run_folder import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    policy_folders,
    read_json,
    read_policy,
    read_settings,
)
from qerl.settings.checks import checked
from qerl.settings.recipe import FIELDS, type_of
from qerl.user_code import foreign_code, named_again
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding, WeightFormatName

ComputeDtype = Literal["auto", "float32", "bfloat16"]

_READ = (
    "weights",
    "rounding",
    "dtype",
    "tuning",
    "task",
    "task_options",
    "chat_template_kwargs",
    "tools",
    "environment",
    "environment_options",
    "tool_timeout",
    "tool_errors",
    "tool_output_limit",
    "max_tool_calling_iterations",
    "max_completion_length",
    "stop_strings",
    "thinking_budget",
    "thinking_end",
    "temperature",
)
"""Settings of a run that evaluation reads."""

_LEFT_OUT = ("max_completion_length", "temperature")
"""Those of them that a run's config.yaml leaves out where they stand at their defaults."""


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
        trust_remote_code: Whether Python code that comes with the checkpoint may run; what the run says of it
            does not count, since an adapter's files may be anybody's.
    """

    model: str
    adapter: Path | None = None
    weights: WeightFormatName | None = None
    rounding: Rounding | None = None
    dtype: ComputeDtype | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    trust_remote_code: bool = False


class Choices:
    """Values, each from the first of a flag, the run and a default, with where it came from.

    Args:
        of_run: What the run says that made the policy; nothing where none is known.
        where: The config.yaml that says it.
    """

    def __init__(self, of_run: Mapping[str, Any] | None = None, where: Path | None = None) -> None:
        self.of_run = of_run or {}
        self.where = where
        self._said: dict[str, tuple[Any, str]] = {}

    def take(self, name: str, given: Any, default: Any, key: str | None = None) -> Any:
        """A value; ``given`` and what the run says count unless they are None.

        Args:
            name: The flag's name.
            given: What the user said.
            default: Where neither says anything.
            key: The run's name for it, if it is another one; empty where the run has no say.

        Raises:
            QeRLError: What the run says names code that is not QeRL's.
        """
        of_run = self.of_run.get(name if key is None else key)
        if given is not None:
            return self.note(name, given, f"from --{name}")
        if of_run is not None:
            again = shlex.join(named_again({name: of_run}))
            self.refuse_foreign(of_run, f"if you trust it, name it yourself with {again}")
            return self.note(name, of_run, f"from {self.where}")
        return self.note(name, default, "default")

    def note(self, name: str, value: Any, origin: str) -> Any:
        """Keep where a value came from, in the place of an earlier one of this name, and give the value."""
        if value not in (None, {}, []):
            self._said[name] = value, origin
        return value

    def refuse_foreign(self, of_run: Any, instead: str) -> None:
        """Refuse a value of the run that names code which is not QeRL's.

        Args:
            of_run: The value.
            instead: What the user can do.

        Raises:
            QeRLError: It does.
        """
        name = foreign_code(of_run)
        if name is not None:
            raise QeRLError(
                f"{self.where} names {name!r}, whose code is not QeRL's and may be anybody's, as the folder "
                f"may; {instead}."
            )

    def __str__(self) -> str:
        """Names and values by origin: ``task gsm8k, weights nvfp4 (from FILE); max_tokens 64 (default)``."""
        by_origin: dict[str, list[str]] = {}
        for name, (value, origin) in self._said.items():
            by_origin.setdefault(origin, []).append(f"{name} {value}")
        return "; ".join(f"{', '.join(values)} ({origin})" for origin, values in by_origin.items())


def choices_of(source: Source) -> Choices:
    """What the run says that made an adapter, or without one the run that tuned a whole model.

    The file lies beside an adapter, or beside the weights of a fully tuned model. An older checkpoint-N
    folder has none; its run's lies one folder up.

    Raises:
        QeRLError: A config.yaml cannot be read or has a value of a wrong kind, or the adapter's folder holds
            none.
    """
    folder = Path(source.model).expanduser() if source.adapter is None else source.adapter
    of_run, where = _read_run(folder, whole=source.adapter is None)
    if source.adapter is not None:
        adapter_file(source.adapter)
    return Choices(of_run, where)


def _read_run(folder: Path, whole: bool) -> tuple[dict[str, Any], Path | None]:
    """Settings of the run that saved a policy, and their file; ``whole`` says that it has no adapter."""
    for place in policy_folders(folder):
        settings = read_settings(place)
        if settings is None:
            continue
        if whole and settings.get("tuning") != "full":
            break  # not a run's: the file is somebody else's
        path = place / CONFIG_FILE
        said = {name: FIELDS[name].default for name in _LEFT_OUT} | settings | read_policy(folder)
        try:
            known = {
                name: checked(name, said[name], type_of(name)) for name in _READ if said.get(name) is not None
            }
        except QeRLError as error:
            raise QeRLError(f"{path} is not as a run wrote it: {error} Restore the file.") from error
        return known, path
    return {}, None


@dataclass(frozen=True)
class Loading:
    """How a policy is loaded, with nothing left open; no rounding where none is done or known."""

    model: LocalModel
    adapter: Path | None
    weights: WeightFormatName
    rounding: Rounding | None
    dtype: torch.dtype
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def as_json(self) -> dict[str, Any]:
        """What decides the policy and its prompts, the contents of the files included."""
        return {
            "model": self.model.name,
            "fingerprint": checkpoint_fingerprint(self.model.folder),
            "adapter": str(self.adapter) if self.adapter else None,
            "adapter_digest": digest(adapter_file(self.adapter).read_bytes()) if self.adapter else None,
            "weights": self.weights,
            "rounding": self.rounding,
            "dtype": str(self.dtype).removeprefix("torch."),
            "chat_template_kwargs": self.chat_template_kwargs,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }

    def load(self) -> PreTrainedModel:
        """The model without its adapter, on the GPU if there is one.

        Raises:
            QeRLError: As `load_model`.
        """
        return load_model(
            self.model,
            self.weights,
            dtype=self.dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
            rounding=self.rounding or DEFAULT_ROUNDING,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True)
class Policy:
    """A model that is ready to answer, and how it was loaded."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]
    loading: Loading

    def stopping(self, params: SamplingParams, asked: Request) -> SamplingParams:
        """These parameters, with what ends and interrupts completions.

        Raises:
            QeRLError: There is a budget of thinking and the model does not think.
        """
        stops: list[Stop] = []
        if asked.stop_strings:
            stops.append(StopStrings(self.tokenizer, asked.stop_strings))
        if asked.thinking_budget is not None:
            assert asked.thinking_end is not None, "settled with the budget"
            stops.append(ThinkingBudget(self.tokenizer, asked.thinking_budget, asked.thinking_end))
        return replace(params, stop_token_ids=self.stop_token_ids, stops=tuple(stops))


def decide(source: Source, choices: Choices) -> Loading:
    """How the policy is loaded; a model and an adapter that do not belong together are refused here.

    Raises:
        QeRLError: The model is not found, the adapter is damaged, or it was trained on another rounding.
    """
    model = find_model(source.model)
    config, _, format = read_config(model.folder)
    packed, packed_with = (None, None) if format is None else (format.name, config.get("qerl_rounding"))
    if packed and source.adapter is None and source.weights is None:
        weights = choices.note("weights", packed, source.model)
    else:
        weights = choices.take("weights", source.weights, packed or DEFAULT_FORMAT)
    if source.adapter is not None:
        check_adapter(source.adapter)
        if packed and source.rounding is None and source.weights is None:
            _check_rounding(source.model, packed_with, choices.of_run.get("rounding"))
    rounding: Any = packed_with
    if FORMATS[weights].packed and not packed:
        rounding = choices.take("rounding", source.rounding, DEFAULT_ROUNDING)
    dtype = choices.take("dtype", source.dtype, "auto")
    if dtype == "auto":
        full = choices.of_run.get("tuning") == "full"
        dtype = "bfloat16" if torch.cuda.is_available() and not full else "float32"
        choices.note("dtype", dtype, "which is auto on this machine")
    kwargs = choices.take("chat_template_kwargs", source.chat_template_kwargs, {})
    trusts = source.trust_remote_code
    return Loading(model, source.adapter, weights, rounding, getattr(torch, dtype), kwargs, trusts)


def _check_rounding(model: str, packed: str | None, trained: str | None) -> None:
    """Refuse a packed model that was rounded otherwise than the one an adapter was trained on, if both are
    known."""
    if packed is not None and trained is not None and packed != trained:
        raise QeRLError(
            f"{model} was packed with {packed} rounding, but the adapter was trained on {trained}; name the "
            f"16-bit model or a copy made with `qerl quantize --rounding {trained}`, or score these weights "
            f"with --rounding {packed}."
        )


def load(loading: Loading, console: Console) -> Policy:
    """Model, adapter, tokenizer and engine.

    Raises:
        QeRLError: Something cannot be loaded, or the adapter changes nothing.
    """
    check_model(loading.model, loading.weights, loading.trust_remote_code)
    tokenizer = load_tokenizer(loading.model, trust_remote_code=loading.trust_remote_code)
    model: Any = loading.load()
    if loading.adapter is not None:
        model = load_adapter(model, loading.adapter)
        _say_proof(model, tokenizer, console)
    engine = make_engine(model, tokenizer.pad_token_id)
    return Policy(model, tokenizer, engine, end_token_ids(model, tokenizer), loading)


class OneAtATime:
    """Policies one after the other, of which one is loaded; the next one takes its model where it can."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._policy: Policy | None = None

    def get(self, loading: Loading) -> Policy:
        """The policy that is loaded so; the one before is of no use afterwards.

        Raises:
            QeRLError: As :func:`load`.
        """
        former = self._policy
        if former is not None and former.loading == loading:
            return former
        if former is not None and _differ_in_weights_of_adapters(former.loading, loading):
            assert loading.adapter is not None
            exchange_adapter(former.model, loading.adapter)
            _say_proof(former.model, former.tokenizer, self._console)
            self._policy = replace(former, loading=loading)
        else:
            former = self._policy = None
            gc.collect()
            torch.cuda.empty_cache()
            self._policy = load(loading, self._console)
        return self._policy


def _differ_in_weights_of_adapters(former: Loading, loading: Loading) -> bool:
    if former.adapter is None or loading.adapter is None:
        return False
    configs = [read_json(folder / ADAPTER_CONFIG_FILE) for folder in (former.adapter, loading.adapter)]
    return configs[0] == configs[1] and replace(former, adapter=None) == replace(loading, adapter=None)


def prove_adapter(model: PeftModel, prompt_ids: list[int]) -> float:
    """Largest absolute difference of the logits with the adapter on and off.

    An evaluation that loads an adapter and then scores the base model looks like any other: the released QeRL
    code did that. So no difference is an error.

    Args:
        model: Model with an active adapter.
        prompt_ids: Any prompt, at least one token.

    Raises:
        QeRLError: The logits are the same, so an evaluation would score the base model, or they are not
            finite.
    """
    ids_1T = torch.tensor([prompt_ids], device=model.device)
    with torch.no_grad(), eval_mode(model):
        on = model(input_ids=ids_1T, use_cache=False).logits
        with model.disable_adapter():
            off = model(input_ids=ids_1T, use_cache=False).logits
    difference = (on - off).abs().max().item()
    if not math.isfinite(difference):
        raise QeRLError(
            "With the adapter the logits are not finite: it diverged, or belongs to another model; take an "
            "earlier checkpoint."
        )
    if difference == 0:
        raise QeRLError(
            "The adapter changes no logit, so this would score the base model; check that it was trained and "
            "belongs to this model."
        )
    return difference


def _say_proof(model: PeftModel, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    difference = prove_adapter(model, tokenizer("The adapter must change what follows this.")["input_ids"])
    console.print(f"The adapter is in use: it moves logits by up to {difference:.3g}.")


def digest(content: bytes) -> str:
    """What tells contents apart, in 32 characters."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
