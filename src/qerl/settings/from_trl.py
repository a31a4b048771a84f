"""Settings of TRL's own class, `GRPOConfig`, as ours.

A `GRPOConfig` asks for what TRL would train: its fields act as TRL's documentation says, with TRL's defaults
where ours differ (masking of whole sequences by their importance weight, a learning rate of 1e-6 also for
adapters, a log line every ten steps), and nothing is added that TRL does not know. How the model is
kept (weights, LoRA rank) has `QeRLConfig`'s defaults, since a `GRPOConfig` cannot say it.

A dataclass does not tell which fields were set, and `GRPOConfig` derives some from others, so a field counts
as set where it differs from that of a `GRPOConfig` without arguments. Two fields are not taken over as they
are. ``bf16``, which is on by default there, is autocast, which does not exist here: `dtype` takes its place.
``generation_batch_size`` follows from the other batch sizes.
"""

import dataclasses
from typing import Any

from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig, default_of
from qerl.settings.recipe import FIELDS

_NOT_COPIED = {"bf16", "generation_batch_size", "output_dir"}


def as_ours(args: GRPOConfig, **own: Any) -> QeRLConfig:
    """Settings that train what TRL would with ``args``.

    Args:
        args: TRL's settings.
        own: Fields of `QeRLConfig` that the caller knows, such as ``tuning`` of a model in hand.

    Raises:
        QeRLError: A field is set that is refused, or the class has fields of its own.
    """
    theirs = {spec.name: spec for spec in dataclasses.fields(GRPOConfig) if spec.init}
    added = sorted({spec.name for spec in dataclasses.fields(args)} - theirs.keys())
    if added:
        raise QeRLError(
            f"{type(args).__name__} has fields that no trainer here reads ({', '.join(added)}); use "
            "QeRLConfig or TRL's GRPOConfig."
        )
    plain = GRPOConfig(output_dir=args.output_dir, bf16=False)  # whose default needs a GPU
    values: dict[str, Any] = {"output_dir": args.output_dir}
    for name, spec in theirs.items():
        value = getattr(args, name)
        if name not in _NOT_COPIED and (
            value != getattr(plain, name) or default_of(spec) != default_of(FIELDS[name])
        ):
            values[name] = value
    return QeRLConfig(**(values | own))
