"""Files saved beside weights, so that the policy is scored as it was trained.

Wherever the trainer saves (the run folder, each checkpoint, `save_model` from Python) it also writes
config.yaml, the settings of the run, and policy.json with the facts that settings cannot tell: the dtype that
``dtype: auto`` stood for on that machine, the rounding that a packed checkpoint was made with, whatever
``rounding`` says, and for an adapter the fingerprints of its base (`qerl.models.fingerprint`).
"""

import functools
import json
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.models.fingerprint import fingerprint, folder_here, linears_fingerprint
from qerl.run_folder import CONFIG_FILE, POLICY_FILE, read_policy
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import dump


def write_provenance(config: QeRLConfig, model: nn.Module, folder: Path) -> None:
    """Write config.yaml and policy.json into a folder that exists.

    Args:
        config: Settings of the run.
        model: The policy, PEFT-wrapped or not.
        folder: Folder of the saved weights.
    """
    base = base_model(model)
    facts: dict[str, Any] = {"dtype": str(base.get_input_embeddings().weight.dtype).removeprefix("torch.")}
    if getattr(getattr(base.config, "quantization_config", None), "packed", ()):
        facts["rounding"] = getattr(base.config, "qerl_rounding", None)  # unknown where others packed it
    if isinstance(model, PeftModel):
        facts |= {"base": base.name_or_path, "fingerprint": fingerprint(base.named_parameters())}
        facts["linears"] = _linears_of(base.name_or_path)
    (folder / CONFIG_FILE).write_text(dump(config), encoding="utf-8")
    (folder / POLICY_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def check_base(folder: Path, base: PreTrainedModel, instead: str) -> None:
    """Raise if an adapter's base had other norms or embeddings than this model.

    Args:
        folder: Folder of the adapter; one without a policy.json passes.
        base: The model.
        instead: End of the error's sentence: the user should give this.

    Raises:
        QeRLError: The adapter belongs to another model.
    """
    expected = read_policy(folder).get("fingerprint")
    if expected is not None and expected != fingerprint(base.named_parameters()):
        raise QeRLError(
            f"{folder} was trained on a model with other norms or embeddings than {base.name_or_path}; give "
            f"{instead}."
        )


@functools.cache
def _linears_of(name: str) -> str | None:
    """Return `linears_fingerprint` of a base by its name, cached; None if the base is not on this machine or
    incomplete."""
    folder = folder_here(name) if name else None
    try:
        return None if folder is None else linears_fingerprint(folder)
    except QeRLError:
        return None
