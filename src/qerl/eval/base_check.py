"""Whether an adapter belongs to the model that it is put on; asked before the model is loaded.

The adapter's policy.json has the fingerprint of its base (`qerl.models.fingerprint`). An adapter that was
made elsewhere has none; then the base that its adapter_config.json names is looked at, if it is on this
machine. Where it is not, names are all there is: other names may be the same model, so that is said and no
error. So is a base whose linear layers alone are other ones.
"""

from pathlib import Path

from qerl.errors import QeRLError
from qerl.fp4.checkpoint import read_config
from qerl.models.fingerprint import checkpoint_fingerprint, folder_here, linears_fingerprint
from qerl.models.hub import LocalModel, local_checkpoint
from qerl.run_folder import ADAPTER_CONFIG_FILE, read_json, read_policy


def check_base(adapter: Path, model: str | LocalModel) -> str:
    """Raise for an adapter of another base model.

    Args:
        adapter: Folder of a PEFT adapter.
        model: The model that it is to be put on.

    Returns:
        A sentence for the user where it cannot be told or is in doubt, else nothing.

    Raises:
        QeRLError: The adapter belongs to another model, or a file that says so cannot be read.
    """
    folder = local_checkpoint(model)
    found = checkpoint_fingerprint(folder)
    recorded = read_policy(adapter)
    named = str(
        recorded.get("base") or read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or ""
    )
    expected = recorded.get("fingerprint")
    if expected is None and named and not _same_name(named, str(model)):
        expected = _fingerprint_here(named)
        if expected is None:
            return (
                f"The adapter names {named} as its base, which is not on this machine: whether {model} is "
                "the same model cannot be checked."
            )
    if expected is not None and found != expected:
        raise QeRLError(
            f"The adapter {adapter} was trained on {named}, whose norms or embeddings are not those of "
            f"{model}; give the model that it was trained on, or a copy of it that `qerl quantize` made."
        )
    linears, own = recorded.get("linears"), linears_fingerprint(folder)
    if None not in (linears, own) and linears != own:
        return (
            f"The linear layers of {model} are not those of {named}, which the adapter was trained on, "
            "though norms and embeddings are: if an adapter was merged into them, this one comes on top of "
            "it."
        )
    return ""


def check_rounding(model: str, packed: str | None, trained: str | None) -> None:
    """Raise for a packed model that was rounded otherwise than the one an adapter was trained on.

    Args:
        model: The model that the adapter is to be put on.
        packed: Its rounding, None where nothing says so.
        trained: That of the model which the adapter was trained on, None where nothing says so.

    Raises:
        QeRLError: Both are known and differ.
    """
    if packed is not None and trained is not None and packed != trained:
        raise QeRLError(
            f"{model} was packed with {packed} rounding, but the adapter was trained on {trained}; name the "
            f"16-bit model or a copy made with `qerl quantize --rounding {trained}`, or score these weights "
            f"with --rounding {packed}."
        )


def packing(model: str) -> tuple[str | None, str | None]:
    """Format of a packed model, None for a plain one, and its rounding, None where nothing says so."""
    config, _, format = read_config(local_checkpoint(model))
    return (None, None) if format is None else (format.name, config.get("qerl_rounding"))


def _same_name(named: str, model: str) -> bool:
    if named == model:
        return True
    return Path(named).expanduser().resolve() == Path(model).expanduser().resolve()


def _fingerprint_here(named: str) -> str | None:
    """Fingerprint of a model that is on this machine, None where it is not, or not whole."""
    folder = folder_here(named)
    try:
        return None if folder is None else checkpoint_fingerprint(folder)
    except QeRLError:
        return None
