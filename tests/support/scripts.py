"""Scripts of users, run as they stand."""

import os
import subprocess
import sys
from pathlib import Path


def run_offline(script: str, folder: Path) -> str:
    """What a script prints that runs in a folder of its own, without network and without a GPU."""
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "cache")}
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder, env=os.environ | offline, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout
