"""Checks of data sets that a trainer samples from.

Checks that need only the settings and column names run before the model is loaded.
"""

from typing import Any

from datasets import Dataset, IterableDataset

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer.prompts import sound_prompts

_NAMES_OF_REWARDS = ("prompts", "completions")
"""Arguments of reward functions that TRL fills; a column of the same name would clash."""


def sound_data(
    args: QeRLConfig, train_dataset: Dataset | IterableDataset, eval_dataset: Any, environments: bool
) -> tuple[Any, Any]:
    """Check the rows to train and to evaluate on; return them with the prompts of `sound_prompts`.

    Args:
        args: The settings.
        train_dataset: Rows to train on.
        eval_dataset: Rows to evaluate on, several sets by name in a dictionary, or None.
        environments: Whether environments answer; they may give the prompts.

    Raises:
        QeRLError: `train_dataset` is a stream that is empty, or is used without `max_steps` or with
            `curriculum`, `dynamic_sampling_batches` or `max_staleness`; or as `sound_rows`.
    """
    if isinstance(train_dataset, IterableDataset):
        _check_stream(args, train_dataset)
    if args.curriculum and isinstance(train_dataset, IterableDataset):
        raise QeRLError(
            "curriculum needs access to any problem at any time, which an IterableDataset lacks; load it as "
            "a Dataset or set curriculum: false."
        )
    if args.dynamic_sampling_batches and isinstance(train_dataset, IterableDataset):
        raise QeRLError(
            "dynamic_sampling_batches needs access to any prompt at any time, which an IterableDataset "
            "lacks; load it as a Dataset or set dynamic_sampling_batches: 0."
        )
    if args.max_staleness and isinstance(train_dataset, IterableDataset):
        raise QeRLError(
            "max_staleness reads rows of coming steps in advance, which an IterableDataset does not support; "
            "load it as a Dataset or set max_staleness: 0."
        )
    return (
        sound_rows(train_dataset, "train_dataset", environments),
        sound_rows(eval_dataset, "eval_dataset", environments),
    )


def _check_stream(args: QeRLConfig, stream: IterableDataset) -> None:
    if args.max_steps <= 0:
        raise QeRLError(
            "train_dataset is an IterableDataset, whose length is unknown; set max_steps to the length of "
            "the run."
        )
    if next(iter(stream), None) is None:
        raise QeRLError(
            "train_dataset is an IterableDataset that yields no rows; check where its rows come from."
        )


def sound_rows(rows: Any, what: str, environments: bool) -> Any:
    """Check rows and return them with the prompts of `sound_prompts`.

    Args:
        rows: As in `sound_prompts`.
        what: Name of the rows in errors, such as ``train_dataset``.
        environments: Whether environments answer; they may give the prompts.

    Raises:
        QeRLError: It is not a data set, is empty, has rows without a prompt, or has a column that cannot be
            passed to reward functions.
    """
    if rows is None:
        return None
    if not isinstance(rows, dict | Dataset | IterableDataset):
        raise QeRLError(
            f"{what} is a {type(rows).__name__}; pass a Dataset or IterableDataset, or several by name in a "
            "dictionary."
        )
    if isinstance(rows, Dataset) and not len(rows):
        raise QeRLError(f"{what} has no row; check how it was filtered.")
    if isinstance(rows, dict):
        return {name: sound_rows(some, f"{what} {name!r}", environments) for name, some in rows.items()}
    # A mapped stream has no column names.
    _check_columns(what, getattr(rows, "column_names", None) or (), environments)
    return sound_prompts(rows, what)


def streams_as_given(given: Any, sound: Any) -> Any:
    """Return the checked rows, but streams as given: a trainer checks streams as it reads them."""
    if isinstance(given, dict):
        return {name: streams_as_given(rows, sound[name]) for name, rows in given.items()}
    return given if isinstance(given, IterableDataset) else sound


def _check_columns(what: str, columns: Any, environments: bool) -> None:
    if columns and "prompt" not in columns and not environments:
        raise QeRLError(
            f"{what} has no column `prompt`, only {', '.join(columns)}; rename one of them, or create it "
            "with `map` (a text, or a list of chat messages)."
        )
    taken = [name for name in _NAMES_OF_REWARDS if name in columns]
    if taken:
        raise QeRLError(
            f"{what} has the column {taken[0]!r}, and reward functions get the samples under that name; "
            "rename or remove the column."
        )


def check_enough(args: QeRLConfig, prompts: int, source: str) -> None:
    """Raise if there are fewer prompts than one rollout takes, so that no step could be made.

    Args:
        args: The settings.
        prompts: Number of prompts.
        source: Where the prompts are from, such as ``the task gsm8k``.

    Raises:
        QeRLError: There are too few.
    """
    needed = (args.generation_batch_size or 0) // (args.num_generations or 1)
    if prompts < needed:
        raise QeRLError(
            f"A step needs {needed} prompts but {source} has {prompts}; give it more problems, or lower "
            "per_device_train_batch_size or steps_per_generation (by default gradient_accumulation_steps)."
        )


def check_metric(metric: str | None, eval_sets: Any) -> None:
    """Raise if `metric_for_best_model` names none of several evaluation sets.

    Args:
        metric: `metric_for_best_model`.
        eval_sets: The trainer's `eval_dataset`.

    Raises:
        QeRLError: The sets have names, and the metric begins with none of them.
    """
    if metric is None or not isinstance(eval_sets, dict):
        return
    if not any(metric.removeprefix("eval_").startswith(f"{name}_") for name in eval_sets):
        choices = ", ".join(f"eval_{name}_reward" for name in eval_sets)
        raise QeRLError(
            f"metric_for_best_model is {metric}, but there are several evaluation sets; choose one "
            f"of {choices}."
        )
