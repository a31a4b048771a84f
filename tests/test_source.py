"""The commit that results are recorded with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qerl import source

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def said(folder: Path, **env: str) -> str:
    """What the module in a folder says, in a process of its own."""
    code = "import source; print(source.commit())"
    given = {key: value for key, value in os.environ.items() if key != "QERL_COMMIT"} | env
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=given, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def test_a_commit_its_changes_and_what_has_none(tmp_path):
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    shutil.copy(source.__file__, package)

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        found = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return found.stdout.strip()

    assert said(package) == "unknown"
    git("init")
    assert said(package) == "unknown", "a folder that git knows without the package"
    git("add", "."), git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")[:7]
    assert said(package) == head
    (tmp_path / "notes.md").write_text("no source")
    assert said(package) == head
    for folder in (package, tmp_path / "bench", tmp_path / "lab" / "study"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new.py").write_text("")
        assert said(package) == f"{head}-dirty"
        (folder / "new.py").unlink()
    (package / "new.py").write_text("")
    assert said(package, QERL_COMMIT="1234567") == "1234567"
