"""Pushing what was exported to the Hub, by the names that transformers and TRL have for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import httpx  # the client it speaks through, whose name differs by version

from qerl.errors import QeRLError, first_line
from qerl.run_folder import CONFIG_FILE, POLICY_FILE


@dataclass(frozen=True)
class Repository:
    """Where to push.

    Attributes:
        hub_model_id: ``owner/name``, or a name of one's own; None for the folder's name.
        hub_private_repo: Whether a new repository is private; None for the owner's default.
        hub_token: Of the Hub; None for HF_TOKEN, or that of `hf auth login`.
    """

    hub_model_id: str | None = None
    hub_private_repo: bool | None = None
    hub_token: str | None = None

    def make(self, folder: Path) -> str:
        """The id of the repository, which is made if it is not there; ``folder`` is what will be pushed.

        Raises:
            QeRLError: The Hub does not answer or refuses.
        """
        with _errors_said("The repository cannot be made"):
            made = self._api().create_repo(
                self.hub_model_id or folder.name, private=self.hub_private_repo, exist_ok=True
            )
        return str(made.repo_id)

    def push(self, name: str, folder: Path) -> str:
        """Upload a folder, without what says where and on what it was trained here; the address of the
        commit.

        Raises:
            QeRLError: The Hub does not answer or refuses.
        """
        with _errors_said(f"{folder} was written and not pushed", f"`hf upload {name} {folder}` tries again"):
            done = self._api().upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message="Exported by QeRL",
                ignore_patterns=[CONFIG_FILE, POLICY_FILE],
            )
        return str(done)

    def _api(self) -> HfApi:
        return HfApi(token=self.hub_token)


@contextmanager
def _errors_said(what: str, then: str = "") -> Iterator[None]:
    """A block in which a Hub that does not answer or refuses ends in a sentence that begins so."""
    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:  # ValueError: an id that is none
        more = f"; {then}" if then else ", or remove --push_to_hub"
        raise QeRLError(
            f"{what} ({first_line(error)}); see to the network, HF_TOKEN and --hub_model_id{more}."
        ) from error
