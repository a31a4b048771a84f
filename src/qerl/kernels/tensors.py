"""Products of 16-bit matrices in FP32, and copies of small tensors to a GPU.

Engines and update compute logits here, in FP32 and unrounded. Differences of logits decide how likely tokens
are. Logits of trained models are near 25, where neighbouring bf16 numbers are 0.125 apart, so a head that
rounds its product to 16 bits moves every log-probability, and sampler and trainer agree only if neither
rounds. Products of 16-bit numbers are summed in FP32 anyway; here the sum is also stored in FP32. The
gradient of logits is rounded to 16 bits before its own products, like every other gradient of the update: its
rounding errors have no common sign, and its products run on tensor cores.

On a CPU both operands are converted first, since torch has no unrounded product of 16-bit matrices there.

`tensor.to("cuda")` copies from pageable memory, so it returns only once the GPU has finished all work queued
before it. From pinned memory (`upload`) the copy is queued like any other work. torch keeps the pinned memory
until the copy is done, and then reuses it.

Shapes: n positions, V vocabulary, D hidden size.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HEAD_TILE = 5 << 25
"""Maximum logits that the output head of the update holds at a time: 1024 positions of a vocabulary of
152,000 in 0.6 GB, with which its second product makes enough blocks to fill a card with 132
multiprocessors."""


def head_positions(positions: int, vocabulary: int) -> int:
    """Return how many positions, with whole rows of logits, the output head of the update holds at a time."""
    return min(positions, max(HEAD_TILE // vocabulary // 128, 1) * 128)


DIVERGENCE_ROWS = 8
"""Maximum number of matrices of the logits' size that a tile of a divergence between two heads holds at a
time, reached by a Jensen-Shannon divergence from logits with a cap; without a cap a forward KL has 6, a
reverse KL 4."""


def divergence_positions(positions: int, vocabulary: int) -> int:
    """Return how many positions, with whole rows of logits, a divergence between two heads holds at a time.

    It is a quarter of the head's, since a divergence has more matrices of that size.
    """
    return head_positions(positions, 4 * vocabulary)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b`` in FP32, without rounding it to the dtype of a and b.

    Args:
        a, b: Matrices of one dtype.
        out: FP32, written and returned.
    """
    if a.is_cuda and a.dtype != torch.float32:
        extra = {} if out is None else {"out": out}
        return torch.mm(a, b, out_dtype=torch.float32, **extra)
    return torch.mm(a.float(), b.float(), out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` for an FP32 total, a and b being of one dtype."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def upload(tensor: torch.Tensor, device: torch.device, to: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a CPU tensor to a device without making the host wait.

    Args:
        tensor: The tensor.
        device: The device.
        to: A tensor there, written and returned; None for a new one.
    """
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True) if to is None else to.copy_(source, non_blocking=True)


@contextlib.contextmanager
def unrounded_logits(model: "PreTrainedModel") -> Iterator[None]:
    """Make a transformers model return FP32 logits inside the block, for passes without a graph.

    This applies only to an output head that is a plain 16-bit linear; a head that an adapter or another
    module wraps keeps its own code, and its own rounding.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or "forward" in vars(head) or head.weight.dtype.itemsize != 2:
        yield
        return
    vars(head)["forward"] = lambda x: _linear(x, head.weight, head.bias)
    try:
        yield
    finally:
        del vars(head)["forward"]


def _linear(x: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    y_nV = product(x.flatten(0, -2), weight_VD.T)
    if bias_V is not None:
        y_nV += bias_V
    return y_nV.view(*x.shape[:-1], -1)
