"""Runs that are killed in the middle and resumed: some of the cases that `tests/fuzz/kills.py` runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_killed_runs_end_as_if_nobody_had_killed_them():
    """One process and two: signals to one and to both, a failure of one, a full disk, within an epoch."""
    command = [sys.executable, "-m", "tests.fuzz", "kills", "--count", "0", "--limit", "200"]
    root = Path(__file__).parents[2]
    source = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "2 of 2 cases, 1 on two processes, 8 kills, 0 with findings" in done.stdout
