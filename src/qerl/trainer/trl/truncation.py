"""Which completions were cut off, in the place of TRL's test. Tied to trl 1.16.

TRL takes a completion for whole if its last token is a stop token. One that a text has ended is whole as
well, which only the engine knows: it must not be masked as truncated, nor be counted among the clipped ones.

Legend: B samples.
"""

from collections.abc import Collection, Sequence

import torch
from accelerate import Accelerator

from qerl.rollout.stops import FinishReason


def cut_off(
    completions: Sequence[Sequence[int]], reasons: Sequence[FinishReason] | None, ends: Collection[int]
) -> list[bool]:
    """Whether each completion was cut off.

    Args:
        completions: Token ids of each.
        reasons: Why each ended; None where stop tokens alone end them.
        ends: Stop tokens, and the pad token, which TRL counts among them.
    """
    ended = [reason == "stop" for reason in reasons or ["error"] * len(completions)]
    return [ids[-1] not in ends and not end for ids, end in zip(completions, ended, strict=True)]


def log_lengths(
    metrics: dict[str, list[float]], lengths: list[int], cut: list[bool], accelerator: Accelerator
) -> None:
    """Replace what TRL has just logged of the lengths of a rollout; every process must call this.

    Args:
        metrics: Values by name, those of the rollout last.
        lengths: Tokens that the policy wrote in each completion.
        cut: Whether each was cut off.
        accelerator: Of the processes.
    """
    own_B2 = torch.tensor([lengths, cut], dtype=torch.float, device=accelerator.device).T
    lengths_B, cut_B = accelerator.gather(own_B2.contiguous()).unbind(1)
    whole = lengths_B[cut_B == 0]
    if len(whole) == 0:
        whole = torch.zeros(1)
    found = {"clipped_ratio": cut_B.mean()}
    for kind, values in (("", lengths_B), ("terminated_", whole)):
        found |= {f"mean_{kind}length": values.mean(), f"min_{kind}length": values.min()}
        found[f"max_{kind}length"] = values.max()
    for name, value in found.items():
        metrics[f"completions/{name}"][-1] = value.item()
