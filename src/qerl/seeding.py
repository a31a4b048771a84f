"""Random numbers that depend on where they are used, not on what was drawn before.

Every draw in this project (noise, sampling, replacement prompts) is keyed by its coordinates: (seed, step,
layer) or (seed, step, prompt, sample). No stream is consumed, so evaluation, another number of processes, or
a resume from a checkpoint cannot shift what follows.
"""

import hashlib

import torch


def derive_seed(*coordinates: int | str) -> int:
    """63-bit seed for a generator, a hash of the coordinates.

    Args:
        coordinates: What the draw is for, outermost first, for example ``("noise", seed, step, layer)``.
    """
    text = "\x1f".join(f"{type(c).__name__}:{c}" for c in coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*coordinates: int | str) -> torch.Generator:
    """CPU generator at the start of the stream that belongs to the coordinates."""
    return torch.Generator().manual_seed(derive_seed(*coordinates))
