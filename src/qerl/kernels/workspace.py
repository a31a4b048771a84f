"""One place in memory for what lives for a single product: dense weights.

Dequantised weights are needed one at a time, in forward and in backward alike, and the largest is a fraction
of a gigabyte. A fixed place for them keeps half a gigabyte per layer from passing through the allocator,
whose cache would otherwise hold a block for each size.

Work on one stream is ordered, so the next writer cannot overtake the present reader. Code that runs products
on several streams of a device must not share it. A captured graph goes on writing to the place that it was
captured with, so that place stays when a larger one follows it.
"""

import math

import torch

_held: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
_captured: dict[int, torch.Tensor] = {}  # by address


def workspace(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Uninitialised [rows, columns] of the dtype and device of ``like``; valid until the next call."""
    size, key = math.prod(shape), (like.device, like.dtype)
    held = _held.get(key)
    if held is None or held.numel() < size:
        _held.pop(key, None)
        with torch.inference_mode(False):  # a rollout may make the place that training writes to later
            held = _held[key] = torch.empty(size, dtype=like.dtype, device=like.device)
    if held.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[held.data_ptr()] = held
    return held[:size].view(shape)
