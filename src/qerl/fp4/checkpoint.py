"""Model folders: reading plain and packed safetensors, writing packed ones.

Three layouts are read, all of them a ``config.json`` beside one ``model.safetensors`` or several shards with
an index. They differ in the tensors of a quantised linear layer:

* ``plain``: ``weight``, BF16, FP16 or FP32.
* ``compressed-tensors`` (llm-compressor, vLLM, and what this project writes): ``weight_packed`` uint8
  [N, K/2], ``weight_scale`` [N, G], and for NVFP4 ``weight_global_scale`` fp32 [1], a divisor.
* ``modelopt`` (NVIDIA): the same bytes named ``weight`` and ``weight_scale``, and ``weight_scale_2`` fp32 [],
  the reciprocal of that divisor.

A reader sees only the names of compressed-tensors. Weights are all that is taken: scales of activations and
of the KV cache, which W4A4 checkpoints carry, are left out, because activations stay in 16 bits here. The
reciprocal of ``weight_scale_2`` is rounded to FP32, a change of at most 2^-23 of a weight's value.

What a folder promises is checked when it is opened, from the headers alone: every shard is there and
complete, every tensor of the index is in its shard. Pickles are never opened.

Shapes: N outputs, K inputs, G = K / block size.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from qerl.atomic import new_folder
from qerl.errors import QeRLError
from qerl.fp4.format import BLOCK_FORMATS, NVFP4, BlockFormat, PackedRows

Layout = Literal["plain", "compressed-tensors", "modelopt"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_BY_CHECKPOINT_NAME = {format.checkpoint_format: format for format in BLOCK_FORMATS.values()}
_ACTIVATION_TENSORS = ("input_scale", "input_global_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Header:
    """A shard's entry for a tensor, before any of its bytes are read.

    Attributes:
        shape: As stored.
        dtype: Name in safetensors, such as ``BF16`` or ``F8_E4M3``.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose shards have been found complete.

    Attributes:
        config: Its ``config.json``.
        layout: Names and form of the tensors of quantised layers.
        format: Their format; None in a plain checkpoint.
        shards: File name -> tensor name as stored -> header, in the order of the index.
    """

    folder: Path
    config: dict[str, Any]
    layout: Layout
    format: BlockFormat | None
    shards: dict[str, dict[str, Header]]

    def read(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of one file, one at a time, under the names of compressed-tensors.

        They are backed by the file mapped into memory: untouched pages cost nothing.
        """
        with _open_shard(self.folder / shard) as file:
            for name, header in self.shards[shard].items():
                if name.rpartition(".")[2] in _ACTIVATION_TENSORS:
                    continue
                tensor = file.get_tensor(name)
                if self.layout == "modelopt":
                    name, tensor = _from_modelopt(name, header, tensor)
                yield name, tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors, under the names of compressed-tensors."""
        return {name: tensor for shard in self.shards for name, tensor in self.read(shard)}

    def size(self) -> int:
        """Bytes of all shards on disk."""
        return sum((self.folder / shard).stat().st_size for shard in self.shards)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a model folder, checked as far as possible without reading weights.

    Raises:
        QeRLError: No such folder or no config, no safetensors, a missing or truncated shard, a tensor that
            its shard lacks, or an unsupported quantisation.
    """
    config, layout, format = read_config(folder)
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
    return Checkpoint(folder, config, layout, format, shards)


def check_held_format(name: str | Path, held: BlockFormat | None, wanted: str) -> None:
    """Raise for a packed checkpoint that is to be loaded in another format than its own.

    Args:
        name: The user's name for the model.
        held: Format of its weights, None where they are not packed.
        wanted: Name of the format in which it is to be loaded.

    Raises:
        QeRLError: It holds another one.
    """
    if held is not None and held.name != wanted:
        raise QeRLError(
            f"{name} holds {held.name} weights, which cannot become {wanted}; set weights to {held.name} or "
            "name the 16-bit model."
        )


def read_config(folder: Path) -> tuple[dict[str, Any], Layout, BlockFormat | None]:
    """A model's ``config.json``, and the layout and format of its weights; no shard needs to be there.

    Raises:
        QeRLError: No config, or an unsupported quantisation.
    """
    config = _read_json(folder / "config.json")
    return config, *_packing(folder, config)


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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a config or an index: indented, with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def new_checkpoint(target: Path) -> Iterator[Path]:
    """A folder that appears under its name complete or not at all (:func:`qerl.atomic.new_folder`).

    Remains of a killed run are reported, because it may still be writing.

    Raises:
        QeRLError: ``target`` exists, another run is writing it, or the disk refuses (full, read-only).
    """
    if target.exists():
        raise QeRLError(f"{target} exists and is not overwritten; choose another folder or remove it first.")
    try:
        with new_folder(target) as partial:
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


def _packing(folder: Path, config: dict[str, Any]) -> tuple[Layout, BlockFormat | None]:
    """Layout and format that ``config.json``, or ModelOpt's own file beside it, declares."""
    declared = config.get("quantization_config")
    if declared is None and (folder / "hf_quant_config.json").is_file():
        declared = _read_json(folder / "hf_quant_config.json").get("quantization", {})
        declared = {"quant_method": "modelopt", **declared}
    if declared is None:
        return "plain", None
    method = declared.get("quant_method")
    if method == "modelopt" and declared.get("quant_algo") == "NVFP4":
        return "modelopt", NVFP4
    if method == "compressed-tensors":
        format = _BY_CHECKPOINT_NAME.get(declared.get("format", ""))
        # A transform rotates weights against activations; weights alone would be a different model.
        if format is not None and not declared.get("transform_config"):
            return "compressed-tensors", format
    detail = declared.get("quant_algo") or declared.get("format") or "unknown format"
    raise QeRLError(
        f"{folder} is quantised with {method} ({detail}), which is not read here; use the 16-bit model, an "
        "NVFP4 or MXFP4 checkpoint of compressed-tensors without transforms, or an NVFP4 one of ModelOpt."
    )


def _from_modelopt(name: str, header: Header, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Name and content of a ModelOpt tensor as compressed-tensors would have it."""
    module, _, kind = name.rpartition(".")
    if kind == "weight" and header.dtype == "U8":
        return f"{module}.weight_packed", tensor
    if kind == "weight_scale_2":
        return f"{module}.weight_global_scale", tensor.float().reciprocal().reshape(1)
    return name, tensor


def _shard_names(folder: Path) -> dict[str, list[str]]:
    """File name -> names of its tensors, none where no index lists them.

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
