"""`qerl completion`: shells are asked what they would complete, where they are installed."""

import shutil
import subprocess

import pytest

from qerl.cli import main

LINES = {
    "qerl tr": {"train"},
    "qerl ": {"train", "plan", "eval", "export", "compare", "serve", "completion"},
    "qerl train gsm": {"gsm8k", "gsm8k-sft"},
    "qerl train gsm8k --learning_r": {"--learning_rate"},
    "qerl train gsm8k --lora_": {"--lora_r", "--lora_alpha", "--lora_dropout"},
    "qerl plan --loss_type dap": {"dapo"},
    "qerl train --noise ": {"true", "false"},
    "qerl export run out --format ": {"merged", "adapter", "gguf"},
    "qerl quantize m out --format ": {"nvfp4", "mxfp4"},
    "qerl eval m --weights nv": {"nvfp4"},
    "qerl export run out --hub_": {"--hub_model_id", "--hub_private_repo", "--hub_token"},
    "qerl completion f": {"fish"},
    "qerl train gsm8k --dry_run --lora_r": {"--lora_r"},
    "qerl demo --tools --lora_r": {"--lora_r"},
}
BASH = """
source "$1"
line="$2"
COMP_WORDS=($line); [[ "$line" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_qerl
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell, tmp_path, capsys):
    assert main(["completion", shell]) == 0
    path = tmp_path / f"qerl.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def completed(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr, done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@needs("bash")
def test_bash(tmp_path, capsys):
    path = script("bash", tmp_path, capsys)
    for line, words in LINES.items():
        found = completed("bash", "--norc", "-c", BASH, "bash", str(path), line)
        assert words <= found, line
        assert all(word.startswith(line.rpartition(" ")[2]) for word in found), line
    for line in ("qerl train --output_dir ru", "qerl train --output_dir g", "qerl eval m --adapter "):
        assert not completed("bash", "--norc", "-c", BASH, "bash", str(path), line), "a file's name"
    inner = BASH.replace("COMP_WORDS=($line)", "COMP_WORDS=(${line//=/ = })")  # as bash does it
    assert completed("bash", "--norc", "-c", inner, "bash", str(path), "qerl plan --loss_type=da") == {"dapo"}
    assert "dapo" in completed("bash", "--norc", "-c", inner, "bash", str(path), "qerl plan --loss_type=")
    recipes = completed("bash", "--norc", "-c", BASH, "bash", str(path), "qerl train --dry_run gsm")
    assert "gsm8k" in recipes, "a flag takes no value"


@needs("zsh")
def test_zsh_runs_the_script_of_bash(tmp_path, capsys):
    path = script("zsh", tmp_path, capsys)
    begin, _, rest = path.read_text().partition("bashcompinit && bashcompinit\n")
    assert "autoload -U +X compinit && compinit" in begin, "a bare ~/.zshrc has not started it"
    completed("zsh", "-f", "-n", str(path))
    path.write_text(rest.rpartition("complete -o")[0])  # which needs a terminal
    for line, words in LINES.items():
        inner = BASH.replace("COMP_WORDS=($line)", "COMP_WORDS=(${=line})")
        functions = "emulate -L zsh; autoload -U +X bashcompinit && bashcompinit; setopt ksharrays;"
        assert words <= completed("zsh", "-f", "-c", f"{functions}{inner}", "zsh", str(path), line), line


@needs("fish")
def test_fish(tmp_path, capsys):
    path = script("fish", tmp_path, capsys)
    for line, words in LINES.items():
        found = completed("fish", "--no-config", "-c", f"source {path}; complete -C '{line}'")
        assert words <= found, line


def test_values_are_those_that_a_field_takes(tmp_path, capsys):
    """Refused and replaced fields are not offered, which would be completed into an error."""
    text = script("bash", tmp_path, capsys).read_text()
    fields = text.split('local fields="')[1].split('"')[0].split()
    assert "--temperature" in fields and "--push_to_hub" in fields
    assert "--use_vllm" not in fields and "--deepspeed" not in fields
