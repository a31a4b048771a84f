"""A shared buffer for tensors that live for a single product: dense weights.

Dequantised weights are needed one at a time, in forward and in backward alike, and the largest is a fraction
of a gigabyte. One fixed buffer keeps half a gigabyte per layer from passing through the allocator, whose
cache would otherwise hold a block for each size.

Work on one stream is ordered, so the next writer cannot overtake the current reader. Code that runs products
on several streams of a device must not share the buffer. A captured graph keeps writing to the buffer that it
was captured with, so that buffer stays alive when a larger one replaces it.
"""

import math

import torch

_held: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
_captured: dict[int, torch.Tensor] = {}  # by address


def workspace(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised [rows, columns] tensor like ``like`` in dtype and device, valid until the next
    call."""
    size, key = math.prod(shape), (like.device, like.dtype)
    held = _held.get(key)
    if held is None or held.numel() < size:
        _held.pop(key, None)
        with torch.inference_mode(False):  # a rollout may create the buffer that training writes to later
            held = _held[key] = torch.empty(size, dtype=like.dtype, device=like.device)
    if held.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[held.data_ptr()] = held
    return held[:size].view(shape)
