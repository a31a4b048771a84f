"""What the decode kernels are compiled for: tokens per block of keys and values, and ranks of an adapter.

Plain numbers without Triton or torch, so that a plan made on a machine without a GPU counts with those of the
kernels.
"""

PAGE = 64
"""Tokens in a block of keys and values."""

MAX_RANK = 256
"""Largest LoRA rank that the kernels take."""

PART = 128
"""Ranks that a kernel holds at once of one adapter's A or B; a multiple of it takes several turns."""

STACKED_PART = 512
"""Rows of several A on top of each other that a kernel holds at once: those of q, k and v at rank `PART`."""


def pad_rank(rank: int) -> int:
    """Ranks that buffers have for an adapter of this rank: a power of two, as Triton wants, from 16 on."""
    return max(16, 1 << (rank - 1).bit_length())


def rank_part(ranks: int) -> int:
    """Ranks of one adapter that a kernel takes at a time."""
    return min(ranks, PART)


def stacked_part(ranks: int) -> int:
    """Rows of several A that a kernel takes at a time, a power of two; half of `STACKED_PART` in a loop, so
    that they and a part of B fit into the shared memory of a multiprocessor."""
    whole = 1 << max(0, ranks - 1).bit_length()
    return whole if whole <= STACKED_PART else STACKED_PART // 2
