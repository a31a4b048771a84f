"""What every result file says of its origin."""

import os
import subprocess
from datetime import UTC, datetime

import torch


def head(command: list[str]) -> dict[str, str]:
    """What produced a result: GPU, versions, commit, date, command.

    A copy of the tree without git takes the commit from the environment variable QERL_COMMIT.
    """
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "commit": os.environ.get("QERL_COMMIT") or found.stdout.strip() or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(command),
    }
