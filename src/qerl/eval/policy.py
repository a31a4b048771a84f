"""Loading of a policy for evaluation, with the settings of its training run.

Training writes config.yaml and policy.json beside a saved policy (`qerl.trainer.resume.provenance`).
Evaluation takes settings that the user does not give from there: format and rounding of the weights, dtype,
task with its options, length of a completion, arguments of the chat template. The user's values win.

Settings for loading are decided first (`qerl.models.decide`); the model is loaded after that (`load`), and an
adapter is checked to change the logits. Policies that differ only in the adapter, such as the checkpoints of
a run, share one loaded base (`OneAtATime`).
"""

import gc
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.agents.thinking import stops_of
from qerl.errors import QeRLError
from qerl.eval.request import Request
from qerl.families.parts import eval_mode
from qerl.lora.adapter import adapter_file, exchange_adapter, load_adapter
from qerl.models.decide import Choices, Loading, Source
from qerl.models.load import check_model, end_token_ids, load_tokenizer
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.select import make_engine
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

_READ = (
    "weights", "rounding", "dtype", "tuning", "task", "task_options", "chat_template_kwargs", "tools",
    "environment", "environment_options", "tool_timeout", "tool_errors", "tool_output_limit",
    "max_tool_calling_iterations", "max_completion_length", "stop_strings", "thinking_budget", "thinking_end",
    "temperature",
)  # fmt: skip
"""Settings of a run that evaluation reads."""

_LEFT_OUT = ("max_completion_length", "temperature")
"""Settings in `_READ` that the config.yaml of earlier versions omits if they have their defaults."""


def choices_of(source: Source) -> Choices:
    """Return the settings of the run that trained an adapter, or that trained all weights of a model.

    They are stored beside the adapter or the weights, or beside a .gguf file that `qerl export` wrote; for an
    older checkpoint-N folder, in the run folder above it.

    Raises:
        QeRLError: A config.yaml cannot be read or has a value of a wrong kind, or the folder has no adapter.
    """
    folder = Path(source.model).expanduser() if source.adapter is None else source.adapter
    if source.adapter is None and folder.suffix == ".gguf" and folder.is_file():
        folder = folder.parent
    of_run, where = _read_run(folder, whole=source.adapter is None)
    if source.adapter is not None:
        adapter_file(source.adapter)
    return Choices(of_run, where)


def _read_run(folder: Path, whole: bool) -> tuple[dict[str, Any], Path | None]:
    """Return settings of the run that saved a policy, and their file; ``whole``: it has no adapter."""
    for place in policy_folders(folder):
        settings = read_settings(place)
        if settings is None:
            continue
        if whole and settings.get("tuning") != "full":
            break  # the file is not a run's
        path = place / CONFIG_FILE
        said = {name: FIELDS[name].default for name in _LEFT_OUT} | settings | read_policy(folder)
        try:
            given = {name: said[name] for name in _READ if said.get(name) is not None}
            return {name: checked(name, value, type_of(name)) for name, value in given.items()}, path
        except QeRLError as error:
            raise QeRLError(
                f"{path} does not hold the settings of a run: {error} Restore the file."
            ) from error
    return {}, None


@dataclass(frozen=True)
class Policy:
    """A loaded policy with its engine, and how it was loaded."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]
    loading: Loading

    def stopping(self, params: SamplingParams, asked: Request) -> SamplingParams:
        """Return the sampling parameters with stop tokens, stop strings and the thinking budget added.

        Raises:
            QeRLError: There is a thinking budget and the model does not think.
        """
        stops = stops_of(asked, self.tokenizer)
        return replace(params, stop_token_ids=self.stop_token_ids, stops=stops)


def load(loading: Loading, console: Console) -> Policy:
    """Load model, adapter and tokenizer, and create the engine.

    Raises:
        QeRLError: One of them cannot be loaded, or the adapter does not change the logits.
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
    """Loads policies one after the other; a policy reuses the base model of the previous one if possible."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._policy: Policy | None = None

    def get(self, loading: Loading) -> Policy:
        """Load a policy and return it; the previous one must not be used afterwards.

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
    """Return the maximum absolute difference of the logits with the adapter on and off.

    An evaluation that loads an adapter but then scores the base model looks like any other: the released QeRL
    code did that. So equal logits are an error.

    Args:
        model: A model with an active adapter.
        prompt_ids: Any prompt of at least one token.

    Raises:
        QeRLError: The logits are equal, or not finite.
    """
    ids_1T = torch.tensor([prompt_ids], device=model.device)
    with torch.no_grad(), eval_mode(model):
        on = model(input_ids=ids_1T, use_cache=False).logits
        with model.disable_adapter():
            off = model(input_ids=ids_1T, use_cache=False).logits
    difference = (on - off).abs().max().item()
    if not math.isfinite(difference):
        raise QeRLError(
            "The logits with the adapter are not finite: the adapter diverged or belongs to another model; "
            "use an earlier checkpoint."
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
