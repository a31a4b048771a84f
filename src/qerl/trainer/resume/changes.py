"""The checkpoint that a run resumes from, and the check that it may.

A checkpoint can be resumed with other settings than it was made with, but never silently. Settings that its
weights and its optimizer's state were made for cannot change: a new learning rate, for one, would be
overwritten by the one in the optimizer's state. Settings of where and how often files are written change
nothing. All other differences are printed in one sentence.
"""

import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from qerl.checkpoint_folder import Manifest, read_manifest
from qerl.errors import QeRLError
from qerl.kernels.device import device_words
from qerl.lora.adapter import check_adapter
from qerl.ranks import is_first_process
from qerl.run_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    checkpoints,
    last_checkpoint,
)
from qerl.settings.config import QeRLConfig
from qerl.settings.foreign import without_gone
from qerl.settings.recipe import left_out, read_mapping, resolved
from qerl.trainer.refill import UNDER_WAY_FILE

logger = logging.getLogger(__name__)

# Settings that the weights of a checkpoint, or the state of its optimizer, were made for.
_FIXED = (
    "model", "weights", "rounding", "tuning", "adapter", "lora_r", "lora_alpha", "lora_target_modules",
    "lora_experts", "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon",
)  # fmt: skip
# Settings by which a rollout that later steps still use was divided.
_LAYOUT = (
    "processes", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
    "generation_batch_size", "num_generations", "num_iterations",
)  # fmt: skip
# Settings on which neither data, samples nor gradients depend, as prefixes of names.
_QUIET = (
    "output_dir", "resume_from_checkpoint", "run_name", "project", "trackio", "report_to", "log_", "logging_",
    "num_completions_to_print", "disable_tqdm", "save_", "hub_", "push_to_hub", "eval_", "do_eval",
    "per_device_eval", "num_generations_eval", "load_best_model", "metric_for_best", "greater_is_better",
    "tokens_per_forward", "gradient_checkpointing", "max_sequences", "reward_timeout", "accelerator_config",
    "ddp_", "dataloader_", "torch_empty_cache_steps", "use_cpu", "restore_callback",
)  # fmt: skip
# Those of them on which samples depend with `max_staleness`: after saves and evaluations keys and values are
# computed again, and which samples run together decides in which step a token is drawn.
_LOUD_IF_STALE = (
    "save_strategy", "save_steps", "save_only_model", "eval_strategy", "eval_steps", "eval_delay",
    "eval_on_start", "max_sequences",
)  # fmt: skip
# The learning rate of checkpoints whose settings lack it: they left out defaults, and TRL's was the default.
_FORMER_RATE = 1e-6
_EFFECTS = {
    "max_steps": "the schedules of learning rate and noise are those of the new length",
    "num_train_epochs": "the schedules of learning rate and noise are those of the new length",
    "seed": "the order of the data, samples and noise are those of the new seed",
    "task": "the completed steps are skipped in the new data",
    "task_options": "the completed steps are skipped in the new data",
    "processes": "each step has other prompts",
    "max_staleness": "unfinished samples that are older than it allows are discarded and drawn again",
}


def prepare_folder(config: QeRLConfig, console: Console) -> str | None:
    """Return the checkpoint to resume from, as `resume_point` does; if there is none, make the output folder.

    Raises:
        QeRLError: As `resume_point`, or the folder cannot be made.
    """
    checkpoint = resume_point(config, console)
    folder = Path(str(config.output_dir))
    if checkpoint is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QeRLError(
                f"The output folder {folder} cannot be made ({error.strerror}); choose another --output_dir."
            ) from error
    return checkpoint


def resume_point(config: QeRLConfig, console: Console) -> str | None:
    """Return the checkpoint to resume from, checked, or None for a run that begins; nothing is written.

    Args:
        config: Settings of the run that begins; nothing is loaded yet.
        console: Prints the settings that differ from the checkpoint's.

    Raises:
        QeRLError: The folder holds another run or a model, there is no checkpoint, it is damaged, or a
            setting differs that it cannot go on with.
    """
    folder, resume = Path(str(config.output_dir)), str(config.resume_from_checkpoint)
    if resume.lower() in ("none", "false"):
        _refuse_a_run(folder)
        return None
    checkpoint = last_checkpoint(folder) if resume.lower() == "true" else Path(resume)
    if checkpoint is None:
        _refuse_a_run(folder)
        raise QeRLError(f"{folder} has no checkpoint to resume from; start without --resume_from_checkpoint.")
    manifest = read_manifest(checkpoint)
    if checkpoint.resolve().parent == folder.resolve():
        _refuse_a_later_one(folder, manifest)
    else:
        _refuse_a_run(folder)
    said = _compare(checkpoint, manifest, config)
    if said:
        console.print(said, highlight=False, soft_wrap=True)
    if ADAPTER_FILE in manifest.files:
        check_adapter(checkpoint)
    return str(checkpoint)


def checkpoint_of_a_trainer(resume: bool | str | Path, args: QeRLConfig) -> str:
    """Return the checkpoint from which a trainer that was made in Python resumes, checked as that of a run.

    Settings that differ are logged. The folder may hold a later checkpoint, as in TRL.

    Args:
        resume: Argument of ``trainer.train``: True for the newest of `output_dir`, or a folder.
        args: The trainer's settings.

    Raises:
        QeRLError: There is no checkpoint, it is damaged, or a setting differs that it cannot go on with.
    """
    folder = Path(str(args.output_dir))
    checkpoint = last_checkpoint(folder) if resume is True else Path(str(resume))
    if checkpoint is None:
        raise QeRLError(f"{folder} has no checkpoint to resume from; leave resume_from_checkpoint out.")
    said = _compare(checkpoint, read_manifest(checkpoint), args)
    if said and is_first_process():
        logger.warning(said)
    return str(checkpoint)


def _refuse_a_run(folder: Path) -> None:
    """Raise if a folder holds files of another run, or of a model, which would be overwritten."""
    if last_checkpoint(folder):
        raise QeRLError(
            f"{folder} already holds a run; resume it with --resume_from_checkpoint true or choose another "
            "--output_dir."
        )
    if (folder / METRICS_FILE).exists():
        raise QeRLError(
            f"{folder} already holds a run, but no checkpoint to resume it from; choose another "
            "--output_dir, or delete that run."
        )
    held = {"config.json": "a model", ADAPTER_CONFIG_FILE: "an adapter"}
    for file, what in held.items():
        if (folder / file).exists():
            raise QeRLError(
                f"{folder} holds {what} ({file}), and the run would write its files among those; choose "
                "another --output_dir."
            )


def _refuse_a_later_one(folder: Path, manifest: Manifest) -> None:
    """Raise if the folder has a later whole checkpoint than this one, which would be taken for the newest."""
    later = [path for path in checkpoints(folder) if int(path.name.rpartition("-")[2]) > manifest.step]
    for path in later:
        try:
            read_manifest(path)
        except QeRLError:
            continue
        raise QeRLError(
            f"{folder} has a later checkpoint, {path.name}; delete it to go on from step {manifest.step}, or "
            "choose another --output_dir."
        )


def _compare(checkpoint: Path, manifest: Manifest, config: QeRLConfig) -> str:
    """Return sentences that name differing settings and devices, empty if none differ; raise for differences
    that no resume allows.

    Also sets `config.weights`, if it is not set, to the checkpoint's.

    Raises:
        QeRLError: The checkpoint has no optimizer state, or a setting differs that it cannot go on with.
    """
    if "optimizer.pt" not in manifest.files:
        raise QeRLError(
            f"{checkpoint} has no state of the optimizer (save_only_model), so it cannot be resumed; start a "
            "new run."
        )
    written = without_gone(read_mapping(checkpoint / CONFIG_FILE, "file of settings"))
    then = _settings({"learning_rate": _FORMER_RATE} | written) | {"processes": manifest.processes}
    config.weights = config.weights or then.get("weights")  # what the run's folder decided
    now = _settings(resolved(config)) | {"processes": config.world_size}
    in_hand = "None" in (then["model"], now["model"])  # its name and its adapter's are unknown
    changes = [
        name
        for name in sorted(then | now)
        if then.get(name) != now.get(name) and not (in_hand and name in ("model", "adapter"))
    ]
    shown = {name: f"{name} {then.get(name)} -> {now.get(name)}" for name in changes}
    half_used = any(name.startswith("rollouts_") for name in manifest.files)
    under_way = config.max_staleness > 0 and UNDER_WAY_FILE in manifest.files
    for name in changes:
        if name in _FIXED:
            raise QeRLError(
                f"{checkpoint} cannot be resumed with another {name} ({shown[name]}): its weights and the "
                f"state of its optimizer belong to {then.get(name)}; set it back, or start a new run."
            )
        if name in _LAYOUT and half_used:
            raise QeRLError(
                f"{checkpoint} holds a rollout that is half used, so it cannot be resumed with "
                f"{shown[name]}; set it back."
            )
        if name in _LAYOUT and under_way:
            raise QeRLError(
                f"{checkpoint} holds unfinished samples of coming steps, so it cannot be resumed with "
                f"{shown[name]}; set it back, or set max_staleness: 0, which discards them."
            )
    said = [
        shown[name] + (f" ({_EFFECTS[name]})" if name in _EFFECTS else "")
        for name in changes
        if not name.startswith(_QUIET) or (config.max_staleness > 0 and name in _LOUD_IF_STALE)
    ]
    sentences = []
    if said:
        listed = ", ".join(said)
        sentences.append(
            f"These settings differ from those of {checkpoint.name} and apply from here on: {listed}."
        )
    here = device_words(config.device)
    if manifest.device not in (None, here):
        sentences.append(
            f"{checkpoint.name} was made on {manifest.device} and continues on {here}, which sums in another "
            "order: from here on, numbers differ in their last bits from those of an uninterrupted run."
        )
    return " ".join(sentences)


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those that a config.yaml leaves out, and only the last part of the model's and
    adapter's paths, because folders may have moved."""
    paths = {name: Path(str(settings.get(name))).name for name in ("model", "adapter")}
    return settings | left_out(settings) | paths
