"""Push an export to the Hub, with options named as in transformers and TRL."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from qerl.models.hub import hub_errors_said
from qerl.run_folder import CONFIG_FILE, POLICY_FILE

_ADVICE = "HF_TOKEN and --hub_model_id"

WEIGHT_FILES = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors",
    "pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_config.json", "adapter_model.safetensors",
    "adapter_model.bin",
)  # fmt: skip
"""Files that, left over from an earlier push, would be loaded in the place of the pushed ones."""


@dataclass(frozen=True)
class Repository:
    """The repository on the Hub to push to.

    Attributes:
        hub_model_id: ``owner/name``, or a name under the user's own account; None for the folder's name.
        hub_private_repo: Whether a new repository is private; None for the owner's default.
        hub_token: Token of the Hub; None for HF_TOKEN, or that of `hf auth login`.
    """

    hub_model_id: str | None = None
    hub_private_repo: bool | None = None
    hub_token: str | None = None

    def name(self, folder: Path) -> str:
        """Return the id, with its owner, of the repository for a folder; nothing is created yet.

        Raises:
            QeRLError: The Hub does not answer or knows no such user.
        """
        with hub_errors_said(
            "The Hub account to push with could not be determined", f"{_ADVICE}; or remove --push_to_hub"
        ):
            own = self._api().whoami()["name"]
        asked = self.hub_model_id or folder.name
        return asked if "/" in asked else f"{own}/{asked}"

    def push(self, name: str, folder: Path, replaced: Sequence[str]) -> str:
        """Upload a folder to its repository, created if missing, and return the address of the commit.

        Records of where and on what the model was trained here (`CONFIG_FILE`, `POLICY_FILE`) are left out.

        Args:
            name: Repository id from :meth:`name`.
            folder: Folder to push.
            replaced: Names of files to delete from the repository unless the folder has them.

        Raises:
            QeRLError: The Hub does not answer or refuses.
        """
        withheld = (CONFIG_FILE, POLICY_FILE)
        again = ["hf", "upload", name, str(folder), *(["--private"] if self.hub_private_repo else [])]
        for flag, names in (("--exclude", withheld), ("--delete", replaced)):
            again += [word for each in names for word in (flag, each)]
        with hub_errors_said(
            f"{folder} was written and not pushed", f"{_ADVICE}; `{shlex.join(again)}` tries again"
        ):
            self._api().create_repo(name, private=self.hub_private_repo, exist_ok=True)
            done = self._api().upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message="Exported by QeRL",
                ignore_patterns=[*withheld],
                delete_patterns=[*replaced],
            )
        return str(done)

    def _api(self) -> HfApi:
        return HfApi(token=self.hub_token)
