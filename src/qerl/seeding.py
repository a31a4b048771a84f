"""Random numbers that depend on where they are used, not on what was drawn before.

Every draw in this project (noise, sampling, replacement prompts) is keyed by its coordinates: (seed, step,
layer) or (seed, step, prompt, sample). No stream is consumed, so evaluation, another number of processes, or
a resume from a checkpoint cannot shift later draws.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def derive_seed(*coordinates: int | str) -> int:
    """63-bit seed for a generator, a hash of the coordinates.

    Args:
        coordinates: Outermost first, for example ``("noise", seed, step, layer)``.
    """
    text = "\x1f".join(f"{type(c).__name__}:{c}" for c in coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*coordinates: int | str) -> torch.Generator:
    """CPU generator at the start of the stream that belongs to the coordinates."""
    return torch.Generator().manual_seed(derive_seed(*coordinates))


def problem_key(row: Mapping[str, Any]) -> str:
    """Stable key of a data set's row: a hash of all its columns."""
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class ProblemSeeds:
    """Seeds of an evaluation's completions, keyed by (seed, problem, sample).

    A problem draws the same independent of other problems, order, batches and processes, and at each
    evaluation of a run, so that two policies are compared on the same random numbers. Copies of one problem
    are numbered, since otherwise all would draw the same.

    Args:
        seed: Seed of the evaluation.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._met: Counter[str] = Counter()

    def of(self, problems: Sequence[str], samples: int) -> list[int]:
        """Return the seeds of further problems, given by their keys (`problem_key`), those of one problem
        adjacent."""
        seeds = []
        for problem in problems:
            copy = self._met[problem]
            self._met[problem] += 1
            seeds += [derive_seed("problem", self._seed, problem, copy, sample) for sample in range(samples)]
        return seeds
