"""docs/tutorial.md, followed from its first block to its last, with a tiny model in place of a real one.

Files that it shows are written, commands run in this process with few steps, the server in one of its own.
A block that needs a network or a GPU says so ahead of it; the words of its commands are checked elsewhere.
"""

import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from qerl.cli import main
from qerl.run_folder import read_metrics
from tests.support.tiny_run import REWARD

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PORT = "8123"
FEW = ["--max_steps", "2"]
EARNED = ["--reward_files", "digits.py:digits"]
"""A reward that random text can earn, for the demo's recipe, whose own it cannot."""


class Block(NamedTuple):
    """A block of code: its language, its text, and what the comment ahead of it says."""

    mark: str
    language: str
    text: str


def blocks():
    """Those of the page, in its order."""
    found = re.findall(
        r"(?:^<!-- (\w+): [^\n]* -->\n)?^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return [Block(*one) for one in found]


def run(line):
    """A line of a shell, which calls Python or this project."""
    program, *words = shlex.split(line)
    if program == "python":
        runpy.run_path(words[0])
        return
    assert program == "qerl", line
    few = FEW if words[0] == "train" and "--dry_run" not in words else []
    few = few + EARNED if few and words[1] == "demo" else few
    assert main([*words, *few]) == 0, line


def free_port():
    """A port that nobody listens on, as text."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def serve(line, port):
    """The server of a line, in a process of its own."""
    words = shlex.split(line.replace(PORT, port))[1:]
    return subprocess.Popen([sys.executable, "-m", "qerl", *words], stdout=subprocess.PIPE, text=True)


def test_every_block_is_run_or_says_what_it_needs():
    assert {block.mark for block in blocks()} == {"", "needs", "served"}
    assert {block.language for block in blocks()} == {"bash", "python", "yaml"}
    assert sum(block.mark == "needs" for block in blocks()) < sum(block.mark == "" for block in blocks())


def test_the_tutorial_can_be_followed(tiny_model, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_model("llama", max_position_embeddings=512).save_pretrained(MODEL)
    tiny_tokenizer.save_pretrained(MODEL)
    Path("digits.py").write_text(REWARD)
    port, server = free_port(), None
    try:
        for block in blocks():
            named = re.match(r"# (my/\S+)\n", block.text)
            if block.mark == "needs":
                continue
            if block.mark == "served":
                server = serve(block.text, port)
            elif named:
                Path(named[1]).parent.mkdir(exist_ok=True)
                Path(named[1]).write_text(block.text)
            elif block.language == "bash":
                for line in block.text.splitlines():
                    run(line)
            else:
                text = block.text.replace(PORT, port)
                wait_for(server)
                exec(text, {})
    finally:
        if server is not None:
            server.terminate()
            server.wait(timeout=60)
    assert len(read_metrics(Path("runs/larger"))) > 2
    assert Path("runs/both.html").stat().st_size > 10_000
    assert Path("models/first/model.safetensors").exists()
    assert "No module" not in capsys.readouterr().err


def wait_for(server):
    """Until a server says what to export, if there is one."""
    if server is None:
        return
    end = time.monotonic() + 120
    for line in server.stdout:
        assert time.monotonic() < end
        if "OPENAI_BASE_URL" in line or "api_key" in line:
            return
    pytest.fail(f"The server ended with {server.wait()}.")
