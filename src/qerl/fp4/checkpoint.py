"""Model folders: reading plain and quantised safetensors, writing packed ones.

A folder is a ``config.json`` beside one ``model.safetensors`` or several shards with an index. Layers may be
held in several formats (`qerl.fp4.published`), with tensors named in one of four ways:

* plain: ``weight``, BF16, FP16 or FP32; in FP8 ``weight`` E4M3 and ``weight_scale`` or
  ``weight_scale_inv``, both of them factors of the weight despite the second name.
* ``compressed-tensors`` (llm-compressor, vLLM, and what this project writes): ``weight_packed`` uint8
  [N, K/2], ``weight_scale`` [N, G], and for NVFP4 ``weight_global_scale`` fp32 [1], a divisor.
* ``modelopt`` (NVIDIA): the same bytes named ``weight`` and ``weight_scale``, and ``weight_scale_2`` fp32 [],
  the reciprocal of that divisor.
* ``mxfp4`` (gpt-oss): the experts of a layer as ``*_blocks`` [E, N, K/32, 16] and ``*_scales`` [E, N, K/32].

`Checkpoint.tensors` yields the tensors of the causal LM under its own names, even if it is one part of a
multimodal model (`qerl.families.towers`), packed tensors under the names of compressed-tensors, and merged
experts one by one (`qerl.families.experts.separated`).
Only weights are read: scales of activations and of the KV cache are left out, because activations stay in 16
bits here. The reciprocal of ``weight_scale_2`` is rounded to FP32, a change of at most 2^-23 of a weight's
value.

A folder is checked when it is opened, from the headers alone: every shard is present and complete, every
tensor of the index is in its shard. Pickles are never opened.

Shapes: N outputs, K inputs, G = K / block size.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qerl.atomic import new_folder
from qerl.errors import QeRLError
from qerl.families.experts import separated
from qerl.families.towers import decoder_name
from qerl.fp4.format import BLOCK_FORMATS, BlockFormat, PackedRows
from qerl.fp4.groups import is_quantized
from qerl.fp4.published import ACTIVATIONS, Header, Held, check_declared, stored_format

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*", "tekken.json",
    "*.model", "*.tiktoken", "chat_template*", "*.jinja", "generation_config.json", "*processor_config.json",
    "readme.md", "license*", "licence*", "notice*", "use_policy*",
)  # fmt: skip
"""Lower-case patterns of files that belong to a model beside its weights. Other files are not copied: a run's
folder also has the run's records, and any files its owner keeps there."""


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose shards were checked to be complete.

    Attributes:
        config: Its ``config.json``.
        quantization: Its declaration of quantised layers; None for a plain checkpoint.
        shards: File name -> tensor name as stored -> header, in the order of the index.
    """

    folder: Path
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    shards: dict[str, dict[str, Header]]

    @property
    def headers(self) -> Iterator[tuple[str, Header]]:
        """Stored name and header of each tensor in all shards."""
        for headers in self.shards.values():
            yield from headers.items()

    @property
    def is_wrapper(self) -> bool:
        """True if the text decoder is one part of the model."""
        return isinstance(self.config.get("text_config"), dict)

    @property
    def model_type(self) -> str:
        """The ``model_type`` of the text decoder."""
        return str((self.config["text_config"] if self.is_wrapper else self.config).get("model_type"))

    @cached_property
    def names(self) -> dict[str, str]:
        """Stored name -> name in the causal LM, for all its tensors except those of activations.

        Raises:
            QeRLError: The model is a wrapper, and none of its tensors has a text decoder's name.
        """
        weights = [name for name, _ in self.headers if name.rpartition(".")[2] not in ACTIVATIONS]
        if not self.is_wrapper:
            return {name: name for name in weights}
        found = {name: own for name in weights if (own := decoder_name(name)) is not None}
        if not any(own.startswith("model.") for own in found.values()):
            raise QeRLError(
                f"{self.folder} has its text decoder inside a model for images or sound, under names that "
                f"are not known (one is {min(weights, default='')!r}); use a checkpoint of the text model "
                "alone."
            )
        return found

    def separated(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split a tensor of the causal LM into names and views: merged experts one by one, others whole."""
        return separated(self.model_type, name, tensor)

    @cached_property
    def separate_headers(self) -> dict[str, Header]:
        """Headers of the causal LM's tensors by their names there, with one per expert for merged experts."""
        return {
            own: Header(tuple(part.shape), header.dtype)
            for stored, header in self.headers
            if stored in self.names
            for own, part in self.separated(self.names[stored], torch.empty(header.shape, device="meta"))
        }

    @property
    def others(self) -> int:
        """Number of a wrapper's tensors outside its text decoder."""
        return sum(decoder_name(name) is None for name, _ in self.headers) if self.is_wrapper else 0

    @cached_property
    def formats(self) -> dict[str, Held]:
        """Format of each module of the causal LM, by its name there; empty in a plain checkpoint.

        Raises:
            QeRLError: A module, or the whole folder, is in an unsupported format.
        """
        if self.quantization is None:
            return {}
        check_declared(self.quantization, self.folder)
        modules: dict[str, dict[str, Header]] = {}
        for name, header in self.separate_headers.items():
            module, _, kind = name.rpartition(".")
            modules.setdefault(module, {})[kind] = header
        return {module: stored_format(module, found, self.folder) for module, found in modules.items()}

    @property
    def held(self) -> list[Held]:
        """Formats of the projections of decoder layers; empty in a plain checkpoint."""
        return [format for module, format in self.formats.items() if is_quantized(module)]

    @property
    def format(self) -> BlockFormat | None:
        """The four-bit format of its packed layers; None where none is packed."""
        return next((BLOCK_FORMATS[name] for name in self.formats.values() if name in BLOCK_FORMATS), None)

    def read(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one file as stored.

        They are views of the memory-mapped file: untouched pages cost nothing.
        """
        with _open_shard(self.folder / shard) as file:
            for name in self.shards[shard]:
                yield name, file.get_tensor(name)

    def tensors(self, wanted: Callable[[str], bool] = bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the causal LM's tensors whose names there satisfy ``wanted``, mapped as in `read`."""
        for shard, headers in self.shards.items():
            chosen = {name: self.names[name] for name in headers if name in self.names}
            with _open_shard(self.folder / shard) as file:
                for stored, whole in chosen.items():
                    header = torch.empty(headers[stored].shape, device="meta")
                    if not any(wanted(name) for name, _ in self.separated(whole, header)):
                        continue
                    for name, tensor in self.separated(whole, file.get_tensor(stored)):
                        if wanted(name):
                            yield self._as_compressed_tensors(name, tensor)

    def _as_compressed_tensors(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return a tensor's name and content, those of ModelOpt converted to compressed-tensors."""
        module, _, kind = name.rpartition(".")
        if kind == "weight" and self.formats.get(module) in BLOCK_FORMATS:
            return f"{module}.weight_packed", tensor
        if kind == "weight_scale_2":
            return f"{module}.weight_global_scale", tensor.float().reciprocal().reshape(1)
        return name, tensor

    def size(self) -> int:
        """Bytes of all shards on disk."""
        return sum((self.folder / shard).stat().st_size for shard in self.shards)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a model folder, checked from its headers without reading weights.

    Raises:
        QeRLError: No such folder or no config, no safetensors, a missing or truncated shard, or a tensor
            that its shard lacks.
    """
    config, quantization = read_config(folder)
    shards = {}
    for shard, names in _shard_names(folder).items():
        with _open_shard(folder / shard) as file:
            present = file.keys()
            missing = sorted(set(names) - set(present))
            if missing:
                raise QeRLError(
                    f"{folder / shard} lacks {missing[0]}, which the index says it has; fetch the file again."
                )
            slices = {name: file.get_slice(name) for name in names or present}
            shards[shard] = {
                name: Header(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()
            }
    return Checkpoint(folder, config, quantization, shards)


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a model's ``config.json``, and the quantisation declared there or in ModelOpt's file, or None.

    No shard needs to be present.

    Raises:
        QeRLError: The config is missing or cannot be read.
    """
    config, name = _read_json(folder / "config.json"), "quantization_config"
    text = config.get("text_config")
    declared = config.get(name) or (text.get(name) if isinstance(text, dict) else None)
    if declared is None and (folder / "hf_quant_config.json").is_file():
        declared = _read_json(folder / "hf_quant_config.json").get("quantization", {})
        declared = {"quant_method": "modelopt", **declared}
    if declared is not None and not isinstance(declared, dict):
        raise QeRLError(
            f"{folder / 'config.json'} has a {name} that is no JSON object; fetch the file again."
        )
    return config, declared


def packed_tensors(module: str, packed: PackedRows) -> dict[str, torch.Tensor]:
    """Tensors of one quantised layer in a checkpoint, by name."""
    return {f"{module}.{name}": tensor for name, tensor in packed.tensors().items()}


def quantization_config(format: BlockFormat, ignore: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a weight-only checkpoint as compressed-tensors defines it.

    Args:
        format: Format of the packed weights.
        ignore: Qualified names of linear layers that are stored in 16 or 32 bits.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": format.checkpoint_format,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group" if format.has_global_scale else "group",
                    "group_size": format.block_size,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": str(format.scale_dtype),
                },
            }
        },
    }


def copy_other_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the model's files beside weights and config.json: tokenizer, chat template, generation settings,
    card, licence; and Python files if its config names classes in them."""
    patterns = (*_COPIED, "*.py") if "auto_map" in checkpoint.config else _COPIED
    for file in checkpoint.folder.iterdir():
        chosen = any(fnmatch(file.name.lower(), pattern) for pattern in patterns)
        if chosen and file.is_file() and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one file of weights, readable by all users; safetensors makes it readable by its owner only."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a config or an index: indented, with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def new_checkpoint(target: Path, locked: bool = False) -> Iterator[Path]:
    """Create a folder that appears under its name complete or not at all (:func:`qerl.atomic.new_folder`).

    Remains of a killed run are an error, because that run may still be writing, unless the caller's lock
    rules this out (``locked``).

    Raises:
        QeRLError: ``target`` exists or lies below a file, another run is writing it, or the disk refuses
            (full, read-only).
    """
    if target.exists():
        raise QeRLError(f"{target} exists and is not overwritten; choose another folder or remove it first.")
    above = next(place for place in target.absolute().parents if place.exists())
    if not above.is_dir():
        raise QeRLError(f"{target} lies below {above}, which is a file; choose another folder.")
    try:
        with new_folder(target, locked) as partial:
            yield partial
    except FileExistsError as error:
        raise QeRLError(
            f"Another run is writing {target}, or was killed while it did; wait for it, or remove "
            f"{error.filename}."
        ) from error
    except (OSError, SafetensorError) as error:
        raise QeRLError(
            f"{target} could not be written ({error}) and was removed; make room or choose another folder."
        ) from error


def _shard_names(folder: Path) -> dict[str, list[str]]:
    """File name -> names of its tensors, empty if no index lists them.

    With both a single file and an index the file wins, as in transformers.
    """
    if (folder / SINGLE_FILE).is_file():
        return {SINGLE_FILE: []}
    if not (folder / INDEX_FILE).is_file():
        raise QeRLError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; convert it to safetensors.")
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise QeRLError(f"{folder / INDEX_FILE} has no weight_map; fetch the file again.")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, []).append(name)
    missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
    if missing:
        raise QeRLError(f"{folder} lacks {', '.join(missing)}; fetch the missing files.")
    return shards


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise QeRLError(f"{path} is damaged or incomplete ({error}); fetch the file again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise QeRLError(
            f"{path} cannot be read ({error.strerror}); give the folder of a transformers model."
        ) from error
    except (ValueError, RecursionError) as error:
        raise QeRLError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(content, dict):
        raise QeRLError(f"{path} is not a JSON object; fetch the file again.")
    return content
