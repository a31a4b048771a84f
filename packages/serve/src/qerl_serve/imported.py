"""Adapters that were trained elsewhere, imported as saved weights when a server starts.

Their folders are named on the command line, since nothing that a client sends is a path of this machine. An
adapter is written to the server's folder as `tinker://imported/weights/NAME`; from then on it is a checkpoint
like those of clients: it is listed, sampled from, found by name on OpenAI's routes, and trained further by
`create_training_client_from_state`. It has no optimizer state, so its training begins with a fresh AdamW.

An adapter of a server has the alpha of `qerl_serve.seats`, and all layers of attention, of the MLPs, or of
both. B is scaled for that alpha, so the model computes the same as before; the optimizer sees the scaled B.
An adapter on only some of these layers is refused, because the others would begin to train.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.lora.adapter import adapter_file, check_adapter, own_name, stored_name
from qerl.run_folder import ADAPTER_CONFIG_FILE, read_json, read_policy
from qerl_serve.adapters import TrainedAdapter
from qerl_serve.bases import Base
from qerl_serve.checkpoints import TRAINING, Store
from qerl_serve.names import IMPORTED, check_name
from qerl_serve.seats import ALPHA, Seats, Shape
from qerl_serve.types import Notes

logger = logging.getLogger(__name__)

_KEEP_BASE = "gaussian", "orthogonal"
"""Values of `init_lora_weights`, beside PEFT's own, that leave the base unchanged; the others change it, and
the saved adapter fits the changed base."""
_TAKEN = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}
"""Fields of an adapter's config that may differ from PEFT's defaults; the adapted layers are read from the
names of the matrices. Any other differing field may mean another kind of adapter, perhaps one that this PEFT
does not know."""


@dataclass(frozen=True)
class Imported:
    """An adapter whose config was read and accepted.

    Attributes:
        name: Name by which clients ask for it.
        folder: Folder with its files.
        rank: Rank of all of its matrices.
        factor: Factor of B, with which the LoRA update stays the same under the server's alpha.
        base: Name of the model it was trained on, according to its config; empty if that has none.
    """

    name: str
    folder: Path
    rank: int
    factor: float
    base: str


def read_imported(word: str, max_rank: int) -> Imported:
    """Read the config of an adapter named on the command line.

    Args:
        word: DIR or NAME=DIR; for DIR alone the name is the folder's.
        max_rank: Maximum rank of the server.

    Raises:
        QeRLError: The name is invalid, files are missing or damaged, or no server can train such an adapter.
    """
    name, is_named, place = word.partition("=")
    if not is_named or Path(word).expanduser().is_dir():  # a folder may have a = in its name
        folder = Path(word).expanduser()
        try:
            name = check_name(folder.resolve().name)
        except QeRLError as error:
            raise QeRLError(f"--adapter {word} needs a name, as --adapter NAME=DIR: {error}") from error
    else:
        folder, name = Path(place).expanduser(), check_name(name)
    check_adapter(folder)
    plain = LoraConfig().to_dict()
    given = read_json(folder / ADAPTER_CONFIG_FILE)
    if given.get("peft_type") != "LORA":
        raise QeRLError(
            f"{folder} is a {given.get('peft_type')} adapter; a server trains only LoRA adapters."
        )
    begins = given.get("init_lora_weights", True)
    beyond = [
        field for field, value in given.items() if field not in _TAKEN and value and value != plain.get(field)
    ]
    if not isinstance(begins, bool) and begins not in _KEEP_BASE:
        beyond.append("init_lora_weights")
    if beyond:
        raise QeRLError(
            f"The adapter {folder} has {beyond[0]}={given[beyond[0]]!r}, but a server trains only plain "
            "LoRA of one rank; convert it to that."
        )
    rank, alpha = given.get("r", plain["r"]), given.get("lora_alpha", plain["lora_alpha"])
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise QeRLError(f"The adapter {folder} has r={rank!r}, which is no rank; copy it again.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise QeRLError(
            f"The adapter {folder} has lora_alpha={alpha!r}, which is no number above 0; copy it again."
        )
    if rank > max_rank:
        raise QeRLError(
            f"The adapter {folder} has rank {rank}, above this server's {max_rank}; give a larger --max_rank."
        )
    scale = alpha / (math.sqrt(rank) if given.get("use_rslora") else rank)
    base = given.get("base_model_name_or_path")
    return Imported(name, folder, rank, scale * rank / ALPHA, base if isinstance(base, str) else "")


def save_imported(imported: Imported, base: Base, store: Store) -> str:
    """Save an adapter as one of the server's, in place of a former one of its name; return its path.

    An adapter of another model is recognized by the fingerprint in its policy.json, or by shapes. Names prove
    little, since a copied or quantized model has another name; without a fingerprint, a differing name is
    logged.

    Raises:
        QeRLError: The adapter was trained on another model, or adapts other layers than the server's
            adapters.
    """
    folder, seats = imported.folder, base.seats
    recorded = read_policy(folder).get("fingerprint")
    if recorded is not None and recorded != base.fingerprint:
        raise QeRLError(
            f"The adapter {folder} was trained on another model than {base.name}, whose norms or embeddings "
            "are not the same; start the server with that model."
        )
    served = {_last(info.name) for info in base.names}
    if recorded is None and imported.base and _last(imported.base) not in served:
        logger.warning(
            "The config of the adapter %s says that it was trained on %s, but this server has %s: if that "
            "is another model, the adapter is useless on it.",
            folder,
            imported.base,
            base.name,
        )
    model = base_model(seats.model)
    weights = {
        stored_name(own_name(name, model), model): tensor.float()
        * (imported.factor if ".lora_B." in name else 1)
        for name, tensor in load_file(adapter_file(folder)).items()
    }
    adapter = _fitted(imported, weights, seats, base.name)
    return store.save(
        IMPORTED, TRAINING, imported.name, adapter, seats.config(adapter.shape), Notes(), overwrite=True
    )


def _last(name: str) -> str:
    """Return the part of a model's name that a copy of the model keeps, in lower case."""
    return name.rstrip("/").rpartition("/")[2].casefold()


def _fitted(imported: Imported, weights: dict[str, torch.Tensor], seats: Seats, base: str) -> TrainedAdapter:
    """Return an adapter with these weights, on the layers in their names."""
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
    kinds = seats.targets
    whole = {kind: names <= adapted for kind, names in kinds.items()}
    if adapted != {name for kind, names in kinds.items() if whole[kind] for name in names}:
        groups = " and ".join(", ".join(sorted(names)) for names in kinds.values())
        raise QeRLError(
            f"The adapter {imported.folder} adapts {', '.join(sorted(adapted))}, but this server needs "
            f"adapters on all layers of one group or of both: {groups}. Train it further with `qerl train "
            "--adapter`."
        )
    shape = Shape(imported.rank, whole["attn"], whole["mlp"])
    adapter = TrainedAdapter(shape, seats.fresh(shape, 0), 0)
    try:
        adapter.load(weights, {}, 0)
    except QeRLError as error:
        raise QeRLError(
            f"The adapter {imported.folder} does not fit {base}; start the server with the model that it was "
            f"trained on. ({error})"
        ) from error
    return adapter
