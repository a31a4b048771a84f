"""Recipes: settings as YAML files and as words of the command line.

A recipe is a YAML file whose keys are fields of `QeRLConfig`, or groups with a mapping of theirs (`sampling:
{temperature: 0.7}`). Several recipes are merged from left to right, so that a task, a model and a tuning
method each live in one small file; fields given on the command line come last. Unknown keys are errors that
name the nearest valid key.
"""

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trl import GRPOConfig

from qerl import yaml12
from qerl.errors import QeRLError
from qerl.settings.algorithms import UNSAID, implied
from qerl.settings.checks import Group
from qerl.settings.config import FIELDS, QeRLConfig
from qerl.settings.foreign import refuse_unknown, without_gone
from qerl.settings.groups import DECLARED, GROUPS, OWN_NAMES, without_effect
from qerl.settings.library import check_card_is_last, read_mapping, recipe_file
from qerl.settings.parents import REPLACED, default_of

# Made from steps_per_generation when settings are made; TRL refuses to be given both.
_DERIVED = {"generation_batch_size"}
# Moved into the fields that mean the same when settings are made.
_MOVED = {"model_init_kwargs", "generation_kwargs"}
# What a reader of a config.yaml looks for first; it has them even if nobody set them.
_ALWAYS = {
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "temperature",
    "max_completion_length", "learning_rate", "seed",
}  # fmt: skip


def parse_value(text: str, where: str) -> Any:
    """Parse a word of the command line as a YAML value.

    Raises:
        QeRLError: The word is not valid YAML.
    """
    try:
        return yaml12.load(text)
    except ValueError as error:
        raise QeRLError(
            f"{where} has a value that is not valid YAML ({error}); put text in quotes of its own, '\"...\"'."
        ) from error


def parse_mapping(text: str | None, flag: str) -> dict[str, Any] | None:
    """Parse the YAML mapping given with a flag; None if the flag is not given.

    Raises:
        QeRLError: The text is not valid YAML, no mapping, or a key is not text.
    """
    if text is None:
        return None
    value = parse_value(text, flag)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise QeRLError(f"{flag} is {text!r}; it must be a mapping, for example '{{level: wp1}}'.")
    return value


def parse_field(name: str, text: str) -> Any:
    """Parse the value of `--name text`: for a text field the word as it is (null unsets it), else YAML.

    Raises:
        QeRLError: There is no such field, or the word is not valid YAML.
    """
    check_key(name, "The command line")
    quoted = text[:1] in ("'", '"')
    if not quoted and text not in ("null", "~") and _is_text(type_of(name)):
        return text
    return parse_value(text, f"--{name}")


def type_of(name: str) -> Any:
    """Return the type of a field, for `qerl.settings.checks.checked`."""
    if name in DECLARED:
        info = DECLARED[name]
        return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return REPLACED[name].type if name in REPLACED else FIELDS[name].type


def _is_text(type_: Any) -> bool:
    """Return True if a field of this type takes only text, or null."""
    origin, parts = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return _is_text(parts[0])
    if origin in (Union, types.UnionType):
        return all(part is type(None) or _is_text(part) for part in parts)
    return type_ is str or (origin is Literal and all(isinstance(part, str) for part in parts))


def check_key(key: Any, where: str) -> None:
    """Raise if a key is no field, with what to do instead or the nearest field's name."""
    refuse_unknown(str(key), where, FIELDS, OWN_NAMES)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the fields that one recipe file sets.

    Raises:
        QeRLError: The file is missing, is not a YAML mapping, or has an unknown key.
    """
    where, values = f"The recipe {path}", {}
    for key, value in without_gone(read_mapping(path, "recipe")).items():
        group = GROUPS.get(key) if isinstance(value, dict) else None
        if group is None:
            check_key(key, where)
        for name, inner in {key: value}.items() if group is None else _of_group(group, value, where):
            if name in values:
                raise QeRLError(f"{where} sets {name} twice, by itself and in its group; set it once.")
            values[name] = inner
    return values


def _of_group(group: type[Group], values: dict[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields in the mapping of a group, by their flat names."""
    for key, value in values.items():
        refuse_unknown(str(key), f"{where}, in {group.__name__.lower()},", group.model_fields, ())
        yield group.model_fields[key].alias or key, value


def load_config(
    recipes: Sequence[str | Path],
    overrides: dict[str, Any],
    required: Sequence[str] = ("model", "task", "output_dir"),
) -> QeRLConfig:
    """Load settings from recipes; later ones override earlier ones, and command-line fields override all.

    If ``output_dir`` is unset, it is runs/ and the recipes' names: runs/gsm8k-nvfp4-aqn.

    Args:
        recipes: Paths, or words that `qerl.settings.library.recipe_file` understands.
        overrides: Values of the command-line fields by name.
        required: Fields that must be set.

    Raises:
        QeRLError: An unknown recipe or key, a card's recipe that is not the last of the package's, a wrong
            value, a contradiction, or a required field that is not set.
    """
    files = [recipe if isinstance(recipe, Path) else recipe_file(recipe) for recipe in recipes]
    check_card_is_last(files)
    values: dict[str, Any] = {}
    for file in files:
        values |= read_recipe(file)
    for key in overrides:
        check_key(key, "The command line")
    values = _without_default_loss(values, overrides) | overrides
    if files and values.get("output_dir") is None:
        values["output_dir"] = str(Path("runs", "-".join(file.stem for file in files)))
    for name in required:
        if values.get(name) is None:
            raise QeRLError(f"{name} is not set; {_where_to_set(name, bool(files))}.")
    config = QeRLConfig(**values)
    _check_noise_is_said(values)
    config.given = _set(values)
    return config


def _set(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of fields with a value; null leaves a field unset."""
    return frozenset(name for name, value in values.items() if value is not None)


def _where_to_set(name: str, in_recipes: bool) -> str:
    """Return what to do about a required field that is not set; ``in_recipes``: recipes are given."""
    listed = "(`qerl recipes` lists them)"
    if not in_recipes:
        return f"pass --{name}, or name recipes, for example gsm8k nvfp4-lora qwen2.5-7b {listed}"
    if name == "model":
        return f"pass --model, or name the recipe of a model, too, for example qwen2.5-7b {listed}"
    return f"add it to the recipe or pass --{name}"


def _check_noise_is_said(values: dict[str, Any]) -> None:
    """Raise if fields of the noise are given without `noise` itself: the user means to train with noise, even
    if the values are the defaults, and would train without."""
    given = [name for name in values if name.startswith("noise_")]
    if given and "noise" not in values:
        raise QeRLError(
            f"{given[0]} is set, but noise is not (it is off by default); set noise: true or false, or "
            f"remove {given[0]}."
        )


def resolved(config: QeRLConfig) -> dict[str, Any]:
    """Return settings as plain YAML values, so that they give the same run again.

    All that a recipe or the command line set is among them, and so are batch sizes, seed, learning rate and
    the other fields that every reader needs. Of the rest these are left out: values that are the default both
    here and in TRL, values implied by the name of the default loss, so that another loss may be set beside
    them, and fields that act only with another loss or algorithm.
    """
    theirs = {spec.name: default_of(spec) for spec in dataclasses.fields(GRPOConfig)}
    unsaid = {name: default for name, default in theirs.items() if default == default_of(FIELDS[name])}
    if config.pad_to_multiple_of is None:  # what TRL makes of its default, auto
        unsaid["pad_to_multiple_of"] = None
    unsaid |= implied(vars(config))
    groups = config.groups
    shown = _ALWAYS | config.given
    omitted = without_effect(groups.loss) - shown
    return {
        name: value
        for name, value in groups.fields()
        if name in FIELDS
        and name not in _DERIVED | _MOVED | omitted
        and (name in shown or name not in unsaid or value != unsaid[name])
    }


def left_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all fields that a config.yaml does not name, the reverse of `resolved`.

    Args:
        settings: Content of the file.
    """
    defaults = {name: default_of(spec) for name, spec in FIELDS.items()}
    values = {name: getattr(default, "value", default) for name, default in defaults.items()}
    values |= {"pad_to_multiple_of": None} | implied(settings)
    return {name: value for name, value in values.items() if name not in settings}


def dump(config: QeRLConfig) -> str:
    """Return the resolved settings as a recipe that gives the same run."""
    return yaml12.dump(resolved(config))


def changed(config: QeRLConfig, fields: dict[str, Any]) -> QeRLConfig:
    """Return the settings with other values of some fields, checked again."""
    again = QeRLConfig(**(_without_default_loss(resolved(config), fields) | fields))
    again.given = config.given | _set(fields)
    return again


def _without_default_loss(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Drop the default loss if a later algorithm has its own, which an explicit loss_type would override."""
    ours = values.get("algorithm") is None and values.get("loss_type") == UNSAID["loss_type"]
    if later.get("algorithm") is None or not ours:
        return values
    return {name: value for name, value in values.items() if name != "loss_type"}
