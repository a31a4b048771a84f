"""`qerl export`: turn a run folder into a model that other programs load.

A policy is read as `qerl eval` reads it: base, format and rounding of its weights come from the run unless
the user says otherwise, and an adapter that belongs to another base is refused. The output appears complete
or not at all, with a config.yaml, so that `qerl eval` scores it as the run was scored. For a merged model the
config.yaml sets full tuning on bf16 weights: rounded to four bits, as a model of the Hub is by default, they
would lose the update.

    format    OUT holds
    merged    the base's folder with the update in its weights, in 16 bits (`qerl.export.merge`)
    adapter   adapter_model.safetensors, adapter_config.json, which names the base on the Hub
    gguf      one .gguf file, made of the merged model (`qerl.export.gguf`)
"""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from qerl import yaml12
from qerl.errors import QeRLError
from qerl.eval.policy import choices_of
from qerl.export.card import Facts, exported_card
from qerl.export.gguf import convert, find_converter
from qerl.export.hub import WEIGHT_FILES, Repository
from qerl.export.merge import Merged, check_mergeable, write_merged
from qerl.fp4.checkpoint import new_checkpoint, open_checkpoint, write_json
from qerl.lora.adapter import adapter_file, check_adapter, load_adapter
from qerl.models.decide import Choices, Loading, Source, decide
from qerl.models.fingerprint import check_base, folder_here
from qerl.run_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CONFIG_FILE,
    POLICY_FILE,
    last_checkpoint,
    read_json,
    read_policy,
    read_settings,
)
from qerl.trainer.card import CARD_FILE, is_hub_id
from qerl.user_code import named_again
from qerl.weight_formats import AS_PUBLISHED, FORMATS, Rounding, WeightFormatName

Format = Literal["merged", "adapter", "gguf"]
Dtype = Literal["bfloat16", "float16", "float32"]

LOSSY = 0.9
"""Share of the update, kept after rounding to 16 bits, below which there is a warning."""


@dataclass(frozen=True)
class Export:
    """Arguments of an export.

    Attributes:
        run: Folder of a run, a checkpoint, or any LoRA adapter of PEFT.
        out: Folder to write; must not exist.
        format: See the module.
        model: The base model; None for the one that the run names.
        base_model: Name of the base in the card; None for that of the model.
        weights: Format of the base's linears under the adapter; None for the run's.
        rounding: Rounding of a base that is packed on loading; None for the run's.
        dtype: Dtype of a merged model; None for bfloat16, but if GGUF is made of it float32 for f32, and
            float16 for f16 and q8_0.
        outtype: Weight type of a GGUF file, as its converter names it; None for bf16.
        converter: Path of llama.cpp's converter; None for the one on the path.
        trust_remote_code: True if Python code that comes with the base may run.
        repository: Where to push; None to push nowhere.
    """

    run: Path
    out: Path
    format: Format = "merged"
    model: str | None = None
    base_model: str | None = None
    weights: WeightFormatName | None = None
    rounding: Rounding | None = None
    dtype: Dtype | None = None
    outtype: str | None = None
    converter: Path | None = None
    trust_remote_code: bool = False
    repository: Repository | None = None


@dataclass(frozen=True)
class _Policy:
    """The policy to export: its adapter's folder, its base, how it is loaded, and its run's settings."""

    adapter: Path | None
    base: str
    source: Source
    choices: Choices


def export(asked: Export, console: Console) -> None:
    """Write an export, and push it if asked.

    Args:
        asked: Arguments given by the user.
        console: Shows progress, and at the end the result.

    Raises:
        QeRLError: Anything the user can fix; no new folder is left then, unless only the push failed.
    """
    if asked.out.exists():
        raise QeRLError(f"{asked.out} exists and is not overwritten; choose another folder or remove it.")
    if asked.out.suffix == ".gguf":
        raise QeRLError(
            f"{asked.out} is named like a file, but an export is a folder; remove .gguf from its name, and "
            "pass --format gguf to write a GGUF file into it."
        )
    asked = _settled(asked)
    converter = find_converter(asked.converter) if asked.format == "gguf" else None
    policy = _policy(asked)
    if asked.base_model is not None and not is_hub_id(asked.base_model):
        raise QeRLError(
            f"--base_model is {asked.base_model}, which is not a Hub id; give the base's id as owner/name."
        )
    named = asked.base_model or policy.base
    if asked.repository and asked.format == "adapter" and not is_hub_id(named):
        raise QeRLError(
            f"The adapter's base is {named}, which is not a Hub id, so others could not load the adapter; "
            "set --base_model to owner/name."
        )
    repository = asked.repository.name(asked.out) if asked.repository else None

    with new_checkpoint(asked.out) as folder:
        if asked.format == "adapter":
            how = _write_adapter(policy, named, folder)
        elif converter is None:
            how = _write_merged(asked, policy, folder, console)
        else:
            how = _write_gguf(asked, policy, folder, converter, console)
        by_qerl, file = policy.choices.where is not None, _gguf_name(asked)
        facts = Facts(asked.format, asked.out.name, repository, file, named, asked.run, by_qerl, how)
        exported_card(facts).save(folder / CARD_FILE)
    if asked.repository and repository:
        replaced = () if asked.format == "gguf" else WEIGHT_FILES  # GGUF files lie beside others
        with console.status(f"Pushing to {repository}"):
            address = asked.repository.push(repository, asked.out, replaced)
        _say(console, f"Pushed to {address}.")
    if not is_hub_id(named):
        _say(
            console,
            f"The card names no base model, because {named} is not a Hub id; set --base_model to name one.",
        )
    _say(console, f"Wrote {asked.out}. Score it with: {_eval_command(asked, policy)}")


def _settled(asked: Export) -> Export:
    """Fill in the arguments that are left open and do not depend on the run.

    Raises:
        QeRLError: An option has no effect on this format.
    """
    without = {"adapter": ("weights", "rounding", "dtype"), "merged": (), "gguf": ()}[asked.format]
    if asked.format != "gguf":
        without = (*without, "outtype", "converter")
    if given := next((flag for flag in without if getattr(asked, flag) is not None), None):
        raise QeRLError(f"--{given} has no effect on --format {asked.format}; remove it.")
    outtype = asked.outtype or "bf16"
    of_gguf: dict[str, Dtype] = {"bf16": "bfloat16", "f32": "float32"}
    dtype = asked.dtype or ("bfloat16" if asked.format == "merged" else of_gguf.get(outtype, "float16"))
    return replace(asked, outtype=outtype, dtype=dtype)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _policy(asked: Export) -> _Policy:
    """Find the policy in the run folder.

    Raises:
        QeRLError: There is no policy, or its base or the format it was trained in is unknown.
    """
    run, trusts = asked.run, asked.trust_remote_code
    if not run.exists():
        raise QeRLError(f"There is no {run}; give the folder of a finished run, a checkpoint or an adapter.")
    if (run / ADAPTER_CONFIG_FILE).is_file():
        adapter_file(run)
        check_adapter(run)
        config = read_json(run / ADAPTER_CONFIG_FILE)
        base = asked.model or read_policy(run).get("base") or config.get("base_model_name_or_path")
        if not base:
            raise QeRLError(f"{run / ADAPTER_CONFIG_FILE} names no base model; name it with --model.")
        source = Source(str(base), run, asked.weights, asked.rounding, trust_remote_code=trusts)
        choices = choices_of(source)
        if choices.where is None and asked.weights is None and asked.format != "adapter":
            raise QeRLError(
                f"{run} has no {CONFIG_FILE}, so the format of the weights under the adapter is unknown; set "
                "--weights (bf16 for a 16-bit base)."
            )
        return _Policy(run, str(base), source, choices)
    if (run / "config.json").is_file():
        if asked.format == "adapter":
            raise QeRLError(f"{run} holds a whole model and no adapter; export it as merged or gguf.")
        for flag in ("model", "weights", "rounding"):
            if (value := getattr(asked, flag)) is not None:
                raise QeRLError(
                    f"--{flag} is {value}, but {run} is a whole model without a base; remove the option."
                )
        base, source = (read_settings(run) or {}).get("model") or run, Source(str(run), None, "bf16")
        source = replace(source, trust_remote_code=trusts)
        choices = choices_of(source)
        if choices.where is None:
            raise QeRLError(
                f"{run} is a model without the {CONFIG_FILE} of a run, so there is nothing to export; use it "
                "as it is."
            )
        return _Policy(None, str(base), source, choices)
    last = last_checkpoint(run)
    advice = (
        f"export its last checkpoint, {last}" if last else "give the folder of a finished run or checkpoint"
    )
    raise QeRLError(f"{run} holds neither an adapter nor a model; {advice}.")


def _write_adapter(policy: _Policy, named: str, folder: Path) -> str:
    """Copy the adapter with its base's name in the config; return how it was trained, for the card."""
    assert policy.adapter is not None
    if folder_here(policy.base) is not None:
        check_base(policy.adapter, policy.base)
    shutil.copyfile(policy.adapter / ADAPTER_FILE, folder / ADAPTER_FILE)
    config = read_json(policy.adapter / ADAPTER_CONFIG_FILE)
    write_json(folder / ADAPTER_CONFIG_FILE, config | {"base_model_name_or_path": named})
    if recorded := read_policy(policy.adapter):
        write_json(folder / POLICY_FILE, recorded | {"base": named})
    _write_settings(policy.choices.of_run, folder)
    weights, rounding = (policy.choices.of_run.get(name) for name in ("weights", "rounding"))
    if not weights or not FORMATS[weights].packed:
        return "It loads with PEFT beside its base model, and in vLLM as a LoRA module."
    return (
        f"It was trained on the base rounded to {weights} ({rounding or 'as published'}), and loads on that "
        "or on the 16-bit model. Do not merge it into 4-bit weights: rounding would remove most of the "
        "update."
    )


def _write_merged(asked: Export, policy: _Policy, folder: Path, console: Console) -> str:
    """Write the merged model and its settings; return how it was made, for the card."""
    if policy.adapter is not None:
        check_mergeable(policy.adapter)
    loading = decide(policy.source, policy.choices)
    if FORMATS[loading.weights].package is not None:
        raise QeRLError(
            f"Cannot merge an adapter into {loading.weights} weights; pass --weights bf16 to merge it into "
            "the 16-bit weights."
        )
    if asked.rounding and loading.weights == "bf16":
        raise QeRLError(f"--rounding {asked.rounding} has no effect on --weights bf16; remove it.")
    if policy.adapter is not None:
        _say(console, f"Settings: {policy.choices}.")
    doubt = check_base(policy.adapter, loading.model) if policy.adapter is not None else ""
    if doubt:
        _say(console, doubt)
    assert asked.dtype is not None
    model: Any = loading.load()
    if policy.adapter is not None:
        model = load_adapter(model, policy.adapter)
    checkpoint = open_checkpoint(loading.model.folder)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        merged = write_merged(model, checkpoint, folder, getattr(torch, asked.dtype), progress)
    whole: dict[str, Any] = {"tuning": "full", "weights": "bf16"}
    _write_settings({k: v for k, v in policy.choices.of_run.items() if k != "rounding"} | whole, folder)
    if policy.adapter is None:
        return f"Its weights are those that were trained, in {asked.dtype}."
    how = _how(policy, loading, asked.dtype, merged)
    _say(console, how)
    if merged.kept < LOSSY:
        _say(
            console,
            f"Rounding to {asked.dtype} loses {1 - merged.kept:.0%} of the update; "
            + ("--dtype float16 loses less, and " if asked.dtype == "bfloat16" else "")
            + "--format adapter nothing.",
        )
    return how


def _write_gguf(asked: Export, policy: _Policy, folder: Path, converter: Path, console: Console) -> str:
    """Write a GGUF file from a temporary merged model; return how it was made, for the card."""
    whole = folder / "merged"
    whole.mkdir()
    how = _write_merged(asked, policy, whole, console)
    with console.status("Converting to GGUF"):
        convert(converter, whole, folder / _gguf_name(asked), str(asked.outtype))
    (whole / CONFIG_FILE).rename(folder / CONFIG_FILE)
    shutil.rmtree(whole)
    return f"{how} llama.cpp's {converter.name} converted this model to GGUF, in {asked.outtype}."


def _gguf_name(asked: Export) -> str:
    return f"{asked.out.name}-{asked.outtype}.gguf"


def _how(policy: _Policy, loading: Loading, dtype: str, merged: Merged) -> str:
    """Describe in sentences the base weights that an adapter was merged into, and the rounding."""
    of_run = policy.choices.of_run
    trained, rounded = of_run.get("weights"), of_run.get("rounding")
    stands = {
        "bf16": "the 16-bit weights of the base",
        AS_PUBLISHED: "the base as it was published, dequantised",
    }.get(
        loading.weights,
        f"the base rounded to {loading.weights} ({loading.rounding or 'as published'}) and dequantised",
    )
    if trained == loading.weights and (loading.rounding is None or rounded in (None, loading.rounding)):
        stands += ", on which it was trained"
    elif trained:
        stands += f", while it was trained on {trained} ({rounded or 'as published'})"
    return (
        f"An adapter on {len(merged.adapted)} matrices was merged into {stands}. The sums are in {dtype}, "
        f"which keeps {merged.kept:.1%} of the update."
    )


def _write_settings(settings: Mapping[str, Any], folder: Path) -> None:
    """Write the config.yaml that `qerl eval` reads, if there are settings."""
    if settings:
        (folder / CONFIG_FILE).write_text(yaml12.dump(dict(settings)), encoding="utf-8")


def _eval_command(asked: Export, policy: _Policy) -> str:
    """Return the shell command that scores the export."""
    words = [str(asked.out / _gguf_name(asked) if asked.format == "gguf" else asked.out)]
    if asked.format == "adapter":
        words = [policy.base, "--adapter", *words]
    if "task" not in policy.choices.of_run:
        words += ["--task", "TASK"]
    words += named_again(policy.choices.of_run)
    return shlex.join(["qerl", "eval", *words])
