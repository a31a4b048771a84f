"""Settings for loading a policy: the user's values, else those of the run that trained it, else defaults.

All settings are decided (`decide`) before a model is loaded (`Loading.load`), and the origin of each value is
recorded (`Choices`) and printed once. Names of code outside QeRL must come from the user, because a folder is
not trusted.
"""

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.fp4.checkpoint import read_config
from qerl.lora.adapter import adapter_file, check_adapter
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.models.hub import LocalModel, find_model
from qerl.models.load import check_model, load_model
from qerl.user_code import foreign_code, named_again
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding, WeightFormatName

ComputeDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Source:
    """The user's settings of a policy; None takes the value of the run that trained it, else the default.

    Attributes:
        model: Hub id, local folder or .gguf file.
        adapter: Folder of a PEFT adapter, or None.
        weights: Format of the linears; by default that of a quantised checkpoint, otherwise nvfp4.
        rounding: Rounding for checkpoints that are not packed yet; by default mse.
        dtype: Dtype of everything that is not quantised; by default auto: bfloat16 on a GPU, float32 on a CPU
            or for a run that trained all weights.
        chat_template_kwargs: Arguments of the chat template; by default none.
        trust_remote_code: Whether Python code that comes with the checkpoint may run; never taken from a run,
            since an adapter's files are not trusted.
    """

    model: str
    adapter: Path | None = None
    weights: WeightFormatName | None = None
    rounding: Rounding | None = None
    dtype: ComputeDtype | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    trust_remote_code: bool = False


class Choices:
    """Values with their origins, each from a flag, else from the run, else a default.

    Args:
        of_run: Settings of the run that trained the policy; None if unknown.
        where: The config.yaml with these settings.
    """

    def __init__(self, of_run: Mapping[str, Any] | None = None, where: Path | None = None) -> None:
        self.of_run = of_run or {}
        self.where = where
        self._said: dict[str, tuple[Any, str]] = {}

    def take(self, name: str, given: Any, default: Any, key: str | None = None) -> Any:
        """Return ``given``, else the run's value, else the default, and record its origin.

        Args:
            name: Name of the flag.
            given: The user's value, or None.
            default: Value if there is neither.
            key: Name of the setting in the run, if different; empty to ignore the run.

        Raises:
            QeRLError: The run's value names code outside QeRL.
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
        """Record the origin of a value, replacing an earlier one of this name, and return the value."""
        if value not in (None, {}, []):
            self._said[name] = value, origin
        return value

    def refuse_foreign(self, of_run: Any, instead: str) -> None:
        """Raise if a value of the run names code outside QeRL; ``instead`` is the advice in the error.

        Raises:
            QeRLError: The value names such code.
        """
        name = foreign_code(of_run)
        if name is not None:
            raise QeRLError(
                f"{self.where} names {name!r}, which is not QeRL's code and may come from anyone, like the "
                f"folder; {instead}."
            )

    def __str__(self) -> str:
        """Names and values by origin: ``task gsm8k, weights nvfp4 (from FILE); max_tokens 64 (default)``."""
        by_origin: dict[str, list[str]] = {}
        for name, (value, origin) in self._said.items():
            by_origin.setdefault(origin, []).append(f"{name} {value}")
        return "; ".join(f"{', '.join(values)} ({origin})" for origin, values in by_origin.items())


@dataclass(frozen=True)
class Loading:
    """Decided settings for loading a policy; ``rounding`` is None if nothing is rounded or it is unknown."""

    model: LocalModel
    adapter: Path | None
    weights: WeightFormatName
    rounding: Rounding | None
    dtype: torch.dtype
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return everything that determines the policy and its prompts, including hashes of the files."""
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
        """Load the model without its adapter, on the GPU if there is one.

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


def decide(source: Source, choices: Choices) -> Loading:
    """Decide how to load a policy, without loading it.

    Raises:
        QeRLError: The model is not found, the adapter is damaged or was trained on another rounding.
    """
    model = find_model(source.model)
    config, quantization = read_config(model.folder)
    held = check_model(model, None, source.trust_remote_code) if quantization else None
    packed_with = config.get("qerl_rounding") if held else None
    if held and source.adapter is None and source.weights is None:
        weights = choices.note("weights", held, source.model)
    else:
        weights = choices.take("weights", source.weights, held or DEFAULT_FORMAT)
    if source.adapter is not None:
        check_adapter(source.adapter)
        if held and source.rounding is None and source.weights is None:
            _check_rounding(source.model, packed_with, choices.of_run.get("rounding"))
    rounding: Any = packed_with
    if FORMATS[weights].packed and weights != held:
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
    """Raise if a packed model's rounding is not that of the adapter's training, if both are known."""
    if packed is not None and trained is not None and packed != trained:
        raise QeRLError(
            f"{model} was packed with {packed} rounding, but the adapter was trained on {trained}; name the "
            f"16-bit model or a copy made with `qerl quantize --rounding {trained}`, or score these weights "
            f"with --rounding {packed}."
        )


def digest(content: bytes) -> str:
    """Return a hash of the content, 32 characters."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
