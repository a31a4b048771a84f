"""Damaged files through the commands: exit status 0 or 2 and no traceback, whatever the bytes.

A small model, an adapter with its config.yaml, a recipe, data, a reward file and metrics are written once.
Each case damages one file (cut off, bytes flipped, another encoding, a value of another type), runs a command
on it in this process, and puts the file back.
"""

import contextlib
import io
import json
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl import yaml12
from qerl.cli import main as qerl
from tests.fuzz._print import run_and_print

SECONDS = 60
"""Longest that one command may take."""

REWARD = "def digits(completions, **_):\n    return [float(len(c[0]['content'])) for c in completions]\n"


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of exit statuses and of defects, each of which is printed with its case."""
    cases = _made(folder)
    counts: dict[str, int] = {}
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        path, words = cases[draw.choice(sorted(cases))]
        sound = path.read_bytes()
        damage = draw.choice(DAMAGES)
        try:
            path.write_bytes(damage(draw, sound, path))
            name = f"case {seed}/{number} ({damage.__name__} of {path.name}, {words[0]})"
            status = _status(words, name)
        except AssertionError as error:
            print(f"FOUND {error}", flush=True)
            status = -1
        finally:
            path.write_bytes(sound)
        key = "found" if status < 0 else f"exit {status}"
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items()))


def _status(words: list[str], case: str) -> int:
    err = io.StringIO()
    try:
        with _within(SECONDS), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(err):
                status = qerl(words)
    except SystemExit as end:
        status = int(end.code or 0)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    assert status in ((0, 1, 2) if words[0] == "plan" else (0, 2)), f"{case}: exit status {status}"
    assert "Traceback" not in err.getvalue(), f"{case}: {err.getvalue()[-500:]}"
    return status


@contextlib.contextmanager
def _within(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _made(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Sound files, and for each the command that reads it."""
    from tests.fuzz._tiny import save_adapter, save_model

    base, tuned, run_folder = folder / "model", folder / "adapter", folder / "run"
    save_model(base)
    save_adapter(base, tuned)
    run_folder.mkdir()
    rows = [{"step": step, "reward": step / 10, "loss": 0.1} for step in range(1, 5)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_folder / "config.yaml").write_text("model: m\nlearning_rate: 1.0e-05\n")
    data = folder / "data.jsonl"
    problems = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in problems))
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml12.dump({
        "model": str(base), "task": f"jsonl:{data}", "output_dir": str(folder / "out"), "lora_r": 4,
        "reward_files": [f"{reward}:digits"], "learning_rate": 1e-5, "report_to": "none", "noise": False,
    }))  # fmt: skip
    train = ["train", str(recipe), "--dry_run"]
    arithmetic = ["--task", "arithmetic", "--task_options", "{examples: 0, test_size: 1}"]
    score = ["eval", str(base), *arithmetic, "--max_tokens", "2", "--limit", "1"]
    with_adapter = [*score, "--adapter", str(tuned)]
    report = ["report", str(run_folder), "--out", str(folder / "report.html")]
    cases = {
        "recipe": (recipe, train),
        "data": (data, train),
        "reward": (reward, train),
        "metrics": (run_folder / "metrics.jsonl", report),
        "report config": (run_folder / "config.yaml", report),
        "quantised": (base / "config.json", ["quantize", str(base), str(folder / "packed" / "x" / "y")]),
        "planned": (base / "config.json", ["plan", str(base), "--gpu", "8000"]),
    }
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        cases[name] = (base / name, ["generate", str(base), "a", "--max_tokens", "1"])
    for path in sorted(tuned.iterdir()):
        if path.suffix in (".json", ".yaml", ".safetensors"):
            cases[f"adapter {path.name}"] = (path, with_adapter)
    return cases


def cut(draw: random.Random, sound: bytes, path: Path) -> bytes:
    return sound[: draw.randrange(len(sound))]


def flip(draw: random.Random, sound: bytes, path: Path) -> bytes:
    damaged = bytearray(sound)
    for _ in range(draw.choice([1, 3, 30])):
        # Sizes and names stand at the front of a file; flips further on change numbers alone.
        damaged[draw.randrange(min(len(damaged), 2000))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def replace(draw: random.Random, sound: bytes, path: Path) -> bytes:
    return draw.choice([
        b"", b"\0" * 64, b"\xff\xfe\x00", b"null", b"[]", b"3", b'"text"', b"{}", b"[1, 2]\n", b"- a\n",
        b"a: 1\na: 2\n",
        draw.randbytes(300), "{\u201ca\u201d: 1}".encode(), b"[" * 3000, b"GGUF" + bytes(40),
    ])  # fmt: skip


def encode(draw: random.Random, sound: bytes, path: Path) -> bytes:
    text = sound.decode("latin-1")
    return text.encode(draw.choice(["utf-16", "utf-32", "utf-8-sig"]))


def retype(draw: random.Random, sound: bytes, path: Path) -> bytes:
    """One value of a mapping becomes another kind of value, or goes."""
    values = [None, True, -1, 0, 3, 1.5, 10**20, "x", "", [], [1], {}, {"a": 1}]
    try:
        content = yaml12.load(sound.decode()) if path.suffix == ".yaml" else json.loads(sound)
        assert isinstance(content, dict)
    except (ValueError, AssertionError):
        return cut(draw, sound, path)
    name = draw.choice(sorted(content))
    if draw.random() < 0.2:
        del content[name]
    else:
        content[name] = draw.choice(values)
    return (yaml12.dump(content) if path.suffix == ".yaml" else json.dumps(content)).encode()


DAMAGES: list[Callable[[random.Random, bytes, Path], bytes]] = [cut, flip, replace, encode, retype, retype]


def main(arguments: list[str]) -> int:
    return run_and_print("malformed", run, arguments)
