"""A training run from its settings: load, wire, train, save.

A run folder holds config.yaml (the resolved settings), metrics.jsonl, checkpoint-N/ folders, and at the end
the adapter (or, for full tuning, the model) beside the tokenizer, as TRL's `save_model` writes them.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from qerl.errors import QeRLError, first_line
from qerl.kernels import needs
from qerl.kernels.cards import card_of
from qerl.models.chat import Chat
from qerl.models.hub import find_model
from qerl.models.load import load_tokenizer
from qerl.rollout.select import make_engine
from qerl.run_folder import CONFIG_FILE
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import dump
from qerl.tasks.base import Task
from qerl.trainer.arguments import RUN_FIELDS, ready_of
from qerl.trainer.callbacks import InterruptGuard, MetricsFile, ProgressBar
from qerl.trainer.demonstrations import ReadyDemonstrations
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.policy import check_trainable, make_policy
from qerl.trainer.preflight import check_length, preflight
from qerl.trainer.processes import ends_together
from qerl.trainer.prompts import ReadyPrompts, sound_prompts
from qerl.trainer.resume.changes import prepare_folder
from qerl.trainer.resume.claim import claimed
from qerl.trainer.sft import QeRLSFTTrainer
from qerl.update.chunks import refuse_memory_error


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run.

    Attributes:
        folder: The run folder.
        interrupted: Whether Ctrl-C or SIGTERM ended it before its last step.
        step: Optimizer steps done.
        judged: Whether completions have rewards, by which `qerl eval` can score.
    """

    folder: Path
    interrupted: bool
    step: int
    judged: bool = True


def train(config: QeRLConfig, console: Console) -> RunResult:
    """Run training to its end, or to the step in which Ctrl-C or SIGTERM came.

    Raises:
        QeRLError: Anything the user can mend: settings, model, data, output folder.
    """
    folder = Path(str(config.output_dir))
    with ends_together(config), contextlib.ExitStack() as claim:
        resume = prepare_folder(config, console)
        if not claim.enter_context(claimed(folder, config.process_index)):
            raise QeRLError(
                f"Another run writes to {folder} at present; wait for its end, or choose another "
                "--output_dir."
            )
        trainer, guard = build(config, console)
        if trainer.is_world_process_zero():
            _write_settings(config, folder)
        with guard, _bar_closed(trainer), _memory_errors_said():
            trainer.train(resume_from_checkpoint=resume)
            step = trainer.state.global_step
            interrupted = guard.interrupted and step < trainer.state.max_steps
            if not interrupted:
                trainer.save_final(folder)
    if interrupted:
        console.print(f"Saved {folder}/checkpoint-{step}. Go on with: --resume_from_checkpoint true")
    return RunResult(folder, interrupted, step, bool(trainer.reward_funcs))


def _write_settings(config: QeRLConfig, folder: Path) -> None:
    try:
        (folder / CONFIG_FILE).write_text(dump(config), encoding="utf-8")
    except OSError as error:
        raise QeRLError(
            f"{folder / CONFIG_FILE} cannot be written ({error.strerror or error}); make room, or choose "
            "another --output_dir."
        ) from error


@contextlib.contextmanager
def _bar_closed(trainer: QeRLTrainer) -> Iterator[None]:
    """Close the progress bar however a run ends, so that the terminal is left as it was."""
    try:
        yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressBar):
                callback.close()


@contextlib.contextmanager
def _memory_errors_said() -> Iterator[None]:
    """Turn errors of memory that ran out, where no retry in smaller chunks is possible, into one sentence.

    Raises:
        QeRLError: Memory ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise QeRLError(
            "GPU memory ran out outside of an update; lower max_sequences, max_completion_length or "
            f"per_device_train_batch_size, see `qerl plan` ({first_line(error)})."
        ) from error
    except torch.AcceleratorError as error:
        refuse_memory_error(error)
        raise
    except MemoryError as error:
        raise QeRLError(
            "Host memory ran out; lower per_device_train_batch_size or free some, and go on with "
            "--resume_from_checkpoint true."
        ) from error


def build(config: QeRLConfig, console: Console) -> tuple[QeRLTrainer, InterruptGuard]:
    """Return the trainer of a run with all its parts, and its interrupt guard; nothing is started yet."""
    assert config.model is not None and config.task is not None
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    parts = preflight(config)
    model = find_model(config.model)
    check_trainable(config, model)
    tokenizer = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
    in_turns = bool(parts.tools) or parts.environment_factory is not None
    ready = ready_of(model, config, tokenizer, in_turns=in_turns)
    train_set, eval_set = _datasets(config, parts.task, ready)
    policy = make_policy(config, model, console)
    guard = InterruptGuard(console)
    make = QeRLSFTTrainer if config.algorithm == "sft" else QeRLTrainer
    trainer = make(
        model=policy,
        reward_funcs=parts.rewards,
        args=config,
        train_dataset=train_set,
        eval_dataset=eval_set,
        engine=make_engine(policy, tokenizer.pad_token_id, config.max_sequences, config.kv_cache_dtype),
        processing_class=tokenizer,
        callbacks=[MetricsFile(Path(str(config.output_dir))), ProgressBar(console), guard],
        tools=parts.tools,
        environment_factory=parts.environment_factory,
        acted_on=RUN_FIELDS,
    )
    for callback in (PrinterCallback, ProgressCallback):  # the run shows its own bar
        trainer.remove_callback(callback)
    path = trainer.update_path
    if trainer.is_world_process_zero() and not path.is_slow:  # the trainer warns of a slow path
        console.print(path.sentence(), highlight=False)
    if trainer.is_world_process_zero() and config.device.type == "cuda" and not needs.obstacles():
        console.print(needs.card_sentence(card_of(config.device)), highlight=False)
    return trainer, guard


def _datasets(
    config: QeRLConfig, task: Task, ready: ReadyPrompts | ReadyDemonstrations
) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and those to evaluate on or None; set the task's `opening`."""
    chat = Chat(ready.tokenizer, config.chat_template_kwargs)
    task.opening = chat.opening
    if config.algorithm == "sft":

        def demonstrations(held_out: bool, what: str) -> Dataset:
            rows = task.demonstrations(held_out)
            if held_out:  # before each row is rendered
                rows = rows.select(range(min(config.eval_samples, len(rows))))
            return ready(chat.dataset(rows) if task.rewards else rows, what)

        train_set = task.epoch(demonstrations(False, "training demonstrations"))
        if not config.evaluates:
            return train_set, None
        return train_set, demonstrations(True, "held-out demonstrations")

    def prompts(rows: Dataset, what: str) -> Dataset:
        found: Dataset = ready(chat.dataset(sound_prompts(rows, f"the {what}")), what)
        return found

    train_set = prompts(task.train(), "training prompts")
    if len(train_set) == 0:
        raise QeRLError(f"The task {config.task} has no training prompts; give it at least one problem.")
    train_set = task.epoch(train_set)
    check_length(config, len(train_set))
    if not config.evaluates:
        return train_set, None
    held_out = prompts(task.test(), "evaluation prompts")
    return train_set, held_out.select(range(min(config.eval_samples, len(held_out))))
