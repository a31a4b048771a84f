"""Adapters that were trained elsewhere, as saved weights that a server begins with.

Whoever starts the server names their folders, since nothing that a client sends is a path of this machine.
An adapter is written to the server's folder as `tinker://imported/weights/NAME`; from there on it is a
checkpoint like those of clients: listed, sampled from, asked for by its name at OpenAI's routes, and the
state from which `create_training_client_from_state` goes on. It has no optimizer, so its first step is
AdamW's first.

An adapter of a server has the alpha of `qerl_serve.seats`, and all layers of attention, of the MLPs, or of
both. B is scaled for that alpha, so the model computes what it did; the optimizer sees B scaled too. An
adapter on some of these layers is refused, because the rest would begin to train.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file

from qerl.errors import QeRLError, first_line
from qerl.families.parts import base_model
from qerl.lora.adapter import adapter_file, check_adapter, own_name, stored_name
from qerl.run_folder import read_policy
from qerl_serve.adapters import TrainedAdapter
from qerl_serve.bases import Base
from qerl_serve.checkpoints import TRAINING, Store
from qerl_serve.names import IMPORTED, check_name
from qerl_serve.seats import ALPHA, Seats, Shape
from qerl_serve.types import Notes

_KEEP_BASE = "gaussian", "orthogonal"
"""Ways to begin, beside PEFT's own, that leave the base as it is; the others change it, and what is saved
fits the changed one."""
_BEYOND = (
    "alpha_pattern",
    "rank_pattern",
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "alora_invocation_tokens",
)
"""Fields of `LoraConfig` for what an adapter of a server does not have."""


@dataclass(frozen=True)
class Imported:
    """An adapter, whose config was read and taken.

    Attributes:
        name: By which clients ask for it.
        folder: Where it lies.
        rank: Of all of its matrices.
        factor: By which B is multiplied, so that the update is the same with the alpha of the server.
    """

    name: str
    folder: Path
    rank: int
    factor: float


def read_imported(word: str, max_rank: int) -> Imported:
    """The adapter that a word of the command line names.

    Args:
        word: DIR or NAME=DIR; DIR alone has the folder's own name.
        max_rank: The largest rank of the server.

    Raises:
        QeRLError: The name is none, files are missing or damaged, or no server can train such an
            adapter.
    """
    name, is_named, place = word.partition("=")
    folder = Path(place if is_named else word).expanduser()
    name = check_name(name if is_named else folder.resolve().name)
    check_adapter(folder)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise QeRLError(
            f"The config of the adapter {folder} cannot be read ({first_line(error)}); copy it again."
        ) from error
    if not isinstance(config, LoraConfig):
        raise QeRLError(f"{folder} is a {config.peft_type} adapter; a server trains LoRA adapters alone.")
    beyond = [field for field in _BEYOND if getattr(config, field, None)]
    if config.bias != "none":
        beyond.append("bias")
    if not isinstance(config.init_lora_weights, bool) and config.init_lora_weights not in _KEEP_BASE:
        beyond.append("init_lora_weights")
    if beyond:
        raise QeRLError(
            f"The adapter {folder} has {beyond[0]}={getattr(config, beyond[0])!r}, and those of a server "
            "are plain LoRA of one rank; go on with it in `qerl train --adapter`."
        )
    if config.r > max_rank:
        raise QeRLError(
            f"The adapter {folder} has rank {config.r}, above this server's {max_rank}; give a larger "
            "--max_rank."
        )
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    return Imported(name, folder, config.r, scale * config.r / ALPHA)


def save_imported(imported: Imported, base: Base, store: Store) -> str:
    """The path under which an adapter is saved as one of the server's, in place of a former one of its name.

    Raises:
        QeRLError: It was trained on another model, or adapts other layers than one of the server.
    """
    folder, seats = imported.folder, base.seats
    recorded = read_policy(folder).get("fingerprint")
    if recorded is not None and recorded != base.fingerprint:
        raise QeRLError(
            f"The adapter {folder} was trained on another model than {base.name}, whose norms or embeddings "
            "are not the same; start the server with that model."
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


def _fitted(imported: Imported, weights: dict[str, torch.Tensor], seats: Seats, base: str) -> TrainedAdapter:
    """The adapter with these weights, on the layers whose names they have."""
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
    kinds = seats.targets
    whole = {kind: names <= adapted for kind, names in kinds.items()}
    if adapted != {name for kind, names in kinds.items() if whole[kind] for name in names}:
        groups = " and ".join(", ".join(sorted(names)) for names in kinds.values())
        raise QeRLError(
            f"The adapter {imported.folder} is on {', '.join(sorted(adapted))}, and those of this server are "
            f"on {groups}, on all of one group or of both; go on with it in `qerl train --adapter`."
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
