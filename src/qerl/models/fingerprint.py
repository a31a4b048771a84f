"""Fingerprints of base models, independent of name and storage.

An adapter on another base than its own still runs and is still scored, but its results are noise. Names do
not identify a base: folders are moved, a Hub id becomes a snapshot folder, and a packed copy has its own
name. So a base is identified by weights that every copy keeps in 16 bits: its norms and a part of its token
embeddings. These are rounded to bfloat16 first, so that a model loaded in FP32 matches its file. Quantising
does not change them. Fine-tuning of all weights does, and so do methods that move scales from weights into
norms; the original's adapter would be wrong on their results, too.

A copy with an adapter merged into its linear layers has the norms and embeddings of the original. If both
have 16 bits, a row of each linear layer distinguishes them (`linears_fingerprint`); for quantised weights
nothing does.

Training writes both fingerprints into an adapter's policy.json, so `check_base` can decide before loading
whether the adapter belongs to a model. For an adapter without that file, the base named in its
adapter_config.json is read, if it is on this machine. If it is not, another name may be the same model, so
the result is a warning, not an error; so it is for a base that differs only in its linear layers.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from qerl.errors import QeRLError
from qerl.fp4.checkpoint import open_checkpoint
from qerl.fp4.groups import is_quantized
from qerl.models.hub import LocalModel, local_checkpoint
from qerl.run_folder import ADAPTER_CONFIG_FILE, read_json, read_policy

_EMBEDDING_ROWS = 512


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the hash of a base model, or None if it has no embeddings or norms of a known name.

    Args:
        tensors: Names and weights, in any order; only embeddings and norms are read.
    """
    chosen = {name: tensor for name, tensor in tensors if _is_looked_at(name)}
    if not chosen:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(chosen):
        tensor = chosen[name].detach()
        digest.update(f"{tuple(tensor.shape)}".encode())
        rows = tensor[:: max(1, len(tensor) // _EMBEDDING_ROWS)] if tensor.ndim == 2 else tensor
        digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def checkpoint_fingerprint(folder: Path) -> str | None:
    """Return the hash of the base model in a folder, read from its files without loading the model.

    Raises:
        QeRLError: The folder is not a complete checkpoint.
    """
    return fingerprint(open_checkpoint(folder).tensors(_is_looked_at))


def linears_fingerprint(folder: Path) -> str | None:
    """Return a hash of one row of each projection of the base model in a folder; None if any is quantised.

    Raises:
        QeRLError: The folder is not a complete checkpoint.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.quantization is not None:
        return None
    rows = {name: tensor[len(tensor) // 2] for name, tensor in checkpoint.tensors(_is_linear)}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(rows):
        digest.update(rows[name].to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest() if rows else None


def folder_here(name: str) -> Path | None:
    """Return the local folder of a model; None if the model is not on this machine or incomplete."""
    path = Path(name).expanduser()
    try:
        if path.is_dir() or path.is_file():
            return local_checkpoint(path)
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None
    except (QeRLError, HFValidationError):
        return None


def check_base(adapter: Path, model: str | LocalModel) -> str:
    """Return a warning if an adapter may not belong to a base model, or an empty string.

    Args:
        adapter: Folder of a PEFT adapter.
        model: The base model.

    Raises:
        QeRLError: The adapter belongs to another model, or a file of it cannot be read.
    """
    folder = local_checkpoint(model)
    found = checkpoint_fingerprint(folder)
    recorded = read_policy(adapter)
    named = str(
        recorded.get("base") or read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or ""
    )
    expected = recorded.get("fingerprint")
    if expected is None and named and not _same_name(named, str(model)):
        expected = _fingerprint_here(named)
        if expected is None:
            return (
                f"The adapter names {named} as its base, which is not on this machine, so QeRL cannot check "
                f"that {model} is the same model."
            )
    if expected is not None and found != expected:
        raise QeRLError(
            f"The adapter {adapter} was trained on {named}, whose norms or embeddings are not those of "
            f"{model}; give the model that it was trained on, or a copy of it that `qerl quantize` made."
        )
    linears, own = recorded.get("linears"), linears_fingerprint(folder)
    if None not in (linears, own) and linears != own:
        return (
            f"The linear layers of {model} differ from those of {named}, on which the adapter was trained, "
            "but norms and embeddings are the same: if an adapter was merged into them, this one is added "
            "on top."
        )
    return ""


def _same_name(named: str, model: str) -> bool:
    return named == model or Path(named).expanduser().resolve() == Path(model).expanduser().resolve()


def _fingerprint_here(named: str) -> str | None:
    """Return the fingerprint of a model; None if the model is not on this machine or incomplete."""
    folder = folder_here(named)
    try:
        return None if folder is None else checkpoint_fingerprint(folder)
    except QeRLError:
        return None


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and is_quantized(name.removesuffix(".weight"))


def _is_looked_at(name: str) -> bool:
    return name.endswith(("norm.weight", "embed_tokens.weight"))
