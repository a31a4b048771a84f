"""From names to a policy that is ready to answer: what is loaded, how, and whether it belongs together.

Everything that decides the policy is settled first (`decide`), from what the user says, what the run says
that made it, and the defaults, in this order; the model is loaded after that (`load`). Policies that differ
in the adapter alone, as the checkpoints of a run do, share one loaded base (`OneAtATime`).
"""

import gc
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.agents.thinking import CLOSING, ThinkingBudget
from qerl.eval.adapter_check import prove_adapter
from qerl.eval.base_check import check_rounding, packing
from qerl.eval.trained import Choices
from qerl.lora.adapter import adapter_file, check_adapter, exchange_adapter, load_adapter
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.hub import local_checkpoint
from qerl.models.load import check_model, load_model, load_tokenizer
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.select import make_engine
from qerl.rollout.stops import Stop, StopStrings
from qerl.run_folder import ADAPTER_CONFIG_FILE, read_json
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding, WeightFormatName

ComputeDtype = Literal["auto", "float32", "bfloat16"]


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


@dataclass(frozen=True)
class Loading:
    """How a policy is loaded, with nothing left open; no rounding where none is done or known."""

    model: str
    adapter: Path | None
    weights: WeightFormatName
    rounding: Rounding | None
    dtype: torch.dtype
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def as_json(self) -> dict[str, Any]:
        """What decides the policy and its prompts, the contents of the files included."""
        folder = local_checkpoint(self.model)
        return {
            "model": self.model,
            "fingerprint": checkpoint_fingerprint(folder),
            "adapter": str(self.adapter) if self.adapter else None,
            "adapter_digest": digest(adapter_file(self.adapter).read_bytes()) if self.adapter else None,
            "weights": self.weights,
            "rounding": self.rounding,
            "dtype": str(self.dtype).removeprefix("torch."),
            "chat_template_kwargs": self.chat_template_kwargs,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }


@dataclass(frozen=True)
class Ends:
    """What ends and interrupts completions beside stop tokens, as in a recipe."""

    stop_strings: tuple[str, ...] = ()
    thinking_budget: int | None = None
    thinking_end: str = CLOSING

    def as_json(self) -> dict[str, Any]:
        """What decides the completions, as plain JSON values; nothing where nothing is set."""
        found: dict[str, Any] = {"stop_strings": list(self.stop_strings)} if self.stop_strings else {}
        if self.thinking_budget is not None:
            found |= {"thinking_budget": self.thinking_budget, "thinking_end": self.thinking_end}
        return found


@dataclass(frozen=True)
class Policy:
    """A model that is ready to answer, and how it was loaded."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]
    loading: Loading

    def stopping(self, params: SamplingParams, ends: "Ends") -> SamplingParams:
        """These parameters, with what ends and interrupts completions.

        Raises:
            QeRLError: There is a budget of thinking and the model does not think.
        """
        stops: list[Stop] = []
        if ends.stop_strings:
            stops.append(StopStrings(self.tokenizer, ends.stop_strings))
        if ends.thinking_budget is not None:
            stops.append(ThinkingBudget(self.tokenizer, ends.thinking_budget, ends.thinking_end))
        return replace(params, stop_token_ids=self.stop_token_ids, stops=tuple(stops))


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
    trusts = source.trust_remote_code
    return Loading(source.model, source.adapter, weights, rounding, getattr(torch, dtype), kwargs, trusts)


def load(loading: Loading, console: Console) -> Policy:
    """Model, adapter, tokenizer and engine.

    Raises:
        QeRLError: Something cannot be loaded, or the adapter changes nothing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_model(loading.model, loading.weights, loading.trust_remote_code)
    tokenizer = load_tokenizer(loading.model, trust_remote_code=loading.trust_remote_code)
    model: Any = load_model(
        loading.model,
        loading.weights,
        dtype=loading.dtype,
        device=device,
        rounding=loading.rounding or DEFAULT_ROUNDING,
        trust_remote_code=loading.trust_remote_code,
    )
    if loading.adapter is not None:
        model = load_adapter(model, loading.adapter)
        _prove(model, tokenizer, console)
    stops = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *([stops] if isinstance(stops, int) else stops or [])}
    engine = make_engine(model, tokenizer.pad_token_id)
    return Policy(model, tokenizer, engine, tuple(sorted(stop_ids)), loading)


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
            _prove(former.model, former.tokenizer, self._console)
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


def _prove(model: PeftModel, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    difference = prove_adapter(model, tokenizer("The adapter must change what follows this.")["input_ids"])
    console.print(f"The adapter is in use: it moves logits by up to {difference:.3g}.")


def digest(content: bytes) -> str:
    """What tells contents apart, in 32 characters."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
