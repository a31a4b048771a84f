"""Random settings: valid ones survive being written and read again, the others are one sentence each."""

import random
import time
from pathlib import Path
from typing import Any, get_args

import yaml

from qerl import yaml12
from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.settings.groups import GROUPS, OWN_NAMES
from qerl.settings.recipe import FIELDS, dump, load_config, parse_field, resolved, type_of
from tests.fuzz._print import run_and_print

SECONDS = 5.0
"""Longest that one case may take."""

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 2**31, 10**30, 0.0, -0.0, 0.5, 1.0, 1e-8, 1.5, -0.1, 1e300,
    float("nan"), float("inf"), float("-inf"), "", " ", "no", "off", "yes", "on", "true", "null", "~", "nan",
    "1", "0o17", "017", "12:30:45", "1e5", "a: b", "a #1", "\u00e9", "\U0001f600", "a\nb", "\t", "\u2028",
    "../..", "x" * 3000, "none", "all", "auto", "steps", "epoch", "best", "linear", "cosine", "{", "[", "*a",
    "&a", "!!int 3", "<<", "%", [], [1], ["a"], ["q_proj", "v_proj"], [[]], [None], {}, {"a": 1},
    {"level": "wp1"}, {"every_n_layers": 2}, {1: 2}, {"a": {"b": [1, {"c": None}]}},
]  # fmt: skip
_WRITTEN = [
    yaml12.dump(value).strip() for value in NASTY if not isinstance(value, str) or value.isprintable()
]
_RAW = [value for value in NASTY if isinstance(value, str)]
TEXTS = [*_WRITTEN, *_RAW, "@x", "{a: [", "[" * 50, "9" * 5000, "\udc80", "--x"]


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Counts of what became of the cases; a defect is an AssertionError that names its case."""
    counts = {"valid": 0, "refused": 0}
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        start = time.perf_counter()
        try:
            config = _from_recipe(draw, folder) if number % 2 else _from_words(draw)
        except QeRLError as error:
            counts["refused"] += 1
            assert str(error).strip() and "\n" not in str(error), f"case {seed}/{number}: {error!r}"
        except Exception as error:
            raise AssertionError(f"case {seed}/{number}: {type(error).__name__}: {error}") from error
        else:
            counts["valid"] += 1
            _check(config, f"case {seed}/{number}", folder)
        seconds = time.perf_counter() - start
        assert seconds < SECONDS, f"case {seed}/{number} took {seconds:.1f} s"
    return counts


def _fields(draw: random.Random) -> dict[str, Any]:
    own = list(OWN_NAMES)
    names = draw.sample(own if draw.random() < 0.5 else list(FIELDS), draw.choice([1, 1, 1, 2, 3, 6]))
    return {name: _value(draw, name) for name in names}


def _value(draw: random.Random, name: str) -> Any:
    """Half of the values are of the kind that the field takes, so that contradictions are reached too."""
    if draw.random() < 0.5:
        return draw.choice(NASTY)
    plain = [value for value in get_args(type_of(name)) if isinstance(value, str)]
    near = draw.choice([0, 1, 2, 4, 8, 16, 100, 0.5, 0.9, 1e-5, True, False, None])
    return draw.choice(plain) if plain and draw.random() < 0.7 else near


def _base() -> dict[str, Any]:
    return {"model": "m", "task": "arithmetic", "output_dir": "o", "report_to": "none"}


def _from_recipe(draw: random.Random, folder: Path) -> QeRLConfig:
    path = folder / "recipe.yaml"
    text = "".join(_line(draw, name, value) for name, value in (_base() | _fields(draw)).items())
    if draw.random() < 0.2:
        group = draw.choice([*GROUPS])
        fields = GROUPS[group].model_fields
        names = draw.sample([*fields], draw.choice([1, 1, 2]))
        text += _line(draw, group, {name: _value(draw, fields[name].alias or name) for name in names})
    if draw.random() < 0.1:  # a key twice, a flow mapping cut off, a tag
        text += draw.choice(
            ["model: n\n", "seed: {a\n", "seed: !!int 3\n", "\tseed: 3\n", "seed: 3\nseed: 3\n"]
        )
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return load_config([path], {})


def _line(draw: random.Random, name: str, value: Any) -> str:
    return f"{name}: {draw.choice(TEXTS)}\n" if draw.random() < 0.1 else yaml12.dump({name: value})


def _from_words(draw: random.Random) -> QeRLConfig:
    words = {name: draw.choice(TEXTS) if draw.random() < 0.5 else str(value)
             for name, value in _fields(draw).items()}  # fmt: skip
    return load_config([], _base() | {name: parse_field(name, text) for name, text in words.items()})


def _check(config: QeRLConfig, case: str, folder: Path) -> None:
    """What holds of all valid settings, in any order of their fields."""
    assert config.temperature > 0 and 0 < config.top_p <= 1 and config.top_k >= 0, case
    assert config.num_generations >= 2 and config.max_completion_length >= 1, case
    assert config.generation_batch_size % config.num_generations == 0, case
    assert config.max_steps == -1 or config.max_steps >= 1, case
    assert not config.noise or config.max_steps == -1 or config.noise_stages <= config.max_steps, case
    assert config.loss_type is not None and config.epsilon_high is not None, case
    assert config.reward_timeout > 0 and config.lora_r >= 1 and config.lora_target_modules != [], case
    assert not (config.use_vllm or config.fp16 or config.bf16 or config.deepspeed or config.fsdp), case
    path = folder / "again.yaml"
    path.write_text(dump(config), encoding="utf-8")
    again = load_config([path], {})
    assert resolved(again) == resolved(config), f"{case}: {dump(config)}"
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == resolved(config), case


def main(arguments: list[str]) -> int:
    return run_and_print("settings", run, arguments)
